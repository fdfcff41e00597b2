"""Which finished sequences the stages still hold, so that a prompt that begins alike need
not be computed again. Only rank 0 decides; it tells the stages in its steps."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

LEAST_TOKENS = 16  # A shorter common beginning is not worth a copy.


class PrefixIndex:
    """The tokens of kept sequences, least recently used first. Only those with the same
    adapter version are alike: keys and values depend on it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, list[int]] = OrderedDict()
        self._adapters: dict[int, int] = {}
        self.num_tokens = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def keep(self, sequence_id: int, tokens: list[int], adapter: int = 0) -> list[int]:
        """Returns those that are not needed any more, because this one begins as they do."""
        alike = self.with_adapter(adapter)
        covered = [id for id, kept in alike.items() if tokens[: len(kept)] == kept]
        for id in covered:
            self.forget(id)
        self._kept[sequence_id], self._adapters[sequence_id] = tokens, adapter
        self.num_tokens += len(tokens)
        return covered

    def forget(self, sequence_id: int) -> None:
        del self._adapters[sequence_id]
        self.num_tokens -= len(self._kept.pop(sequence_id))

    def oldest(self) -> int | None:
        return next(iter(self._kept), None)

    def with_adapter(self, adapter: int) -> dict[int, list[int]]:
        return {id: kept for id, kept in self._kept.items() if self._adapters[id] == adapter}

    def longest(
        self, tokens: Sequence[int], whole: bool, adapter: int = 0
    ) -> tuple[int, int] | None:
        """The kept sequence that begins most like tokens, and how many are the same. If
        whole, only one that tokens begin with as a whole."""
        best = best_match(self.with_adapter(adapter).items(), tokens, whole)
        if best:
            self._kept.move_to_end(best[0])
        return best


def best_match(
    candidates: Iterable[tuple[int, Sequence[int]]], tokens: Sequence[int], whole: bool = False
) -> tuple[int, int] | None:
    best: tuple[int, int] | None = None
    for id, held in candidates:
        num_common = common_length(held, tokens)
        if num_common >= max(LEAST_TOKENS, best[1] + 1 if best else 0) and (
            not whole or num_common == len(held)
        ):
            best = id, num_common
    return best


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first elements are the same: a binary search, because comparing slices is
    a hundred times faster than comparing elements."""
    low, high = 0, min(len(a), len(b))
    if a[:LEAST_TOKENS] != b[:LEAST_TOKENS]:
        high = min(high, LEAST_TOKENS)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
