"""LoRA modules in training, when the layers are divided among shards.

A shard has the same part of an adapter as when it serves (`serve.lora.reading`): columns of B where
the outputs of a module are divided, rows of A where its inputs are. The other matrix is whole on
every shard, and each shard computes only a part of its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from serve.core.errors import PlanError
from serve.lora.layers import DIVIDED, SUMMING, times_own_weight
from serve.model.sharding import (
    Division,
    Sharding,
    shard,
    sum_of_shards,
    with_summed_gradient,
)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a trained array that this shard has. axis is the axis that is divided."""

    division: Division
    axis: int

    def own_part(self, whole: mx.array) -> mx.array:
        """Returns this shard's part of the whole array."""
        return self.division.own_part(whole, self.axis)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole array, from that of this shard's part."""
        sizes = list(shape)
        sizes[self.axis] = round(sizes[self.axis] / self.division.share)
        return tuple(sizes)

    def among_zeros(self, own: mx.array) -> mx.array:
        """Returns an array of the whole shape that is zero outside of this shard's part. The sum of
        those of all shards is the whole array."""
        division = self.division
        shape = self.whole_shape(own.shape)
        size = shape[self.axis]
        whole = mx.zeros(shape, own.dtype)
        before = [slice(None)] * (self.axis % own.ndim)
        start_of_piece = 0
        for start, end in division.ranges:
            first = start * size // division.num_whole
            last = end * size // division.num_whole
            end_of_piece = start_of_piece + last - first
            piece = own[(*before, slice(start_of_piece, end_of_piece))]
            whole[(*before, slice(first, last))] = piece
            start_of_piece = end_of_piece
        return whole


@dataclass(slots=True)
class TrainedParts:
    """The names of trained arrays that are not the same on all shards: those that are divided among
    the shards, and those of which each shard computes only a part of the gradient."""

    divided: dict[str, Part]
    partial: set[str]


class ShardedLoRALinear(nn.Module):
    """This shard's part of a linear module with a LoRA adapter.

    The adapter's product is added before the sum over the shards, so that it needs no sum of its
    own. linear is one of MLX's modules that are divided.
    """

    def __init__(self, linear: nn.Module, lora: LoRALinear, division: Division) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = linear
        self.dropout = lora.dropout
        self.scale = lora.scale
        self.lora_a = lora.lora_a
        self.lora_b = lora.lora_b
        if isinstance(linear, SUMMING):
            self.lora_a = division.own_part(lora.lora_a, 0)
        else:
            self.lora_b = division.own_part(lora.lora_b, 1)

    def __call__(self, x: mx.array) -> mx.array:
        linear: Any = self.linear
        if not isinstance(linear, SUMMING):
            x = with_summed_gradient(x, linear.group)
        y = times_own_weight(x, linear)
        z = (self.dropout(x) @ self.lora_a) @ self.lora_b
        y = y + (self.scale * z).astype(x.dtype)
        if isinstance(linear, SUMMING):
            y = sum_of_shards(y, linear.group)
        if "bias" in linear:
            y = y + linear["bias"]
        return y


def shard_trained(model: nn.Module, group: Any) -> tuple[Sharding, TrainedParts]:
    """Divides a lazy model with LoRA modules among the shards. Raises PlanError if the shards could
    not compute its gradients."""
    adapted: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, (LoRALinear, LoRASwitchLinear)):
            adapted[name] = module
    _replace(model, {name: module.linear for name, module in adapted.items()})
    sharding = shard(model, group)
    modules = dict(model.named_modules())
    inside = {id(module) for layer in model.layers for module in layer.modules()}
    _check_gradients({name: each for name, each in modules.items() if id(each) in inside})
    for module in modules.values():
        if isinstance(module, DIVIDED):
            module.freeze()
    parts = TrainedParts({}, set())
    for name, lora in adapted.items():
        division = sharding.divisions.get(name)
        if division is not None:
            _check_division(name, division, group.size())
            adapted[name] = ShardedLoRALinear(modules[name], lora, division)
            _note(name, division, parts)
    _replace(model, adapted)
    return sharding, parts


def _check_gradients(modules: dict[str, Any]) -> None:
    """Raises PlanError unless MLX's own modules divide all matrices of the layers: they add up the
    gradients of their inputs. A matrix beside them that stays whole, or is divided in another way,
    would pass on only a part of its gradient."""
    for name, module in modules.items():
        weight = module.get("weight")
        is_matrix = isinstance(weight, mx.array) and weight.ndim > 1
        if is_matrix and not isinstance(module, DIVIDED):
            raise PlanError(
                f"--tensor-parallel: the shards of this model do not divide {name} in a way in "
                "which it can be trained: leave the option out, and use stages or --data-parallel."
            )


def _replace(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    model.update_modules(tree_unflatten(list(modules.items())))


def _check_division(name: str, division: Division, num_shards: int) -> None:
    is_even = abs(division.share * num_shards - 1) < 1e-9
    if division.axis not in (-1, -2) or not is_even:
        raise PlanError(
            f"--tensor-parallel {num_shards}: {name} is divided among the shards in a way in which "
            "it cannot be trained: name other modules in keys of lora_parameters, or use fewer "
            "shards."
        )


def _note(name: str, division: Division, parts: TrainedParts) -> None:
    """Notes which of the two matrices of a module is divided."""
    if division.axis == -1:
        parts.divided[f"{name}.lora_a"] = Part(division, 0)
        parts.partial.add(f"{name}.lora_b")
    else:
        parts.divided[f"{name}.lora_b"] = Part(division, 1)
        parts.partial.add(f"{name}.lora_a")
