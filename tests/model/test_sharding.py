"""Shards of a model: together they give the logits of the whole model, whatever is divided."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from serve.model import pairs
from serve.model.sharding import Divisions, StandIn, shard, shard_to_train, without_sums
from serve.model.trial import Trial, named_arrays
from tests import architectures
from tests.model.shard_threads import Seat, on_shards
from tests.models import build
from tests.models_page import sharded

# mlx-lm's own shard; and pairs: fused matrices, experts, a recurrence, and values that the code
# changes in place (`h *= ...`).
QUICK = {"deepseek_v3", "llama", "qwen3_5", "phi3", "mixtral", "falcon_h1", "gemma3_text"}
CANNOT_RUN = {"olmo"}  # mlx-lm's own forward fails.
ROOT = Path(__file__).resolve().parent.parent.parent
NUM_SHARDS = 2
MAX_DIFFERENCE = 1e-4
MAX_DIFFERENCE_OF = {"muse_spark": 1e-3}  # It computes in half precision.


ALL = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in architectures.architectures()
    if name not in CANNOT_RUN
]


def answers(model: nn.Module) -> list[mx.array]:
    """Returns the logits of a prompt and of the token after it."""
    caches = make_prompt_cache(model)
    logits = []
    for tokens in ([[3, 5, 7, 11, 13]], [[17]]):
        out = model(mx.array(tokens), cache=caches)
        finite = mx.where(mx.isinf(out), 0, out)  # phi3small excludes some tokens with -inf.
        mx.eval(finite)
        logits.append(finite)
    return logits


@pytest.mark.parametrize("name", ALL)
def test_shards_together_give_the_logits_of_the_whole_model(name: str) -> None:
    compare_shards(lambda: architectures.build(name), MAX_DIFFERENCE_OF.get(name, MAX_DIFFERENCE))
    assert sharded(name) == documented(name)


def documented(name: str) -> str:
    """What docs/models.md says that shards divide."""
    for line in (ROOT / "docs" / "models.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 2 and cells[1] == name:
            return cells[-2]
    raise AssertionError(f"{name} is missing in docs/models.md: run scripts/check --all-models")


def compare_shards(
    make: Callable[[], nn.Module],
    max_difference: float = MAX_DIFFERENCE,
    num_shards: int = NUM_SHARDS,
) -> Divisions:
    """Compares the answers of shards with those of the whole model. Returns what is divided."""
    first, *_ = divisions_of_shards(make, max_difference, num_shards)
    return first


def divisions_of_shards(
    make: Callable[[], nn.Module], max_difference: float, num_shards: int
) -> list[Divisions]:
    """Compares the answers of shards with those of the whole model. Returns each shard's parts."""
    whole = answers(make())
    divisions: list[Divisions] = []
    digests: set[str] = set()

    def build_shard(seat: Seat) -> nn.Module:
        model = make()
        sharding = shard(model, seat)
        divisions.append(sharding.divisions)
        digests.add(sharding.digest)
        mx.eval(model.parameters())
        return model

    for own in on_shards(num_shards, build_shard, answers):
        for expected, logits in zip(whole, own, strict=True):
            scale = float(mx.abs(expected).max())
            assert float(mx.abs(expected - logits).max()) < max_difference * scale
    assert all(each.keys() == divisions[0].keys() for each in divisions)
    assert len(digests) == 1
    return sorted(divisions, key=lambda each: [each[name].ranges for name in sorted(each)])


def test_shards_divide_layers_and_keep_everything_else_whole() -> None:
    whole = dict(named_arrays(build("llama")))
    model = build("llama")
    shard(model, StandIn(2))
    sizes = {name: array.size for name, array in named_arrays(model)}
    assert sizes.keys() == whole.keys()
    for name, array in whole.items():
        is_divided = name.startswith("model.layers") and "norm" not in name
        assert sizes[name] == (array.size // 2 if is_divided else array.size), name


def test_shards_do_not_divide_the_head() -> None:
    """mlx-lm divides this head, and then every shard would have to take part in the logits."""
    model = architectures.build("qwen3_5")
    head = model.language_model.lm_head
    shard(model, StandIn(2))
    assert model.language_model.lm_head is head
    assert getattr(model.language_model, "sharding_group", None) is None


def test_shapes_of_a_single_shard_are_found_without_sums() -> None:
    model = build("llama")
    shard(model, StandIn(2))
    with without_sums():
        caches = make_prompt_cache(model)
        logits = model(mx.array([[1, 2, 3]]), cache=caches)
    assert logits.shape == (1, 3, 96)
    assert caches[0].keys.shape[1] == 1  # of two heads


@pytest.mark.parametrize(
    ("changes", "num_shards", "parts"),
    [
        ({"num_key_value_heads": 1}, 2, {"self_attn.q_proj", "self_attn.o_proj"}),
        ({"num_key_value_heads": 2}, 4, {"self_attn.k_proj", "self_attn.v_proj"}),
        ({}, 3, set()),
    ],
    ids=["one kv head", "fewer kv heads than shards", "no whole kv heads"],
)
def test_heads_that_mlx_lm_cannot_divide_are_divided_correctly(
    changes: dict[str, int], num_shards: int, parts: set[str]
) -> None:
    """mlx-lm would round the number of heads down and give wrong results. Shards that need the same
    head each have a copy of it; otherwise the attention stays whole. The MLP is divided anyway."""
    divisions = compare_shards(lambda: build("llama", **changes), num_shards=num_shards)
    inside = {name.removeprefix("model.layers.1.") for name in divisions}
    assert {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} < inside
    assert parts <= inside
    if not parts:
        assert not any("self_attn" in name for name in inside)


SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
EIGHT_KV_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
SLOW = pytest.mark.slow
# The heads, or the columns of an MLP, of each shard.
UNEVEN = [
    ("llama", SIX_HEADS, {"self_attn.o_proj": (4, 2)}),
    ("llama", EIGHT_KV_HEADS, {"self_attn.o_proj": (6, 6, 4), "mlp.down_proj": (22, 21, 21)}),
    pytest.param("llama", {}, {"mlp.down_proj": (22, 21, 21)}, marks=SLOW),
    pytest.param(
        "llama",
        {"num_attention_heads": 5, "num_key_value_heads": 1},
        {"self_attn.o_proj": (3, 2)},
        marks=SLOW,
    ),
    pytest.param("qwen2", SIX_HEADS, {"self_attn.o_proj": (4, 2)}, marks=SLOW),
    pytest.param("qwen3", SIX_HEADS, {"self_attn.o_proj": (4, 2)}, marks=SLOW),
    pytest.param(
        "gemma3_text",
        EIGHT_KV_HEADS,
        {"self_attn.o_proj": (6, 6, 4), "mlp.down_proj": (22, 21, 21)},
        marks=SLOW,
    ),
    pytest.param(
        "phi3", {**SIX_HEADS, "hidden_size": 96}, {"self_attn.o_proj": (4, 2)}, marks=SLOW
    ),
    pytest.param(
        "mixtral",
        EIGHT_KV_HEADS,
        {
            "self_attn.o_proj": (6, 6, 4),
            "block_sparse_moe.switch_mlp.down_proj": (22, 21, 21),
        },
        marks=SLOW,
    ),
    pytest.param(
        "qwen3_moe",
        EIGHT_KV_HEADS,
        {"self_attn.o_proj": (6, 6, 4), "mlp.switch_mlp.down_proj": (11, 11, 10)},
        marks=SLOW,
    ),
    pytest.param("gpt_oss", SIX_HEADS, {"self_attn.o_proj": (4, 2)}, marks=SLOW),
]


@pytest.mark.parametrize(("name", "changes", "expected"), UNEVEN)
def test_shards_of_unequal_parts_give_the_logits_of_the_whole_model(
    name: str, changes: dict[str, int], expected: dict[str, tuple[int, ...]]
) -> None:
    (num_shards,) = {len(sizes) for sizes in expected.values()}
    parts = divisions_of_shards(
        lambda: architectures.build(name, **changes), MAX_DIFFERENCE, num_shards
    )
    for module, sizes in expected.items():
        own = [each[f"model.layers.1.{module}"] for each in parts]
        assert [each.share * sum(sizes) for each in own] == pytest.approx(sizes)


@pytest.mark.slow
def test_shards_give_the_right_logits_if_experts_are_looked_up_in_a_table() -> None:
    """The search ran with a table of random numbers, and MLX read outside of an array, which ended
    the process."""
    divisions = compare_shards(lambda: architectures.build("deepseek_v41"), num_shards=3)
    assert any("down_proj" in name for name in divisions)


def test_shards_use_the_loaded_arrays_if_mlx_lm_fails_to_divide_a_model() -> None:
    """mlx-lm divides this bias in place before it fails. The weights have to stay the objects that
    were loaded, because a shard reads only its parts of these."""
    model = architectures.build("gpt_oss", **SIX_HEADS)
    loaded = dict(named_arrays(model))
    sharding = shard(model, StandIn(2))
    known = {id(array) for array in loaded.values()}
    assert {id(made.source) for made in sharding.made.values()} <= known
    biases = dict(named_arrays(architectures.build("gpt_oss", **SIX_HEADS)))
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.down_proj.bias"
        bias = dict(named_arrays(model))[name]
        assert mx.allclose(2 * bias, biases[name])


def test_modules_in_a_list_are_divided_only_once_for_training() -> None:
    """The MLP was divided twice, and then it was not known that it is divided at all."""
    model = architectures.build("phi")
    for layer in model.layers:
        up = nn.Linear(64, 256)
        layer.mlp = nn.Sequential(nn.LayerNorm(64), up, nn.GELU(), nn.Linear(256, 64))
    trained = {"model.layers.0.mlp.layers.0.weight"}
    sharding = shard_to_train(model, StandIn(2), trained)
    assert "model.layers.0.mlp" in sharding.blocks
    _, first, _, last = model.layers[0].mlp.layers
    assert type(first) is type(last) is nn.Linear
    assert (first.weight.shape, last.weight.shape) == ((128, 64), (64, 128))


def test_weights_of_four_bits_are_divided_between_groups_of_numbers() -> None:
    """Groups of 32 numbers: a head has two groups, and the MLP has five."""
    sizes = {**SIX_HEADS, "head_dim": 64, "intermediate_size": 160}
    parts = divisions_of_shards(
        lambda: architectures.quantized(architectures.build("llama", **sizes)),
        MAX_DIFFERENCE,
        num_shards=2,
    )
    for module, num_numbers in (("self_attn.o_proj", (256, 128)), ("mlp.down_proj", (96, 64))):
        own = [each[f"model.layers.1.{module}"] for each in parts]
        packed = [end - start for each in own for start, end in each.ranges]
        assert packed == [number // 8 for number in num_numbers]


def test_experts_of_four_bits_are_divided() -> None:
    divisions = compare_shards(lambda: architectures.quantized(architectures.build("mixtral")))
    assert any("switch_mlp.down_proj" in name for name in divisions)


def test_modules_without_a_proof_are_not_divided() -> None:
    """A norm goes over all heads together, so a shard of them would compute something else."""
    divisions = compare_shards(lambda: architectures.build("olmo2"))
    inside = {name.removeprefix("model.layers.1.") for name in divisions}
    assert {name for name in inside if not name.startswith("model.")} == {
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    }


def test_digest_differs_if_a_shard_leaves_a_matrix_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its processor may round differently, so that a trial run fails there. The other shards would
    compute sums in which it takes no part."""
    digest = shard(architectures.build("phi3"), StandIn(2)).digest
    assert shard(architectures.build("phi3"), StandIn(2)).digest == digest
    can_be_summed = pairs._Layer._can_be_summed

    def is_not_mlp(self: pairs._Layer, matrix: str) -> bool:
        return "mlp" not in matrix and can_be_summed(self, matrix)

    monkeypatch.setattr(pairs._Layer, "_can_be_summed", is_not_mlp)
    other = shard(architectures.build("phi3"), StandIn(2))
    assert other.divisions
    assert other.digest != digest


def test_digest_differs_if_mlx_lm_divides_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = shard(build("llama"), StandIn(2)).digest
    monkeypatch.delattr(type(build("llama")), "shard")
    assert shard(build("llama"), StandIn(2)).digest != digest


def test_functions_are_not_compiled_while_sums_are_turned_off() -> None:
    """A function compiled within it would leave out sums later, too."""
    model = build("llama")

    @mx.compile
    def total(x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x)

    with without_sums():
        Trial(model, list(model.layers), cached=True)  # It disables compilation, too.
        assert total(mx.ones(2)).tolist() == [1, 1]
    with sums_times_seven():
        assert total(mx.ones(2)).tolist() == [7, 7]


@contextmanager
def sums_times_seven() -> Iterator[None]:
    with without_sums():
        vars(mx.distributed)["all_sum"] = lambda x, **_: x * 7
        mx.enable_compile()
        yield
