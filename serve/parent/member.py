"""The parent of every rank but 0: it joins rank 0, runs an engine, and passes messages on."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec

from serve.core.config import Address, Cluster, ServeConfig
from serve.core.errors import ClusterError
from serve.core.folder import own_folder
from serve.core.messages import (
    Fault,
    ForgetPrefixFiles,
    FromEngine,
    FromRank,
    Left,
    LoadAdapter,
    Order,
    Ping,
    Pong,
    PrepareSpare,
    ReadPrefix,
    Renew,
    Report,
    Start,
    Status,
    Stop,
    ToRank,
)
from serve.core.types import StageState
from serve.parent.control import Identity, engine_ended, fault_of, join
from serve.parent.engine import EngineProcess
from serve.parent.link import Link
from serve.parent.spare import Spare

Result = TypeVar("Result")
_LAST_WORD_SECONDS = 1.0
_REFUSED_SECONDS = 2.0
_CAUSE_SECONDS = 0.05
_NO_LIFE = -1
_SIGN_SECONDS = 2.0  # between two signs to rank 0 while an engine computes before it leaves
_STOP_SECONDS = 3.0  # how long rank 0 may take once its streams are finished


async def run_member(
    config: ServeConfig,
    cluster: Cluster,
    facts: dict[str, str],
) -> None:
    """Runs this rank until rank 0 sends Stop or a signal arrives. Raises ClusterError. A launcher
    signals all ranks at once, and rank 0 may have streams to finish. So after a signal, a rank that
    has joined waits for rank 0's Stop. If none comes, it ends by that signal: the launcher then
    sees that the rank was lost."""
    if cluster.control is None:
        raise ClusterError("A rank above 0 needs the control address of rank 0.")
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[signal.Signals] = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _note, signalled, number)
    mine = Identity.of_cluster(cluster, facts, os.getpid())
    start_seconds = config.start_patience(is_launched=cluster.leash is not None)
    joining = join(cluster.control, mine, config.join_timeout, start_seconds)
    control = await _until(signalled, joining)
    grace_seconds = config.drain_timeout + _STOP_SECONDS
    with own_folder() as copies:
        member = _Member(config, cluster, copies)
        try:
            while control is not None:
                if await _until(signalled, member.serve(control), grace_seconds):
                    return
                # The connection broke, or rank 0 ended. A launcher should see that end first.
                await asyncio.sleep(_LAST_WORD_SECONDS)
                control = await _until(signalled, _join_again(cluster.control, mine, config))
        finally:
            await member.close()
    signal.signal(signalled.result(), signal.SIG_DFL)
    signal.raise_signal(signalled.result())


def _note(signalled: "asyncio.Future[signal.Signals]", number: signal.Signals) -> None:
    if not signalled.done():
        signalled.set_result(number)


async def _join_again(
    control: Address,
    mine: Identity,
    config: ServeConfig,
) -> Link[ToRank]:
    """Joins rank 0 again. If its host refuses the connection, rank 0 has ended."""
    try:
        return await join(control, mine, config.constants.return_timeout, _REFUSED_SECONDS)
    except ClusterError as error:
        raise ClusterError(f"Rank 0 is gone, look at its log: {error}") from error


async def _until(
    signalled: "asyncio.Future[signal.Signals]",
    work: Coroutine[Any, Any, Result],
    grace_seconds: float = 0.0,
) -> Result | None:
    """Returns the result of work, or None if it has not ended grace_seconds after a signal."""
    working = asyncio.create_task(work)
    try:
        either: set[asyncio.Future[Any]] = {working, signalled}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if grace_seconds and not working.done():
            await asyncio.wait({working}, timeout=grace_seconds)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


class _Member:
    """Does what rank 0 says. When its engine ends or loses its ring, it reports that and waits,
    because all engines form the next ring together. Its engine outlives the connection to rank
    0."""

    def __init__(self, config: ServeConfig, cluster: Cluster, copies: str) -> None:
        self._config, self._rank = config, cluster.rank
        self._addresses, self._copies = cluster.addresses, copies
        self._control: Link[ToRank] | None = None
        self._life = 0
        self._engine: EngineProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_fresh = False
        self._left: Left | None = None  # the engine's answer, until it gets its next order
        self._spare = Spare(config.constants.keeps_spare_engine)

    async def serve(self, control: Link[ToRank]) -> bool:
        """Obeys rank 0 until it sends Stop (True) or the connection ends (False)."""
        self._control = control
        try:
            if self._engine is None:
                await self._start_engine()
            while message := await control.receive():
                if isinstance(message, Stop):
                    return True
                await self._obey(message)
        finally:
            # The life of what comes next is known when rank 0 sends Renew over another connection.
            self._life = _NO_LIFE
            await control.close()
        return False

    async def close(self) -> None:
        """Ends the engine, and the spare one. Raises EngineError if one of them does not end."""
        async with AsyncExitStack() as stack:  # Both are ended, even if one raises.
            stack.push_async_callback(self._spare.close)
            await self._stop_engine()

    async def _obey(self, message: ToRank) -> None:
        assert self._engine is not None
        match message:
            case Renew():
                await self._renew(message)
            case Ping():
                self._send(Pong())
            case Start(order):
                self._is_fresh = False
                self._left = None
                self._engine.link.send(self._localised(order))
            case PrepareSpare():
                self._spare.prepare()
            case LoadAdapter() | ReadPrefix() | ForgetPrefixFiles():
                self._engine.link.send(message)
            case _:
                raise ClusterError(f"Rank 0 sent an unexpected {type(message).__name__}.")

    def _localised(self, order: Order) -> Order:
        """Returns the order with this host's paths and addresses. Rank 0 decides what to load,
        including the commit of a hub model; this host decides where it is kept."""
        cache_dir = self._config.cache_dir
        prefix_dir = self._config.prefix_cache_dir
        return msgspec.structs.replace(
            order,
            model=str(self._config.model),
            cache_dir=str(cache_dir) if cache_dir else None,
            addresses=self._addresses,
            copies=self._copies,
            prefix_dir=str(prefix_dir) if prefix_dir else None,
        )

    async def _renew(self, message: Renew) -> None:
        """Replaces the engine, unless it had no order yet, or has left its ring and stays."""
        assert self._engine is not None
        # A new engine has nothing to show, and the signal would end one that still imports MLX.
        if message.dump and not self._is_fresh:
            await self._engine.dump()
        if message.keep and await self._stays(message.life):
            return
        if not self._is_fresh:
            # If the engine has ended already, its reason is reported first: it may be the cause.
            if self._reading:
                await asyncio.wait({self._reading}, timeout=_CAUSE_SECONDS)
            await self._stop_engine()
            await self._start_engine()
        self._life = message.life
        self._tell(Status(StageState.STARTING))

    async def _stays(self, life: int) -> bool:
        """Whether the engine outlives the fault, because it leaves its ring or has left it."""
        assert self._engine is not None
        if self._is_fresh or not self._engine.is_alive:
            return False
        if self._left:
            self._life = life
            self._tell(msgspec.structs.replace(self._left, life=life))
            return True
        leaving = asyncio.create_task(self._engine.leave(life))
        try:
            while not leaving.done():
                await asyncio.wait({leaving}, timeout=_SIGN_SECONDS)
                if not leaving.done() and self._left is None:
                    # It may compute for long, and rank 0 has to know that this parent lives.
                    self._send(Report(life, Status(StageState.LEAVING)))
        finally:
            leaving.cancel()
        return leaving.result() is not None

    async def _start_engine(self) -> None:
        self._left = None
        engine = self._engine = await self._spare.take()
        self._reading = asyncio.create_task(self._read(engine))
        self._is_fresh = True

    async def _stop_engine(self) -> None:
        if self._reading:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._engine:
            await self._engine.stop()

    async def _read(self, engine: EngineProcess) -> None:
        has_said_why = False
        try:
            while message := await engine.receive():
                if isinstance(message, Fault):
                    has_said_why = True
                    self._forget_engine()
                if isinstance(message, Left):
                    self._life = message.life
                    self._left = message
                self._tell(message)
        except ClusterError as error:
            self._tell(fault_of(error))
        self._forget_engine()
        if not has_said_why:
            self._tell(engine_ended(self._rank, await engine.wait()))

    def _forget_engine(self) -> None:
        """Notes that the engine ends: it must be replaced, even if its process still lives."""
        self._is_fresh = False
        self._left = None

    def _tell(self, message: FromEngine) -> None:
        self._send(Report(self._life, message))

    def _send(self, message: FromRank) -> None:
        """Sends a message to rank 0. Without a connection it is dropped: a Renew comes next."""
        assert self._control is not None
        self._control.send(message)
