"""Passes on what the hub gives to this machine, with the hub's own HTTP.

GET /api/models/REPO/revision/REVISION    the files of a commit
GET /REPO/resolve/COMMIT/FILE             a range of a weight file, or another file whole

A machine that cannot ask the hub answers 404. Why the hub or this machine refuses is told as a
HubRefusal.
"""

import re
from collections.abc import AsyncIterator, Generator

import anyio
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from serve.core.errors import ModelError
from serve.hub.access import HubError
from serve.hub.gateway import MAX_TRIES, HubGateway, NoHubError
from serve.hub.listing import FileListing, HubRefusal, to_json

# A thread waits for each answer of the hub: eight ranks with eight connections each. They are not
# those that read what this machine holds.
_NUM_THREADS = 64
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)


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


class _Answers:
    """The answers to each kind of request."""

    def __init__(self) -> None:
        self._hub = HubGateway()
        self._threads = anyio.CapacityLimiter(_NUM_THREADS)

    async def list_files(self, request: Request) -> Response:
        asked = request.path_params
        find = self._hub.snapshot
        snapshot = await run_sync(find, asked["repo"], asked["revision"], limiter=self._threads)
        return Response(to_json(FileListing.of(snapshot)), media_type="application/json")

    async def send(self, request: Request) -> Response:
        file = [request.path_params[key] for key in ("repo", "revision", "file")]
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        if not asked:
            return Response(await run_sync(self._hub.small_file, *file, limiter=self._threads))
        remote = await run_sync(self._hub.weight_file, *file, limiter=self._threads)
        start = int(asked[1])
        end = int(asked[2]) + 1
        size = remote.file.size
        if not start < end <= size:
            return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
        pieces = remote.read(start, end, max_tries=MAX_TRIES)
        first = await self._next(pieces)
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
        # Nobody closes the pieces: a thread may still wait for one. The last to drop them does.
        while first:
            yield first
            first = await self._next(pieces)

    async def _next(self, pieces: Generator[bytes, None, None]) -> bytes:
        """Returns the next piece, or nothing at the end."""
        # A node that ends does not wait for a silent hub.
        return await run_sync(next, pieces, b"", limiter=self._threads, abandon_on_cancel=True)


async def _no_hub(_: Request, __: Exception) -> Response:
    return Response(status_code=404)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ModelError)
    status = 503 if isinstance(error, HubError) else 403
    refusal = HubRefusal(str(error), error.code)
    return Response(to_json(refusal), status, media_type="application/json")
