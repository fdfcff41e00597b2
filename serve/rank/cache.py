"""The key-value caches of the sequences of this stage, by group.

Does what each step says and checks that it can: rank 0 decides, nothing is guessed
here. A row that its group no longer lists is parked until a later step asks for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
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


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step that run in one forward, as indices into step.rows."""

    rows: tuple[int, ...]
    caches: list[Any]

    def tokens(self, step: Step) -> mx.array:
        """(B, L), of these rows."""
        length = len(step.tokens) // len(step.rows)
        return mx.array([step.tokens[n * length : (n + 1) * length] for n in self.rows])


class GroupCaches:
    """make_cache gives the plain caches of one new row. can_batch says whether several
    rows can have caches together; otherwise each row is a part of its own."""

    def __init__(self, make_cache: Callable[[], list[Any]], can_batch: bool = True) -> None:
        self._make_cache = make_cache
        self._can_batch = can_batch
        self._free_keys = count(-1, -1)  # no group of the scheduler is below 0
        self._batches: dict[int, _Batch] = {}
        self._group_of: dict[int, int] = {}
        self._positions: dict[int, int] = {}

    def apply(self, step: Step) -> list[Part]:
        """The parts in which the rows of a step run, with caches arranged as it says."""
        for sequence in step.drop:
            self._leave(sequence)
        if not step.rows:
            return []
        self._check(step)
        parts = []
        for key, rows in self._split(step).items():
            batch = self._gather(key, [step.rows[n].sequence for n in rows])
            parts.append(Part(tuple(rows), batch.caches))
        for row in step.rows:
            self._positions[row.sequence] = row.position + row.num_tokens
        return parts

    def states(self, step: Step) -> list[mx.array]:
        """The arrays to evaluate after a step. Offsets too: unevaluated, the graphs
        behind them would grow with each token."""
        keys = {self._group_of[row.sequence] for row in step.rows}
        flat = tree_flatten([_states(self._batches[key].caches) for key in sorted(keys)])
        return [entry[1] for entry in flat if isinstance(entry[1], mx.array)]

    def _split(self, step: Step) -> dict[int, list[int]]:
        """Which rows of a step go into which batch.

        New rows do not share one with old ones: to some models an empty state is not
        the same as the zeros that it would become in a batch.
        """
        new = [row.sequence not in self._group_of for row in step.rows]
        if self._can_batch and (all(new) or not any(new)):
            return {step.group: list(range(len(step.rows)))}
        key_of_new = next(self._free_keys)
        split: dict[int, list[int]] = {}
        for n, row in enumerate(step.rows):
            if self._can_batch:
                key = key_of_new if new[n] else step.group
            else:
                key = next(self._free_keys) if new[n] else self._group_of[row.sequence]
            split.setdefault(key, []).append(n)
        return split

    def _gather(self, key: int, wanted: list[int]) -> _Batch:
        """The batch of a key, with the wanted rows and no others."""
        batch = self._batches.get(key) or _Batch([], [])
        for sequence in set(batch.sequences) - set(wanted):
            self._park(sequence, batch)
        joining = [s for s in wanted if self._group_of.get(s) != key]
        parts = [self._take(sequence) for sequence in joining]
        _arrange(batch, [s for s in batch.sequences if s in wanted])
        _extend(batch, joining, parts)
        _arrange(batch, wanted)
        self._batches[key] = batch
        self._group_of |= dict.fromkeys(wanted, key)
        return batch

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
        alone = next(self._free_keys)
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
