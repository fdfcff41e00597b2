"""Modules to which adapters add something, row by row.

Each adapter has a slot. A module holds the matrices of all slots, and each row of a forward is
multiplied with those of its own. Slot 0 is nobody's and stays zero.
"""

import functools
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from serve.core.errors import EngineError
from serve.rank import trace

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True, slots=True)
class Matrices:
    """For one module, in float32: a (in, rank), and b (rank, out) times the scale; of experts
    (experts, in, rank) and (experts, rank, out). With DoRA gain (1, out) is what the magnitudes
    make of each output, less one."""

    a: mx.array
    b: mx.array
    gain: mx.array | None = None


@dataclass(slots=True)
class Rows:
    """The slots of the rows of the forward under way. alone is that of all, if it is the same
    one, else index (B,) tells them. routed (B, ..., M) are the experts of each token, where
    some are called."""

    used: Set[int] = frozenset()
    alone: int | None = 0
    index: mx.array | None = None
    routed: mx.array | None = None

    def apart(self, x: mx.array, name: str) -> mx.array:
        """(B, L, D) out of (B, ..., D) or (B * L, D), if rows differ."""
        if self.index is None:
            return x
        if x.shape[0] % self.index.size:
            raise EngineError(f"{name} gets {x.shape}: its rows cannot be told from each other.")
        return x.reshape(self.index.size, -1, x.shape[-1])

    def of_experts(self, is_sorted: bool) -> mx.array:
        """The slot of each token and expert, in the order of mlx-lm's SwitchGLU."""
        assert self.index is not None
        assert self.routed is not None
        slots = mx.repeat(self.index, self.routed.size // self.index.size)
        if is_sorted:
            return slots[mx.argsort(self.routed.flatten())]
        return slots.reshape(self.routed.shape)

    def pick(self, table: mx.array) -> mx.array:
        return table[self.alone] if self.index is None else table[self.index]

    def times(self, x: mx.array, table: mx.array) -> mx.array:
        """Each row (L, in) times its own matrix in table (slots, in, out)."""
        if self.index is None:
            return x @ table[self.alone]
        return mx.gather_mm(x, table, rhs_indices=self.index)


class Adapted:
    """One module, which adds what the adapters of its rows say. Where none of them has
    anything to say it is the plain module."""

    def __init__(self, name: str, module: nn.Module, rows: Rows) -> None:
        self._name, self._rows = name, rows
        self._bias = module["bias"] if "bias" in module else mx.array(0.0)
        self._empty()
        if isinstance(module, EMBEDDINGS):
            trace.open_seam(module, self._embed)
            # A tied head. A seam is for calls only.
            as_linear = functools.partial(self._as_linear, module.as_linear)
            object.__setattr__(module, "as_linear", as_linear)
        elif isinstance(module, EXPERTS):
            trace.open_seam(module, self._ask_experts)
        else:
            trace.open_seam(module, self._project)

    def arrays(self) -> list[mx.array]:
        return [table for table in (self._a, self._b, self._gain) if table is not None]

    # Tables: a (slots, in, rank), b (slots, rank, out) and with DoRA gain (slots, 1, out); of
    # experts (slots, experts, in, rank) and (slots, experts, rank, out).

    def _empty(self) -> None:
        self._held: set[int] = set()
        self._a: Any = None
        self._b: Any = None
        self._gain: Any = None

    def write(self, slot: int, new: Matrices, num_slots: int) -> None:
        rank = new.a.shape[-1]
        if self._a is None:
            self._a = mx.zeros((num_slots, *new.a.shape))
            self._b = mx.zeros((num_slots, *new.b.shape))
        if (more := rank - self._a.shape[-1]) > 0:
            as_they_are = [(0, 0)] * (new.a.ndim - 1)
            self._a = mx.pad(self._a, [*as_they_are, (0, 0), (0, more)])
            self._b = mx.pad(self._b, [*as_they_are, (0, more), (0, 0)])
        self._a[slot, ..., :rank], self._b[slot, ..., :rank, :] = new.a, new.b
        if new.gain is not None:
            if self._gain is None:
                self._gain = mx.zeros((num_slots, *new.gain.shape))
            self._gain[slot] = new.gain
        self._held.add(slot)

    def clear(self, slot: int) -> None:
        if slot in self._held:
            self._held.remove(slot)
            for table in self.arrays():
                table[slot] = 0
        if not self._held:
            self._empty()

    def move(self, sources: list[int]) -> None:
        """The slot of each new one; slot 0 for one that is free."""
        self._held = {new for new, old in enumerate(sources) if old in self._held}
        index = mx.array(sources)
        self._a, self._b, self._gain = (
            None if table is None else table[index] for table in (self._a, self._b, self._gain)
        )

    # Called in place of the module's own.

    def _is_used(self) -> bool:
        return not self._held.isdisjoint(self._rows.used)

    def _project(self, call: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        y = call(*args, **kwargs)
        if not self._is_used():
            return y
        x, base = (self._rows.apart(value, self._name) for value in (args[0], y))
        delta = self._rows.times(self._rows.times(x, self._a), self._b).astype(y.dtype)
        output: mx.array = base + delta
        if self._gain is not None:
            # Zero for a row without DoRA, whose output stays as it is, also if it is infinite.
            gain = self._rows.pick(self._gain)
            more = (gain * (base - self._bias + delta)).astype(y.dtype)
            output = mx.where(gain == 0, output, output + more)
        return output.reshape(y.shape)

    def _embed(self, call: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        y = call(*args, **kwargs)
        if not self._is_used():
            return y
        ids, index = args[0], self._rows.index
        rows = self._a[self._rows.alone][ids] if index is None else self._a[index[:, None], ids]
        return y + self._rows.times(rows, self._b).astype(y.dtype)

    def _as_linear(self, call: Callable[..., mx.array], x: mx.array) -> mx.array:
        y = call(x)
        if not self._is_used():
            return y
        inner = self._rows.times(self._rows.apart(x, self._name), self._b.swapaxes(1, 2))
        delta = self._rows.times(inner, self._a.swapaxes(1, 2))
        return y + delta.reshape(y.shape).astype(y.dtype)

    def _ask_experts(self, call: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        y = call(*args, **kwargs)
        if not self._is_used():
            return y
        x: mx.array
        x, experts = args
        is_sorted = kwargs.get("sorted_indices", False)
        if self._rows.index is None:
            tables = (self._a[self._rows.alone], self._b[self._rows.alone])
        else:
            # One matrix for each slot and expert, which are not in order any more.
            experts = self._rows.of_experts(is_sorted) * self._a.shape[1] + experts
            tables, is_sorted = (self._a.flatten(0, 1), self._b.flatten(0, 1)), False
        for table in tables:
            x = mx.gather_mm(x, table, rhs_indices=experts, sorted_indices=is_sorted)
        return y + x.astype(y.dtype)


def note_routing(rows: Rows, call: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
    """Around a module of experts, which gets (x, experts of each token)."""
    rows.routed = args[1]
    return call(*args, **kwargs)
