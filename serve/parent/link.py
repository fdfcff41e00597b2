"""An asyncio connection that carries frames: from a parent to its engine, and between parents."""

import asyncio
from typing import Any, Generic

from serve.core.connection import keep_alive
from serve.core.messages import AnyMessage
from serve.core.wire import MAX_BODY_BYTES, FrameReader, Received, frame


class Link(Generic[Received]):
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        expected: Any,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._frames: FrameReader[Received] = FrameReader(expected, max_body_bytes)
        self._ready: list[Received] = []
        self._has_ended_writing = False

    @property
    def peer_host(self) -> str:
        peer = self._writer.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "local"

    def keep_alive(self) -> None:
        keep_alive(self._writer.get_extra_info("socket"))

    def allow_large_messages(self) -> None:
        self._frames.max_body_bytes = MAX_BODY_BYTES

    def send(self, message: AnyMessage) -> None:
        """Queues a message without waiting: the steps in flight bound the number of messages."""
        if not self._writer.is_closing() and not self._has_ended_writing:
            self._writer.write(frame(message))

    async def receive(self) -> Received | None:
        """Returns the next message, or None when the peer is gone. Raises ClusterError."""
        while not self._ready:
            try:
                data = await self._reader.read(1 << 16)
            except (ConnectionError, OSError):
                return None
            if not data:
                return None
            self._ready += self._frames.feed(data)
        return self._ready.pop(0)

    def end_writing(self) -> None:
        """Tells the peer that no more messages will come. Messages of the peer still arrive."""
        if not self._writer.is_closing() and not self._has_ended_writing:
            self._has_ended_writing = True
            self._writer.write_eof()

    def abort(self) -> None:
        """Closes the connection without waiting for the peer, which may not read any more."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), 1)
        except (OSError, TimeoutError):
            self.abort()
