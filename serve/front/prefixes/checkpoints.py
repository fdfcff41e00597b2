"""Knows the checkpoints that the stages keep, and which sequences they belong to. Pure.

A checkpoint is a copy of the caches that cannot be cut, at one position in a sequence. With the
keys and values of any sequence that begins with the same tokens, a new one can begin there.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass, field
from typing import NamedTuple

from serve.core.types import FIRST_CHECKPOINT, Sequence
from serve.front.prefixes.tree import PrefixTree

EVERY_TOKENS = 2048  # the distance of checkpoints in a long prompt, wherever its messages end
# The fewest tokens before a checkpoint: it costs a step and memory, and must save more.
MIN_TOKENS = 64
# A checkpoint has up to four arrays for each layer; see MAX_KEPT.
MAX_CHECKPOINTS = 256


class PrefixKey(NamedTuple):
    """Sequences share prefixes only if they have equal keys. Keys and values depend on the version
    of the adapter, and the scope separates clients that must not learn of each other."""

    adapter_version: int = 0
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a prompt shares prefixes: only within a scope. boundaries are the positions after which
    later prompts of the same chat may differ."""

    scope: str = ""
    boundaries: tuple[int, ...] = ()


NO_SHARING = Sharing()


class Stops:
    """The positions in prompts at which prefill stops, so that the stages make a checkpoint."""

    def __init__(self) -> None:
        self._positions: dict[int, list[int]] = {}

    def plan(self, sequence: Sequence, boundaries: Collection[int]) -> None:
        """Chooses where the prefill of a prompt, which begins now, will stop: at its boundaries, at
        fixed distances, and at its end."""
        if not sequence.has_answer:
            return
        end = sequence.num_to_prefill
        near = [position for position in boundaries if position <= end]
        regular = [*range(EVERY_TOKENS, end, EVERY_TOKENS), end]
        spare = [p for p in regular if all(abs(p - b) >= MIN_TOKENS for b in near)]
        first = max(MIN_TOKENS, sequence.num_computed + 1)
        chosen = {position for position in [*near, *spare] if position >= first}
        self._positions[sequence.id] = sorted(chosen)

    def next(self, sequence: Sequence) -> int:
        """Returns the position up to which the next step of a prompt may go."""
        positions = self._positions.get(sequence.id)
        return positions[0] if positions else sequence.num_to_prefill

    def reach(self, sequence_id: int, position: int) -> bool:
        """Removes a prompt's next stop if it is at this position. Returns whether it was there."""
        positions = self._positions.get(sequence_id)
        if not positions or positions[0] != position:
            return False
        del positions[0]
        return True

    def forget(self, sequence_id: int) -> None:
        self._positions.pop(sequence_id, None)


@dataclass(slots=True)
class _Checkpoint:
    """A checkpoint. holders are the sequences that begin with its tokens."""

    id: int
    num_tokens: int
    key: PrefixKey
    holders: set[int] = field(default_factory=set)


class Checkpoints:
    """All checkpoints, and the sequences that hold them. One without a holder is removed."""

    def __init__(self) -> None:
        self._ids = itertools.count(FIRST_CHECKPOINT)
        self._checkpoints: dict[int, _Checkpoint] = {}
        self._held: defaultdict[int, set[int]] = defaultdict(set)
        self._trees: defaultdict[PrefixKey, PrefixTree] = defaultdict(PrefixTree)

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __iter__(self) -> Iterator[int]:
        return iter(self._checkpoints)

    @property
    def is_full(self) -> bool:
        return len(self) >= MAX_CHECKPOINTS

    def of_sequence(self, sequence_id: int) -> dict[int, int]:
        """Returns the checkpoints of a sequence, by their positions."""
        held = sorted(self._held.get(sequence_id, ()))
        return {self._checkpoints[id].num_tokens: id for id in held}

    def add(self, sequence: Sequence, num_tokens: int, key: PrefixKey) -> int:
        """Makes a sequence hold a checkpoint of its first num_tokens tokens, and returns its id. An
        existing checkpoint of the same tokens is used again."""
        tokens = sequence.tokens[:num_tokens]
        found = self.longest(tokens, key)
        if found is None or found.num_tokens < num_tokens:
            found = _Checkpoint(next(self._ids), num_tokens, key)
            self._checkpoints[found.id] = found
            self._trees[key].add(found.id, tokens)
        self._hold(sequence.id, found)
        return found.id

    def is_held_by(self, sequence_id: int, checkpoint: int) -> bool:
        return checkpoint in self._held.get(sequence_id, ())

    def share(self, sequence_id: int, source_id: int, num_tokens: int) -> None:
        """Makes a sequence hold another one's checkpoints within num_tokens common tokens."""
        for id in self._held.get(source_id, ()):
            if self._checkpoints[id].num_tokens <= num_tokens:
                self._hold(sequence_id, self._checkpoints[id])

    def leave(self, sequence_id: int) -> list[int]:
        """Removes a sequence from the holders. Returns checkpoints that have no other holder."""
        gone: list[int] = []
        for id in sorted(self._held.pop(sequence_id, ())):
            checkpoint = self._checkpoints[id]
            checkpoint.holders.remove(sequence_id)
            if not checkpoint.holders:
                self.remove(id)
                gone.append(id)
        return gone

    def remove(self, checkpoint: int) -> None:
        """Removes a checkpoint whose sequences stay."""
        removed = self._checkpoints.pop(checkpoint)
        for sequence_id in removed.holders:
            self._held[sequence_id].remove(checkpoint)
        tree = self._trees[removed.key]
        tree.remove(checkpoint)
        if not tree:
            del self._trees[removed.key]

    def longest(self, tokens: ReadableList[int], key: PrefixKey) -> _Checkpoint | None:
        """Finds the longest checkpoint that tokens begin with."""
        if key not in self._trees:
            return None
        found = self._trees[key].prefixes(tokens)
        return self._checkpoints[max(found, key=found.__getitem__)] if found else None

    def _hold(self, sequence_id: int, checkpoint: _Checkpoint) -> None:
        checkpoint.holders.add(sequence_id)
        self._held[sequence_id].add(checkpoint.id)
