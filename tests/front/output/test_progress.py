"""The progress of a prompt, as shown to a waiting client."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from serve.core.errors import EngineError
from serve.front.output import progress as showing
from serve.front.output.deltas import PromptProgress
from serve.front.output.progress import with_progress

pytestmark = pytest.mark.anyio


def read_from(*counts: int) -> Iterator[PromptProgress]:
    """The progress at each look: of 100 tokens, 10 of which were cached. 0 is that of a prompt that
    waits in the queue."""
    for done in counts:
        yield PromptProgress(total=100, done=done, cached=10, seconds=0.5)


async def shown(events: AsyncIterator[str], counts: Iterator[PromptProgress]) -> list[str | int]:
    found: list[str | int] = []
    async for each in with_progress(events, lambda: next(counts)):
        found.append(each.done if isinstance(each, PromptProgress) else each)
    return found


async def test_each_increase_of_progress_is_sent_and_then_the_whole_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(showing, "POLL_SECONDS", 0.001)
    counts = read_from(0, 20, 20, 40, 40, 70, 70)
    is_read = asyncio.Event()

    def read() -> PromptProgress:
        progress = next(counts)
        if progress.done == 70:
            is_read.set()
        return progress

    async def events() -> AsyncIterator[str]:
        await is_read.wait()
        yield "a"
        yield "b"

    found = [each async for each in with_progress(events(), read)]
    numbers = [each.done for each in found if isinstance(each, PromptProgress)]
    assert (numbers, found[-2:]) == ([10, 20, 40, 70, 100], ["a", "b"])


async def test_the_whole_prompt_is_sent_as_progress_even_without_a_wait() -> None:
    async def events() -> AsyncIterator[str]:
        yield "a"

    assert await shown(events(), read_from(100)) == [10, 100, "a"]


async def test_errors_of_the_engine_are_raised_while_progress_is_sent() -> None:
    async def events() -> AsyncIterator[str]:
        raise EngineError("broken")
        yield "a"

    with pytest.raises(EngineError):
        await shown(events(), read_from(5))


async def test_no_task_is_left_when_a_reader_of_progress_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(showing, "POLL_SECONDS", 0.001)

    async def events() -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield "never"

    reading = with_progress(events(), lambda: PromptProgress(100, 5, 0, 0.5))
    assert isinstance(await anext(reading), PromptProgress)
    before = len(asyncio.all_tasks())
    await reading.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before - 1
