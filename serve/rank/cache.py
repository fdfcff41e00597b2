"""The key-value caches of the sequences of this stage, by group.

Does what each step says and checks that it can: rank 0 decides, nothing is guessed
here. A row that its group no longer lists is parked until a later step asks for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from serve.core.errors import EngineError
from serve.core.types import Row, Step


@dataclass(slots=True)
class _Batch:
    """Sequences in the order of their rows. A lone row has mlx-lm's plain caches,
    several have its batch caches."""

    sequences: list[int]
    caches: list[Any]
    batched: bool = False


class GroupCaches:
    """make_cache gives the plain caches of one new row."""

    def __init__(self, make_cache: Callable[[], list[Any]]) -> None:
        self._make_cache = make_cache
        self._batches: dict[int, _Batch] = {}
        self._group_of: dict[int, int] = {}
        self._positions: dict[int, int] = {}

    def apply(self, step: Step) -> list[Any]:
        """The caches that the rows of a step use, arranged as it says."""
        for sequence in step.drop:
            self._leave(sequence)
        if not step.rows:
            return []
        self._check(step)
        wanted = [row.sequence for row in step.rows]
        batch = self._batches.get(step.group) or _Batch([], [])
        for sequence in set(batch.sequences) - set(wanted):
            self._park(sequence, batch)
        joining = [s for s in wanted if self._group_of.get(s) != step.group]
        parts = [self._take(sequence) for sequence in joining]
        _arrange(batch, [s for s in batch.sequences if s in wanted])
        _extend(batch, joining, parts)
        _arrange(batch, wanted)
        self._batches[step.group] = batch
        for row in step.rows:
            self._group_of[row.sequence] = step.group
            self._positions[row.sequence] = row.position + row.num_tokens
        return batch.caches

    def states(self, step: Step) -> list[mx.array]:
        """The arrays to evaluate after a step. Offsets too: unevaluated, the graphs
        behind them would grow with each token."""
        batch = self._batches.get(step.group) if step.rows else None
        flat = tree_flatten(_states(batch.caches)) if batch else []
        return [entry[1] for entry in flat if isinstance(entry[1], mx.array)]

    def _check(self, step: Step) -> None:
        lengths = {row.num_tokens for row in step.rows}
        if len(lengths) != 1:
            raise EngineError(
                f"Step {step.number} has rows of different lengths {sorted(lengths)}."
            )
        for row in step.rows:
            if (held := self._positions.get(row.sequence, 0)) != row.position:
                raise EngineError(_out_of_step(step, row, held))

    def _leave(self, sequence: int) -> None:
        self._positions.pop(sequence, None)
        group = self._group_of.pop(sequence, None)
        if group is not None:
            batch = self._batches[group]
            _arrange(batch, [s for s in batch.sequences if s != sequence])
            if not batch.sequences:
                del self._batches[group]

    def _park(self, sequence: int, batch: _Batch) -> None:
        alone = -1 - sequence  # no group of the scheduler is below 0
        self._batches[alone] = _Batch([sequence], _extract(batch, sequence))
        self._group_of[sequence] = alone

    def _take(self, sequence: int) -> list[Any]:
        """The plain caches of a row, out of the group where it is."""
        group = self._group_of.get(sequence)
        if group is None:
            return self._make_cache()
        batch = self._batches[group]
        caches = _extract(batch, sequence)
        position = self._positions[sequence]
        self._leave(sequence)
        self._positions[sequence] = position
        return caches


def _out_of_step(step: Step, row: Row, held: int) -> str:
    return (
        f"Step {step.number} feeds sequence {row.sequence} at position {row.position}, "
        f"this stage holds {held} tokens of it: the ranks are out of step."
    )


def _extract(batch: _Batch, sequence: int) -> list[Any]:
    if not batch.batched:
        return batch.caches
    index = batch.sequences.index(sequence)
    return [cache.extract(index) for cache in batch.caches]


def _arrange(batch: _Batch, sequences: list[int]) -> None:
    """Keeps these rows of a batch, in this order."""
    if sequences == batch.sequences:
        return
    if batch.batched and sequences:
        keep = mx.array([batch.sequences.index(s) for s in sequences])
        for cache in batch.caches:
            cache.filter(keep)
    batch.sequences = sequences
    if not sequences:
        batch.caches, batch.batched = [], False


def _extend(batch: _Batch, sequences: list[int], parts: list[list[Any]]) -> None:
    """Appends rows, given as plain caches."""
    if not parts:
        return
    if not batch.sequences and len(parts) == 1:
        batch.caches = parts[0]
    elif batch.batched:
        for cache, joining in zip(batch.caches, _merge(parts), strict=True):
            cache.extend(joining)
    else:
        batch.caches = _merge([batch.caches, *parts] if batch.sequences else parts)
        batch.batched = True
    batch.sequences = batch.sequences + sequences


def _merge(parts: list[list[Any]]) -> list[Any]:
    return [type(caches[0]).merge(caches) for caches in zip(*parts, strict=True)]


def _states(caches: list[Any]) -> list[Any]:
    return [cache.state for cache in caches]
