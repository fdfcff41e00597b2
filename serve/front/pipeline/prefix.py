"""Which finished sequences the stages still hold, so that a prompt that begins alike need
not be computed again. Only rank 0 decides; it tells the stages in its steps."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as ReadableList
from itertools import chain

from serve.core.types import Group, Sequence

LEAST_TOKENS = 16  # A shorter common beginning is not worth a copy.
# Each has two arrays for each layer, is looked at for each new prompt, and Metal has room for
# half a million arrays in all.
MOST_KEPT = 256


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
        """Returns those that go for it: they are how this one begins, or were not used longest."""
        alike = self.with_adapter(adapter)
        gone = [id for id, kept in alike.items() if tokens[: len(kept)] == kept]
        if not gone and len(self._kept) == MOST_KEPT:
            gone = [next(iter(self._kept))]
        for id in gone:
            self.forget(id)
        self._kept[sequence_id], self._adapters[sequence_id] = tokens, adapter
        self.num_tokens += len(tokens)
        return gone

    def forget(self, sequence_id: int) -> None:
        del self._adapters[sequence_id]
        self.num_tokens -= len(self._kept.pop(sequence_id))

    def oldest(self) -> int | None:
        return next(iter(self._kept), None)

    def with_adapter(self, adapter: int) -> dict[int, list[int]]:
        return {id: kept for id, kept in self._kept.items() if self._adapters[id] == adapter}

    def longest(
        self,
        tokens: ReadableList[int],
        whole: bool,
        others: Iterable[tuple[int, ReadableList[int]]] = (),
        adapter: int = 0,
    ) -> tuple[int, int] | None:
        """The sequence, kept or of others, that begins most like tokens, and how many are the
        same. If whole, only one that tokens begin with as a whole."""
        alike = self.with_adapter(adapter).items()
        best = best_match(chain(alike, others), tokens, whole)
        if best and best[0] in self._kept:
            self._kept.move_to_end(best[0])
        return best


def beginning(
    sequence: Sequence, kept: PrefixIndex, groups: Iterable[Group], whole: bool
) -> tuple[int, int] | None:
    """The sequence that begins most like this one, and how many tokens are the same: a kept
    one or, unless only a whole one can be copied, one of the groups. What is to be scored
    has to be computed."""
    if sequence.sampling.prompt_logprobs is not None:
        return None
    decoding = (s for group in groups for s in group.sequences)
    alike = (s for s in decoding if s.adapter == sequence.adapter)
    prompts = ((s.id, s.prompt) for s in alike if s.num_computed >= len(s.prompt))
    others = () if whole else prompts
    return kept.longest(sequence.tokens[:-1], whole, others, sequence.adapter)


def beginning_of_original(sequence: Sequence, live: Collection[int]) -> tuple[int, int] | None:
    """All that an original holds that has just been prefilled: this every cache can copy."""
    original, num_tokens = sequence.original, len(sequence.prompt) - 1
    if original and original.id in live and original.num_computed == num_tokens > 0:
        return original.id, num_tokens
    return None


def best_match(
    candidates: Iterable[tuple[int, ReadableList[int]]],
    tokens: ReadableList[int],
    whole: bool = False,
) -> tuple[int, int] | None:
    best: tuple[int, int] | None = None
    for id, held in candidates:
        num_common = common_length(held, tokens)
        if num_common >= max(LEAST_TOKENS, best[1] + 1 if best else 0) and (
            not whole or num_common == len(held)
        ):
            best = id, num_common
    return best


def common_length(a: ReadableList[int], b: ReadableList[int]) -> int:
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
