"""Starts the engine process, talks to it and ends it. It imports nothing of MLX, unlike the
engine."""

import asyncio
import os
import signal
import socket
import sys

from serve.core.blas import with_openblas
from serve.core.errors import EngineError
from serve.core.messages import FromEngine
from serve.parent.link import Link

_DUMP_SECONDS = 0.3
_KILLED_SECONDS = 10.0


class EngineProcess:
    program = "serve.rank.worker"

    def __init__(self, process: asyncio.subprocess.Process, link: Link[FromEngine]) -> None:
        self._process, self.link = process, link

    @classmethod
    async def start(cls) -> "EngineProcess":
        """Starts the child, which takes some seconds to import MLX and then waits for an
        order. Raises EngineError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", cls.program, str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=with_openblas(os.environ),
                )
            except OSError as error:
                ours.close()
                raise EngineError(f"The engine cannot be started: {error}.") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, Link(reader, writer, FromEngine))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    async def dump(self) -> None:
        """Makes the engine write the stacks of all its threads to stderr, if it still can."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(_DUMP_SECONDS)

    async def stop(self) -> None:
        """Kills the engine, which has nothing to save and may hang in MLX. Raises EngineError if it
        does not end even then, for example when a driver is stuck."""
        if self._process.returncode is None:
            self._process.kill()
        await self.link.close()
        try:
            await asyncio.wait_for(self._process.wait(), _KILLED_SECONDS)
        except TimeoutError as error:
            raise EngineError(
                f"The engine of pid {self.pid} does not end when it is killed: restart its host."
            ) from error
