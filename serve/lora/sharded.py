"""Trained modules in layers that are divided among shards: with LoRA or DoRA adapters, or with
trained weights.

A shard holds the same part of an adapter as when it serves (`serve.lora.reading`): columns of B
where a module's outputs are divided, rows of A where its inputs are. The other matrix is whole on
every shard, and each shard computes only a part of its gradient."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from serve.core.errors import PlanError
from serve.lora.layers import dequantized, times_own_weight
from serve.model.sharding import (
    DIVIDED,
    SUMMING,
    Division,
    Sharding,
    matrices_of_layers,
    owner_of,
    shard_to_train,
    sum_of_shards,
    with_summed_gradient,
)


@dataclass(frozen=True, slots=True)
class ArrayDivision:
    """The division of one axis of a trained array, and this shard's part."""

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
        """Returns an array of the whole shape, zero outside of this shard's part."""
        shape = self.whole_shape(own.shape)
        whole = mx.zeros(shape, own.dtype)
        before = [slice(None)] * (self.axis % own.ndim)
        start_of_piece = 0
        for start, end in self.division.ranges_of(shape[self.axis]):
            end_of_piece = start_of_piece + end - start
            piece = own[(*before, slice(start_of_piece, end_of_piece))]
            whole[(*before, slice(start, end))] = piece
            start_of_piece = end_of_piece
        return whole


Shapes = dict[str, tuple[int, ...]]
"""The shapes of trained arrays, by name."""


@dataclass(slots=True)
class TrainedParts:
    """The names of trained arrays that are divided, or whose gradients the shards add up."""

    divided: dict[str, ArrayDivision]
    partial: set[str]


class ShardedLoRALinear(nn.Module):
    """This shard's part of a linear module of MLX's with a LoRA adapter, whose product is added
    before the sum over the shards, so that one sum is enough."""

    def __init__(
        self,
        linear: nn.Module,
        lora: LoRALinear | DoRALinear,
        division: Division,
    ) -> None:
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


class ShardedDoRALinear(ShardedLoRALinear):
    """This shard's part of a linear module with a DoRA adapter. The magnitudes m belong to the
    outputs, as do the norms that they replace. Where the inputs are divided, the squared norms are
    added up over the shards, and m is whole."""

    def __init__(
        self,
        linear: nn.Module,
        dora: DoRALinear,
        division: Division,
        *,
        is_initial: bool,
    ) -> None:
        super().__init__(linear, dora, division)
        if isinstance(linear, SUMMING):
            self.m = mx.zeros(dora.m.shape) if is_initial else dora.m
        elif is_initial:
            self.set_magnitudes()
        else:
            self.m = division.own_part(dora.m, 0)

    def __call__(self, x: mx.array) -> mx.array:
        linear: Any = self.linear
        if not isinstance(linear, SUMMING):
            x = with_summed_gradient(x, linear.group)
        weight = dequantized(linear)
        y = x @ weight.T
        dropped = self.dropout(x)
        z = (dropped @ self.lora_a) @ self.lora_b
        y = y + (self.scale * z).astype(x.dtype)
        if isinstance(linear, SUMMING):
            y = sum_of_shards(y, linear.group)
        scaled = self.scale * self.lora_b.T
        adapted = weight + scaled @ self.lora_a.T
        norms = self._norms(mx.stop_gradient(adapted))
        gain = self.m / norms
        y = gain.astype(x.dtype) * y
        if "bias" in linear:
            y = y + linear["bias"]
        return y

    def set_magnitudes(self) -> None:
        """Sets m to its initial value. If the inputs are divided, all shards call this at once."""
        weight = dequantized(self.linear)
        self.m = self._norms(weight.astype(mx.float32))

    def _norms(self, weight: mx.array) -> mx.array:
        """Returns the norms of the rows of a whole weight, from this shard's part of it."""
        linear: Any = self.linear
        squares = weight.square()
        squares = squares.sum(axis=1)
        if isinstance(linear, SUMMING):
            squares = sum_of_shards(squares, linear.group)
        return squares.sqrt()


def set_magnitudes(model: nn.Module) -> None:
    """Sets the initial magnitudes that need a sum over the shards; `shard_trained` leaves them
    zero. All shards have to call this at the same time."""
    for module in model.modules():
        if not isinstance(module, ShardedDoRALinear):
            continue
        if isinstance(module.linear, SUMMING):
            module.set_magnitudes()


def shard_trained(
    model: nn.Module,
    group: Any,
    *,
    is_initial: bool = True,
) -> tuple[Sharding, TrainedParts]:
    """Divides a lazy model that was made trainable. is_initial is False for an adapter from a file.
    Raises PlanError if the shards could not compute its gradients."""
    adapted = _detach_adapters(model)
    shapes = {name: array.shape for name, array in _trained_arrays(model).items()}
    trained = shapes.keys()
    sharding = shard_to_train(model, group, trained)
    _check_gradients(model, sharding)
    _train_in_new_modules(model, trained)
    if sharding.blocks:
        parts = _parts_in_blocks(model, sharding, group.size())
    else:
        parts = _parts_of_weights(trained, sharding, group.size())
    _check_shapes(shapes, model, parts)
    modules = dict(model.named_modules())
    for name, lora in adapted.items():
        division = sharding.divisions.get(name)
        if division is not None:
            _check_division(name, division, group.size())
            if sharding.blocks:
                _divide_in_block(name, lora, division, is_initial=is_initial)
            else:
                adapted[name] = _divided(modules[name], lora, division, is_initial=is_initial)
            _add_parts(name, lora, division, parts)
        elif sharding.is_in_block(name):
            own_names = _trained_arrays(lora)
            parts.partial.update(f"{name}.{key}" for key in own_names)
    _replace(model, adapted)
    return sharding, parts


def _detach_adapters(model: nn.Module) -> dict[str, Any]:
    """Puts back the plain modules without adapters. Returns the replaced ones by name."""
    adapted: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, (LoRALinear, LoRASwitchLinear, DoRALinear)):
            adapted[name] = module
    _replace(model, {name: module.linear for name, module in adapted.items()})
    return adapted


def _train_in_new_modules(model: nn.Module, trained: Set[str]) -> None:
    """Makes exactly these arrays trainable in the modules of MLX's that the division has made."""
    for name, module in model.named_modules():
        if not isinstance(module, DIVIDED):
            continue
        module.freeze()
        for key in module:
            if f"{name}.{key}" in trained:
                module.unfreeze(recurse=False, keys=key)


def _divided(
    module: nn.Module,
    lora: LoRALinear | DoRALinear,
    division: Division,
    *,
    is_initial: bool,
) -> ShardedLoRALinear:
    """Makes this shard's part of a module with an adapter, from its part of the plain module."""
    if isinstance(lora, DoRALinear):
        return ShardedDoRALinear(module, lora, division, is_initial=is_initial)
    return ShardedLoRALinear(module, lora, division)


def _divide_in_block(name: str, lora: Any, division: Division, *, is_initial: bool) -> None:
    """Reduces the adapter of a divided module to this shard's part. Raises PlanError."""
    axis_of_a, axis_of_b = _axes(lora)
    is_dora = isinstance(lora, DoRALinear)
    has_some_inputs = division.axis == -1
    if has_some_inputs and is_dora:
        raise PlanError(
            f"--tensor-parallel-size: the shards of this model cannot train DoRA on {name}, "
            "because each has only some of its inputs: use LoRA, or name other modules in keys of "
            "lora_parameters.",
            code="unsupported_layer",
        )
    if has_some_inputs:
        lora.lora_a = division.own_part(lora.lora_a, axis_of_a)
        return
    lora.lora_b = division.own_part(lora.lora_b, axis_of_b)
    if is_dora and is_initial:
        lora.set_linear(lora.linear)  # This computes the magnitudes from this shard's part.
    elif is_dora:
        lora.m = division.own_part(lora.m, 0)


def _axes(lora: nn.Module) -> tuple[int, int]:
    """Returns the axes of lora_a's inputs and lora_b's outputs (transposed for experts)."""
    if isinstance(lora, LoRASwitchLinear):
        return -1, -2
    return 0, 1


def _parts_in_blocks(model: nn.Module, sharding: Sharding, num_shards: int) -> TrainedParts:
    """Finds how trained weights are divided in a model with blocks. Raises PlanError."""
    parts = TrainedParts({}, set())
    for path, array in _trained_arrays(model).items():
        name = owner_of(path)
        key = path.removeprefix(f"{name}.")
        division = sharding.divisions.get(name)
        made = sharding.made.get(id(array))
        if made is not None:
            _check_share(path, made.division, num_shards)
            parts.divided[path] = ArrayDivision(made.division, made.division.axis)
        elif sharding.is_in_block(name):
            parts.partial.add(path)
            if division is not None and key == "bias":
                # Each shard adds a part of the bias, which the optimizer does not allow for.
                raise PlanError(_cannot_train(path), code="unsupported_layer")
    return parts


def _parts_of_weights(trained: Set[str], sharding: Sharding, num_shards: int) -> TrainedParts:
    """Finds how trained weights are divided by MLX's own modules. Raises PlanError."""
    parts = TrainedParts({}, set())
    for name, division in sharding.divisions.items():
        weight = f"{name}.weight"
        bias = f"{name}.bias"
        if weight not in trained:
            continue
        _check_division(name, division, num_shards)
        parts.divided[weight] = ArrayDivision(division, division.axis)
        if bias in trained and division.axis == -2:
            parts.divided[bias] = ArrayDivision(division, -1)
    return parts


def _check_shapes(before: Shapes, model: nn.Module, parts: TrainedParts) -> None:
    """Raises PlanError if the model's own code has divided a trained array in an unknown way."""
    for name, array in _trained_arrays(model).items():
        if name not in parts.divided and array.shape != before[name]:
            raise PlanError(_cannot_train(name), code="unsupported_layer")


def _trained_arrays(model: nn.Module) -> dict[str, mx.array]:
    arrays = model.trainable_parameters()
    return dict(tree_flatten(arrays))


def _check_gradients(model: nn.Module, sharding: Sharding) -> None:
    """Raises PlanError unless all matrices of the layers add up gradients in the same way: all of
    them by MLX's own modules or, if there are blocks, none of them."""
    for name, module in matrices_of_layers(model).items():
        is_of_mlx = isinstance(module, DIVIDED)
        if is_of_mlx == bool(sharding.blocks):
            raise PlanError(_cannot_train(name), code="unsupported_layer")


def _cannot_train(name: str) -> str:
    return (
        f"--tensor-parallel-size: the shards of this model do not divide {name} in a way in which "
        "it can be trained: leave the option out, and use stages or --data-parallel-size."
    )


def _replace(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    model.update_modules(tree_unflatten(list(modules.items())))


def _check_division(name: str, division: Division, num_shards: int) -> None:
    if division.axis not in (-1, -2):
        raise PlanError(_cannot_train(name), code="unsupported_layer")
    _check_share(name, division, num_shards)


def _check_share(name: str, division: Division, num_shards: int) -> None:
    """Raises PlanError if several shards hold the same part, such as a head that they all need."""
    if not division.is_partition:
        raise PlanError(
            f"--tensor-parallel-size {num_shards}: {name} is divided among the shards in a way in "
            "which it cannot be trained: name other modules in keys of lora_parameters, or use "
            "fewer shards.",
            code="unsupported_layer",
        )


def _add_parts(name: str, adapter: nn.Module, division: Division, parts: TrainedParts) -> None:
    """Adds the arrays of a module's adapter to parts."""
    axis_of_a, axis_of_b = _axes(adapter)
    if division.axis == -1:
        parts.divided[f"{name}.lora_a"] = ArrayDivision(division, axis_of_a)
        parts.partial.add(f"{name}.lora_b")
    else:
        parts.divided[f"{name}.lora_b"] = ArrayDivision(division, axis_of_b)
        parts.partial.add(f"{name}.lora_a")
        if isinstance(adapter, DoRALinear):
            parts.divided[f"{name}.m"] = ArrayDivision(division, 0)
