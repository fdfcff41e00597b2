"""The stream of the cluster's state for web pages: the whole state first, then the changes.

All watchers share one observation, which runs only while somebody watches. A watcher that reads too
slowly loses frames; it then gets the whole state again.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from serve.core.errors import OverloadedError
from serve.front.http import replies
from serve.front.http.record import trace_of
from serve.front.http.replies import Json
from serve.front.pipeline.status import StageSpan
from serve.front.routes.history import Sample

PERIOD_SECONDS = 0.25  # the pace at which engines report
MAX_WATCHERS = 16
MAX_FRAMES = 8  # frames that one watcher may leave unread
_SHOWN_SECONDS = 20.0  # how far back the spans go that a new watcher gets
_NUM_SHOWN_SPANS = 6000
_END = 6  # the place of a span's end in its row

_logger = logging.getLogger(__name__)


class Watcher:
    """One reader of the stream. While the reader is behind, at first or after it has lost frames,
    it needs the whole state."""

    def __init__(self) -> None:
        self.is_behind = True
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_FRAMES)

    def offer(self, frame: bytes) -> None:
        if self.is_behind:
            return
        try:
            self.frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.lose_frames()

    def end(self) -> None:
        self.lose_frames()
        self.frames.put_nowait(None)

    def lose_frames(self) -> None:
        self.is_behind = True
        while not self.frames.empty():
            self.frames.get_nowait()


class Watchers:
    """All readers of the stream. `observe` returns the sections of the state, spans_after is the
    engine's method of that name, and samples returns the history behind the charts."""

    def __init__(
        self,
        observe: Callable[[], dict[str, Any]],
        spans_after: Callable[[Mapping[int, int], float], list[StageSpan]],
        samples: Callable[[], list[Sample]],
    ) -> None:
        self._observe, self._spans_after, self._samples = observe, spans_after, samples
        self._watchers: set[Watcher] = set()
        self._observing: asyncio.Task[None] | None = None
        self._sections: dict[str, Any] = {}
        self._numbers: dict[int, int] = {}  # the number of each rank's latest span
        self._recent: deque[list[Any]] = deque(maxlen=_NUM_SHOWN_SPANS)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self) -> Watcher:
        """Adds a watcher, which the caller must remove. Raises OverloadedError."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise OverloadedError(
                f"{MAX_WATCHERS} pages watch this server already: close one of them.",
                code="too_many_watchers",
            )
        watcher = Watcher()
        if self._is_closed:
            watcher.end()
        elif self._observing is None:
            self._start()
        self._watchers.add(watcher)  # last: after a failed start, nobody would remove it
        return watcher

    def remove(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers and self._observing is not None:
            self._observing.cancel()
            self._observing = None

    def close(self) -> None:
        """Ends all streams; streams that begin later end at once."""
        self._is_closed = True
        self._end_all()

    def _end_all(self) -> None:
        for watcher in self._watchers:
            watcher.end()

    async def frames(self, watcher: Watcher) -> AsyncIterator[bytes]:
        """Yields the events for a watcher, encoded."""
        while True:
            if watcher.is_behind and watcher.frames.empty():
                watcher.is_behind = False
                yield self._whole()
                continue  # Frames may have been lost meanwhile.
            frame = await watcher.frames.get()
            if frame is None:
                return
            yield frame

    def _start(self) -> None:
        # Without span numbers, the stages return all their recent spans again.
        self._numbers.clear()
        self._recent.clear()
        self._sections = {}
        self._change_frame()
        self._observing = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            try:
                frame = self._change_frame()
            except Exception as error:  # Uncaught, it would leave the streams waiting forever.
                _logger.error("event=bug trace=%s", trace_of(error))
                self._end_all()
                self._observing = None  # The next watcher starts a new observation.
                return
            for watcher in self._watchers:
                watcher.offer(frame)

    def _change_frame(self) -> bytes:
        """Observes the state, and returns the frame with its changes."""
        before, self._sections = self._sections, self._observe()
        changed = {
            name: section for name, section in self._sections.items() if section != before.get(name)
        }
        rows = []
        for found in reversed(self._spans_after(self._numbers, _SHOWN_SECONDS)):
            self._numbers[found.rank] = found.number
            if found.span.num_rows:
                rows.append(_row(found))
        self._recent.extend(rows)
        return _frame("change", {**changed, "spans": rows})

    def _whole(self) -> bytes:
        since = time.time() - _SHOWN_SECONDS
        rows = [row for row in self._recent if row[_END] > since]
        return _frame("state", {**self._sections, "history": self._samples(), "spans": rows})


def _row(found: StageSpan) -> list[Any]:
    """Returns a span as it is sent: a list is a third of the size of an object with names."""
    span = found.span
    return [
        found.rank,
        span.step,
        span.kind,
        span.num_rows,
        span.num_tokens,
        round(span.start, 5),
        round(span.end, 5),
        found.sequences,
    ]


def _frame(kind: str, fields: Json) -> bytes:
    return replies.server_sent({"kind": kind, "time": round(time.time(), 3), **fields})
