"""An asyncio connection that carries frames: from a parent to its engine, and between parents."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from serve.core import wire
from serve.core.connection import keep_alive


class Link:
    """One end of a connection that carries frames in both directions."""

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
        """Queues a frame. Frames are small and their number is bounded by the steps in flight, so
        the caller need not wait until the queue drains."""
        if not self._writer.is_closing():
            self._writer.write(data)

    def send_json(self, message: dict[str, Any]) -> None:
        self.send(wire.json_frame(message))

    async def receive(self) -> tuple[wire.Kind, bytes] | None:
        """Waits for the next frame; returns None when the peer is gone. Raises ClusterError if
        the bytes are not a frame."""
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
        if message is None:
            return None
        _, body = message
        return wire.parse_json(body)

    async def messages(self) -> AsyncIterator[tuple[wire.Kind, bytes]]:
        while (message := await self.receive()) is not None:
            yield message

    def abort(self) -> None:
        """Closes the connection without waiting for the peer, which may not read any more."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), 1)
        except (OSError, TimeoutError, asyncio.TimeoutError):
            self.abort()
