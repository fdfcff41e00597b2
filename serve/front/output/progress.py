"""Shows a client that waits for its answer how much of the prompt is computed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from serve.front.output.deltas import Progress

POLL_SECONDS = 0.25

Given = TypeVar("Given")


async def with_progress(
    events: AsyncIterator[Given], read: Callable[[], Progress]
) -> AsyncIterator[Given | Progress]:
    """Yields the events. Before the first of them comes the progress, each time that it has grown,
    and at last that of the whole prompt."""
    first = asyncio.ensure_future(anext(events, None))
    num_shown = -1
    try:
        while not (await asyncio.wait({first}, timeout=POLL_SECONDS))[0]:
            progress = read()
            if progress.done > num_shown:
                num_shown = progress.done
                yield progress
        event = await first
    finally:
        first.cancel()
    if event is None:
        return
    yield read().completed()
    yield event
    async for event in events:
        yield event
