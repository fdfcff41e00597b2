"""Rows that share a forward pass, with mlx-lm's own caches of any kind."""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from serve.core.errors import EngineError
from serve.rank import checkpoints
from serve.rank.slots import Joining


class MergedBatch:
    """Works with all of mlx-lm's caches. A lone row has plain caches, several have batch caches,
    which are copied when a row joins or leaves. So a row always has room."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.caches: list[Any] = []
        self.has_grown = False  # Buffers grow only when rows join.
        self._batched = False

    def staying(self, sequences: Collection[int]) -> list[int]:
        return [sequence for sequence in self.sequences if sequence in sequences]

    def keep(self, sequences: list[int]) -> None:
        """Does nothing: rows that are not fed leave, as `to_park` says."""

    def has_room(self, _: int) -> bool:
        return True

    def in_the_way(self) -> list[int]:
        return []

    def to_park(self, sequences: list[int], _: int) -> list[int]:
        return [sequence for sequence in self.sequences if sequence not in sequences]

    def add(self, rows: list[Joining]) -> None:
        joining = [caches for _, caches, _ in rows]
        if not self.sequences and len(joining) == 1:
            self.caches = joining[0]
        elif self._batched:
            for cache, added in zip(self.caches, _merge(joining), strict=True):
                cache.extend(added)
        else:
            parts = joining
            if self.sequences:
                parts = [self.caches, *joining]
            self.caches = _merge(parts)
            self._batched = True
        added_sequences = [sequence for sequence, _, _ in rows]
        self.sequences = self.sequences + added_sequences

    def remove(self, sequence: int) -> None:
        self._select([other for other in self.sequences if other != sequence])

    def rewind(self, sequence: int, num_tokens: int) -> None:
        if self._batched:
            raise EngineError(
                f"Sequence {sequence} cannot be cut: its caches are merged in a batch."
            )
        _trim(self.caches, num_tokens)

    def extract(self, sequence: int, _: int) -> list[Any]:
        """Returns plain caches with all tokens of a row: not every cache can be cut shorter."""
        if not self._batched:
            return [copy.deepcopy(cache) for cache in self.caches]
        index = self.sequences.index(sequence)
        return [cache.extract(index) for cache in self.caches]

    def states(self, sequence: int) -> list[Any]:
        row = self.sequences.index(sequence) if self._batched else None
        return [checkpoints.state_of(cache, row) for cache in self.caches]

    def arrange(self, feeds: Mapping[int, int]) -> list[int | None]:
        sequences = list(feeds)
        self._select(sequences)
        return list(sequences)

    def _select(self, sequences: list[int]) -> None:
        if sequences != self.sequences:
            if self._batched and sequences:
                keep = mx.array([self.sequences.index(sequence) for sequence in sequences])
                for cache in self.caches:
                    cache.filter(keep)
            self.sequences = sequences


def _trim(caches: list[Any], num_tokens: int) -> None:
    if not can_trim_prompt_cache(caches):
        raise EngineError(
            "These caches cannot be cut to an earlier position.", code="cannot_rewind"
        )
    trim_prompt_cache(caches, num_tokens)


def _merge(parts: list[list[Any]]) -> list[Any]:
    merged: list[Any] = []
    for caches in zip(*parts, strict=True):
        cache_class = type(caches[0])
        merged.append(cache_class.merge(caches))
    return merged
