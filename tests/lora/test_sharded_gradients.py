"""Shards compute the gradients of the whole model, whatever is divided."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from serve.core.errors import PlanError, UsageError
from serve.lora.sharded import TrainedParts, shard_trained
from serve.model.sharding import StandIn
from tests import architectures
from tests.model.shard_threads import Seat, on_shards
from tests.tune.ranks import LORA, config_of, tuned

TOKENS = [[3, 5, 7, 11, 13], [2, 4, 6, 8, 10]]
MAX_DIFFERENCE = 1e-4
KINDS = {
    "lora": {"lora_parameters": LORA},
    "full": {"fine_tune_type": "full"},
}
# Experts; keys of low rank; and a norm in the attention, before the matrices that are divided.
QUICK = {("mixtral", "lora"), ("deepseek_v3", "full"), ("lille-130m", "full")}
WITHOUT_GRADIENT = {"deepseek_v41", "olmo", "recurrent_gemma"}  # mlx-lm's code fails.
HALF = {"muse_spark"}  # It computes in half precision.
ALL = [
    pytest.param(name, kind, marks=() if (name, kind) in QUICK else pytest.mark.slow)
    for name in architectures.architectures()
    for kind in KINDS
    if name not in WITHOUT_GRADIENT | HALF
]


NO_CHANGES: Mapping[str, int] = {}
THREE_KV_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
FOUR_KV_HEADS = {"num_key_value_heads": 4}
UNEVEN = [
    ("qwen3", "lora", 2, THREE_KV_HEADS),
    pytest.param("qwen3", "full", 2, THREE_KV_HEADS, marks=pytest.mark.slow),
    pytest.param("llama", "lora", 3, FOUR_KV_HEADS, marks=pytest.mark.slow),
    pytest.param("llama", "full", 3, FOUR_KV_HEADS, marks=pytest.mark.slow),
    pytest.param("gemma3_text", "lora", 2, THREE_KV_HEADS, marks=pytest.mark.slow),
    pytest.param("mixtral", "lora", 3, FOUR_KV_HEADS, marks=pytest.mark.slow),
    pytest.param("mixtral", "full", 3, FOUR_KV_HEADS, marks=pytest.mark.slow),
]


class Shard(NamedTuple):
    parts: TrainedParts
    gradients: dict[str, mx.array]


def trainable(name: str, kind: str, changes: Mapping[str, int] = NO_CHANGES) -> nn.Module:
    make = partial(architectures.build, **changes)
    return tuned(config_of(num_layers=-1, **KINDS[kind]), name, make=make)


def gradients_of(model: nn.Module) -> dict[str, mx.array]:
    """Returns the gradients of a random linear function of the logits."""

    def value(parameters: Any) -> mx.array:
        model.update(parameters)
        logits = model(mx.array(TOKENS))
        weights = mx.random.normal(logits.shape, key=mx.random.key(1))
        return (mx.where(mx.isinf(logits), 0, logits) * weights).sum()

    parameters = model.trainable_parameters()
    gradients = mx.grad(value)(parameters)
    model.update(parameters)
    mx.eval(gradients)
    return dict(tree_flatten(gradients))


def of_shards(
    name: str, kind: str, num_shards: int, changes: Mapping[str, int] = NO_CHANGES
) -> list[Shard]:
    found: dict[int, TrainedParts] = {}

    def build(seat: Seat) -> tuple[Seat, nn.Module]:
        model = trainable(name, kind, changes)
        _, found[seat.rank()] = shard_trained(model, seat, is_initial=False)
        mx.eval(model.parameters())
        return seat, model

    def run(built: tuple[Seat, nn.Module]) -> Shard:
        seat, model = built
        return Shard(found[seat.rank()], gradients_of(model))

    return on_shards(num_shards, build, run)


def joined(shards: list[Shard]) -> dict[str, mx.array]:
    """Returns the gradients of the whole arrays."""
    first, *others = shards
    whole: dict[str, mx.array] = {}
    for name, gradient in first.gradients.items():
        summands = [gradient]
        if name in first.parts.divided:
            summands = [
                shard.parts.divided[name].among_zeros(shard.gradients[name]) for shard in shards
            ]
        elif name in first.parts.partial:
            summands = [shard.gradients[name] for shard in shards]
        else:
            for other in others:
                assert differs(other.gradients[name], gradient) < MAX_DIFFERENCE, name
        whole[name] = mx.stack(summands).sum(axis=0)
    return whole


def differs(found: mx.array, expected: mx.array, scale: float = 0.0) -> float:
    largest = max(float(mx.abs(expected).max()), scale)
    return float(mx.abs(found - expected).max()) / (largest + 1e-20)


def compare(found: Mapping[str, mx.array], expected: Mapping[str, mx.array]) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(mx.abs(gradient).max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert differs(found[name], gradient, 1e-3 * scale) < MAX_DIFFERENCE, name


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_gradients_of_shards_add_up_to_those_of_the_whole_model(name: str, kind: str) -> None:
    try:
        shard_trained(trainable(name, kind), StandIn(2))
    except (PlanError, UsageError) as error:  # The latter refuses it without shards, too.
        pytest.skip(str(error))
    compare(joined(of_shards(name, kind, 2)), gradients_of(trainable(name, kind)))


@pytest.mark.parametrize(("name", "kind", "num_shards", "changes"), UNEVEN)
def test_gradients_of_unequal_shards_add_up_to_those_of_the_whole_model(
    name: str, kind: str, num_shards: int, changes: dict[str, int]
) -> None:
    shards = of_shards(name, kind, num_shards, changes)
    leaf = "lora_a" if kind == "lora" else "weight"
    matrix = f"model.layers.1.self_attn.o_proj.{leaf}"
    first, *_, last = [shard.gradients[matrix].size for shard in shards]
    assert first == 2 * last
    compare(joined(shards), gradients_of(trainable(name, kind, changes)))
