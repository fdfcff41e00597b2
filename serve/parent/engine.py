"""Starts the engine process, talks to it and ends it. It imports nothing of MLX, unlike the
engine."""

import asyncio
import os
import signal
import socket
import sys
from typing import Any

from serve.core.blas import with_openblas
from serve.core.errors import EngineError
from serve.core.messages import FromEngine, Leave, Left
from serve.parent.link import Link

_DUMP_SECONDS = 0.3
_KILLED_SECONDS = 10.0
# The step that an engine computes when its ring is lost has to end before the engine can leave.
_LEAVE_SECONDS = 5.0


class EngineProcess:
    program = "serve.rank.worker"

    def __init__(self, process: asyncio.subprocess.Process, link: Link[FromEngine]) -> None:
        self._process, self.link = process, link
        self._left: asyncio.Future[Left] | None = None

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

    async def receive(self) -> FromEngine | None:
        """Waits for the engine's next message; returns None when the engine is gone. Raises
        ClusterError if the bytes are not a message that is expected."""
        while isinstance(message := await self.link.receive(), Left):
            if self._left and not self._left.done():
                self._left.set_result(message)
                return message
        return message

    async def leave(self, life: int) -> Left | None:
        """Asks the engine to leave its ring and to keep everything else. Returns its answer, or
        None if it does not answer in time: then the caller has to stop it. Another task calls
        receive."""
        left: asyncio.Future[Left] = asyncio.get_running_loop().create_future()
        ended = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {left, ended}
        self._left = left
        self.link.send(Leave(life))
        await asyncio.wait(
            either,
            timeout=_LEAVE_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ended.cancel()
        self._left = None  # An answer that comes later is ignored.
        return left.result() if left.done() else None

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
