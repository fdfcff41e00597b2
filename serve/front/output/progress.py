"""Shows a client that waits for its answer how much of the prompt is computed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from serve.front.output.deltas import PromptProgress

POLL_SECONDS = 0.25

Given = TypeVar("Given")


async def with_progress(
    events: AsyncIterator[Given], read: Callable[[], PromptProgress]
) -> AsyncIterator[Given | PromptProgress]:
    """Yields the events. Before the first event, yields the progress: the cached tokens as soon as
    the prompt starts, then each increase, and at last the whole prompt."""
    first = asyncio.ensure_future(anext(events, None))
    shown: PromptProgress | None = None
    try:
        while not (await asyncio.wait({first}, timeout=POLL_SECONDS))[0]:
            for progress in _unseen(shown, read()):
                yield progress
                shown = progress
        event = await first
    finally:
        first.cancel()
    if event is None:
        return
    for progress in _unseen(shown, read().at_end()):
        yield progress
    yield event
    async for event in events:
        yield event


def _unseen(shown: PromptProgress | None, progress: PromptProgress) -> Iterator[PromptProgress]:
    """Yields the steps from the progress that was shown last to the current one. Clients read the
    number of cached tokens from the first step."""
    if shown is None and progress.done:
        shown = progress.at_start()
        yield shown
    if shown is not None and progress.done > shown.done:
        yield progress
