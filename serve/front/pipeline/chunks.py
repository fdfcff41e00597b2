"""Chooses which prompts share a prefill step, and how much of each prompt it takes. Pure."""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass

from serve.core.types import Sequence

LONGEST_CHUNK = 1.25  # with the rest of a prompt, as a share of what was asked for
_MIN_CHUNK = 64
_CHUNKS_OF_A_STAGE = 4  # of what waits for prefill: with fewer, stages would wait for each other
_SHORT_PROMPT = 128  # cut up it would cost everybody more
_SHORT_PROMPTS = 264  # tokens of several together: their step costs less than one for each


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """The prompt tokens that the stages take. max_tokens are those of a step, and beside_decoding
    those of a step beside sequences that decode; None if none does."""

    num_stages: int
    max_tokens: int
    beside_decoding: int | None

    def max_chunks(self, first: Sequence) -> int:
        """The number of chunks under way: one for each stage, so that chunks of one prompt follow
        each other through them. Beside decoding they are fewer and larger, because each has to read
        all that is before it."""
        if self._must_make_way(first):
            return max(1, self.num_stages // 2)
        return self.num_stages

    def chunk(self, prefilling: ReadableList[Sequence]) -> int:
        """How many tokens the next prefill step may have. Beside sequences that decode,
        few enough for them to keep their pace; else so few that all stages get their share."""
        if self.beside_decoding is not None:
            if self._must_make_way(prefilling[0]):
                return min(self.max_tokens, self.beside_decoding)
            return min(self.max_tokens, max(self.beside_decoding, _SHORT_PROMPTS))
        if self.num_stages == 1:
            return self.max_tokens
        num_left = sum(s.num_to_prefill - s.num_computed for s in prefilling)
        num_chunks = _CHUNKS_OF_A_STAGE * self.num_stages
        share = math.ceil(num_left / num_chunks)
        return min(self.max_tokens, max(_MIN_CHUNK, share))

    def _must_make_way(self, first: Sequence) -> bool:
        """Whether the next prompt is a long one beside sequences that decode."""
        return is_long(first) and self.beside_decoding is not None


def is_long(sequence: Sequence) -> bool:
    return sequence.num_to_prefill - sequence.num_cached > _SHORT_PROMPT


def next_chunk(sequence: Sequence, chunk: int) -> int:
    """How many of a prompt's tokens the next chunk takes, up to its next stop. A short rest goes
    along, because a step of its own would cost more."""
    num_left = _next_stop(sequence) - sequence.num_computed
    return num_left if num_left <= LONGEST_CHUNK * chunk else chunk


def _next_stop(sequence: Sequence) -> int:
    return sequence.stops[0] if sequence.stops else sequence.num_to_prefill


def batchable(prefilling: Iterable[Sequence], chunk: int) -> Iterator[Sequence]:
    """Prompts that can share a step with the first one: new, and without a stop before their end,
    as it is. Rows are as long as the longest, which must be less than twice the shortest."""
    first, *others = prefilling
    longest = first.num_to_prefill
    shortest = longest
    num_rows = 1
    if not _is_one_chunk(first) or longest > LONGEST_CHUNK * chunk:
        return
    for sequence in others:
        length = sequence.num_to_prefill
        longest = max(longest, length)
        shortest = min(shortest, length)
        num_rows += 1
        is_too_large = num_rows * longest > chunk
        is_too_uneven = longest >= 2 * shortest
        if not _is_one_chunk(sequence) or is_too_large or is_too_uneven:
            return
        yield sequence


def _is_one_chunk(sequence: Sequence) -> bool:
    return sequence.num_computed == 0 and _next_stop(sequence) == sequence.num_to_prefill
