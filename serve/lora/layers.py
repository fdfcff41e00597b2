"""Modules to whose outputs adapters add. Each row of a batch can have a different adapter.

Each adapter has a slot. A module holds the matrices of all slots, and multiplies each row of a
batch by the matrices of the row's slot. Slot 0 means no adapter: its matrices are always zero.
"""

import functools
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from serve.core.errors import EngineError
from serve.model import trace
from serve.model.sharding import SUMMING, sum_of_shards

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of one adapter for one module, in float32: a (in, rank), and b (rank, out)
    multiplied by the scale; (experts, in, rank) and (experts, rank, out) for experts. gain (1, out)
    exists with DoRA: the factor by which its magnitudes change each output, minus one."""

    a: mx.array
    b: mx.array
    gain: mx.array | None = None


ModuleMatrices = dict[str, Matrices]
"""The matrices of one adapter, by the full name of the module."""


@dataclass(slots=True)
class Rows:
    """The slots of the current batch's rows: `used` is the set of these slots. If all rows have the
    same slot, `alone` is that slot and index is None; otherwise index (B,) lists the slot of each
    row. Inside a module of experts, `routed` (B, ..., M) lists the experts of each token."""

    used: Set[int] = frozenset()
    alone: int | None = 0
    index: mx.array | None = None
    routed: mx.array | None = None

    def apart(self, x: mx.array, name: str) -> mx.array:
        """Reshapes (B, ..., D) or (B * L, D) to (B, L, D), if slots differ. Raises EngineError."""
        if self.index is None:
            return x
        num_rows = self.index.size
        if x.shape[0] % num_rows:
            raise EngineError(
                f"{name} gets an input of shape {x.shape}, which does not divide into "
                f"{num_rows} sequences."
            )
        return x.reshape(num_rows, -1, x.shape[-1])

    def for_experts(self, is_sorted: bool) -> mx.array:
        """Returns the slot of each pair of token and expert, in the order of mlx-lm's SwitchGLU."""
        assert self.index is not None
        assert self.routed is not None
        pairs_per_row = self.routed.size // self.index.size
        slots = mx.repeat(self.index, pairs_per_row)
        if is_sorted:
            experts = self.routed.flatten()
            order = mx.argsort(experts)
            return slots[order]
        return slots.reshape(self.routed.shape)

    def pick(self, table: mx.array) -> mx.array:
        if self.index is None:
            return table[self.alone]
        return table[self.index]

    def times(self, x: mx.array, table: mx.array) -> mx.array:
        """Multiplies each row (L, in) with its own matrix in table (slots, in, out)."""
        if self.index is None:
            return x @ table[self.alone]
        return mx.gather_mm(x, table, rhs_indices=self.index)


class Adapted:
    """A module to whose output the adapters of the rows are added. Its tables are a (slots, in,
    rank), b (slots, rank, out) and, with DoRA, gain (slots, 1, out); for experts, a (slots,
    experts, in, rank) and b (slots, experts, rank, out)."""

    def __init__(self, name: str, module: nn.Module, rows: Rows) -> None:
        self._name = name
        self._module = module
        self._rows = rows
        if "bias" in module:
            self._bias = module["bias"]
        else:
            self._bias = mx.array(0.0)
        self._empty()
        if isinstance(module, EMBEDDINGS):
            trace.open_seam(module, self._embed)
            # A seam does not see as_linear, which a tied head calls.
            as_linear = functools.partial(self._as_linear, module.as_linear)
            object.__setattr__(module, "as_linear", as_linear)
        elif isinstance(module, EXPERTS):
            trace.open_seam(module, self._apply_experts)
        elif isinstance(module, SUMMING):
            trace.open_seam(module, self._project_and_sum)
        else:
            trace.open_seam(module, self._project)

    def arrays(self) -> list[mx.array]:
        tables = (self._a, self._b, self._gain)
        return [table for table in tables if table is not None]

    # --- tables

    def _empty(self) -> None:
        self._held: set[int] = set()
        self._a: Any = None
        self._b: Any = None
        self._gain: Any = None

    def write(self, slot: int, new: Matrices, num_slots: int) -> None:
        """Puts an adapter's matrices into a slot; tables grow to the largest rank."""
        rank = new.a.shape[-1]
        if self._a is None:
            shape_a = (num_slots, *new.a.shape)
            shape_b = (num_slots, *new.b.shape)
            self._a = mx.zeros(shape_a)
            self._b = mx.zeros(shape_b)
        held_rank = self._a.shape[-1]
        added_ranks = rank - held_rank
        if added_ranks > 0:
            unpadded = [(0, 0)] * (new.a.ndim - 1)
            widths_a = [*unpadded, (0, 0), (0, added_ranks)]
            widths_b = [*unpadded, (0, added_ranks), (0, 0)]
            self._a = mx.pad(self._a, widths_a)
            self._b = mx.pad(self._b, widths_b)
        self._a[slot, ..., :rank] = new.a
        self._b[slot, ..., :rank, :] = new.b
        if new.gain is not None:
            if self._gain is None:
                shape_gain = (num_slots, *new.gain.shape)
                self._gain = mx.zeros(shape_gain)
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
        """Rearranges the slots: sources gives the old slot of each new one, 0 for a free one."""
        held = self._held
        self._held = {new for new, old in enumerate(sources) if old in held}
        index = mx.array(sources)
        if self._a is not None:
            self._a = self._a[index]
            self._b = self._b[index]
        if self._gain is not None:
            self._gain = self._gain[index]

    # --- seams, which are called in place of the module

    def _is_used(self) -> bool:
        return not self._held.isdisjoint(self._rows.used)

    def _project(self, call: trace.Call, args: Any, kwargs: Any) -> mx.array:
        y: mx.array = call(*args, **kwargs)
        if not self._is_used():
            return y
        x = self._rows.apart(args[0], self._name)
        base = self._rows.apart(y, self._name)
        inner = self._rows.times(x, self._a)
        wide_delta = self._rows.times(inner, self._b)
        delta = wide_delta.astype(y.dtype)
        output: mx.array = base + delta
        if self._gain is not None:
            # A row without DoRA has zero gain. Its output must not change, even if it is infinite.
            gain = self._rows.pick(self._gain)
            without_bias = base - self._bias + delta
            more = (gain * without_bias).astype(y.dtype)
            has_none = gain == 0
            output = mx.where(has_none, output, output + more)
        return output.reshape(y.shape)

    def _project_and_sum(self, call: trace.Call, args: Any, kwargs: Any) -> mx.array:
        """Adds the adapter's change before the sum over shards, so that one sum is enough."""
        if not self._is_used():
            plain: mx.array = call(*args, **kwargs)
            return plain
        module: Any = self._module
        x = args[0]
        base = times_own_weight(x, module)
        apart = self._rows.apart(x, self._name)
        inner = self._rows.times(apart, self._a)
        wide_delta = self._rows.times(inner, self._b)
        delta = wide_delta.astype(base.dtype)
        delta = delta.reshape(base.shape)
        own = base + delta
        y = sum_of_shards(own, module.group)
        if "bias" in module:
            bias = module["bias"]
            y = y + bias
        return y

    def _embed(self, call: trace.Call, args: Any, kwargs: Any) -> mx.array:
        y: mx.array = call(*args, **kwargs)
        if not self._is_used():
            return y
        ids = args[0]
        if self._rows.index is None:
            own_a = self._a[self._rows.alone]
            inner = own_a[ids]
        else:
            slots = self._rows.index[:, None]
            inner = self._a[slots, ids]
        wide_delta = self._rows.times(inner, self._b)
        delta = wide_delta.astype(y.dtype)
        return y + delta

    def _as_linear(self, call: trace.Call, x: mx.array) -> mx.array:
        y: mx.array = call(x)
        if not self._is_used():
            return y
        # The head multiplies with the transposed embedding.
        a_transposed = self._a.swapaxes(1, 2)
        b_transposed = self._b.swapaxes(1, 2)
        x = self._rows.apart(x, self._name)
        inner = self._rows.times(x, b_transposed)
        delta = self._rows.times(inner, a_transposed)
        delta = delta.reshape(y.shape)
        return y + delta.astype(y.dtype)

    def _apply_experts(self, call: trace.Call, args: Any, kwargs: Any) -> mx.array:
        y: mx.array = call(*args, **kwargs)
        if not self._is_used():
            return y
        x: mx.array
        x, experts = args
        is_sorted = kwargs.get("sorted_indices", False)
        if self._rows.index is None:
            a = self._a[self._rows.alone]
            b = self._b[self._rows.alone]
        else:
            # There is one matrix for each pair of slot and expert. The pairs are not sorted.
            num_experts = self._a.shape[1]
            slots = self._rows.for_experts(is_sorted)
            experts = slots * num_experts + experts
            a = self._a.flatten(0, 1)
            b = self._b.flatten(0, 1)
            is_sorted = False
        inner = mx.gather_mm(x, a, rhs_indices=experts, sorted_indices=is_sorted)
        delta = mx.gather_mm(inner, b, rhs_indices=experts, sorted_indices=is_sorted)
        return y + delta.astype(y.dtype)


def times_own_weight(x: mx.array, module: Any) -> mx.array:
    """Returns the outputs of a module in SUMMING before they are summed over the shards."""
    weight = module["weight"]
    y: mx.array
    if "scales" not in module:
        y = x @ weight.T
        return y
    scales = module["scales"]
    return mx.quantized_matmul(
        x,
        weight,
        scales=scales,
        biases=module.get("biases"),
        transpose=True,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def dequantized(module: Any) -> mx.array:
    """Returns the weight (out, in) of a module."""
    weight: mx.array = module["weight"]
    if "scales" not in module:
        return weight
    return mx.dequantize(
        weight,
        module["scales"],
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def record_routing(rows: Rows, call: trace.Call, args: Any, kwargs: Any) -> mx.array:
    """Records the experts of each token. Called as the seam of the module that calls the experts;
    args[1] lists them."""
    rows.routed = args[1]
    output: mx.array = call(*args, **kwargs)
    return output
