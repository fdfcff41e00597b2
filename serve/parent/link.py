"""A connection that carries frames, for asyncio: to the engine child, between parents."""

import asyncio
from typing import Any, Generic

from serve.core.connection import keep_alive
from serve.core.messages import AnyMessage
from serve.core.wire import FrameReader, Received, frame


class Link(Generic[Received]):
    """A connection to a peer that sends messages of the expected types."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected: Any
    ) -> None:
        self._reader, self._writer = reader, writer
        self._frames: FrameReader[Received] = FrameReader(expected)
        self._ready: list[Received] = []

    @property
    def peer_host(self) -> str:
        peer = self._writer.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "local"

    def keep_alive(self) -> None:
        keep_alive(self._writer.get_extra_info("socket"))

    def send(self, message: AnyMessage) -> None:
        """Queues a message. Messages this way are small and bounded by the steps in flight, so
        nobody waits for them to drain."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(self) -> Received | None:
        """The next message; None when the peer is gone. Raises ClusterError on nonsense."""
        while not self._ready:
            try:
                data = await self._reader.read(1 << 16)
            except (ConnectionError, OSError):
                return None
            if not data:
                return None
            self._ready += self._frames.feed(data)
        return self._ready.pop(0)

    def abort(self) -> None:
        """Ends it without a word to the peer, which may not listen any more."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), 1)
        except (OSError, TimeoutError, asyncio.TimeoutError):
            self.abort()
