"""A node's SSH server, attacked by strangers. Nothing that they ask for may run."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncssh
import psutil
import pytest

from launcher.nodes import client, door
from launcher.nodes.door import (
    MAX_STRANGER_SESSIONS,
    MEMBER,
    STRANGER,
    STRANGER_WINDOW_BYTES,
    WEIGHTS,
)
from serve.core.errors import ClusterError
from tests.nodes.running import RunningNode
from tests.test_launcher import wait_until

# The first test also waits until the nodes that they share are paired.
pytestmark = pytest.mark.timeout(300)

HOST = "127.0.0.1"
COMMANDS = [
    "agent token",
    "agent",
    "node",
    "sh -c id",
    "hello; id",
    "pair\nagent x",
    " agent x",
    "scp -t /tmp",
    "sftp-server",
    "python",
    "",
]


@pytest.fixture
def node(pair_of_nodes: tuple[RunningNode, RunningNode]) -> RunningNode:
    return pair_of_nodes[0]


@asynccontextmanager
async def stranger(node: RunningNode) -> AsyncIterator[asyncssh.SSHClientConnection]:
    connection = await asyncssh.connect(
        HOST,
        node.port,
        username=STRANGER,
        client_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        known_hosts=None,
        config=None,
        agent_path=None,
    )
    async with connection:
        yield connection


def children(node: RunningNode) -> list[list[str]]:
    found = []
    for child in psutil.Process(node.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # It ends just now.
            found.append(child.cmdline())
    return found


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def what_ran(
    connection: asyncssh.SSHClientConnection, command: str
) -> tuple[int | None, str]:
    process = await connection.create_process(command, encoding=None)
    with suppress(BrokenPipeError):  # The node may have closed the channel already.
        process.stdin.write(b'{"type":"DescribeHost","model":null,"ips":[]}\n{"type":"ShowCode"}\n')
        process.stdin.write_eof()
    done = await process.wait()
    return done.returncode, repr(done.stdout)


def attack(node: RunningNode, num_connections: int, num_commands: int) -> int:
    """Asks for services as strangers. Returns how many were refused, each by code 1 and silence."""
    chance = random.Random(0)
    refused = 0

    async def test() -> None:
        nonlocal refused
        for _ in range(num_connections):
            async with stranger(node) as connection:
                for _ in range(num_commands):
                    command = chance.choice(COMMANDS)
                    code, said = await what_ran(connection, command)
                    assert code == 1, command
                    assert said == "b''"
                    refused += 1

    run(test)
    return refused


def test_a_stranger_gets_no_service_of_members(node: RunningNode) -> None:
    before = children(node)
    assert attack(node, 10, 20) == 200
    assert children(node) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_commands_of_strangers_do_not_run(node: RunningNode) -> None:
    before = children(node)
    assert attack(node, 100, 100) == 10_000
    assert children(node) == before


@pytest.mark.parametrize("user", [MEMBER, "root", "", "a" * 2000])
def test_an_unknown_key_is_refused(node: RunningNode, user: str) -> None:
    async def test() -> None:
        with pytest.raises((asyncssh.PermissionDenied, asyncssh.Error)):
            await asyncssh.connect(
                HOST,
                node.port,
                username=user,
                client_keys=[asyncssh.generate_private_key("ssh-ed25519")],
                known_hosts=None,
                config=None,
                agent_path=None,
            )

    run(test)


def test_the_public_key_of_a_member_is_not_enough(
    pair_of_nodes: tuple[RunningNode, RunningNode],
) -> None:
    """The attacker knows the key from an announcement, but signs with a key of its own."""
    one, two = pair_of_nodes
    member = two.ask(lambda: client.known_nodes()[0].key)

    class Forged(asyncssh.SSHKeyPair):
        def __init__(self) -> None:
            own = asyncssh.generate_private_key("ssh-ed25519")
            self._own = asyncssh.load_keypairs([own])[0]
            known = asyncssh.import_public_key(member).public_data
            algorithm = b"ssh-ed25519"
            super().__init__(algorithm, algorithm, (algorithm,), (algorithm,), known, b"")

        def sign(self, data: bytes) -> bytes:
            return self._own.sign(data)

    async def test() -> None:
        with pytest.raises(asyncssh.PermissionDenied):
            await asyncssh.connect(
                HOST,
                one.port,
                username=MEMBER,
                client_keys=[Forged()],
                known_hosts=None,
                config=None,
                agent_path=None,
            )

    run(test)


def test_passwords_are_not_asked_for(node: RunningNode) -> None:
    async def test() -> None:
        with pytest.raises(asyncssh.PermissionDenied):
            await asyncssh.connect(
                HOST,
                node.port,
                username=MEMBER,
                password="guess",
                client_keys=None,
                known_hosts=None,
                config=None,
                agent_path=None,
            )

    run(test)


def test_a_stranger_opens_no_channel(node: RunningNode) -> None:
    """Neither to the weights, nor to other hosts, files or agents, in either direction."""

    async def test() -> None:
        async with stranger(node) as connection:
            for host in (WEIGHTS, HOST, "localhost"):
                with pytest.raises(asyncssh.ChannelOpenError):
                    await connection.open_connection(host, node.port)
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.open_unix_connection("/tmp/x")
            with pytest.raises(asyncssh.ChannelListenError):
                await connection.forward_remote_port("", 0, HOST, 1)
            with pytest.raises((asyncssh.Error, OSError)):
                await connection.start_sftp_client()

    run(test)


def test_what_a_stranger_sends_takes_little_memory(node: RunningNode) -> None:
    """Both limits count: a node keeps what fills a window, also before a service is named."""

    async def test() -> None:
        async with stranger(node) as connection:
            sessions = [
                await connection.create_process("hello", encoding=None)
                for _ in range(MAX_STRANGER_SESSIONS)
            ]
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.create_process("hello", encoding=None)
            for session in sessions:
                # asyncssh has no public name for what it may send.
                assert session.channel._send_window <= STRANGER_WINDOW_BYTES
                session.close()
                await session.wait_closed()
            # A place that is free again can be used.
            assert await what_ran(connection, "node") == (1, repr(b""))

    run(test)


def test_a_stranger_learns_name_and_version_only(node: RunningNode) -> None:
    async def test() -> None:
        async with stranger(node) as connection:
            process = await connection.create_process("hello", encoding=None)
            process.stdin.write(b'{"type":"NodeHello","name":"x","version":"1","port":1}\n')
            answer = (await process.stdout.readline()).decode()
            assert set(json.loads(answer)) == {"type", "name", "version", "port"}

    run(test)


def lets_in(node: RunningNode, member: RunningNode) -> bool:
    try:
        member.ask(lambda: client.stop_launches(client.node_named(node.name)))
    except ClusterError:
        return False
    return True


def test_random_bytes_end_the_connection_and_not_the_node(node: RunningNode) -> None:
    chance = random.Random(1)
    for number in range(200):
        # The node may have had enough before all is sent.
        with suppress(OSError), socket.create_connection((HOST, node.port), 60) as connection:
            if number % 2:
                connection.sendall(b"SSH-2.0-Guest\r\n")
            connection.sendall(chance.randbytes(chance.randrange(1, 5000)))
    assert node.process.poll() is None
    # Not before it has seen that most of them have left: it lets only a few strangers in.
    wait_until(lambda: lets_in(node, node))


@pytest.mark.long
def test_silent_strangers_do_not_keep_members_out(
    pair_of_nodes: tuple[RunningNode, RunningNode],
) -> None:
    one, two = pair_of_nodes
    idle = [socket.create_connection((HOST, one.port), 60) for _ in range(3 * door.MAX_STRANGERS)]
    try:
        # Those above the limit are closed at once, and the others after the time for a login.
        wait_until(lambda: lets_in(one, two), 100.0)
    finally:
        for connection in idle:
            connection.close()
        wait_until(lambda: lets_in(one, two))


def test_a_stranger_is_sent_away_after_a_while(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run in this process, where the time is short."""
    from launcher.nodes.door import Services, listen
    from launcher.nodes.group import NodeFiles

    monkeypatch.setattr(door, "STRANGER_SECONDS", 0.3)

    async def none(*_: Any) -> None:
        raise AssertionError("nothing was asked for")

    async def test() -> None:
        files = NodeFiles(tmp_path)
        visitors: set[Any] = set()
        server = await listen(files, Services({}, {}, none), 0, visitors)
        with suppress(asyncssh.ConnectionLost):  # A busy machine takes as long for the login.
            connection = await asyncssh.connect(
                HOST,
                server.get_port(),
                username=STRANGER,
                client_keys=[asyncssh.generate_private_key("ssh-ed25519")],
                known_hosts=None,
                config=None,
                agent_path=None,
            )
            await asyncio.wait_for(connection.wait_closed(), 60)
        server.close()
        await server.wait_closed()
        assert not visitors

    run(test)
