"""Decides where the bodies of requests are read, so that large ones do not delay small ones.

Small bodies are read in threads, those that make the model answer apart from the others. Large
ones wait in two queues, one for all up to a megabyte, each for a process of its own.
"""

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from serve.core.errors import BrigadeError, RequestError
from serve.core.helper_messages import BodyKind, BodyNotRead, BodyRead, BodyRefused, ReadBody
from serve.front.api.reading import process
from serve.front.api.reading.reader import AnyReading, Reader
from serve.front.api.reading.turns import MAX_SMALL_BYTES, Turns
from serve.front.http.guard import Parts
from serve.front.text.isolated import IsolatedProcess, ProcessEnded

ReadHere = Callable[[BodyKind, list[Parts]], AnyReading]
Read = TypeVar("Read")

# Of bodies that the model does not answer: a client may send many of them, one after the other.
MAX_SMALL_TEXT_BYTES = 4 << 10
MAX_MEDIUM_BYTES = 1 << 20
_ANSWERED: set[BodyKind] = {
    "chat",
    "completion",
    "embedding",
    "message",
    "response",
    "ollama_chat",
    "ollama_generate",
    "ollama_embed",
    "ollama_embeddings",
}
_NUM_THREADS = 2


class Lanes:
    """Chooses by kind and size where a body is read. For one event loop. finds_boundaries is called
    for each body: whether to find the boundaries of its prompts."""

    def __init__(self, reader: Reader, finds_boundaries: Callable[[], bool]) -> None:
        self._reader = reader
        self._finds_boundaries = finds_boundaries
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prompt")
        self._other_threads = ThreadPoolExecutor(1, "tokenize")
        self._medium = ProcessLane(reader, self._read_here)
        self._large = ProcessLane(reader, None)

    def warm_up(self) -> None:
        """Starts the process for the largest bodies, and does not wait for it. The first such body
        would have to wait until the process has loaded the tokenizer, which takes seconds."""
        self._large.process.is_ready()

    def close(self) -> None:
        for threads in (self._threads, self._other_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._medium.close()
        self._large.close()

    async def read(self, method: Callable[..., Read], held: list[Parts], client: str) -> Read:
        """Calls this method of Reader with what is held: the body first, each in parts. Empties
        held, so that a body is freed when it is read or its client has left. Raises
        RequestError."""
        self._reader.finds_boundaries = self._finds_boundaries()
        kind = cast(BodyKind, method.__name__)
        num_bytes = _num_bytes(held)
        is_answered = kind in _ANSWERED
        if num_bytes <= (MAX_SMALL_BYTES if is_answered else MAX_SMALL_TEXT_BYTES):
            threads = self._threads if is_answered else self._other_threads
            loop = asyncio.get_running_loop()
            read = await loop.run_in_executor(threads, self._read_here, kind, held)
        else:
            lane = self._medium if num_bytes <= MAX_MEDIUM_BYTES else self._large
            read = await lane.read(kind, held, client)
        return cast(Read, read)

    def _read_here(self, kind: BodyKind, held: list[Parts]) -> AnyReading:
        given = [b"".join(parts) for parts in held]
        held.clear()
        method: Callable[..., AnyReading] = getattr(self._reader, kind)
        return method(*given)


class ProcessLane:
    """Reads bodies one at a time in a process, in turn by client.

    While the process still loads the tokenizer, read_here reads them in a thread of this one,
    where they hold Python's lock; if it is None they wait.
    """

    def __init__(self, reader: Reader, read_here: ReadHere | None) -> None:
        self._reader = reader
        self._read_here = read_here
        self._turns = Turns()
        self._thread = ThreadPoolExecutor(1, "large")
        tokenizer = reader.tokenizer
        self.process: IsolatedProcess[process.Answer]
        self.process = IsolatedProcess(
            process.Answer,
            process.__name__,
            str(tokenizer.folder),
            tokenizer.tool_parser or "",
            tokenizer.generation_config,
            str(reader.max_context),
            str(reader.max_answers),
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.process.close()

    async def read(self, kind: BodyKind, held: list[Parts], client: str) -> AnyReading:
        """Reads a body like `Lanes.read`. Raises OverloadedError if too many bodies wait."""
        await self._turns.begin(client, kind in _ANSWERED, _num_bytes(held))
        loop = asyncio.get_running_loop()
        try:
            reading = loop.run_in_executor(self._thread, self._read, kind, held)
            reading.add_done_callback(self._finished)
        except BaseException:
            self._turns.end()
            raise
        # If the client leaves now, the process stays busy, and the next body waits for it.
        return await asyncio.shield(reading)

    def _finished(self, reading: "asyncio.Future[AnyReading]") -> None:
        if not reading.cancelled():
            reading.exception()  # Nobody else asks for it if the client has left.
        self._turns.end()

    def _read(self, kind: BodyKind, held: list[Parts]) -> AnyReading:
        try:
            if self._read_here is not None and not self.process.is_ready():
                return self._read_here(kind, held)
            answer = self._ask(kind, held)
        except ProcessEnded as error:
            if error.code == -signal.SIGPROF:
                raise RequestError(
                    f"The request takes more than {process.MAX_SECONDS:g} s to read: "
                    "make it smaller."
                ) from None
            raise BrigadeError(f"The process that parses requests failed: {error}") from None
        match answer:
            case BodyRead(result):
                return result
            case BodyRefused():
                raise RequestError(answer.message, param=answer.param, code=answer.code)
            case BodyNotRead(reason):
                raise BrigadeError(reason)

    def _ask(self, kind: BodyKind, held: list[Parts]) -> process.Answer:
        given = list(held)
        held.clear()
        sizes = [sum(map(len, parts)) for parts in given]
        question = ReadBody(kind, tuple(sizes), self._reader.finds_boundaries)
        return self.process.ask(question, *(part for parts in given for part in parts))


def _num_bytes(held: list[Parts]) -> int:
    return sum(len(part) for parts in held for part in parts)
