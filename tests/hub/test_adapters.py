"""Adapters of the hub: all ranks read the same commit, each only what belongs to its layers."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from serve.core.errors import AdapterError
from serve.lora.table import Adapters
from tests import adapters
from tests.cluster.servers import TINY_CHAT, alone, brigade_launch, serve_flags, started
from tests.errors import fails
from tests.front.fakes import FakeRanks
from tests.hub.checkpoints import header_sizes
from tests.hub.server import COMMIT, REPO, FakeHub, running
from tests.lora.test_table import ALL, LLAMA, Pipeline
from tests.ports import free_ports

SIZE = 0.3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """An adapter, and what else people put beside one."""
    folder = adapters.save_adapter(tmp_path / "repo", LLAMA(), keys=ALL)
    (folder / "README.md").write_text("# An adapter")
    for name in ("tokenizer.json", "optimizer.safetensors", "adapter_model.bin"):
        (folder / name).write_bytes(b"not to be read")
    return folder


def on_hub(caches: list[Path], cuts: list[int]) -> Pipeline:
    pipeline = Pipeline(LLAMA, cuts)
    for own, cache in zip(pipeline.adapters, caches, strict=True):
        own._cache_dir = cache
    return pipeline


def read(own: Adapters, version: int = 1) -> Any:
    return own.read(version, REPO, None, COMMIT)


# --- a rank


@pytest.mark.parametrize("peft", [False, True])
def test_each_rank_reads_only_its_own_layers_of_an_adapter(
    hub: FakeHub, home: Path, repo: Path, peft: bool
) -> None:
    if peft:
        (repo / "optimizer.safetensors").unlink()
        adapters.as_peft(repo, repo)
        (repo / "adapters.safetensors").unlink()
    headers = header_sizes(repo)
    pipeline = on_hub([home / "a", home / "b", home / "c"], [1, 3])
    for own in pipeline.adapters:
        hub.served.clear()
        read(own)
        assert hub.data_bytes(headers) == own.num_bytes
    local = Pipeline(LLAMA, [1, 3])
    local.read(1, repo)
    for got, expected in zip(pipeline.logits([1, 0]), local.logits([1, 0]), strict=True):
        assert mx.array_equal(got, expected)
    asked = " ".join(hub.requests)
    assert not any(name in asked for name in ("tokenizer", ".bin", "optimizer"))
    hub.served.clear()
    read(pipeline.adapters[0], 2)
    assert not hub.served, "it was there already"


def test_refused_and_missing_adapters_raise_an_error(hub: FakeHub, home: Path, repo: Path) -> None:
    (own,) = on_hub([home / "a"], []).adapters

    def refused(code: str) -> None:
        with fails(AdapterError, code):
            read(own)
        assert own.num_bytes == 0

    hub.faults.gated = 403
    refused("licence")
    hub.faults.gated = None
    config = (repo / "adapter_config.json").read_text()
    (repo / "adapter_config.json").unlink()
    refused("missing_file")
    (repo / "adapter_config.json").write_text(config)
    weights = (repo / "adapters.safetensors").read_bytes()
    (repo / "adapters.safetensors").unlink()
    own._cache_dir = home / "b"  # the listing of the first is remembered
    refused("pickles")
    (repo / "adapter_model.bin").unlink()
    own._cache_dir = home / "c"
    refused("missing_file")
    (repo / "adapters.safetensors").write_bytes(weights[:2000])
    own._cache_dir = home / "d"
    refused("cut_short")
    (repo / "adapters.safetensors").write_bytes(weights)
    own._cache_dir = home / "e"
    hub.faults.cut = 2
    hub.faults.cut_bytes = 500
    read(own)
    assert own.num_bytes > 0, "a connection that ends is taken up again"


def test_an_adapter_that_changes_while_it_is_fetched_leaves_no_file(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = on_hub([home / "a"], []).adapters
    monkeypatch.setattr("serve.hub.access._FIRST_WAIT_SECONDS", 0.0)
    hub.faults.change_after = 2  # after the header
    with fails(AdapterError, "changed_file") as raised:
        read(own)
    assert raised.value.http_status == 503
    assert own.num_bytes == 0


# --- the registry


@pytest.mark.anyio
async def test_all_ranks_load_the_same_commit_of_an_adapter(
    hub: FakeHub, home: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"allow_hub_adapters": True, "cache_dir": home / "cache"}
    ranks = FakeRanks(adapter_root=None, adapter_memory="100KB", **flags)
    await ranks.adapters.load("x", REPO, in_place=False)
    (described,) = ranks.adapters.registry.described()
    assert described["source"] == f"{REPO}@{COMMIT}"
    hub.revisions["main"] = "f" * 40
    await ranks.adapters.load("y", REPO, in_place=False)
    assert await ranks.adapters.version("x") == 3, "it was evicted"
    assert ranks.commits == [COMMIT] * 3


@pytest.mark.anyio
async def test_a_folder_is_preferred_to_the_hub_which_is_asked_only_with_the_flag(
    hub: FakeHub, home: Path, tmp_path: Path
) -> None:
    (tmp_path / REPO).mkdir(parents=True)
    ranks = FakeRanks(adapter_root=tmp_path, allow_hub_adapters=True)
    await ranks.adapters.load("x", REPO, in_place=False)
    ranks = FakeRanks(adapter_root=tmp_path / "other")
    await ranks.adapters.load("x", REPO, in_place=False)
    assert ranks.commits == [None]
    ranks = FakeRanks(adapter_root=None)
    with fails(AdapterError, "not_allowed") as raised:
        await ranks.adapters.load("x", REPO, in_place=False)
    assert raised.value.http_status == 403
    assert not hub.requests


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "fault", "status", "code"),
    [
        ("org/nobody", {}, 404, "not_on_hub"),
        (REPO, {"gated": 403}, 404, "licence"),
        (REPO, {"busy_api": 99}, 503, "no_hub"),
    ],
)
async def test_a_refusal_by_the_hub_keeps_its_http_status(
    hub: FakeHub, home: Path, path: str, fault: dict[str, Any], status: int, code: str
) -> None:
    vars(hub.faults).update(fault)
    ranks = FakeRanks(adapter_root=None, allow_hub_adapters=True)
    with fails(AdapterError, code) as raised:
        await ranks.adapters.load("x", path, in_place=False)
    assert raised.value.http_status == status
    assert not ranks.paths
    assert ranks.adapters.registry.described() == []


# --- a cluster


@pytest.mark.long
@pytest.mark.uses("adapters")
def test_a_cluster_loads_an_adapter_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(mlx_lm.load, str(TINY_CHAT))
    folder = adapters.save_adapter(tmp_path / "repo", make()[0], keys=ALL, size=SIZE)
    messages = [{"role": "user", "content": "Who are you?"}]
    model, tokenizer = make(adapter_path=str(folder))
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def answer(model: Any) -> str:
        """mlx_lm.generate leaves out a blank at the begin."""
        generated = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24)
        return tokenizer.decode([each.token for each in generated], skip_special_tokens=True)

    expected = answer(model)
    assert expected != answer(make()[0])
    with running(folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        port = free_ports(1)[0]
        flags = serve_flags(
            port, TINY_CHAT, "--allow-hub-adapters", "--lora-modules", f"first={REPO}"
        )
        with started(brigade_launch(2, flags), port) as server:
            server.wait_until_ready()
            body = {"lora_name": "second", "lora_path": REPO}
            client = server.client()
            client.post("/load_lora_adapter", body=body, cast_to=str)
            for name in ("first", "second"):
                reply = client.chat.completions.create(
                    model=name, messages=messages, temperature=0, max_tokens=24
                )
                assert reply.choices[0].message.content == expected
            listed = {a["name"]: a for a in server.get("/v1/lora_adapters")["data"]}
    assert listed["second"]["source"] == f"{REPO}@{COMMIT}"
    # Both ranks, one cache: each tensor came once.
    assert hub.data_bytes(header_sizes(folder)) == sum(listed["second"]["bytes"])


@pytest.mark.long
def test_an_adapter_missing_on_the_hub_ends_the_start(hub: FakeHub, home: Path) -> None:
    flags = serve_flags(free_ports(1)[0], TINY_CHAT, "--lora-modules", f"x={REPO}")
    with started(alone(flags)) as server:
        assert server.process.wait(60) == 2
        server.wait_for_log(
            "--lora-modules x: there is no folder org/tiny on this host. If you mean"
        )
    assert not hub.requests
