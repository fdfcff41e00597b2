"""How prompts are cut up and put together for a prefill step. Pure."""

from collections.abc import Iterable, Iterator

from serve.core.types import Sequence

_REST = 1.25


def next_chunk(num_left: int, chunk: int) -> int:
    """A short rest goes along: a step of its own would cost more."""
    return num_left if num_left <= _REST * chunk else chunk


def alike(first: Sequence, others: Iterable[Sequence], chunk: int) -> Iterator[Sequence]:
    """Prompts that can share a step with the first one: whole and new, as it is. Rows are as
    long as the longest, which must be less than twice the shortest."""
    num_rows, least, most = 1, first.num_tokens - 1, first.num_tokens - 1
    if first.num_computed or most > _REST * chunk:
        return
    for sequence in others:
        length = sequence.num_tokens - 1
        least, most = min(least, length), max(most, length)
        if sequence.num_computed or (num_rows + 1) * most > chunk or most >= 2 * least:
            return
        num_rows += 1
        yield sequence
