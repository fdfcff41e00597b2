"""Chooses which prompts share a prefill step, and how much of each prompt it takes. Pure."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from serve.core.types import Sequence
from serve.front.prefixes.checkpoints import Stops

MAX_CHUNK_SHARE = 1.25  # the largest chunk with a short rest, as a share of the intended size
MIN_CHUNK = 64
_CHUNKS_PER_STAGE = 4  # how many chunks prompts make for each stage; with fewer, stages idle
SHORT_PROMPT = 128  # in tokens: cutting a shorter prompt costs more than it helps
# The most tokens of short prompts in one step while sequences decode. One step for several prompts
# costs less than a step for each, but all streams wait for it.
_SHORT_PROMPTS = 132


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """How many prompt tokens a step may have: at most max_tokens. While sequences decode,
    beside_decoding limits them further; while none does, beside_decoding is None, and
    without_decoding limits the tokens of long prompts. Short prompts are cut to beside_decoding
    only if cuts_short_prompts."""

    num_stages: int
    max_tokens: int
    without_decoding: int
    beside_decoding: int | None
    cuts_short_prompts: bool = False

    def chunk(self, first: Sequence, prefilling: Iterable[Sequence]) -> int:
        """Returns the number of tokens that the next prefill step may have, which begins with the
        prompt of `first`. The step is small enough for streams to keep their pace while sequences
        decode, and otherwise for all stages to be busy."""
        if self.beside_decoding is not None:
            if self.cuts_short_prompts or is_long(first):
                return min(self.max_tokens, self.beside_decoding)
            return min(self.max_tokens, max(self.beside_decoding, _SHORT_PROMPTS))
        max_tokens = self.max_tokens
        if is_long(first):
            max_tokens = min(max_tokens, self.without_decoding)
        if self.num_stages == 1:
            return max_tokens
        num_left = sum(s.num_to_prefill - s.num_computed for s in prefilling)
        num_chunks = _CHUNKS_PER_STAGE * self.num_stages
        share = math.ceil(num_left / num_chunks)
        return min(max_tokens, max(MIN_CHUNK, share))


def max_chunks_between_steps(num_stages: int) -> int:
    """Returns how many prefill steps may come between two decode steps. Streams wait for them."""
    return max(1, num_stages // 2)


def is_long(sequence: Sequence) -> bool:
    return sequence.num_to_prefill - sequence.num_cached > SHORT_PROMPT


def next_chunk(sequence: Sequence, chunk: int, stops: Stops) -> int:
    """Returns the number of tokens of a prompt that the next step takes, up to its next stop. A
    short rest is taken along, because another step would cost more."""
    num_left = stops.next(sequence) - sequence.num_computed
    return num_left if num_left <= MAX_CHUNK_SHARE * chunk else chunk


def batchable(prefilling: Iterable[Sequence], chunk: int, stops: Stops) -> Iterator[Sequence]:
    """Yields the prompts that can share a step with the first one. All these prompts, the first
    included, have to be new and without a stop before their end. Rows are padded to the longest
    prompt, which must be less than twice as long as the shortest."""
    first, *others = prefilling
    longest = first.num_to_prefill
    shortest = longest
    num_rows = 1
    if not _is_one_chunk(first, stops) or longest > MAX_CHUNK_SHARE * chunk:
        return
    for sequence in others:
        length = sequence.num_to_prefill
        longest = max(longest, length)
        shortest = min(shortest, length)
        num_rows += 1
        is_too_large = num_rows * longest > chunk
        is_too_uneven = longest >= 2 * shortest
        if not _is_one_chunk(sequence, stops) or is_too_large or is_too_uneven:
            return
        yield sequence


def _is_one_chunk(sequence: Sequence, stops: Stops) -> bool:
    return sequence.num_computed == 0 and stops.next(sequence) == sequence.num_to_prefill
