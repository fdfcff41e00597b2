"""The parent of every rank but 0: joins rank 0, keeps an engine, passes messages on."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from serve.core import wire
from serve.core.config import Cluster, ServeConfig
from serve.core.errors import ClusterError
from serve.parent.control import Hello, engine_ended, join, raise_if_error
from serve.parent.engine import EngineProcess
from serve.parent.link import Link

Result = TypeVar("Result")
_LAST_WORD_SECONDS = 1.0
_STOP_SECONDS = 3.0  # how long rank 0 may take once its streams are finished


async def run_member(config: ServeConfig, cluster: Cluster, facts: dict[str, str]) -> None:
    """Returns when rank 0 says stop, or after a signal; raises the error that ended
    this rank.

    A launcher signals all ranks at once, and rank 0 may have streams to finish: so
    once it has joined, this rank waits for rank 0's word.
    """
    if cluster.control is None:
        raise ClusterError("A rank above 0 needs the control address of rank 0.")
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    hello = Hello.of(cluster, facts, os.getpid())
    hub = await _until(signalled, join(cluster.control, hello, config.join_timeout))
    if hub is not None:
        grace_seconds = config.drain_timeout + _STOP_SECONDS
        await _until(signalled, _live(config, cluster.rank, hub), grace_seconds)


async def _until(
    signalled: asyncio.Event, work: Coroutine[Any, Any, Result], grace_seconds: float = 0.0
) -> Result | None:
    """The result of work; None if a signal, and the grace after it, came first."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(signalled.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if grace_seconds and not working.done():
        await asyncio.wait({working}, timeout=grace_seconds)
    waiting.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return None


async def _live(config: ServeConfig, rank: int, hub: Link) -> None:
    engine = await EngineProcess.start()
    try:
        order = await _wait_for_start(hub)
        if order is not None:
            # What to load is rank 0's word, also the commit of a hub model; where, this host's.
            cache_dir = config.cache_dir and str(config.cache_dir)
            engine.link.send_json({**order, "model": str(config.model), "cache_dir": cache_dir})
            await _relay(rank, hub, engine)
    finally:
        await engine.stop()
        await hub.close()


async def _wait_for_start(hub: Link) -> dict[str, Any] | None:
    """What to start, or None if the cluster stops before it began."""
    message = await _hear(hub)
    raise_if_error(message)
    return None if message["type"] == "stop" else message["order"]


async def _relay(rank: int, hub: Link, engine: EngineProcess) -> None:
    tasks = {
        asyncio.create_task(_engine_to_hub(rank, hub, engine)),
        asyncio.create_task(_hub_to_engine(hub, engine)),
    }
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _engine_to_hub(rank: int, hub: Link, engine: EngineProcess) -> None:
    async for _, body in engine.link.messages():
        message = wire.parse_json(body)
        hub.send_json(message)
        if message.get("exit_code") == ClusterError.exit_code:
            # Its neighbour is gone, and rank 0 may know why: a launcher should see that first.
            await asyncio.sleep(_LAST_WORD_SECONDS)
        raise_if_error(message)
    message = engine_ended(rank, await engine.wait())
    hub.send_json(message)
    raise_if_error(message)


async def _hub_to_engine(hub: Link, engine: EngineProcess) -> None:
    """Until rank 0 says stop: what else it says is for the engine."""
    while (message := await _hear(hub))["type"] != "stop":
        engine.link.send_json(message)


async def _hear(hub: Link) -> dict[str, Any]:
    message = await hub.receive_json()
    if message is None:
        # Its own reason is the better one: a launcher should see rank 0 end first.
        await asyncio.sleep(_LAST_WORD_SECONDS)
        raise ClusterError("Rank 0 is gone: look at its log.")
    return message
