"""Runs an HTTP app behind a Unix socket, inside of the node's event loop."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

_END_SECONDS = 5.0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.over = asyncio.Event()

    async def main_loop(self) -> None:
        """Waits for the end. uvicorn's own loop wakes up ten times a second."""
        await self.over.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signal handlers to the node."""
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, path: str) -> AsyncIterator[None]:
    """Serves an app on a Unix socket that only this user can open."""
    config = uvicorn.Config(
        app,
        uds=path,
        lifespan="auto",
        log_config=None,
        access_log=False,
        date_header=False,  # main_loop does not update it.
    )
    server = _Server(config)
    work = asyncio.create_task(server.serve())
    while not server.started and not work.done():
        await asyncio.sleep(0.01)
    os.chmod(path, 0o600)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        server.over.set()
        await asyncio.wait([work], timeout=_END_SECONDS)
        # With force_exit, uvicorn skips this. Without it, uvicorn would wait for slow readers.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.lifespan.shutdown(), _END_SECONDS)
