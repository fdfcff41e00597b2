"""Decides where the bodies of requests are read, so that large bodies do not delay small ones.

Small bodies are read in threads; requests that need no answer from the model have their own thread.
Helper processes read larger bodies, which wait in two queues: up to a megabyte, and above.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

from serve.core.errors import BrigadeError, NotFoundError, RequestError
from serve.core.helper_messages import BodyNotRead, BodyRead, BodyRefused, ReadBody
from serve.front.api.reading import process
from serve.front.api.reading.kinds import BodyKind, Reading
from serve.front.api.reading.reader import Reader
from serve.front.http.fair_queue import FairQueue
from serve.front.http.middleware import Parts
from serve.front.text.helpers import HelperEnded, Helpers

MAX_SMALL_BYTES = 32 << 10
# The size limit for requests that need no answer from the model: a client may send many.
MAX_SMALL_TEXT_BYTES = 4 << 10
MAX_MEDIUM_BYTES = 1 << 20
MAX_MEDIUM_WAITING = 256
MAX_LARGE_WAITING = 32
_NUM_THREADS = 2


class BodyReaders:
    """Chooses by kind and size where a body is read. Belongs to one event loop. The helper
    processes contain readers like this one."""

    def __init__(self, reader: Reader) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prompt")
        self._other_threads = ThreadPoolExecutor(1, "tokenize")
        self._medium = FairQueue("request bodies", 1, MAX_MEDIUM_WAITING)
        self._large = FairQueue("large request bodies", 1, MAX_LARGE_WAITING)
        tokenizer = reader.tokenizer
        self._helpers: Helpers[process.Answer]
        self._helpers = Helpers(
            process.Answer,
            process.__name__,
            str(tokenizer.folder),
            tokenizer.tool_parser or "",
            tokenizer.generation_config,
            str(reader.max_context),
            str(reader.max_answers),
        )

    def warm_up(self) -> None:
        """Starts a helper process, without waiting for it: loading the tokenizer takes seconds, for
        which the first large body would wait."""
        self._helpers.warm_up()

    def close(self) -> None:
        for threads in (self._threads, self._other_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._medium.close()
        self._large.close()
        self._helpers.close()

    async def read(
        self, reader: Reader, kind: BodyKind[Reading], held: list[Parts], client: str
    ) -> Reading:
        """Reads the texts in held, each in parts; the first is the body. Empties held, so that the
        memory is freed when a body is read or its client has left. Raises RequestError."""
        num_bytes = sum(len(part) for parts in held for part in parts)
        if num_bytes > (MAX_SMALL_BYTES if kind.is_answered else MAX_SMALL_TEXT_BYTES):
            queue = self._medium if num_bytes <= MAX_MEDIUM_BYTES else self._large
            ask = partial(self._read_in_helper, reader, kind, held)
            return await queue.run(client, num_bytes, ask, kind.is_answered)
        threads = self._threads if kind.is_answered else self._other_threads
        return await asyncio.get_running_loop().run_in_executor(
            threads, _read_here, reader, kind, held
        )

    def _read_in_helper(
        self, reader: Reader, kind: BodyKind[Reading], held: list[Parts]
    ) -> Reading:
        """Reads the texts in held in a helper process."""
        given = list(held)
        held.clear()
        sizes = tuple(sum(map(len, parts)) for parts in given)
        question = ReadBody(kind.name, sizes, reader.names, reader.finds_boundaries)
        try:
            answer = self._helpers.call(question, *(part for parts in given for part in parts))
        except HelperEnded as error:
            if error.is_overrun:
                raise RequestError(
                    f"The request takes more than {process.MAX_SECONDS:g} s to read: "
                    "make it smaller.",
                    code="request_too_slow",
                ) from None
            raise BrigadeError(f"The process that parses requests failed: {error}") from None
        match answer:
            case BodyRead(result):
                return cast(Reading, result)
            case BodyRefused(message, param, code):
                refusal = NotFoundError if answer.is_not_found else RequestError
                raise refusal(message, param=param, code=code)
            case BodyNotRead(reason):
                raise BrigadeError(reason)


def _read_here(reader: Reader, kind: BodyKind[Reading], held: list[Parts]) -> Reading:
    given = [b"".join(parts) for parts in held]
    held.clear()
    return kind.read(reader, *given)
