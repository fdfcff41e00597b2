"""Keeps the key-value caches of a stage's sequences, and arranges them for each step.

Rank 0 decides. This module does what a step says, and checks that it is possible. A row that
its group no longer lists is kept until a later step asks for it.
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

_PLAIN_CACHES = (KVCache, QuantizedKVCache)
_MANY_GROUPS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step that run in one forward. rows has indices into step.rows, and None for a row
    that only pads the batch."""

    rows: tuple[int | None, ...]
    caches: list[Any]

    def tokens(self, step: Step) -> mx.array:
        """The tokens (B, L) of these rows, padded on the left."""
        ends = [0]
        for row in step.rows:
            ends.append(ends[-1] + row.num_tokens)
        tokens_of_rows: list[tuple[int, ...]] = []
        for n in self.rows:
            tokens: tuple[int, ...] = ()
            if n is not None:
                tokens = step.tokens[ends[n] : ends[n + 1]]
            tokens_of_rows.append(tokens)
        length = max(map(len, tokens_of_rows))
        padded = [(0,) * (length - len(tokens)) + tokens for tokens in tokens_of_rows]
        return mx.array(padded)

    def own_rows(self, output: mx.array) -> mx.array:
        """The rows of an output (B, ...) that belong to rows of the step."""
        own = [i for i, n in enumerate(self.rows) if n is not None]
        if len(own) == len(self.rows):
            return output
        return output[mx.array(own)]


class GroupCaches:
    """The caches of all sequences of a stage, and where each sequence is.

    make_cache returns the plain caches of one new row. can_batch says whether several rows can
    share a batch; otherwise each row runs in a part of its own. Each batch has a key.
    """

    def __init__(self, make_cache: Callable[[], list[Any]], can_batch: bool = True) -> None:
        self._make_cache = make_cache
        self._can_batch = can_batch
        self._is_plain = all(type(cache) in _PLAIN_CACHES for cache in make_cache())
        self._in_slots = can_batch and self._is_plain
        self._free_keys = count()
        self._batches: dict[int, MergedBatch | SlotBatch] = {}
        self._keys_of_group: dict[int, list[int]] = {}
        self._place: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._moved: list[Any] = []

    def apply(self, step: Step) -> list[Part]:
        """Arranges the caches as a step says, and returns the parts in which its rows run. Raises
        EngineError if the step does not fit what this stage holds."""
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
        """Copied rows, which have to be evaluated before the forward: while a copy is lazy, MLX
        cannot write to the buffers in place."""
        moved = _arrays(self._moved)
        self._moved = []
        return moved

    def states(self, step: Step) -> list[mx.array]:
        """The arrays that have to be evaluated after a step. Offsets are among them: the graph of
        an offset that is never evaluated would grow with each token."""
        keys = {self._place[row.sequence] for row in step.rows}
        caches = [self._batches[key].caches for key in sorted(keys)]
        return _arrays(caches)

    @property
    def num_bytes(self) -> int:
        """The bytes of all keys and values. It is safe to read from any thread."""
        num_bytes = 0
        for batch in list(self._batches.values()):
            for cache in list(batch.caches):
                if not cache.empty():
                    num_bytes += cache.nbytes
        return num_bytes

    # --- which rows go where

    def _assign(self, step: Step) -> dict[int, list[int]]:
        """Divides the rows of a step among batches. Returns their indices by the batch's key.

        New rows do not share a batch with old ones: to some models an empty state is not the
        same as the zeros that it would become in a batch.
        """
        new: list[int] = []
        old: list[int] = []
        for n, row in enumerate(step.rows):
            if row.sequence in self._place:
                old.append(n)
            else:
                new.append(n)
        split: dict[int, list[int]] = {}
        for rows in self._divide_new(step, new):
            key = self._begin(step, rows)
            split[key] = rows
        if not old:
            if len(self._keys_of_group) > _MANY_GROUPS:
                self._forget_groups()
            self._keys_of_group[step.group] = list(split)[:1]
        elif self._can_batch:
            split |= self._gather(step, old)
        else:
            for n in old:
                key = self._place[step.rows[n].sequence]
                split[key] = [n]
        return split

    def _forget_groups(self) -> None:
        """Forgets groups without a batch. Each prompt has a group of its own until its rows join
        another one, so there would be more and more of them."""
        for group, keys in list(self._keys_of_group.items()):
            live = [key for key in keys if key in self._batches]
            if live:
                self._keys_of_group[group] = live
            else:
                del self._keys_of_group[group]

    def _divide_new(self, step: Step, new: list[int]) -> list[list[int]]:
        """Divides new rows into those that begin together."""
        if not new:
            return []
        lengths = {step.rows[n].num_tokens for n in new}
        can_begin_together = self._in_slots or (self._can_batch and len(lengths) == 1)
        if can_begin_together:
            return [new]
        return [[n] for n in new]

    def _begin(self, step: Step, rows: list[int]) -> int:
        """Makes a batch of new rows, and returns its key."""
        key = next(self._free_keys)
        lengths: dict[int, int] = {}
        for n in rows:
            row = step.rows[n]
            lengths[row.sequence] = row.num_tokens
        if self._in_slots and len(rows) > 1:
            self._batches[key] = SlotBatch.of_new(lengths, self._make_cache())
        else:
            batch = self._new_batch()
            batch.add([(sequence, self._make_cache(), 0) for sequence in lengths])
            self._batches[key] = batch
        for sequence in lengths:
            self._place[sequence] = key
        return key

    def _gather(self, step: Step, rows: list[int]) -> dict[int, list[int]]:
        """Gathers the rows of a group. Rows of the group's last step stay in their batches, others
        join them where there is room."""
        known_keys = self._keys_of_group.get(step.group, [])
        keys = [key for key in known_keys if key in self._batches]
        index_of = {step.rows[n].sequence: n for n in rows}
        split: dict[int, list[int]] = {}
        for key in list(keys):
            batch = self._batches[key]
            staying = batch.stay(index_of)
            if key != keys[0]:
                # A row that was too long to share the first batch may fit into it by now.
                first = self._batches[keys[0]]
                staying = [s for s in staying if not first.has_room(self._positions[s])]
            if staying:
                split[key] = [index_of.pop(sequence) for sequence in staying]
                continue
            for sequence in list(batch.sequences):
                self._park(sequence)
            keys.remove(key)
        for sequence, n in index_of.items():
            key = self._join(sequence, keys)
            split.setdefault(key, []).append(n)
        self._keys_of_group[step.group] = keys
        return split

    def _join(self, sequence: int, keys: list[int]) -> int:
        """Moves a row to the first batch of its group that has room, and returns the batch's key.

        keys are those of the group's batches; the key of a new batch is added if none has room.
        """
        length = self._positions[sequence]
        caches = self._batches[self._place[sequence]].extract(sequence, length)
        self._leave(sequence)
        with_room = [key for key in keys if self._batches[key].has_room(length)]
        if with_room:
            key = with_room[0]
        else:
            key = next(self._free_keys)
            keys.append(key)
            self._batches[key] = self._new_batch()
        batch = self._batches[key]
        for idle in batch.in_the_way():
            self._park(idle)
        batch.add([(sequence, caches, length)])
        self._place[sequence] = key
        return key

    def _arrange(self, step: Step, key: int, rows: list[int]) -> Part:
        """Arranges a batch for its rows of a step."""
        batch = self._batches[key]
        index_of = {step.rows[n].sequence: n for n in rows}
        sequences = list(index_of)
        num_tokens = max(step.rows[n].num_tokens for n in rows)
        for idle in batch.to_park(sequences, num_tokens):
            self._park(idle)
        order = batch.arrange(sequences, num_tokens)
        indices = [None if sequence is None else index_of[sequence] for sequence in order]
        return Part(tuple(indices), batch.caches)

    # --- single rows

    def _begin_as_copy(self, step: Step, take: Take) -> None:
        """Begins a sequence with a copy of the first tokens of another one."""
        held = self._positions.get(take.source, 0)
        if held < take.num_tokens:
            raise EngineError(
                f"Step {step.number} takes {take.num_tokens} tokens of sequence {take.source}, "
                f"this stage holds {held} tokens of it: the ranks are out of step."
            )
        self._set_apart(take.sequence, take.source, take.num_tokens)
        self._positions[take.sequence] = take.num_tokens

    def _park(self, sequence: int) -> None:
        """Moves a row to a batch of its own."""
        self._set_apart(sequence, sequence, self._positions[sequence])

    def _set_apart(self, sequence: int, source: int, length: int) -> None:
        """Gives a sequence a batch of its own, with a copy of the first tokens of source."""
        caches = self._batches[self._place[source]].extract(source, length)
        if self._in_slots:
            for cache in caches:
                cache.keys = tree_map(mx.contiguous, cache.keys)
                cache.values = tree_map(mx.contiguous, cache.values)
        surplus = self._positions[source] - length
        if surplus and not self._in_slots:
            if not can_trim_prompt_cache(caches):
                raise EngineError("A sequence cannot begin as a part of one with such caches.")
            trim_prompt_cache(caches, surplus)
        self._moved.append(caches)
        self._leave(sequence)
        batch = self._new_batch()
        batch.add([(sequence, caches, length)])
        key = next(self._free_keys)
        self._batches[key] = batch
        self._place[sequence] = key

    def _leave(self, sequence: int) -> None:
        """Removes a sequence from its batch, and the batch if it is empty by then."""
        key = self._place.pop(sequence, None)
        if key is None:
            return
        batch = self._batches[key]
        batch.remove(sequence)
        if not batch.sequences:
            del self._batches[key]

    def _new_batch(self) -> "MergedBatch | SlotBatch":
        if self._in_slots:
            return SlotBatch()
        return MergedBatch()

    def _check(self, step: Step) -> None:
        """Raises EngineError if a step does not fit what this stage holds."""
        lengths = {row.num_tokens for row in step.rows}
        continues_any = any(row.position for row in step.rows)
        if len(lengths) != 1 and continues_any:
            raise EngineError(
                f"Step {step.number} has rows of different lengths {sorted(lengths)}."
            )
        for row in step.rows:
            held = self._positions.get(row.sequence, 0)
            if held != row.position:
                raise EngineError(_out_of_step(step, row, held))


def _out_of_step(step: Step, row: Row, held: int) -> str:
    return (
        f"Step {step.number} feeds sequence {row.sequence} at position {row.position}, "
        f"this stage holds {held} tokens of it: the ranks are out of step."
    )


class MergedBatch:
    """A batch of rows that works with all of mlx-lm's caches. A lone row has plain caches, several
    rows have batch caches. When a row joins or leaves, the whole batch is copied.

    Its methods are those of SlotBatch; a row always has room, and never waits in the batch.
    """

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.caches: list[Any] = []
        self._batched = False

    def stay(self, sequences: Collection[int]) -> list[int]:
        return [sequence for sequence in self.sequences if sequence in sequences]

    def has_room(self, _: int) -> bool:
        return True

    def in_the_way(self) -> list[int]:
        return []

    def to_park(self, sequences: list[int], _: int) -> list[int]:
        return [sequence for sequence in self.sequences if sequence not in sequences]

    def add(self, rows: list[tuple[int, list[Any], int]]) -> None:
        """Adds rows: the sequence, plain caches and number of tokens of each."""
        joining = [caches for _, caches, _ in rows]
        if not self.sequences and len(joining) == 1:
            self.caches = joining[0]
        elif self._batched:
            for cache, added in zip(self.caches, _merge(joining), strict=True):
                cache.extend(added)
        else:
            if self.sequences:
                parts = [self.caches, *joining]
            else:
                parts = joining
            self.caches = _merge(parts)
            self._batched = True
        added_sequences = [sequence for sequence, _, _ in rows]
        self.sequences = self.sequences + added_sequences

    def remove(self, sequence: int) -> None:
        others = [other for other in self.sequences if other != sequence]
        self.arrange(others, 0)

    def extract(self, sequence: int, _: int) -> list[Any]:
        """Plain caches with all tokens of a row: not every cache can be cut shorter."""
        if not self._batched:
            return [copy.deepcopy(cache) for cache in self.caches]
        index = self.sequences.index(sequence)
        return [cache.extract(index) for cache in self.caches]

    def arrange(self, sequences: list[int], _: int) -> list[int | None]:
        """Keeps only these rows, in this order."""
        if sequences != self.sequences:
            if self._batched and sequences:
                keep = mx.array([self.sequences.index(sequence) for sequence in sequences])
                for cache in self.caches:
                    cache.filter(keep)
            self.sequences = sequences
        return list(sequences)


def _merge(parts: list[list[Any]]) -> list[Any]:
    """Merges the plain caches of several rows, layer by layer."""
    merged: list[Any] = []
    for caches in zip(*parts, strict=True):
        cache_class = type(caches[0])
        merged.append(cache_class.merge(caches))
    return merged


def _arrays(caches_of_batches: list[list[Any]]) -> list[mx.array]:
    """The arrays in the states of several batches' caches."""
    states = [[cache.state for cache in caches] for caches in caches_of_batches]
    entries = tree_flatten(states)
    return [entry[1] for entry in entries if isinstance(entry[1], mx.array)]
