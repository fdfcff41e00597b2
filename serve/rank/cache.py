"""The key-value caches of the sequences of this stage, by group.

Does what each step says and checks that it can: rank 0 decides, nothing is guessed
here. A row that its group no longer lists is kept until a later step asks for it.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    trim_prompt_cache,
)

from serve.core.errors import EngineError
from serve.core.types import Row, Step, Take
from serve.rank.slots import SlotBatch

_MANY_GROUPS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step that run in one forward, as indices into step.rows; None for a row
    that only fills the batch up."""

    rows: tuple[int | None, ...]
    caches: list[Any]

    def tokens(self, step: Step) -> mx.array:
        """(B, L), of these rows, padded on the left."""
        ends = [0]
        for row in step.rows:
            ends.append(ends[-1] + row.num_tokens)
        fed = [() if n is None else step.tokens[ends[n] : ends[n + 1]] for n in self.rows]
        length = max(map(len, fed))
        return mx.array([(0,) * (length - len(tokens)) + tuple(tokens) for tokens in fed])

    def own_rows(self, output: mx.array) -> mx.array:
        """Those of the step, of an output (B, ...)."""
        own = [i for i, n in enumerate(self.rows) if n is not None]
        return output if len(own) == len(self.rows) else output[mx.array(own)]


class GroupCaches:
    """make_cache gives the plain caches of one new row. can_batch says whether several
    rows can have caches together; otherwise each row is a part of its own."""

    def __init__(self, make_cache: Callable[[], list[Any]], can_batch: bool = True) -> None:
        self._make_cache = make_cache
        self._can_batch = can_batch
        self._is_plain = all(type(c) in (KVCache, QuantizedKVCache) for c in make_cache())
        self._in_slots = can_batch and self._is_plain
        self._free_keys = count()
        self._batches: dict[int, MergedBatch | SlotBatch] = {}
        self._keys_of_group: dict[int, list[int]] = {}
        self._place: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._moved: list[Any] = []

    def apply(self, step: Step) -> list[Part]:
        """The parts in which the rows of a step run, with caches arranged as it says."""
        for take in step.take:
            self._begin_as_copy(step, take)
        for sequence in step.drop:
            self._leave(sequence)
            self._positions.pop(sequence, None)
        if not step.rows:
            return []
        self._check(step)
        parts = []
        for key, rows in self._assign(step).items():
            parts.append(self._arrange(step, key, rows))
        for row in step.rows:
            self._positions[row.sequence] = row.position + row.num_tokens
        return parts

    @property
    def reuse(self) -> str:
        """Whether a sequence can begin as "any" part of another one, or only as the "whole"."""
        return "any" if self._is_plain else "whole"

    def moved(self) -> list[mx.array]:
        """Copies to evaluate before the forward: until then they keep buffers from being
        written in place."""
        moved, self._moved = _arrays(self._moved), []
        return moved

    def states(self, step: Step) -> list[mx.array]:
        """The arrays to evaluate after a step. Offsets too: unevaluated, the graphs
        behind them would grow with each token."""
        keys = {self._place[row.sequence] for row in step.rows}
        return _arrays([self._batches[key].caches for key in sorted(keys)])

    @property
    def num_bytes(self) -> int:
        """Of all keys and values. May be asked from another thread than the steps'."""
        batches = list(self._batches.values())
        caches = (cache for batch in batches for cache in list(batch.caches))
        return sum(cache.nbytes for cache in caches if not cache.empty())

    # --- which rows go where

    def _assign(self, step: Step) -> dict[int, list[int]]:
        """Which rows of a step go into which batch.

        New rows do not share one with old ones: to some models an empty state is not
        the same as the zeros that it would become in a batch.
        """
        new = [n for n, row in enumerate(step.rows) if row.sequence not in self._place]
        old = [n for n in range(len(step.rows)) if n not in new]
        split: dict[int, list[int]] = {}
        for rows in self._divide_new(step, new):
            split[self._begin(step, rows)] = rows
        if not old:
            if len(self._keys_of_group) > _MANY_GROUPS:
                self._forget_groups()
            self._keys_of_group[step.group] = list(split)[:1]
        for n in old if not self._can_batch else ():
            split[self._place[step.rows[n].sequence]] = [n]
        if self._can_batch and old:
            split |= self._gather(step, old)
        return split

    def _forget_groups(self) -> None:
        """Of prompts, which have a group each, until their rows have joined another one."""
        live = {
            g: [k for k in keys if k in self._batches] for g, keys in self._keys_of_group.items()
        }
        self._keys_of_group = {group: keys for group, keys in live.items() if keys}

    def _divide_new(self, step: Step, new: list[int]) -> list[list[int]]:
        lengths = {step.rows[n].num_tokens for n in new}
        if new and (self._in_slots or (self._can_batch and len(lengths) == 1)):
            return [new]
        return [[n] for n in new]

    def _begin(self, step: Step, rows: list[int]) -> int:
        """A batch of new rows."""
        key = next(self._free_keys)
        lengths = {step.rows[n].sequence: step.rows[n].num_tokens for n in rows}
        if self._in_slots and len(rows) > 1:
            self._batches[key] = SlotBatch.of_new(lengths, self._make_cache())
        else:
            self._batches[key] = self._new_batch()
            self._batches[key].add([(sequence, self._make_cache(), 0) for sequence in lengths])
        self._place |= dict.fromkeys(lengths, key)
        return key

    def _gather(self, step: Step, rows: list[int]) -> dict[int, list[int]]:
        """Those that were in the group's last step stay where they are; others join them
        where there is room."""
        keys = [k for k in self._keys_of_group.get(step.group, []) if k in self._batches]
        number = {step.rows[n].sequence: n for n in rows}
        split: dict[int, list[int]] = {}
        for key in list(keys):
            batch = self._batches[key]
            staying = batch.stay(number)
            if key != keys[0]:
                # What was too long to share with the first may fit now.
                first = self._batches[keys[0]]
                staying = [s for s in staying if not first.has_room(self._positions[s])]
            for sequence in staying:
                split.setdefault(key, []).append(number[sequence])
            if not staying:
                for sequence in list(batch.sequences):
                    self._park(sequence)
                keys.remove(key)
        settled = {n for part in split.values() for n in part}
        for n in rows:
            if n not in settled:
                key = self._join(step.rows[n].sequence, keys)
                split.setdefault(key, []).append(n)
        self._keys_of_group[step.group] = keys
        return split

    def _join(self, sequence: int, keys: list[int]) -> int:
        """keys are those of the batches of the group; a new one is added when none fits."""
        length = self._positions[sequence]
        caches = self._batches[self._place[sequence]].extract(sequence, length)
        self._leave(sequence)
        key = next((k for k in keys if self._batches[k].has_room(length)), None)
        if key is None:
            key = next(self._free_keys)
            keys.append(key)
            self._batches[key] = self._new_batch()
        for idle in self._batches[key].in_the_way():
            self._park(idle)
        self._batches[key].add([(sequence, caches, length)])
        self._place[sequence] = key
        return key

    def _arrange(self, step: Step, key: int, rows: list[int]) -> Part:
        batch, number = self._batches[key], {step.rows[n].sequence: n for n in rows}
        num_tokens = max(step.rows[n].num_tokens for n in rows)
        for idle in batch.to_park(list(number), num_tokens):
            self._park(idle)
        order = batch.arrange(list(number), num_tokens)
        return Part(tuple(None if s is None else number[s] for s in order), batch.caches)

    # --- single rows

    def _begin_as_copy(self, step: Step, take: Take) -> None:
        held = self._positions.get(take.source, 0)
        if held < take.num_tokens:
            raise EngineError(
                f"Step {step.number} takes {take.num_tokens} tokens of sequence {take.source}, "
                f"this stage holds {held} tokens of it: the ranks are out of step."
            )
        self._set_apart(take.sequence, take.source, take.num_tokens)
        self._positions[take.sequence] = take.num_tokens

    def _park(self, sequence: int) -> None:
        """Gives a row caches of its own."""
        self._set_apart(sequence, sequence, self._positions[sequence])

    def _set_apart(self, sequence: int, source: int, length: int) -> None:
        caches = self._batches[self._place[source]].extract(source, length)
        for cache in caches:
            if self._in_slots:
                cache.keys = tree_map(mx.contiguous, cache.keys)
                cache.values = tree_map(mx.contiguous, cache.values)
        too_many = self._positions[source] - length
        if too_many and not self._in_slots:
            if not can_trim_prompt_cache(caches):
                raise EngineError("A sequence is to begin as a part of one that is whole.")
            trim_prompt_cache(caches, too_many)
        self._moved.append(caches)
        self._leave(sequence)
        key = self._place[sequence] = next(self._free_keys)
        self._batches[key] = self._new_batch()
        self._batches[key].add([(sequence, caches, length)])

    def _leave(self, sequence: int) -> None:
        key = self._place.pop(sequence, None)
        if key is not None:
            self._batches[key].remove(sequence)
            if not self._batches[key].sequences:
                del self._batches[key]

    def _new_batch(self) -> "MergedBatch | SlotBatch":
        return SlotBatch() if self._in_slots else MergedBatch()

    def _check(self, step: Step) -> None:
        lengths = {row.num_tokens for row in step.rows}
        if len(lengths) != 1 and any(row.position for row in step.rows):
            raise EngineError(
                f"Step {step.number} has rows of different lengths {sorted(lengths)}."
            )
        for row in step.rows:
            if (held := self._positions.get(row.sequence, 0)) != row.position:
                raise EngineError(_out_of_step(step, row, held))


def _out_of_step(step: Step, row: Row, held: int) -> str:
    return (
        f"Step {step.number} feeds sequence {row.sequence} at position {row.position}, "
        f"this stage holds {held} tokens of it: the ranks are out of step."
    )


class MergedBatch:
    """Rows with any of mlx-lm's caches, which copy all of them when one joins or leaves. A
    lone row has plain caches, several have batch caches."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.caches: list[Any] = []
        self._batched = False

    def stay(self, sequences: Collection[int]) -> list[int]:
        return [s for s in self.sequences if s in sequences]

    def has_room(self, _: int) -> bool:
        return True

    def in_the_way(self) -> list[int]:
        return []

    def to_park(self, sequences: list[int], _: int) -> list[int]:
        return [s for s in self.sequences if s not in sequences]

    def add(self, rows: list[tuple[int, list[Any], int]]) -> None:
        parts = [caches for _, caches, _ in rows]
        if not self.sequences and len(parts) == 1:
            self.caches = parts[0]
        elif self._batched:
            for cache, joining in zip(self.caches, _merge(parts), strict=True):
                cache.extend(joining)
        else:
            self.caches = _merge([self.caches, *parts] if self.sequences else parts)
            self._batched = True
        self.sequences = [*self.sequences, *(sequence for sequence, _, _ in rows)]

    def remove(self, sequence: int) -> None:
        self.arrange([s for s in self.sequences if s != sequence], 0)

    def extract(self, sequence: int, _: int) -> list[Any]:
        """All of a row: not every cache can go back."""
        index = self.sequences.index(sequence)
        if self._batched:
            caches = [cache.extract(index) for cache in self.caches]
        else:
            caches = [copy.deepcopy(cache) for cache in self.caches]
        return caches

    def arrange(self, sequences: list[int], _: int) -> list[int | None]:
        """Keeps these rows, in this order."""
        if sequences != self.sequences:
            if self._batched and sequences:
                keep = mx.array([self.sequences.index(s) for s in sequences])
                for cache in self.caches:
                    cache.filter(keep)
            self.sequences = sequences
        return list(sequences)


def _merge(parts: list[list[Any]]) -> list[Any]:
    return [type(caches[0]).merge(caches) for caches in zip(*parts, strict=True)]


def _arrays(caches: list[Any]) -> list[mx.array]:
    """The arrays of caches in nested lists."""
    states = [[cache.state for cache in part] for part in caches]
    return [entry[1] for entry in tree_flatten(states) if isinstance(entry[1], mx.array)]
