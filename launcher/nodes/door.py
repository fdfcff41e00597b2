"""The node's SSH server: who may connect, and what they may ask for.

    user        who                       may run
    member      machines of the group     agent TOKEN, node, and a channel to the weights
    stranger    everyone                  hello, pair

The commands are names of functions of this program: no shell runs, and no path is read from a peer.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import asyncssh

from launcher.nodes.group import NodeFiles, public
from serve.core.errors import BrigadeError

MEMBER = "member"
STRANGER = "stranger"
WEIGHTS = "weights"  # the pseudo host of the channel to the weights
LOGIN_SECONDS = 10
STRANGER_SECONDS = 30.0
MAX_STRANGERS = 16
MAX_STRANGER_SESSIONS = 4  # open ones on a connection; a pairing needs one
STRANGER_WINDOW_BYTES = 64 << 10  # A stranger's messages are small, and wait in memory.
KEEP_ALIVE_SECONDS = 5
NUM_KEEP_ALIVES = 4
WINDOW_BYTES = 16 << 20
PACKET_BYTES = 256 << 10
PUMP_BYTES = 1 << 20

# The fastest of OpenSSH's modern algorithms, and none that is older.
ALGORITHMS = {
    "kex_algs": ["curve25519-sha256"],
    "encryption_algs": ["aes128-gcm@openssh.com", "chacha20-poly1305@openssh.com"],
    "compression_algs": ["none"],
    "signature_algs": ["ssh-ed25519"],
}
Process = asyncssh.SSHServerProcess[bytes]
Connections = set["Visitor"]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What the node does for its visitors. Each service gets the SSH process of its visitor, and
    the weights' service the two ends of a channel."""

    for_strangers: Mapping[str, Callable[["Visitor", Process], Awaitable[None]]]
    for_members: Mapping[str, Callable[["Visitor", Process], Awaitable[None]]]
    weights: Callable[[Any, Any], Awaitable[None]]


@dataclass(eq=False)
class Visitor(asyncssh.SSHServer):
    """One connection to the node. key is the public key that the visitor has proved to hold."""

    files: NodeFiles
    services: Services
    connections: Connections
    key: str = ""
    is_member: bool = False
    num_sessions: int = 0
    _connection: Any = field(default=None)
    _end: asyncio.TimerHandle | None = field(default=None)

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self.connections.add(self)
        if sum(not visitor.is_member for visitor in self.connections) > MAX_STRANGERS:
            conn.abort()
        # A stranger must not hold one of the few places for strangers.
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(STRANGER_SECONDS, self._end_stranger)

    def connection_lost(self, _: Exception | None) -> None:
        self.connections.discard(self)
        if self._end:
            self._end.cancel()  # It would keep the connection and all that it has received.

    def _end_stranger(self) -> None:
        if not self.is_member:
            self.close()

    def close(self) -> None:
        self._connection.abort()

    @property
    def address(self) -> str:
        return str(self._connection.get_extra_info("peername")[0])

    # --- who

    def begin_auth(self, _: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        """Called before and after the visitor has proved that it has the key."""
        self.key = public(key)
        return username == STRANGER or (username == MEMBER and self.may_be_member())

    def may_be_member(self) -> bool:
        members = {machine.key for machine in self.files.members()}
        return self.key in members or self.key == public(self.files.own_key())

    def auth_completed(self) -> None:
        self.is_member = self._connection.get_extra_info("username") == MEMBER

    # --- what

    def session_requested(self) -> Any:
        """Returns a channel and its session. Those of strangers are few, and receive little: what
        they send is kept in memory, even before they have named a service."""
        if not self.is_member and self.num_sessions >= MAX_STRANGER_SESSIONS:
            return False
        window = WINDOW_BYTES if self.is_member else STRANGER_WINDOW_BYTES
        packet = min(PACKET_BYTES, window)
        channel = self._connection.create_server_channel(None, "strict", window, packet)
        return channel, _Session(self)

    def connection_requested(self, dest_host: str, *_: Any) -> Any:
        if self.is_member and dest_host == WEIGHTS:
            return self.services.weights
        return False


class _Session(asyncssh.SSHServerProcess[bytes]):
    """A session that its visitor counts as long as its channel is open."""

    def __init__(self, visitor: Visitor) -> None:
        super().__init__(serve_process, None, 0, False)
        self._visitor = visitor
        visitor.num_sessions += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitor.num_sessions -= 1
        super().connection_lost(exc)


async def serve_process(process: Process) -> None:
    """Runs the service that a visitor asks for, if the visitor may have it."""
    visitor = process.channel.get_connection().get_owner()
    assert isinstance(visitor, Visitor)
    name = (process.command or "").partition(" ")[0]
    services = visitor.services.for_strangers
    if visitor.is_member:
        services = {**services, **visitor.services.for_members}
    service = services.get(name)
    if service is None:
        process.stderr.write(b"This node has no such service for you.\n")
        process.exit(1)
        return
    code = 0
    try:
        await service(visitor, process)
    except (asyncssh.Error, OSError, BrigadeError) as error:
        # The visitor is gone, or a file of the node cannot be read or written.
        _logger.warning("event=service_failed name=%s reason=%s", name, json.dumps(str(error)))
        code = 1
    with suppress(OSError):
        process.exit(code)


async def listen(
    files: NodeFiles,
    services: Services,
    port: int,
    connections: Connections,
) -> asyncssh.SSHAcceptor:
    """Listens on all IPv4 addresses of this machine: MLX's ring has no others. Raises OSError."""
    return await asyncssh.listen(
        "0.0.0.0",
        port,
        server_factory=lambda: Visitor(files, services, connections),
        server_host_keys=[files.own_key()],
        encoding=None,
        allow_pty=False,
        line_editor=False,
        agent_forwarding=False,
        x11_forwarding=False,
        allow_scp=False,
        password_auth=False,
        kbdint_auth=False,
        host_based_auth=False,
        gss_kex=False,
        gss_auth=False,
        login_timeout=LOGIN_SECONDS,
        keepalive_interval=KEEP_ALIVE_SECONDS,
        keepalive_count_max=NUM_KEEP_ALIVES,
        window=WINDOW_BYTES,
        max_pktsize=PACKET_BYTES,
        server_version="Brigade",
        **ALGORITHMS,
    )


async def run_agent(process: Process, environment: Mapping[str, str]) -> None:
    """Runs the agent of a launch, which ends with its connection. The agent is the one of this
    Python, and the visitor's only argument is the token of its messages."""
    token = (process.command or "").partition(" ")[2]
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "launcher.agent", token),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    inward = asyncio.create_task(pump(process.stdin, agent.stdin))
    await pump(agent.stdout, process.stdout)
    await agent.wait()
    inward.cancel()


async def pump(reader: Any, writer: Any) -> None:
    """Copies a stream to its end. The writer's end follows, even if the reader's has failed."""
    try:
        while data := await reader.read(PUMP_BYTES):
            writer.write(data)
            await writer.drain()
    except (OSError, asyncssh.Error):
        return  # Its other end is gone, and so both are closed.
    finally:
        with suppress(OSError):
            if writer.can_write_eof():
                writer.write_eof()


async def bridge(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Copies in both directions until both have ended."""
    try:
        await asyncio.gather(pump(one[0], other[1]), pump(other[0], one[1]))
    finally:
        one[1].close()
        other[1].close()
