"""The sequences that wait, and what blocks them."""

from serve.core.types import Sampling, Sequence
from serve.front.pipeline.queues import Waiting


def with_copy() -> tuple[Sequence, Sequence]:
    first = Sequence(1, [5, 6, 7], 4, Sampling(), frozenset())
    second = Sequence(2, first.prompt, 4, Sampling(), frozenset())
    second.original = first
    return first, second


def test_waiting_frees_a_copy_after_the_prompt_of_its_original() -> None:
    waiting = Waiting()
    first, second = with_copy()
    waiting.add(first)
    waiting.add(second)
    waiting.remove(first)
    waiting.restart()
    assert waiting.next() is None, "its original has to begin again"
    waiting.free_copies(first)
    assert waiting.next() is second


def test_waiting_frees_all_that_read_when_the_engines_restart() -> None:
    waiting = Waiting()
    first, second = with_copy()
    for sequence in (first, second):
        waiting.add(sequence)
    waiting.free_copies(first)
    waiting.block(second)  # The original may have ended long before.
    waiting.block(first)
    waiting.free_copies(first)
    assert waiting.next() is None
    assert len(waiting) == 2
    waiting.restart()
    assert list(waiting) == [second, first]
    assert waiting.next() is second
