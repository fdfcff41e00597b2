"""Computes norm and head only at the positions that are trained, which saves most of the head's
work.

In nearly every model, the modules after the last layer treat each position by itself, which a trial
with random numbers checks."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from serve.model import trace, trial
from serve.model.stage import Stage

_HALF = (mx.bfloat16, mx.float16)
_NUM_TOKENS = 32  # the tokens of a trial; every vocabulary has as many
_HALF_TOLERANCE = 1e-2
_TOLERANCE = 1e-4


class Head:
    """The norm and head of the last stage, on chosen positions. is_exact says whether a call
    returns the same logits as the whole stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        layer = stage.layers[-1]
        self._outer: trace.Seam | None = vars(layer).get("_brigade_seam")
        self._shape: tuple[int, ...] = ()
        self._chosen: mx.array | None = None
        trace.open_seam(layer, self._choose)
        self.is_exact = self._agrees()

    def __call__(
        self,
        chosen: mx.array,
        tokens: mx.array,
        caches: Any,
        received: Sequence[mx.array],
    ) -> mx.array:
        """Runs the stage, and its head only on N chosen positions, numbered along all rows.
        Returns the logits (1, N, vocabulary)."""
        self._shape = tokens.shape
        self._chosen = chosen
        try:
            return self._stage(tokens, caches, received)[0]
        finally:
            self._chosen = None

    def _choose(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._outer:
            output = self._outer(call, args, kwargs)
        else:
            output = call(*args, **kwargs)
        if self._chosen is None:
            return output
        batch_and_length = tuple(output.shape[:-1])
        if batch_and_length != tuple(self._shape):
            raise ValueError(f"positions are not rows in {output.shape}")
        return _one_row(output)[:, self._chosen]

    def _agrees(self) -> bool:
        cut = self._stage.cuts[False]
        numbers = mx.arange(cut.tokens.size) % _NUM_TOKENS
        tokens = numbers.reshape(cut.tokens.shape)
        received = [_random(array) for array in cut.example()]
        chosen = mx.array([1, tokens.size - 1])
        try:
            (whole,) = self._stage(tokens, None, received)
            short = self(chosen, tokens, None, received).astype(mx.float32)
            expected = _one_row(whole)[:, chosen].astype(mx.float32)
            if short.shape != expected.shape:
                return False
            difference = mx.linalg.norm(short - expected) / mx.linalg.norm(expected)
            tolerance = _HALF_TOLERANCE if whole.dtype in _HALF else _TOLERANCE
            return bool((difference < tolerance).item())
        except trial.FAILURES:
            return False


def _one_row(array: mx.array) -> mx.array:
    """Reshapes (B, L, D) to (1, B * L, D)."""
    return array.reshape(1, -1, array.shape[-1])


def _random(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return mx.zeros(array.shape, array.dtype)
    key = mx.random.key(0)
    return mx.random.normal(array.shape, array.dtype, key=key)
