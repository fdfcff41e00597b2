"""The engine of this rank, whichever process it is at the moment. Every parent has one engine.

After a fault, the parent keeps the process if it leaves its ring in time, and otherwise starts
another one. Everything that the engine says, and how it ended, is reported to rank 0 together with
the number of its life.
"""

import asyncio
from collections.abc import Callable
from enum import Enum

import msgspec

from serve.core.errors import BrigadeError, ClusterError, EngineError
from serve.core.messages import Fault, FromEngine, Left, Renew, Report, Status, ToEngine
from serve.core.types import StageState
from serve.parent.engine import EngineProcess
from serve.parent.spare import Spare

_CAUSE_SECONDS = 0.05
_SIGN_SECONDS = 2.0  # between signs of life to rank 0 while an engine finishes its step


class EnginePhase(Enum):
    """The state of an engine's process."""

    NEW = "it has got no message yet"
    BUSY = "it obeys its messages"
    LEFT = "it has left its ring, and has got no message since then"
    ENDED = "it ends, or has ended, or there is none yet"


class OwnEngine:
    """The engine of a rank. `report` takes its messages, each with the number of its life."""

    def __init__(self, rank: int, keeps_spare: bool, report: Callable[[Report], None]) -> None:
        self._rank, self._report = rank, report
        self.life = 0
        self.phase = EnginePhase.ENDED
        self.process: EngineProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._left: Left | None = None  # the answer of an engine that has left its ring
        self.spare = Spare(keeps_spare)

    async def start(self) -> None:
        """Starts a process. Raises EngineError."""
        process = self.process = await self.spare.take()
        self.phase = EnginePhase.NEW
        self._reading = asyncio.create_task(self._read(process))

    def send(self, message: ToEngine) -> None:
        """Sends a message to the engine. If it has ended, the message is lost."""
        assert self.process is not None
        if self.phase in (EnginePhase.NEW, EnginePhase.LEFT):
            self.phase = EnginePhase.BUSY
        self.process.link.send(message)

    async def renew(self, message: Renew) -> None:
        """Finds an engine that is in no ring, and reports it as Renew says. Raises EngineError."""
        # A new engine has no useful stacks, and the signal would end one that still imports MLX.
        if message.dump and self.process and self.phase is not EnginePhase.NEW:
            await self.process.dump()
        if message.keep and await self._try_to_keep(message.life):
            return
        if self.phase is not EnginePhase.NEW:
            # If the engine has ended already, its report is read first: it may contain the cause.
            if self._reading:
                await asyncio.wait({self._reading}, timeout=_CAUSE_SECONDS)
            await self._stop()
            await self.start()
        self.life = message.life
        self._tell(Status(StageState.STARTING))

    async def close(self) -> None:
        """Ends the engine, and the spare one. Raises EngineError if one of them does not end."""
        ends = await asyncio.gather(self.spare.close(), self._stop(), return_exceptions=True)
        for error in ends:  # Both engines have been ended, even if one call raised.
            if error is not None:
                raise error

    async def _try_to_keep(self, life: int) -> bool:
        """Has the engine leave its ring, unless it has left. Returns whether it is in none."""
        is_used = self.phase in (EnginePhase.BUSY, EnginePhase.LEFT)
        if not is_used or self.process is None or not self.process.is_alive:
            return False
        if self.phase is EnginePhase.LEFT and self._left:
            self.life = life
            self._tell(msgspec.structs.replace(self._left, life=life))
            return True
        leaving = asyncio.create_task(self.process.leave(life))
        try:
            while not leaving.done():
                await asyncio.wait({leaving}, timeout=_SIGN_SECONDS)
                if not leaving.done() and self.phase is EnginePhase.BUSY:
                    # This may take long, and rank 0 must know that this parent lives.
                    self._report(Report(life, Status(StageState.LEAVING)))
        finally:
            leaving.cancel()
        return leaving.result() is not None

    async def _stop(self) -> None:
        if self._reading:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self.process:
            await self.process.stop()

    async def _read(self, process: EngineProcess) -> None:
        """Reports the messages of the engine until it ends, and then why it has ended."""
        has_said_why = False
        try:
            while message := await process.receive():
                if isinstance(message, Fault):
                    has_said_why = True
                    self.phase = EnginePhase.ENDED
                if isinstance(message, Left):
                    self.life = message.life
                    self.phase = EnginePhase.LEFT
                    self._left = message
                self._tell(message)
        except ClusterError as error:
            self._tell(fault_of(error))
        self.phase = EnginePhase.ENDED
        if not has_said_why:
            self._tell(engine_ended(self._rank, await process.wait()))

    def _tell(self, message: FromEngine) -> None:
        self._report(Report(self.life, message))


def engine_ended(rank: int, exit_code: int) -> Fault:
    """Returns the fault of an engine that ended without a report, such as one that was killed."""
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return fault_of(EngineError(f"The engine of rank {rank} ended by {how}."))


def fault_of(error: BrigadeError) -> Fault:
    """Turns an error into a message, which from_exit_code turns back into one of its kind."""
    return Fault(error.exit_code, str(error), error.code)
