"""The engine child: started, spoken to, ended. Never imports what the child does."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from serve.core.errors import EngineError
from serve.parent.link import Link

_OPENBLAS = (
    "/usr/lib/x86_64-linux-gnu/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
)
"""MLX's Linux CPU wheel links the reference BLAS, which is some 30 times slower."""

_DUMP_SECONDS = 0.3
_KILLED_SECONDS = 10.0


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: on Linux with OpenBLAS before the BLAS that MLX links,
    one thread a rank. What the user has set stays."""
    chosen = dict(environment)
    library = next((path for path in _OPENBLAS if Path(path).exists()), None)
    if sys.platform == "linux" and library:
        chosen.setdefault("LD_PRELOAD", library)
        chosen.setdefault("OPENBLAS_NUM_THREADS", "1")
    return chosen


class EngineProcess:
    program = "serve.rank.worker"

    def __init__(self, process: asyncio.subprocess.Process, link: Link) -> None:
        self._process, self.link = process, link

    @classmethod
    async def start(cls) -> "EngineProcess":
        """Starts the child, which takes some seconds to import MLX and then waits for an
        order, as serve.rank.worker.Order reads it. Raises EngineError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", cls.program, str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=engine_environment(os.environ),
                )
            except OSError as error:
                ours.close()
                raise EngineError(f"The engine cannot be started: {error}.") from error
        return cls(process, Link(*await asyncio.open_connection(sock=ours)))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    async def dump(self) -> None:
        """Has it write the stacks of all its threads to stderr, if it still can."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(_DUMP_SECONDS)

    async def stop(self) -> None:
        """The engine holds nothing that is worth a goodbye, and may hang in MLX. Raises EngineError
        if it does not even end when it is killed, as under a driver that is stuck."""
        if self._process.returncode is None:
            self._process.kill()
        await self.link.close()
        try:
            await asyncio.wait_for(self._process.wait(), _KILLED_SECONDS)
        except TimeoutError as error:
            raise EngineError(
                f"The engine of pid {self.pid} does not end when it is killed: restart its host."
            ) from error
