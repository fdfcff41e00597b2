"""Responses that are generated in the background: they continue when their clients leave, and
their events can be read again."""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator

from serve.front.api.writers.responses import ResponsesWriter
from serve.front.http.replies import Json
from serve.front.output.answer import Answer
from serve.front.routes.stream import NAMED, sent_events

MAX_KEPT = 64
MAX_KEPT_BYTES = 16 << 20

_logger = logging.getLogger(__name__)


class Run:
    """One response that is or was generated. events are encoded; the number of an event is its
    index."""

    def __init__(self, answer: Answer, writer: ResponsesWriter) -> None:
        self._answer = answer
        self._writer = writer
        self.events: list[bytes] = []
        self._is_changed = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    @property
    def response(self) -> Json:
        return self._writer.response

    @property
    def is_done(self) -> bool:
        return self._task.done()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.events))

    async def cancel(self) -> None:
        """Ends the response. Does nothing if it has ended."""
        self._task.cancel()
        await self.wait()

    async def wait(self) -> None:
        """Returns when the response has ended."""
        await asyncio.wait({self._task})

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """Yields the events from this number on, as they are generated."""
        while True:
            is_done = self.is_done
            new = self.events[start:]
            start += len(new)
            for event in new:
                yield event
            if is_done:
                return
            if not new:
                changed = asyncio.ensure_future(self._is_changed.wait())
                waiting = {changed, self._task}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()

    async def _run(self) -> None:
        try:
            async for event in sent_events(self._answer, self._writer, NAMED):
                self._add(event)
        except asyncio.CancelledError:
            for last in self._writer.cancelled():
                self._add(NAMED.encode(last))
        finally:
            self._answer.close()
            status = self.response["status"]
            name = json.dumps(self.response["id"])
            _logger.info("event=background_ended response=%s status=%s", name, status)

    def _add(self, event: bytes) -> None:
        self.events.append(event)
        self._is_changed.set()
        self._is_changed = asyncio.Event()  # Later readers wait for the next change.


class Background:
    """The running responses, and those that ended last. The events of ended ones are kept up to
    max_num responses and max_bytes."""

    def __init__(self, max_num: int = MAX_KEPT, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_num, self._max_bytes = max_num, max_bytes
        self._runs: OrderedDict[str, Run] = OrderedDict()

    def start(self, answer: Answer, writer: ResponsesWriter) -> Run:
        run = Run(answer, writer)
        self._runs[run.response["id"]] = run
        self._forget_oldest()
        return run

    def get(self, id: str) -> Run | None:
        return self._runs.get(id)

    async def forget(self, id: str) -> None:
        """Ends the run with this id, if there is one."""
        run = self._runs.pop(id, None)
        if run is not None:
            await run.cancel()

    async def idle(self, seconds: float) -> None:
        """Waits until no run is under way, at most this many seconds."""
        waiting = [asyncio.ensure_future(run.wait()) for run in self._runs.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)

    def _forget_oldest(self) -> None:
        ended = [id for id, run in self._runs.items() if run.is_done]
        num_bytes = sum(self._runs[id].num_bytes for id in ended)
        for id in self._too_many(ended, num_bytes):
            del self._runs[id]

    def _too_many(self, ended: list[str], num_bytes: int) -> Iterator[str]:
        num_left = len(ended)
        for id in ended:
            if num_left <= self._max_num and num_bytes <= self._max_bytes:
                return
            num_left -= 1
            num_bytes -= self._runs[id].num_bytes
            yield id
