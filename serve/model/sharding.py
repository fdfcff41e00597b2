"""Divides the layers of a model among shards, with mlx-lm's own `shard`, and refuses models that
cannot be divided evenly. Every shard keeps everything outside of the layers whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from serve.core.errors import PlanError
from serve.model import trace
from serve.model.trial import FAILURES

_Numbers = dict[str, int]


@dataclass(frozen=True, slots=True)
class StandIn:
    """Stands in for MLX's group of the shards, so that one process can plan what a shard holds."""

    num_shards: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.num_shards


def shard(model: nn.Module, group: Any) -> None:
    """Reduces each layer of a lazy model to the part that this shard computes. group is MLX's group
    of the shards, or a StandIn. Raises PlanError if the layers cannot be divided."""
    divide = getattr(model, "shard", None)
    kind = getattr(model, "model_type", type(model).__module__)
    if divide is None:
        raise PlanError(
            f"--tensor-parallel: mlx-lm cannot shard models of type {kind}. Leave the option out, "
            "so that each rank becomes a stage."
        )
    numbers = [(module, _numbers(module)) for module in model.modules()]
    outside = [(module, dict(module), dict(vars(module))) for module in _outside_layers(model)]
    num_shards = group.size()
    try:
        divide(group)
    except FAILURES as error:
        raise PlanError(
            f"--tensor-parallel {num_shards}: this model of type {kind} cannot be divided "
            f"evenly ({error})."
        ) from error
    for module, before in numbers:
        _check_numbers(before, _numbers(module), num_shards)
    for module, children, attributes in outside:
        _restore(module, children, attributes, group)


@contextmanager
def without_sums() -> Iterator[None]:
    """Lets a model that was sharded with a StandIn run inside a with block. Its results have the
    right shapes, but nothing is exchanged. Nothing is compiled either, because a function that is
    compiled here would not exchange anything later."""

    def all_sum(x: mx.array, **_: Any) -> mx.array:
        return x

    def all_gather(x: mx.array, *, group: StandIn, **_: Any) -> mx.array:
        return mx.concatenate([x] * group.size(), axis=0)

    stand_ins = {"all_sum": all_sum, "all_gather": all_gather}
    real = {name: getattr(mx.distributed, name) for name in stand_ins}
    try:
        vars(mx.distributed).update(stand_ins)
        with trace.uncompiled():
            yield
    finally:
        vars(mx.distributed).update(real)


def _numbers(module: nn.Module) -> _Numbers:
    """The integer attributes of a module, such as its number of heads."""
    return {name: value for name, value in vars(module).items() if type(value) is int}


def _check_numbers(before: _Numbers, after: _Numbers, num_shards: int) -> None:
    """Raises PlanError if a number of heads is not divisible: mlx-lm rounds it down, and then
    computes wrong results."""
    for name, whole in before.items():
        part = after.get(name, whole)
        is_even = part * num_shards == whole
        # A shard may also hold a copy of a head that several shards need.
        is_copied = part == 1 and whole > 0 and num_shards % whole == 0
        if part != whole and not is_even and not is_copied:
            raise PlanError(
                f"--tensor-parallel {num_shards} does not divide this model's {name} of {whole}: "
                f"choose a divisor of {whole}, or leave the option out."
            )


def _outside_layers(model: nn.Module) -> list[nn.Module]:
    inside = {id(module) for layer in model.layers for module in layer.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def _restore(
    module: nn.Module,
    children: dict[str, Any],
    attributes: dict[str, Any],
    group: Any,
) -> None:
    """Makes a module outside of the layers whole again. Only rank 0 computes the head, so it must
    not wait for other shards there."""
    for name, child in children.items():
        if isinstance(child, nn.Module) and module.get(name) is not child:
            module[name] = child
    for name, value in attributes.items():
        if vars(module)[name] is group:
            vars(module)[name] = value
