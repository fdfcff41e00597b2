"""Starts the engine process, talks to it and ends it. Unlike the engine, it needs no MLX."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serve.core.blas import with_openblas
from serve.core.errors import EngineError
from serve.core.messages import FromEngine, Leave, Left, Status
from serve.parent.link import Link

_logger = logging.getLogger(__name__)

_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM)
_DUMP_SECONDS = 0.3
_END_SECONDS = 15.0 if sys.platform == "darwin" else 5.0
_UNUSED_END_SECONDS = 1.0
_KILLED_SECONDS = 10.0
_WHY_KILLED = (
    "it did not end when it was asked to; "
    "on a Mac, the memory that it had wired may stay taken until the next boot"
)
_LEAVE_SECONDS = 5.0
# How long an engine may compute after its ring is lost: it can leave only when its step ends. As
# for the stall time-out, a long prefill of a large model may take all of this time.
_COMPUTE_SECONDS = 30.0
_LOOK_SECONDS = 0.25
# After this silence, an engine has stopped and cannot leave: others report four times a second.
_SILENT_SECONDS = 2.0
_FIRST_WORD_SECONDS = 0.5  # time to read waiting reports, if this process was busy


class EngineProcess:
    program = "serve.rank.worker"

    def __init__(self, process: asyncio.subprocess.Process, link: Link[FromEngine]) -> None:
        self._process, self.link = process, link
        self._left: asyncio.Future[Left] | None = None
        self._heard_at: float | None = None
        self._computes = False

    @classmethod
    async def start(cls) -> "EngineProcess":
        """Starts the child, which imports MLX and then waits for an order. Raises EngineError."""
        try:
            return await cls._start()
        except OSError as error:
            raise EngineError(f"The engine cannot be started: {error}.") from error

    @classmethod
    async def _start(cls) -> "EngineProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reader, writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            # The process starts last: nobody would end it if the caller were cancelled later.
            try:
                with _signals_blocked():
                    process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", cls.program, str(theirs.fileno())),
                        pass_fds=[theirs.fileno()],
                        stdin=asyncio.subprocess.DEVNULL,
                        env=with_openblas(os.environ),
                    )
            except BaseException:
                writer.close()
                raise
        return cls(process, Link(reader, writer, FromEngine))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def receive(self) -> FromEngine | None:
        """Returns the engine's next message, or None when it is gone. Raises ClusterError."""
        while True:
            message = await self.link.receive()
            self._heard_at = time.monotonic()
            if isinstance(message, Status):
                self._computes = _computes(message)
            if not isinstance(message, Left):
                return message
            if self._left and not self._left.done():
                self._left.set_result(message)
                return message

    async def leave(self, life: int) -> Left | None:
        """Asks the engine to leave its ring and to keep everything else. Returns its answer, or
        None if it does not answer in time or has stopped reporting: in that case the caller has to
        stop it. An engine that computes a step has more time. Another task has to call receive."""
        left: asyncio.Future[Left] = asyncio.get_running_loop().create_future()
        ended = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {left, ended}
        self._left = left
        self.link.send(Leave(life))
        began = time.monotonic()
        try:
            while (seconds := self._patience(began)) > 0:
                done, _ = await asyncio.wait(
                    either,
                    timeout=min(seconds, _LOOK_SECONDS),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if done:
                    break
        finally:
            ended.cancel()
            self._left = None  # An answer that comes later is ignored.
        return left.result() if left.done() else None

    def _patience(self, began: float) -> float:
        """Returns how many seconds to wait for an engine that was asked to leave at `began`."""
        heard_at = self._heard_at or began
        silent_until = max(began + _FIRST_WORD_SECONDS, heard_at + _SILENT_SECONDS)
        max_seconds = _COMPUTE_SECONDS if self._computes else _LEAVE_SECONDS
        return min(began + max_seconds, silent_until) - time.monotonic()

    async def _wait_for_end(self, seconds: float) -> None:
        """Waits until the engine has ended or has stopped reporting, or until the time is over."""
        deadline = time.monotonic() + seconds
        ended = asyncio.create_task(self._process.wait())
        reading = asyncio.create_task(self._read_to_end())
        try:
            while not ended.done() and not self._is_silent and time.monotonic() < deadline:
                await asyncio.wait({ended}, timeout=_LOOK_SECONDS)
        finally:
            ended.cancel()
            reading.cancel()
            await asyncio.gather(ended, reading, return_exceptions=True)

    async def _read_to_end(self) -> None:
        while await self.receive():
            continue

    @property
    def _is_silent(self) -> bool:
        """Whether the engine has stopped reporting: then it cannot end by itself."""
        if self._heard_at is None:
            return False
        return time.monotonic() - self._heard_at > _SILENT_SECONDS

    async def wait(self) -> int:
        return await self._process.wait()

    async def dump(self) -> None:
        """Makes the engine write the stacks of all its threads to stderr, if it still can."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(_DUMP_SECONDS)

    async def stop(self) -> None:
        """Ends the engine. The engine is killed only if it does not end by itself in time, because
        macOS may lose the memory of a killed process until the next boot. Raises EngineError if it
        does not end."""
        if self.is_alive and not self._is_silent:
            self.link.end_writing()
            # An engine that has not reported holds nothing, and may still import MLX.
            seconds = _END_SECONDS if self._heard_at else _UNUSED_END_SECONDS
            await self._wait_for_end(seconds)
        if self.is_alive:
            reason = json.dumps(_WHY_KILLED)
            _logger.warning("event=engine_killed pid=%d reason=%s", self.pid, reason)
            self._process.kill()
        await self.link.close()
        try:
            await asyncio.wait_for(self._process.wait(), _KILLED_SECONDS)
        except TimeoutError as error:
            raise EngineError(
                f"The engine of pid {self.pid} does not end when it is killed: restart its host."
            ) from error


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks the signals of a terminal or a launcher, for this thread and for processes that it
    starts. An engine ignores them, but only once it has imported MLX. Two engines may start at the
    same time, so the earlier mask is not restored."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FROM_OUTSIDE)


def _computes(status: Status) -> bool:
    """Whether an engine computes a step, and does not wait for a neighbour meanwhile."""
    activity = status.activity
    return activity is not None and activity.step is not None and activity.waits_on is None
