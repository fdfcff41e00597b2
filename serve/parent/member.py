"""The parent of every rank but 0: it joins rank 0, runs an engine, and passes messages on."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from serve.core.config import Address, Cluster, ServeConfig
from serve.core.errors import ClusterError
from serve.core.folder import own_folder
from serve.core.messages import (
    ForgetPrefixFiles,
    FromRank,
    LoadAdapter,
    Order,
    Ping,
    Pong,
    PrepareSpare,
    ReadPrefix,
    Renew,
    Start,
    Stop,
    ToRank,
)
from serve.parent.control import Identity, join
from serve.parent.link import Link
from serve.parent.own_engine import OwnEngine

Result = TypeVar("Result")
_LAST_WORD_SECONDS = 1.0
_REFUSED_SECONDS = 2.0
_NO_LIFE = -1
_STOP_SECONDS = 3.0  # how long rank 0 may take to send Stop after its streams are finished


async def run_member(
    config: ServeConfig,
    cluster: Cluster,
    facts: dict[str, str],
) -> None:
    """Runs this rank until rank 0 sends Stop or a signal arrives. Raises ClusterError. A launcher
    signals all ranks at once, and rank 0 may have streams to finish. So after a signal, a rank that
    has joined waits for rank 0's Stop. If none comes, the rank ends by that signal, so the launcher
    sees that it was lost."""
    if not cluster.control:
        raise ClusterError("A rank above 0 needs the control address of rank 0.")
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[signal.Signals] = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, signalled, number)
    mine = Identity.of_cluster(cluster, facts, os.getpid())
    start_seconds = config.start_patience(is_launched=cluster.leash is not None)
    rank_0, *_ = cluster.control
    joining = join(rank_0, mine, config.join_timeout, start_seconds)
    control = await _unless_signalled(signalled, joining)
    grace_seconds = config.drain_timeout + _STOP_SECONDS
    with own_folder() as copies:
        member = _Member(config, cluster, copies)
        try:
            while control is not None:
                if await _unless_signalled(signalled, member.serve(control), grace_seconds):
                    return
                # The connection broke, or rank 0 ended. A launcher should see that end first.
                await asyncio.sleep(_LAST_WORD_SECONDS)
                control = await _unless_signalled(signalled, _join_again(rank_0, mine, config))
        finally:
            await member.close()
    signal.signal(signalled.result(), signal.SIG_DFL)
    signal.raise_signal(signalled.result())


def _on_signal(signalled: "asyncio.Future[signal.Signals]", number: signal.Signals) -> None:
    if not signalled.done():
        signalled.set_result(number)


async def _join_again(
    control: Address,
    mine: Identity,
    config: ServeConfig,
) -> Link[ToRank]:
    """Joins rank 0 again. If rank 0's host refuses the connection, rank 0 has ended."""
    try:
        return await join(control, mine, config.constants.return_timeout, _REFUSED_SECONDS)
    except ClusterError as error:
        raise ClusterError(f"Rank 0 is gone, look at its log: {error}") from error


async def _unless_signalled(
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
    """Follows rank 0's messages. When the engine ends or loses its ring, this parent reports it and
    waits, because all engines form the next ring together. The engine outlives the connection to
    rank 0."""

    def __init__(self, config: ServeConfig, cluster: Cluster, copies: str) -> None:
        self._config = config
        self._addresses, self._copies = cluster.addresses, copies
        self._control: Link[ToRank] | None = None
        self._engine = OwnEngine(cluster.rank, config.constants.keeps_spare_engine, self._send)

    async def serve(self, control: Link[ToRank]) -> bool:
        """Obeys rank 0 until it sends Stop (True) or the connection ends (False)."""
        self._control = control
        try:
            if self._engine.process is None:
                await self._engine.start()
            while message := await control.receive():
                if isinstance(message, Stop):
                    return True
                await self._obey(message)
        finally:
            # The next life is known when rank 0 sends Renew over another connection.
            self._engine.life = _NO_LIFE
            await control.close()
        return False

    async def close(self) -> None:
        """Ends the engines. Raises EngineError if one of them does not end."""
        await self._engine.close()

    async def _obey(self, message: ToRank) -> None:
        match message:
            case Renew():
                await self._engine.renew(message)
            case Ping():
                self._send(Pong())
            case Start(order):
                self._engine.send(self._localised(order))
            case PrepareSpare():
                self._engine.spare.prepare()
            case LoadAdapter() | ReadPrefix() | ForgetPrefixFiles():
                self._engine.send(message)
            case _:
                raise ClusterError(f"Rank 0 sent an unexpected {type(message).__name__}.")

    def _localised(self, order: Order) -> Order:
        """Returns the order with this host's paths and addresses. Rank 0 decides what to load,
        including a hub model's commit; this host decides where files are kept."""
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

    def _send(self, message: FromRank) -> None:
        """Sends a message to rank 0, or drops it without a connection: Renew comes next."""
        assert self._control is not None
        self._control.send(message)
