"""Passes on what the hub gives to this machine, with the hub's own HTTP.

GET /api/models/REPO/revision/REVISION    the files of a commit
GET /REPO/resolve/COMMIT/FILE             a range of a weight file, or another file whole

If this machine cannot ask the hub, the answer is 404. Any other error has a HubRefusal as its body.
"""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from serve.core.errors import ModelError
from serve.hub.access import HubError
from serve.hub.gateway import MAX_TRIES, HubGateway, NoHubError, requested_wait, sleep_briefly
from serve.hub.listing import FileListing, HubRefusal, to_json

_NUM_AT_ONCE = 64  # threads that ask the hub: eight ranks have eight connections each
# The other machine gives up after 20 seconds, and then takes this one for lost.
_MAX_SECONDS = 15.0
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)

Result = TypeVar("Result")


def gateway() -> Starlette:
    """Returns the ASGI app that asks the hub with this machine's token."""
    answers = _Answers()
    return Starlette(
        routes=[
            Route("/api/models/{repo:path}/revision/{revision:path}", answers.list_files),
            Route("/{repo:path}/resolve/{revision}/{file:path}", answers.send),
        ],
        exception_handlers={ModelError: _refused, NoHubError: _no_hub},
    )


async def _in_thread(function: Callable[[], Result]) -> Result:
    """Returns what the function returns. If this is cancelled, the function goes on.

    Its thread is a daemon, unlike those of asyncio and anyio: a node that ends must not wait for a
    silent hub."""
    future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    threading.Thread(target=_call, args=(function, future), name="gateway", daemon=True).start()
    return await future


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
            snapshot = await _in_thread(find)
        return Response(to_json(FileListing.of(snapshot)), media_type="application/json")

    async def send(self, request: Request) -> Response:
        async with self._place():
            return await self._send(request)

    async def _send(self, request: Request) -> Response:
        file = [request.path_params[key] for key in ("repo", "revision", "file")]
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        if not asked:
            return Response(await _in_thread(partial(self._hub.small_file, *file)))
        remote = await _in_thread(partial(self._hub.weight_file, *file))
        start = int(asked[1])
        end = int(asked[2]) + 1
        size = remote.file.size
        if not start < end <= size:
            return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
        pieces = remote.read(start, end, sleep_briefly, MAX_TRIES)
        first = await _in_thread(partial(next, pieces, b""))
        headers = {
            "ETag": f'"{remote.file.etag}"',
            "X-Repo-Commit": remote.commit,
            "Content-Range": f"bytes {start}-{end - 1}/{size}",
            "Content-Length": f"{end - start}",
        }
        return StreamingResponse(self._all(first, pieces), 206, headers)

    async def _all(
        self, first: bytes, pieces: Generator[bytes, None, None]
    ) -> AsyncIterator[bytes]:
        # The pieces are not closed here, because a thread may still be waiting for one. They are
        # closed when the last reference to them is gone.
        while first:
            yield first
            async with self._place():
                first = await _in_thread(partial(next, pieces, b""))

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Limits how much is asked at the same time, and for how long. Raises HubError."""
        try:
            async with asyncio.timeout(_MAX_SECONDS), self._places:
                yield
        except ModelError as error:
            if error.code == "changed_file":
                self._hub.forget_files()  # So that the next fetch succeeds.
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
