"""A stage gets the right weights from a folder with holes, and only its own bytes."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gpt2, llama, mixtral

from serve.core.checkpoint import read_checkpoint
from serve.core.errors import ModelError
from serve.core.plan import even_split
from serve.hub.fetch import Sizes
from serve.hub.partial import open_partial
from serve.model.mtp import load_head
from serve.model.sharding import Sharding, StandIn, shard, without_sums
from serve.model.trial import named_arrays
from serve.model.weights import LoadedStage, build_model, load_stage
from tests import heads
from tests.errors import fails
from tests.hub.checkpoints import header_sizes
from tests.hub.server import COMMIT, REPO, FakeHub

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 500,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MIXTRAL = {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {
    "model_type": "gpt2",
    "n_ctx": 64,
    "n_positions": 64,
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 6,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 500,
}
_EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def hub_form(name: str, array: mx.array) -> dict[str, mx.array]:
    """What a checkpoint of the hub has, which mlx-lm's sanitize stacks or transposes."""
    if ".switch_mlp." in name:
        before, _, rest = name.partition(".switch_mlp.")
        expert = _EXPERTS[rest.partition(".")[0]]
        return {f"{before}.experts.{e}.{expert}.weight": part for e, part in enumerate(array)}
    conv = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    if name.endswith(conv):
        return {name.removeprefix("model."): mx.contiguous(array.T)}
    return {name.removeprefix("model.") if ".h." in name else name: array}


def write(folder: Path, module: Any, config: dict[str, Any], num_shards: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(7)
    arrays = tree_map(lambda a: mx.random.normal(a.shape) * 0.3, model.parameters())
    raw = {k: v for name, array in tree_flatten(arrays) for k, v in hub_form(name, array).items()}
    names, places = sorted(raw), {}
    size = -(-len(names) // num_shards)
    for n in range(num_shards):
        file = f"model-{n:05}.safetensors"
        part = {name: raw[name] for name in names[n * size : (n + 1) * size]}
        places |= dict.fromkeys(part, file)
        mx.save_safetensors(str(folder / file), part, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture
def repo(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return write(tmp_path / "repo", *getattr(request, "param", (llama, _LLAMA, 3)))


def from_hub(cache: Path, layers: tuple[int, int], progress=lambda *_: None) -> LoadedStage:
    return load_stage(open_partial(REPO, COMMIT, cache), *layers, progress)


def assert_equal(mine: LoadedStage, theirs: LoadedStage) -> None:
    expected = theirs.stage.weights()
    assert mine.stage.weights().keys() == expected.keys()
    for name, array in mine.stage.weights().items():
        assert mx.array_equal(array, expected[name]), name


_CHECKPOINTS = {
    "llama-1": (llama, _LLAMA, 1),
    "llama-3": (llama, _LLAMA, 3),
    "llama-tied": (llama, {**_LLAMA, "tie_word_embeddings": True}, 3),
    "mixtral-experts": (mixtral, _MIXTRAL, 3),
    "gpt2-transposed": (gpt2, _GPT2, 2),
}
_QUICK = {
    ("llama-1", 3),
    ("llama-3", 2),
    ("llama-tied", 2),
    ("mixtral-experts", 4),
    ("gpt2-transposed", 3),
}


@pytest.mark.parametrize(
    ("repo", "num_ranks"),
    [
        pytest.param(
            _CHECKPOINTS[name],
            num_ranks,
            id=f"{name}-{num_ranks}",
            marks=() if (name, num_ranks) in _QUICK else pytest.mark.slow,
        )
        for name in _CHECKPOINTS
        for num_ranks in (1, 2, 3, 4)
    ],
    indirect=["repo"],
)
def test_fetched_weights_equal_those_of_a_whole_folder(
    hub: FakeHub, home: Path, repo: Path, num_ranks: int
) -> None:
    headers = header_sizes(repo)
    for rank, layers in enumerate(even_split(6, num_ranks)):
        hub.served.clear()
        seen: list[tuple[str, int, int]] = []
        mine = from_hub(home / f"cache-{rank}", layers, lambda *step, to=seen: to.append(step))
        assert_equal(mine, load_stage(repo, *layers, lambda *_: None))
        assert mine.bytes_fetched == hub.data_bytes(headers)
        ratio = mine.bytes_fetched / mine.bytes_owned
        # Trained masks and such that a checkpoint holds and the model drops are not fetched.
        assert 0.99 <= ratio <= 1.01, ratio
        assert seen == sorted(seen)
        fetched = [step for step in seen if step[0] == "fetching"]
        assert fetched[-1][1] == fetched[-1][2] <= mine.bytes_fetched
        assert seen[-1] == ("loading", mine.bytes_owned, mine.bytes_owned)


@pytest.mark.parametrize("repo", [_CHECKPOINTS["llama-tied"]], indirect=True)
def test_the_embedding_is_fetched_first_by_the_first_stage_and_late_by_the_last(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    places: list[int] = []
    for cache, layers in (("a", (0, 3)), ("b", (3, 6))):
        model = open_partial(REPO, COMMIT, home / cache, sizes=Sizes(num_connections=1))
        hub.served.clear()
        load_stage(model, *layers, lambda *_: None)
        embedding = model.tensors["model.embed_tokens.weight"]
        for number, served in enumerate(hub.served):
            is_same_file = served.file == embedding.file.name
            if is_same_file and served.start <= embedding.start < served.end:
                places.append(number)
    first, last = places
    assert first == 0
    assert last >= len(hub.served) - 2, "only the norm may come after it"


@pytest.mark.parametrize(
    "repo",
    [_CHECKPOINTS[name] for name in ("llama-tied", "mixtral-experts", "gpt2-transposed")],
    indirect=True,
)
def test_loaded_weights_are_not_fetched_again(hub: FakeHub, home: Path, repo: Path) -> None:
    """As after a replan, on a host whose cache is empty."""
    headers = header_sizes(repo)
    held = from_hub(home / "first", (0, 4)).stage.weights()
    hub.served.clear()
    model = open_partial(REPO, COMMIT, home / "second")
    mine = load_stage(model, 2, 6, lambda *_: None, loaded=held)
    assert_equal(mine, load_stage(repo, 2, 6, lambda *_: None))
    assert held == {}
    assert mine.bytes_fetched == hub.data_bytes(headers)
    missing = mine.bytes_owned - mine.bytes_kept
    assert 0 < missing < 0.7 * mine.bytes_owned
    assert 0.99 <= mine.bytes_fetched / missing <= 1.01


class Second(StandIn):
    """The second shard."""

    def rank(self) -> int:
        return 1


@pytest.mark.parametrize("group", [StandIn(2), Second(2)], ids=["first", "second"])
def test_a_shard_reads_only_its_own_bytes(
    hub: FakeHub,
    home: Path,
    repo: Path,
    group: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The rows of this model are so short that a shard would read past its parts of them.
    monkeypatch.setattr("serve.hub.parts._MAX_GAP_BYTES", 0)

    def divide(model: nn.Module) -> Sharding:
        return shard(model, group)

    whole = build_model(repo)
    shard(whole, group)
    expected = dict(named_arrays(whole))
    all_layers = load_stage(repo, 0, 6, lambda *_: None)
    with without_sums():
        local = load_stage(repo, 0, 6, lambda *_: None, divide)
        headers = header_sizes(repo)
        partial = open_partial(REPO, COMMIT, home / "cache")
        remote = load_stage(partial, 0, 6, lambda *_: None, divide)
    for mine in (local, remote):
        for name, array in mine.stage.weights().items():
            assert mx.array_equal(array, expected[name]), name
    assert local.bytes_owned == remote.bytes_owned < 0.7 * all_layers.bytes_owned
    if local.bytes_read is not None:
        assert local.bytes_read <= 1.01 * local.bytes_owned + 100_000  # headers and config
    assert remote.bytes_fetched == hub.data_bytes(headers) < 0.8 * all_layers.bytes_owned


def test_no_byte_is_fetched_twice(hub: FakeHub, home: Path, repo: Path) -> None:
    first = from_hub(home / "cache", (0, 3))
    hub.served.clear()
    again = from_hub(home / "cache", (0, 3))
    assert again.bytes_fetched == 0
    assert not hub.served
    assert_equal(again, first)


def test_rank_0_fetches_a_prediction_head_with_its_layers(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    shutil.rmtree(repo)
    folder = heads.make(repo, "mimo", vocab_size=4096, hidden_size=128)
    partial = open_partial(REPO, COMMIT, home / "cache")
    headers = header_sizes(folder)
    mine = load_head(partial, lambda *_: None, lambda _: None)
    theirs = load_head(folder, lambda *_: None, lambda _: None)
    num_bytes = 0
    for name, array in mine.weights().items():
        assert mx.array_equal(array, theirs.weights()[name]), name
        num_bytes += array.nbytes
    # Small gaps between tensors are fetched too.
    assert num_bytes <= hub.data_bytes(headers) < 1.01 * num_bytes


def test_a_model_that_evaluates_weights_while_it_is_built_gets_right_values(
    hub: FakeHub, home: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compute from zeros, and nobody would see it."""

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        for name in list(weights):
            if name.endswith("input_layernorm.weight"):
                largest = mx.max(mx.abs(weights[name])).item()
                weights[name] = weights[name] / largest
        return weights

    monkeypatch.setattr(llama.Model, "sanitize", sanitize)
    mine = from_hub(home / "cache", (0, 3))
    theirs = load_stage(repo, 0, 3, lambda *_: None)
    assert_equal(mine, theirs)
    assert mine.bytes_fetched <= 1.02 * mine.bytes_owned


def test_code_in_a_repository_is_never_fetched(hub: FakeHub, home: Path, repo: Path) -> None:
    config = {**_LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    (repo / "config.json").write_text(json.dumps(config))
    (repo / "modeling_evil.py").write_text("raise SystemExit('it has run')")
    mine = from_hub(home / "cache", (0, 3))
    assert mine.bytes_owned > 0
    assert not any("evil" in asked for asked in hub.requests)


def test_a_model_that_requires_code_from_its_repository_is_refused(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    (repo / "config.json").write_text(json.dumps({**_LLAMA, "model_file": "evil.py"}))
    (repo / "evil.py").write_text("raise SystemExit('it has run')")
    with fails(ModelError, "model", match=r"evil\.py"):
        from_hub(home / "cache", (0, 3))


def test_a_refusal_halfway_through_a_fetch_is_one_error(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    open_partial(REPO, COMMIT, home / "cache")
    hub.faults.gated = 403
    with fails(ModelError, "licence"):
        from_hub(home / "cache", (0, 3))
    hub.faults.gated = None
    digest = read_checkpoint(open_partial(REPO, COMMIT, home / "cache").folder).digest
    assert digest == read_checkpoint(repo).digest
