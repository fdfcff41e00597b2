"""One stage in training: one lazy graph for each micro-batch.

mx.vjp builds the outputs and the gradients of inputs and parameters at once, with a placeholder for
the gradient of the outputs, which is received later. The caller evaluates these results one after
another, and each operation is computed once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.utils import checkpoint
from mlx.utils import tree_flatten, tree_unflatten

from serve.model import trace
from serve.model.stage import Stage
from serve.tune.data import packing
from serve.tune.data.examples import MicroBatch
from serve.tune.head import Head

Arrays = dict[str, mx.array]
SlotType = tuple[tuple[int, ...], mx.Dtype]
"""The shape and the type of a gradient."""
# By a number's bytes: an integer type of this size, and the bits of a NaN.
_BITS_AND_NAN = {
    2: (mx.uint16, 0x7FFF),
    4: (mx.uint32, 0x7FFFFFFF),
}


@dataclass(slots=True)
class Pass:
    """One micro-batch in one stage, not evaluated. outputs are the arrays for the next stage, or
    the scaled sum of losses in the last stage. dx are the gradients of received floating-point
    arrays, gradients the parameters' gradients."""

    outputs: list[mx.array]
    dx: list[mx.array]
    gradients: Arrays
    _slots: "list[_Slot]"

    def set_output_gradients(self, dy: Sequence[mx.array]) -> None:
        """Fills in the outputs' evaluated gradients. Only then can dx and gradients be
        evaluated."""
        for slot, array in zip(self._slots, dy, strict=True):
            slot.fill(array)


class TrainedStage:
    """A stage and its trained parameters, by their names in the whole model."""

    def __init__(self, stage: Stage, grad_checkpoint: bool) -> None:
        self.stage = stage
        self.grad_checkpoint = grad_checkpoint
        self.names = list(self.parameters())
        self._slot_types: dict[tuple[int | bool, ...], list[SlotType]] = {}
        if grad_checkpoint:
            for layer in stage.layers[stage.start : stage.end]:
                _checkpoint(layer)
        self._head = Head(stage) if stage.is_last else None

    def parameters(self) -> Arrays:
        trainable = self.stage.model.trainable_parameters()
        return dict(tree_flatten(trainable))

    def update(self, parameters: Arrays) -> None:
        own = [(name, parameters[name]) for name in self.names]
        tree = tree_unflatten(own)
        self.stage.model.update(tree, strict=False)

    def forward(
        self,
        batch: MicroBatch,
        received: Sequence[mx.array],
        scale: float,
    ) -> Pass:
        """Runs a forward pass of the stage, without gradients."""
        outputs = self._outputs(batch, received, scale)
        return Pass(outputs, [], {}, [])

    def forward_backward(
        self,
        batch: MicroBatch,
        received: Sequence[mx.array],
        scale: float,
        needs_dx: bool,
    ) -> Pass:
        """Runs a forward pass of the stage and builds its gradients, with dx if needs_dx."""
        parameters = self.parameters()
        received = list(received)
        num_parameters = len(parameters)
        floating = [n for n, array in enumerate(received) if _is_floating(array)]
        differentiated = floating if needs_dx else []

        def run(*primals: mx.array) -> list[mx.array]:
            traced = zip(parameters, primals[:num_parameters], strict=True)
            self.update(dict(traced))
            inputs = list(received)
            for n, array in zip(differentiated, primals[num_parameters:], strict=True):
                inputs[n] = array
            outputs = self._outputs(batch, inputs, scale)
            # mx.vjp ignores outputs without a gradient, and expects no cotangent for them.
            return [a if _is_floating(a) else mx.stop_gradient(a) for a in outputs]

        slots = self._placeholders(batch, received)
        cotangents = [slot.array for slot in slots] or [mx.array(1.0)]
        inputs = [received[n] for n in differentiated]
        primals = [*parameters.values(), *inputs]
        try:
            outputs, found = mx.vjp(run, primals, cotangents)
        finally:
            self.update(parameters)  # Tracing has replaced the parameters.
        dx = found[num_parameters:]
        gradients = zip(parameters, found[:num_parameters], strict=True)
        return Pass(outputs, dx, dict(gradients), slots)

    def _outputs(
        self,
        batch: MicroBatch,
        received: Sequence[mx.array],
        scale: float,
    ) -> list[mx.array]:
        segments = batch.segments
        if segments is None:
            caches = None
        else:
            caches = packing.caches(self.stage, segments)
        if self._head and self._head.is_exact and batch.num_labels:
            learned = batch.learned
            logits = self._head(learned, batch.inputs, caches, received)
            loss = loss_sum(logits, batch, learned)
            return [loss * scale]
        outputs = self.stage(batch.inputs, caches, received)
        if self._head:
            loss = loss_sum(outputs[0], batch)
            return [loss * scale]
        return outputs

    def _placeholders(self, batch: MicroBatch, received: Sequence[mx.array]) -> "list[_Slot]":
        """Makes placeholders for the gradients of the outputs. Their shapes come from a forward
        pass that is never evaluated."""
        if self.stage.is_last:
            return []
        # Without caches, a model may pass other arrays to its next stage than with caches.
        kind = (*batch.inputs.shape, batch.segments is None)
        if kind not in self._slot_types:
            blank = [mx.zeros(a.shape, a.dtype) for a in received]
            outputs = self._outputs(batch, blank, 1.0)
            floating = filter(_is_floating, outputs)
            self._slot_types[kind] = [(tuple(a.shape), a.dtype) for a in floating]
        return [_Slot(shape, dtype) for shape, dtype in self._slot_types[kind]]


def loss_sum(
    logits: mx.array,
    batch: MicroBatch,
    learned: mx.array | None = None,
) -> mx.array:
    """Returns the sum of the cross-entropies at the learned positions. logits are (B, L,
    vocabulary), or (1, N, vocabulary) for the N learned positions alone."""
    targets = batch.targets
    mask = batch.mask
    if learned is not None:
        targets = targets.reshape(1, -1)[:, learned]
        mask = mask.reshape(1, -1)[:, learned]
    losses = nn.losses.cross_entropy(logits.astype(mx.float32), targets)
    return (losses * mask).sum()


def _is_floating(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


class _Slot:
    """A placeholder for a gradient that comes after the graph is built: a buffer that is written in
    place. Until then it holds NaN, so a missing gradient is noticed."""

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        # NumPy has no bfloat16, so arrays are written as integers with the same bits.
        self._bits, nan = _BITS_AND_NAN[dtype.size]
        nans = np.full(shape, nan, dtype=f"u{dtype.size}")
        self._buffer = mx.array(nans)
        self.array = self._buffer.view(dtype)
        self._shape = shape
        self._dtype = dtype

    def fill(self, value: mx.array) -> None:
        if (tuple(value.shape), value.dtype) != (self._shape, self._dtype):
            raise ValueError(f"A gradient of {value.shape} came where {self._shape} was due.")
        buffer = np.array(self._buffer, copy=False)
        buffer[...] = np.array(value.view(self._bits))


def _checkpoint(layer: nn.Module) -> None:
    """Makes a layer's forward pass store only inputs and outputs; the backward pass computes the
    rest again. A seam that the layer already has encloses the new seam."""
    outer = vars(layer).get("_brigade_seam")

    def seam(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        checkpointed = checkpoint(layer, call)
        if outer:
            return outer(checkpointed, args, kwargs)
        return checkpointed(*args, **kwargs)

    trace.open_seam(layer, seam)
