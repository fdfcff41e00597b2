"""Clusters whose shards have unequal parts, such as two heads of keys and values and one. They
answer as mlx_lm on the whole model: with adapters, from prefixes on disk, and after a kill."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import mlx_lm
import pytest

from tests import adapters
from tests.cluster.recovery.test_prefixes_on_disk import TEXT, disk, wait_until_written
from tests.cluster.servers import TINY_CHAT, Server, running
from tests.cluster.shards.test_shards import check_scores
from tests.lora.test_table import ALL
from tests.models import build, save

PROMPTS = [TEXT[:1000], "the cat sat on the mat", "one two three four five six seven"]
MAX_TOKENS = 16


def save_with_tokenizer(folder: Path, **changes: int) -> Path:
    save(folder, "llama", vocab_size=1024, **changes)
    for file in TINY_CHAT.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder


def complete(server: Server, model: str, prompt: str) -> str:
    reply = server.client().completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=MAX_TOKENS
    )
    return reply.choices[0].text


def complete_all(server: Server, model: str) -> list[str]:
    """Sends all prompts at the same time."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: complete(server, model, prompt), PROMPTS))


def complete_with_mlx_lm(folder: Path, adapter: Path | None = None) -> list[str]:
    loaded: Any = mlx_lm.load(str(folder), adapter_path=str(adapter) if adapter else None)
    model, tokenizer = loaded
    texts: list[str] = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        steps = mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=MAX_TOKENS)
        tokens = [step.token for step in steps]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return texts


@pytest.mark.long
def test_answers_of_two_shards_of_three_kv_heads_equal_those_of_mlx_lm(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = save_with_tokenizer(tmp_path / "model", num_hidden_layers=2, **sizes)
    with running(2, "--tensor-parallel-size", "2", model=folder) as server:
        first, second = server.get("/admin/pipeline")["stages"]
        check_scores(server, MAX_TOKENS, folder)
        texts = complete_all(server, folder.name)
    assert first["bytes_owned"] > second["bytes_owned"]
    assert texts == complete_with_mlx_lm(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.uses("adapters", "disk")
def test_answers_of_three_shards_of_eight_kv_heads_equal_those_of_mlx_lm(tmp_path: Path) -> None:
    """With an adapter, after the loss of a shard, and after a restart from prefixes on disk."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 50}
    folder = save_with_tokenizer(tmp_path / "model", **sizes)
    adapter = adapters.save_adapter(
        tmp_path / "adapters" / "a", build("llama", vocab_size=1024, **sizes), keys=ALL
    )
    flags = ["--tensor-parallel-size", "3", "--adapter-root", str(tmp_path / "adapters")]
    flags += ["--prefix-cache-dir", str(tmp_path / "kept"), "--prefix-cache-disk", "1GB"]
    expected = complete_with_mlx_lm(folder)
    with running(3, *flags, model=folder) as server:
        first, _, last = server.get("/admin/pipeline")["stages"]
        assert first["bytes_owned"] > last["bytes_owned"]  # three heads and 17 columns, two and 16
        check_scores(server, MAX_TOKENS, folder)
        assert complete_all(server, folder.name) == expected
        wait_until_written(server, 2)
        body = {"lora_name": "a", "lora_path": "a"}
        url = f"{server.url}/v1/load_lora_adapter"
        httpx2.post(url, json=body, timeout=60).raise_for_status()
        assert complete_all(server, "a") == complete_with_mlx_lm(folder, adapter)
        server.engines()[2].kill()
        assert complete_all(server, folder.name) == expected
        assert server.get("/admin/pipeline")["num_restarts"] == 1
    with running(3, *flags, model=folder) as server:
        assert complete_all(server, folder.name) == expected
        assert disk(server)["num_reads"] >= 1
