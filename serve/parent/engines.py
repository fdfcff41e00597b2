"""The engines of all ranks, as rank 0's parent reaches them: its own engine over a socket pair,
others through their parents."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from serve.core.config import Cluster
from serve.core.errors import ClusterError
from serve.core.layouts import Link
from serve.core.messages import (
    LoadAdapter,
    Order,
    PrepareSpare,
    Renew,
    Report,
    Start,
    ToEngine,
    ToPrefixCache,
)
from serve.parent.control import ControlServer, Heard, Identity
from serve.parent.own_engine import OwnEngine


class Engines:
    """The engines of a launch. facts describe rank 0. ring lists the ranks that got the latest
    orders, or all ranks before that."""

    def __init__(self, cluster: Cluster, facts: dict[str, str], keeps_spare: bool) -> None:
        self._addresses = cluster.control
        mine = Identity.of_cluster(cluster, facts, os.getpid())
        self._control = ControlServer(mine, self._on_heard)
        self._own = OwnEngine(0, keeps_spare, self._on_report)
        self._hear: Callable[[int, Heard], None] | None = None
        self.ring = tuple(range(cluster.num_ranks))

    async def listen(self, hear: Callable[[int, Heard], None]) -> None:
        """Starts to listen for the other ranks. `hear` takes their messages, and those of rank 0's
        engine. Raises AddressError."""
        self._hear = hear
        for address in self._addresses:
            await self._control.listen(address)

    async def close(self) -> None:
        """Ends the engines of all ranks. Raises EngineError if rank 0's does not end."""
        async with AsyncExitStack() as stack:  # All engines are ended, even if one call raises.
            stack.push_async_callback(self._own.close)
            await self._control.close()

    def _on_report(self, report: Report) -> None:
        self._on_heard(0, report)

    def _on_heard(self, rank: int, message: Heard) -> None:
        assert self._hear is not None
        self._hear(rank, message)

    # --- messages

    def send(self, message: ToEngine) -> None:
        """Sends a message to rank 0's engine."""
        self._own.send(message)

    def send_to_all(self, message: LoadAdapter | ToPrefixCache) -> None:
        """Sends a message to the engines of all ranks that take part."""
        self._own.send(message)
        for rank in self.ring[1:]:
            self._control.send(rank, message)

    def give_orders(self, orders: Sequence[Order]) -> None:
        """Sends the ranks of a ring their orders, rank 0 first."""
        first, *others = orders
        self.ring = first.ring
        self._own.send(first)
        for rank, order in zip(self.ring[1:], others, strict=True):
            self._control.send(rank, Start(order))

    async def renew_own(self, message: Renew) -> None:
        """Provides an engine for rank 0 that is in no ring. Raises EngineError."""
        await self._own.renew(message)

    def renew(self, rank: int, message: Renew) -> None:
        """Tells another rank to provide an engine that is in no ring."""
        self._control.send(rank, message)

    def prepare_spares(self) -> None:
        """Tells each rank that takes part to start a spare engine, unless it has one."""
        self._own.spare.prepare()
        for rank in self.ring[1:]:
            self._control.send(rank, PrepareSpare())

    # --- the other parents

    def disconnect(self, rank: int) -> None:
        """Ends the connection of a rank, so that it has to join again."""
        self._control.disconnect(rank)

    async def silent_of(self, ranks: Sequence[int]) -> frozenset[int]:
        """Returns those of the ranks whose parents do not answer."""
        answers = await asyncio.gather(*(self._control.answers(rank) for rank in ranks))
        both = zip(ranks, answers, strict=True)
        return frozenset(rank for rank, has_answered in both if not has_answered)

    async def slowest_link(self, ranks: Sequence[int]) -> tuple[Link | None, int | None]:
        """Measures the links from rank 0 to these ranks. If a rank does not answer in time, returns
        that rank and no link; if a rank is lost, neither."""
        links: list[Link] = []
        for rank in ranks:  # One rank at a time, so that no measurements share a link.
            try:
                link = await self._control.measure(rank)
            except ClusterError:  # The driver has heard which rank is gone, and why.
                return None, None
            if link is None:
                return None, rank
            links.append(link)
        slowest = Link(
            max(link.round_trip_seconds for link in links),
            min(link.bytes_per_second for link in links),
        )
        return slowest, None
