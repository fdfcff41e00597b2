"""Where bodies of requests are read, so that large ones do not hold up small ones.

Small bodies are read in threads, those that make the model answer apart from the others. Large
ones wait in a queue, the smallest first, for a process of their own.
"""

import asyncio
import heapq
import itertools
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from serve.core.errors import BrigadeError, OverloadedError, RequestError
from serve.front.api import reading_process
from serve.front.api.reading import Reader, load
from serve.front.text.isolated import IsolatedProcess, ProcessEnded

Kind = Literal["chat", "completion", "message", "response", "count", "tokenize", "detokenize"]

MAX_SMALL_BYTES = 32 << 10
MAX_BYTES_HERE = 1 << 20  # in a thread of the server's process
MAX_WAITING = 32
_ANSWERED = {"chat", "completion", "message", "response"}
_NUM_THREADS = 2


@dataclass(order=True, slots=True)
class _Waiting:
    """Requests that the model answers come before others, then small ones before large ones."""

    is_only_told: bool
    num_bytes: int
    number: int
    turn: "asyncio.Future[None]" = field(compare=False)


class Lanes:
    """For one event loop."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prompt")
        self._other_threads = ThreadPoolExecutor(1, "tokenize")
        self._large_thread = ThreadPoolExecutor(1, "large")
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._is_busy = False
        tokenizer = reader.tokenizer
        self._process = IsolatedProcess(
            reading_process.__name__,
            str(tokenizer.folder),
            tokenizer.tool_parser or "",
            str(reader.max_context),
            str(reader.max_answers),
        )

    def close(self) -> None:
        for threads in (self._threads, self._other_threads, self._large_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    async def read(self, kind: Kind, held: list[Any]) -> Any:
        """What the Reader's method of this name gives for what is held, body first. Empties held,
        so that a body is freed when it is read or its client has left. Raises RequestError."""
        num_bytes = sum(map(len, held))
        loop = asyncio.get_running_loop()
        if num_bytes <= MAX_SMALL_BYTES:
            threads = self._threads if kind in _ANSWERED else self._other_threads
            return await loop.run_in_executor(threads, self._read_here, kind, held)
        await self._wait(kind, num_bytes)
        try:
            reading = loop.run_in_executor(self._large_thread, self._read_large, kind, held)
            reading.add_done_callback(self._finished)
        except BaseException:
            self._next()
            raise
        # Whoever leaves now leaves the process busy: the next one waits for it.
        return await asyncio.shield(reading)

    def _finished(self, reading: "asyncio.Future[Any]") -> None:
        if not reading.cancelled():
            reading.exception()  # Of a client that has left nobody else asks for it.
        self._next()

    async def _wait(self, kind: Kind, num_bytes: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(kind not in _ANSWERED, num_bytes, next(self._numbers), turn)
        heapq.heappush(self._waiting, waiting)
        self._refuse_last()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                if turn.exception() is None:
                    self._next()  # It was its turn at the same moment.
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            raise

    def _refuse_last(self) -> None:
        """If too many wait: whoever fills the queue with large bodies keeps no smaller ones out."""
        if len(self._waiting) <= MAX_WAITING:
            return
        last = max(self._waiting)
        self._waiting.remove(last)
        heapq.heapify(self._waiting)
        if not last.turn.done():
            error = OverloadedError(
                f"{MAX_WAITING} requests with large bodies wait already: try again later.",
                code="queue_full",
            )
            last.turn.set_exception(error)

    def _next(self) -> None:
        while self._waiting:
            waiting = heapq.heappop(self._waiting)
            if not waiting.turn.done():
                waiting.turn.set_result(None)
                return
        self._is_busy = False

    def _read_here(self, kind: Kind, held: list[Any]) -> Any:
        given, held[:] = list(held), []
        return getattr(self._reader, kind)(*given)

    def _read_large(self, kind: Kind, held: list[Any]) -> Any:
        """While the process still loads the tokenizer, in this one, unless that would hold Python's
        lock for long."""
        try:
            is_ready = self._process.is_ready()
            if not is_ready and sum(map(len, held)) <= MAX_BYTES_HERE:
                return self._read_here(kind, held)
            given, held[:] = list(held), []
            head = json.dumps([kind, [len(each) for each in given]]).encode()
            answer = self._process.ask(head, b"\n", *given)
        except ProcessEnded as error:
            if error.code == -signal.SIGPROF:
                raise RequestError(
                    f"The request takes more than {reading_process.MAX_SECONDS:g} s to read: "
                    "make it smaller."
                ) from None
            raise BrigadeError(f"The process that reads requests: {error}") from None
        read = load(answer, self._reader.tokenizer)
        if isinstance(read, BrigadeError):
            raise read
        return read
