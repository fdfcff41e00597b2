"""A folder with a Unix socket for each other machine of the group. Behind it stands that machine's
weights server, through the paired channel."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import asyncssh

from launcher.command import NEIGHBOURS
from launcher.nodes.door import PACKET_BYTES, WEIGHTS, WINDOW_BYTES, bridge
from launcher.nodes.group import NodeFiles
from launcher.nodes.link import NodePlace, connect
from launcher.nodes.messages import NodeError

_logger = logging.getLogger(__name__)
_BUFFER_BYTES = 4 << 20


class NeighbourSockets:
    """The sockets of one folder. A connection to a machine is made when a rank first asks it, and
    kept for later ones."""

    def __init__(self, folder: Path, files: NodeFiles) -> None:
        self._folder = folder
        self._files = files
        self._sockets: dict[NodePlace, tuple[Path, asyncio.Server]] = {}
        self._connections: dict[NodePlace, asyncssh.SSHClientConnection] = {}
        self._locks: dict[NodePlace, asyncio.Lock] = {}
        self._num_made = 0
        self._refreshing = asyncio.Lock()

    async def __aenter__(self) -> "NeighbourSockets":
        self._folder.mkdir(0o700)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.refresh([])

    def environment(self) -> dict[str, str]:
        """Returns the variables that tell ranks of this machine where the sockets are."""
        return {NEIGHBOURS: str(self._folder)}

    async def refresh(self, places: Sequence[NodePlace]) -> None:
        """Makes a socket for each new place, and removes those of places that are gone."""
        async with self._refreshing:
            for place in set(self._sockets) - set(places):
                path, server = self._sockets.pop(place)
                server.close()
                path.unlink(missing_ok=True)
                if connection := self._connections.pop(place, None):
                    connection.abort()
            for place in places:
                if place not in self._sockets:
                    self._sockets[place] = await self._listen(place)

    async def _listen(self, place: NodePlace) -> tuple[Path, asyncio.Server]:
        # A short name: on macOS the path of a socket has at most 103 characters.
        self._num_made += 1
        path = self._folder / f"{self._num_made}.sock"

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                remote = await self._open(place)
            except (NodeError, asyncssh.Error, OSError) as error:
                # The rank sees a closed connection, and asks another neighbour, or the hub.
                _logger.warning("event=no_neighbour name=%s reason=%s", place.name, error)
                writer.close()
                return
            with suppress(OSError, asyncssh.Error):
                await bridge((reader, writer), remote)

        return path, await asyncio.start_unix_server(serve, path, limit=_BUFFER_BYTES)

    async def _open(
        self, place: NodePlace
    ) -> tuple[asyncssh.SSHReader[bytes], asyncssh.SSHWriter[bytes]]:
        async with self._locks.setdefault(place, asyncio.Lock()):
            connection = self._connections.get(place)
            if connection is None or connection.is_closed():
                connection = await connect(place, self._files)
                self._connections[place] = connection
        return await connection.open_connection(
            WEIGHTS, 80, encoding=None, window=WINDOW_BYTES, max_pktsize=PACKET_BYTES
        )
