"""One client's numbers overflow: nobody else's answers change, while it runs and afterwards.

Two models: tiny-chat in float16, in which prompts with one token overflow; and tiny-chat itself
with an adapter whose weights are finite and huge.
"""

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import mlx_lm
import pytest

from tests import adapters
from tests.cluster.servers import TINY_CHAT, Server, brigade_launch, serve_flags, started
from tests.ports import free_ports

pytestmark = pytest.mark.long

BAD = 7  # the token that overflows
NUM_TOKENS = 12
NUM_PROMPTS = 12
NUM_CLIENTS = 8


def prompts(count: int) -> list[list[int]]:
    """Of many lengths: the padding of a short row in a slot holds numbers of a longer one."""
    chance = random.Random(3)
    return [
        [chance.randrange(100, 400) for _ in range(chance.choice((1, 3, 9, 30)))]
        for _ in range(count)
    ]


def overflowing_model(folder: Path) -> Path:
    """Its token BAD is huge, and the first layer makes it larger than float16 can hold. Its head
    is the embedding before that: else every prompt could overflow by the logit of BAD."""
    shutil.copytree(TINY_CHAT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    (file,) = folder.glob("*.safetensors")
    tensors = mx.load(str(file))
    assert isinstance(tensors, dict)
    tensors = {name: array.astype(mx.float16) for name, array in tensors.items()}
    (embedding,) = [name for name in tensors if "embed_tokens.weight" in name]
    tensors["lm_head.weight"] = mx.array(tensors[embedding])
    tensors[embedding][BAD] = 65504
    mx.eval(tensors)
    file.unlink()
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
    return folder


@contextmanager
def running(model: Path, *more: str) -> Iterator[Server]:
    port = free_ports(1)[0]
    with started(brigade_launch(2, serve_flags(port, model, *more)), port) as server:
        server.wait_until_ready()
        yield server


def post(server: Server, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body, timeout=120)


def ask(server: Server, model: str, prompt: list[int], **more: Any) -> httpx2.Response:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS}
    body |= {"return_token_ids": True, "ignore_eos": True}
    return post(server, "/v1/completions", **{**body, **more})


def tokens(reply: httpx2.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return ids


def changed(server: Server, model: str, bad: Callable[[], httpx2.Response], num: int) -> int:
    """Returns how many of num answers change beside requests that overflow all the time, and how
    many change afterwards."""
    asked = prompts(NUM_PROMPTS)
    expected = [tokens(ask(server, model, prompt)) for prompt in asked]
    assert len({tuple(answer) for answer in expected}) > NUM_PROMPTS // 2
    over = threading.Event()
    failures: list[httpx2.Response] = []

    def overflow() -> None:
        while not over.is_set():
            failures.append(bad())

    with ThreadPoolExecutor(NUM_CLIENTS + 2) as pool:
        beside = [pool.submit(overflow) for _ in range(2)]
        try:
            numbers = [n % NUM_PROMPTS for n in range(num)]
            got = list(pool.map(lambda n: tokens(ask(server, model, asked[n])), numbers))
        finally:
            over.set()
        for each in beside:
            each.result()
    assert failures
    assert {reply.status_code for reply in failures} == {500}
    after = [tokens(ask(server, model, prompt)) for prompt in asked]
    wrong = [answer != expected[n] for n, answer in zip(numbers, got, strict=True)]
    return sum(wrong) + sum(a != b for a, b in zip(after, expected, strict=True))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = overflowing_model(tmp_path_factory.mktemp("half") / "half")
    with running(folder) as server:
        yield server


@pytest.mark.parametrize(
    "num", [24, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_overflow_in_float16_changes_no_other_answer(half: Server, num: int) -> None:
    assert changed(half, "half", lambda: ask(half, "half", [5, BAD, 9, 300, 200]), num) == 0


def test_overflow_ends_its_request_with_an_error(half: Server) -> None:
    """Whatever it asks for, as a reply and as a stream; the log names sequence and adapter."""
    prompt = [5, BAD, 9]
    for more in (
        {},
        {"logprobs": 3},
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"prompt_logprobs": 2, "max_tokens": 1},
        {"n": 3},
        {"temperature": 1, "top_p": 0.5, "seed": 4},
        {"frequency_penalty": 1},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ):
        reply = ask(half, "half", prompt, **more)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (500, "numbers_overflowed"), (more, reply.text)
        if "prompt_logprobs" in more:  # not with streams
            continue
        streamed = ask(half, "half", prompt, stream=True, **more)
        assert '"code":"numbers_overflowed"' in streamed.text.replace(": ", ":"), more
        assert streamed.text.rstrip().endswith("[DONE]")
    half.wait_for_log(r"event=numbers_overflowed sequence=\d+ adapter=null version=0")
    assert "event=bug" not in half.text


def test_overflow_is_not_kept_as_a_prefix(half: Server) -> None:
    """What is asked for again is computed again, and fails again."""
    prompt = [*range(100, 140), BAD, 9]
    assert [ask(half, "half", prompt).status_code for _ in range(3)] == [500] * 3
    kept = tokens(ask(half, "half", prompt[:40]))
    assert kept == tokens(ask(half, "half", prompt[:40]))


def huge_adapter(folder: Path) -> Path:
    """Finite in float32, but its products are not."""
    model, _ = mlx_lm.load(str(TINY_CHAT))
    return adapters.save_adapter(folder, model, size=3e19)


@pytest.mark.slow
@pytest.mark.parametrize("num", [24, pytest.param(1000, marks=pytest.mark.timeout(600))])
@pytest.mark.uses("adapters")
def test_an_adapter_with_huge_numbers_changes_no_other_answer(tmp_path: Path, num: int) -> None:
    """Nor does it after it is unloaded, when its slots belong to others."""
    huge_adapter(tmp_path / "huge")
    with running(TINY_CHAT, "--adapter-root", str(tmp_path)) as server:
        loading = {"lora_name": "huge", "lora_path": "huge"}
        assert post(server, "/v1/load_lora_adapter", **loading).status_code == 200
        long = [100 + n for n in range(40)]
        assert changed(server, "tiny-chat", lambda: ask(server, "huge", long), num) == 0
        server.wait_for_log(r'event=numbers_overflowed sequence=\d+ adapter="huge" version=1')
        expected = [tokens(ask(server, "tiny-chat", prompt)) for prompt in prompts(NUM_PROMPTS)]
        assert ask(server, "huge", long).json()["error"]["message"].count("'huge'") == 1
        assert post(server, "/v1/unload_lora_adapter", lora_name="huge").status_code == 200
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            got = list(pool.map(lambda p: tokens(ask(server, "tiny-chat", p)), prompts(12)))
        assert got == expected
