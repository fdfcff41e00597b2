"""Passes on what the hub gives to this machine, with the hub's own HTTP.

GET /api/models/REPO/revision/REVISION    the files of a commit
GET /REPO/resolve/COMMIT/FILE             a range of a weight file, or another file whole

A machine that cannot ask the hub answers 404. Why the hub or this machine refuses is told as a
HubRefusal.
"""

import asyncio
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from serve.core.errors import ModelError
from serve.hub.access import HubError
from serve.hub.gateway import MAX_TRIES, HubGateway, NoHubError, requested_wait, sleep_briefly
from serve.hub.listing import FileListing, HubRefusal, to_json

_NUM_AT_ONCE = 64  # Threads that ask the hub: eight ranks have eight connections each.
# The machine that asks gives up after 20 seconds, and then believes that this one is away.
_MAX_SECONDS = 15.0
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)

Result = TypeVar("Result")


def gateway() -> Starlette:
    """Returns an ASGI app."""
    answers = _Answers()
    return Starlette(
        routes=[
            Route("/api/models/{repo:path}/revision/{revision:path}", answers.list_files),
            Route("/{repo:path}/resolve/{revision}/{file:path}", answers.send),
        ],
        exception_handlers={ModelError: _refused, NoHubError: _no_hub},
    )


class _Worker:
    """A thread that makes one call after another, and ends when nobody holds this object any more.
    The end of the process does not wait for it, because the hub may be silent."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="gateway", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    async def call(self, function: Callable[[], Result]) -> Result:
        """Returns what the function returns. If this is cancelled, the function goes on."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._calls.put(partial(_call, function, future))
        return await future


def _work(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while call := calls.get():
        call()
        del call  # It holds the connection to the hub.


def _call(function: Callable[[], Result], future: "asyncio.Future[Result]") -> None:
    tell: Callable[[], None]
    try:
        tell = partial(future.set_result, function())
    except Exception as error:
        tell = partial(future.set_exception, error)
    with suppress(RuntimeError):  # The event loop has ended.
        future.get_loop().call_soon_threadsafe(_unless_done, future, tell)


def _unless_done(future: "asyncio.Future[Any]", tell: Callable[[], None]) -> None:
    if not future.done():
        tell()


class _Answers:
    """The answers to each kind of request."""

    def __init__(self) -> None:
        self._hub = HubGateway()
        self._places = asyncio.Semaphore(_NUM_AT_ONCE)

    async def list_files(self, request: Request) -> Response:
        asked = request.path_params
        find = partial(self._hub.snapshot, asked["repo"], asked["revision"])
        async with self._place():
            snapshot = await _Worker().call(find)
        return Response(to_json(FileListing.of(snapshot)), media_type="application/json")

    async def send(self, request: Request) -> Response:
        async with self._place():
            return await self._send(_Worker(), request)

    async def _send(self, worker: _Worker, request: Request) -> Response:
        file = [request.path_params[key] for key in ("repo", "revision", "file")]
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        if not asked:
            return Response(await worker.call(partial(self._hub.small_file, *file)))
        remote = await worker.call(partial(self._hub.weight_file, *file))
        start = int(asked[1])
        end = int(asked[2]) + 1
        size = remote.file.size
        if not start < end <= size:
            return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
        pieces = remote.read(start, end, sleep_briefly, MAX_TRIES)
        first = await worker.call(partial(next, pieces, b""))
        headers = {
            "ETag": f'"{remote.file.etag}"',
            "X-Repo-Commit": remote.commit,
            "Content-Range": f"bytes {start}-{end - 1}/{size}",
            "Content-Length": f"{end - start}",
        }
        return StreamingResponse(self._all(worker, first, pieces), 206, headers)

    async def _all(
        self, worker: _Worker, first: bytes, pieces: Generator[bytes, None, None]
    ) -> AsyncIterator[bytes]:
        # Nobody closes the pieces: the thread may still wait for one. The last to drop them does.
        while first:
            yield first
            async with self._place():
                first = await worker.call(partial(next, pieces, b""))

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Limits how much is asked at the same time, and for how long. Raises HubError."""
        try:
            async with asyncio.timeout(_MAX_SECONDS), self._places:
                yield
        except ModelError as error:
            if error.code == "changed_file":
                self._hub.forget_files()  # The next fetch starts anew.
            raise
        except TimeoutError as error:
            raise HubError(f"the hub has not answered for {_MAX_SECONDS:.0f} seconds") from error


async def _no_hub(_: Request, __: Exception) -> Response:
    return Response(status_code=404)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ModelError)
    status = 503 if isinstance(error, HubError) else 403
    refusal = HubRefusal(str(error), error.code)
    wait = requested_wait(error)
    headers = {} if wait is None else {"Retry-After": f"{wait:.0f}"}
    return Response(to_json(refusal), status, headers, "application/json")
