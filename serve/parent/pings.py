"""Measures the link to another rank's parent, with Pings over the connection of the two parents.

Both ends are Python programs, whose event loops take longer than a fast link. Pings within this
process measure the time of the event loops, which is then subtracted.
"""

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Any

from serve.core.errors import ClusterError
from serve.core.layouts import Link as LinkSpeed
from serve.core.messages import Ping, Pong
from serve.parent.link import Link

_MAX_SECONDS = 10.0  # the longest time for all Pings of one measurement
_NUM_PINGS = 32
_NUM_LARGE_PINGS = 4
_LARGE_PING_BYTES = 1 << 20
_MIN_SECONDS = 1e-6


class Pings:
    """Measures a link by Pings. The link's reader must call on_pong for each Pong, and on_lost."""

    def __init__(self, link: Link[Any]) -> None:
        self._link = link
        self._answered = asyncio.Event()
        self._is_lost = False

    def on_pong(self) -> None:
        self._answered.set()

    def on_lost(self) -> None:
        self._is_lost = True
        self._answered.set()

    async def measure(self) -> LinkSpeed | None:
        """Measures the link. Returns None if that takes too long. Raises ClusterError."""
        try:
            async with asyncio.timeout(_MAX_SECONDS):
                small = await self.seconds(_NUM_PINGS)
                large = await self.seconds(_NUM_LARGE_PINGS, _LARGE_PING_BYTES)
                own = await _own_seconds()
        except TimeoutError:
            return None
        return link_speed(small, large, own)

    async def seconds(self, count: int, num_bytes: int = 0) -> list[float]:
        """Returns the seconds that the answer to each Ping took. Raises ClusterError."""
        return [await self._seconds(num_bytes) for _ in range(count)]

    async def _seconds(self, num_bytes: int) -> float:
        if not self._is_lost:
            self._answered.clear()
        started = time.perf_counter()
        self._link.send(Ping(bytes(num_bytes)))
        await self._answered.wait()
        if self._is_lost:
            raise ClusterError(f"The link to {self._link.peer_host} was lost.")
        return time.perf_counter() - started


def link_speed(
    small: Sequence[float],
    large: Sequence[float],
    own: Sequence[float],
) -> LinkSpeed:
    """Computes a link's speed from the seconds that Pings take without padding, with 1 MiB, and
    within this process. The fastest of each were disturbed the least."""
    round_trip = max(min(small) - min(own), _MIN_SECONDS)
    # Both times include the time in Python, so it cancels out.
    seconds = max(min(large) - min(small), _MIN_SECONDS)
    return LinkSpeed(round_trip, _LARGE_PING_BYTES / seconds)


async def _own_seconds() -> list[float]:
    """Returns the seconds that Python takes for Pings which this process answers itself."""
    near_socket, far_socket = socket.socketpair()
    near: Link[Pong] = Link(*await asyncio.open_connection(sock=near_socket), Pong)
    far: Link[Ping] = Link(*await asyncio.open_connection(sock=far_socket), Ping)
    pings = Pings(near)
    tasks = [asyncio.create_task(_listen(near, pings)), asyncio.create_task(_answer(far))]
    try:
        return await pings.seconds(_NUM_PINGS)
    finally:
        await near.close()
        await far.close()
        await asyncio.gather(*tasks)


async def _listen(link: Link[Pong], pings: Pings) -> None:
    while await link.receive():
        pings.on_pong()


async def _answer(link: Link[Ping]) -> None:
    while await link.receive():
        link.send(Pong())
