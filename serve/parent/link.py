"""A connection that carries frames, for asyncio: to the engine child, between parents."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from serve.core import wire
from serve.core.connection import keep_alive


class Link:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = wire.FrameReader()
        self._ready: list[tuple[wire.Kind, bytes]] = []

    @property
    def peer_host(self) -> str:
        peer = self._writer.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "local"

    def keep_alive(self) -> None:
        keep_alive(self._writer.get_extra_info("socket"))

    def send(self, data: bytes) -> None:
        """Queues a frame. What goes this way is small and bounded by the steps in
        flight, so nobody waits for it to drain."""
        if not self._writer.is_closing():
            self._writer.write(data)

    def send_json(self, message: dict[str, Any]) -> None:
        self.send(wire.json_frame(message))

    async def receive(self) -> tuple[wire.Kind, bytes] | None:
        """The next frame; None when the peer is gone. Raises ClusterError on nonsense."""
        while not self._ready:
            try:
                data = await self._reader.read(1 << 16)
            except (ConnectionError, OSError):
                return None
            if not data:
                return None
            self._ready += self._frames.feed(data)
        return self._ready.pop(0)

    async def receive_json(self) -> dict[str, Any] | None:
        message = await self.receive()
        return None if message is None else wire.parse_json(message[1])

    async def messages(self) -> AsyncIterator[tuple[wire.Kind, bytes]]:
        while (message := await self.receive()) is not None:
            yield message

    def abort(self) -> None:
        """Ends it without a word to the peer, which may not listen any more."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), 1)
        except (OSError, TimeoutError):
            self.abort()
