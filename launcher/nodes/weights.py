"""Serves what this machine's caches hold to paired machines, with the hub's own HTTP.

GET /api/models/REPO/revision/REVISION    the files of a commit
GET /REPO/resolve/REVISION/FILE           a file or a range of it; also HEAD
GET /REPO/held/REVISION/FILE              its ranges that are held or being fetched (not the hub's)

Below /.hub is what the hub holds (launcher.nodes.gateway).
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from launcher.nodes.gateway import gateway
from serve.hub.digests import BLOCK_BYTES, content_digest
from serve.hub.holdings import BusyError, HeldFile, Holdings, NotHeldError
from serve.hub.listing import FileListing, HeldRanges, to_json
from serve.hub.ranges import subtract
from serve.hub.snapshot import Snapshot

_NUM_ANSWERS_AT_ONCE = 12  # Each has up to a block in memory.
_POLL_SECONDS = 0.5
_LIBRARY_SECONDS = 8.0  # huggingface_hub gives up after ten.
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})", re.ASCII)


def app(cache: Path | None = None, hub_cache: Path | None = None) -> Starlette:
    """Returns an ASGI app that serves Brigade's cache and the hub's (None: the default ones)."""
    holdings = Holdings(cache, hub_cache)
    weights = _Weights(holdings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        holdings.close()

    held = [
        Route("/api/models/{repo:path}/revision/{revision:path}", weights.list_files),
        Route("/{repo:path}/held/{revision}/{file:path}", weights.list_ranges),
        Route("/{repo:path}/resolve/{revision}/{file:path}", weights.send),
    ]
    return Starlette(
        routes=[
            Mount("/.hub", gateway()),
            Mount("/", routes=held, middleware=[Middleware(_AtOnce)]),
        ],
        exception_handlers={NotHeldError: _not_held, BusyError: _busy},
        lifespan=lifespan,
    )


class _AtOnce:
    """Limits the answers that are sent at the same time."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner
        self._places = asyncio.Semaphore(_NUM_ANSWERS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._places:
            await self._inner(scope, receive, send)


class _Weights:
    """The answers to each kind of request."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings

    async def list_files(self, request: Request) -> Response:
        snapshot = await self._snapshot(request)
        return _json(to_json(FileListing.of(snapshot)))

    async def list_ranges(self, request: Request) -> Response:
        snapshot = await self._snapshot(request)
        held = await self._file(request, snapshot, _POLL_SECONDS)
        coming = await run_in_threadpool(held.coming)
        # A range that was fetched meanwhile is neither coming nor in the first list.
        held = await self._file(request, snapshot, _POLL_SECONDS)
        return _json(to_json(HeldRanges(held.file.etag, held.ranges, coming)))

    async def send(self, request: Request) -> Response:
        snapshot = await self._snapshot(request)
        held = await self._file(request, snapshot, _LIBRARY_SECONDS)
        size = held.file.size
        start = 0
        end = size
        status = 200
        headers = {
            "ETag": f'"{held.file.etag}"',
            "X-Repo-Commit": snapshot.commit,
            "Accept-Ranges": "bytes",
        }
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        if asked:
            start = int(asked[1])
            end = min(int(asked[2]) + 1, size) if asked[2] else size
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        if asked and (start >= end or subtract([(start, end)], held.ranges)):
            return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
        if subtract([(start, end)], held.ranges):
            raise NotHeldError
        if request.method == "HEAD":
            headers["Content-Length"] = f"{end - start}"
            return Response(status_code=status, headers=headers)
        if end - start <= BLOCK_BYTES:
            data, digest = await run_in_threadpool(held.read_whole, start, end)
            headers["Content-Digest"] = content_digest(digest)
            return Response(data, status, headers)
        headers["Content-Length"] = f"{end - start}"
        return StreamingResponse(held.read(start, end), status, headers)

    async def _snapshot(self, request: Request) -> Snapshot:
        asked = request.path_params
        find = self._holdings.snapshot
        snapshot = await run_in_threadpool(find, asked["repo"], asked["revision"])
        if snapshot is None:
            raise NotHeldError
        return snapshot

    async def _file(self, request: Request, snapshot: Snapshot, wait_seconds: float) -> HeldFile:
        find = self._holdings.file
        return await run_in_threadpool(find, snapshot, request.path_params["file"], wait_seconds)


def _json(content: bytes) -> Response:
    digest = content_digest(sha256(content).hexdigest())
    return Response(content, media_type="application/json", headers={"Content-Digest": digest})


async def _not_held(_: Request, __: Exception) -> Response:
    return Response(status_code=404, headers={"X-Error-Code": "EntryNotFound"})


async def _busy(_: Request, __: Exception) -> Response:
    return Response(status_code=503, headers={"Retry-After": "1"})
