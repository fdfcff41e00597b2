"""Shards of a model: together they give the logits of the whole model, or the model is refused."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import PlanError
from serve.model.sharding import StandIn, shard, without_sums
from serve.model.trial import Trial, named_arrays
from tests import architectures
from tests.model.shard_threads import Seat, on_shards
from tests.models import build

QUICK = {"deepseek_v3", "llama", "qwen3_5"}
ROOT = Path(__file__).resolve().parent.parent.parent
NUM_SHARDS = 2
MAX_DIFFERENCE = 1e-4
MAX_DIFFERENCE_OF = {"muse_spark": 1e-3}  # It computes in half precision.


def shardable() -> Iterator[Any]:
    for name in architectures.architectures():
        if hasattr(architectures.model_class(name), "shard"):
            yield pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


def answers(model: nn.Module) -> list[mx.array]:
    """Returns the logits of a prompt and of the token after it."""
    caches = make_prompt_cache(model)
    logits = []
    for tokens in ([[3, 5, 7, 11, 13]], [[17]]):
        out = model(mx.array(tokens), cache=caches)
        mx.eval(out)
        logits.append(out)
    return logits


@pytest.mark.parametrize("name", list(shardable()))
def test_shards_give_the_logits_of_the_whole_model(name: str) -> None:
    whole = answers(architectures.build(name))

    def build_shard(seat: Seat) -> nn.Module:
        model = architectures.build(name)
        shard(model, seat)
        mx.eval(model.parameters())
        return model

    for own in on_shards(NUM_SHARDS, build_shard, answers):
        for expected, logits in zip(whole, own, strict=True):
            scale = float(mx.abs(expected).max())
            limit = MAX_DIFFERENCE_OF.get(name, MAX_DIFFERENCE) * scale
            assert float(mx.abs(expected - logits).max()) < limit


def test_shardable_architectures_are_those_of_the_documentation() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (listed,) = re.findall(r"which (\d+) of its architectures have: ([^.]*)\.", page)
    count, names = listed
    expected = [parameter.values[0] for parameter in shardable()]
    assert names.replace("\n", " ").split(", ") == expected
    assert int(count) == len(expected)


def test_shard_divides_layers_and_keeps_the_rest_whole() -> None:
    whole = dict(named_arrays(build("llama")))
    model = build("llama")
    shard(model, StandIn(2))
    sizes = {name: array.size for name, array in named_arrays(model)}
    assert sizes.keys() == whole.keys()
    for name, array in whole.items():
        is_divided = name.startswith("model.layers") and "norm" not in name
        assert sizes[name] == (array.size // 2 if is_divided else array.size), name


def test_shard_leaves_the_head_to_rank_0() -> None:
    """mlx-lm divides this head, and then every shard would have to take part in the logits."""
    model = architectures.build("qwen3_5")
    head = model.language_model.lm_head
    shard(model, StandIn(2))
    assert model.language_model.lm_head is head
    assert getattr(model.language_model, "sharding_group", None) is None


def test_without_sums_shows_the_shapes_of_a_shard() -> None:
    model = build("llama")
    shard(model, StandIn(2))
    with without_sums():
        caches = make_prompt_cache(model)
        logits = model(mx.array([[1, 2, 3]]), cache=caches)
    assert logits.shape == (1, 3, 96)
    assert caches[0].keys.shape[1] == 1  # of two heads


@pytest.mark.parametrize(
    ("name", "changes", "num_shards", "reason"),
    [
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "n_kv_heads of 3"),
        ("llama", {"num_key_value_heads": 1}, 2, "n_kv_heads of 1"),
        ("llama", {}, 3, "evenly"),
    ],
)
def test_shard_refuses_heads_that_it_cannot_divide_evenly(
    name: str, changes: dict[str, int], num_shards: int, reason: str
) -> None:
    """mlx-lm would round the number of heads down and give wrong results."""
    with pytest.raises(PlanError, match=reason):
        shard(build(name, **changes), StandIn(num_shards))


def test_shard_refuses_architectures_that_mlx_lm_cannot_divide() -> None:
    with pytest.raises(PlanError, match="cannot shard models of type gemma2"):
        shard(architectures.build("gemma2"), StandIn(2))


def test_without_sums_compiles_nothing() -> None:
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
