"""Connects to a node, and checks that it is the one with the expected key."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import asyncssh

from launcher.nodes.door import (
    ALGORITHMS,
    KEEP_ALIVE_SECONDS,
    MEMBER,
    NUM_KEEP_ALIVES,
    PACKET_BYTES,
    WINDOW_BYTES,
)
from launcher.nodes.group import NodeFiles, public
from launcher.nodes.messages import Conversation, FromNode, NodeError

CONNECT_SECONDS = 10.0
KnownHosts = tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]] | None
_STAGGER_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a node may be: its addresses, best first, and its port. Its key must be this one; ""
    accepts any key, which only a pairing may do."""

    name: str
    addresses: Sequence[str]
    port: int
    key: str


async def connect(
    place: NodePlace,
    files: NodeFiles,
    user: str = MEMBER,
) -> asyncssh.SSHClientConnection:
    """Tries all addresses, each a moment after the one before, and returns the first connection.
    Raises NodeError."""
    if not place.addresses:
        raise NodeError(f"{place.name}: no address is known: run `brigade node` there")
    key = files.own_key()
    tries = [
        asyncio.create_task(_connect(place, address, key, user, number * _STAGGER_SECONDS))
        for number, address in enumerate(place.addresses)
    ]
    errors: list[NodeError] = []
    try:
        for done in asyncio.as_completed(tries):
            try:
                return await done
            except NodeError as error:
                errors.append(error)
    finally:
        await _end(tries)
    # Of several errors, one about the key or the pairing tells more than one about the network.
    raise max(errors, key=lambda error: not isinstance(error, NoRouteError))


def host_key(connection: asyncssh.SSHClientConnection) -> str:
    """Returns the public key that a node has proved to hold."""
    key = connection.get_server_host_key()
    assert key is not None
    return public(key)


class NoRouteError(NodeError):
    """Nobody answers at this address."""


class NotMemberError(NodeError):
    """The node answers, but does not know this machine's key, or has revoked it."""


async def _end(tries: Sequence[asyncio.Task[asyncssh.SSHClientConnection]]) -> None:
    """Ends the tries that are not needed, and closes connections that came too late."""
    finished = [each for each in tries if each.done() and not each.cancelled()]
    first = next((each.result() for each in finished if not each.exception()), None)
    for each in tries:
        each.cancel()
    for outcome in await asyncio.gather(*tries, return_exceptions=True):
        if isinstance(outcome, asyncssh.SSHClientConnection) and outcome is not first:
            outcome.abort()


async def _connect(
    place: NodePlace,
    address: str,
    key: asyncssh.SSHKey,
    user: str,
    wait_seconds: float,
) -> asyncssh.SSHClientConnection:
    await asyncio.sleep(wait_seconds)
    at = f"{address}:{place.port}"
    known: KnownHosts = None
    if place.key:
        known = ([asyncssh.import_public_key(place.key)], [], [])
    try:
        return await asyncssh.connect(
            address,
            place.port,
            username=user,
            client_keys=[key],
            known_hosts=known,
            config=None,
            agent_path=None,
            preferred_auth="publickey",
            connect_timeout=CONNECT_SECONDS,
            login_timeout=CONNECT_SECONDS,
            keepalive_interval=KEEP_ALIVE_SECONDS,
            keepalive_count_max=NUM_KEEP_ALIVES,
            **ALGORITHMS,
        )
    except asyncssh.HostKeyNotVerifiable as error:
        raise NodeError(
            f"{place.name}: another machine answers at {at}, or its key has changed: if so, run "
            f"`brigade nodes --forget {place.name}` and pair it again"
        ) from error
    except asyncssh.PermissionDenied as error:
        raise NotMemberError(
            f"{place.name}: {at} does not know this machine: run `brigade nodes --pair "
            f"{place.name}`"
        ) from error
    except asyncssh.Error as error:
        what = f"no node of Brigade answers at {at} ({error.reason})"
        raise NodeError(f"{place.name}: {what}") from error
    except (OSError, TimeoutError, UnicodeError) as error:
        # UnicodeError: the host cannot be a name, for example because of an empty label.
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else "no answer"
        raise NoRouteError(
            f"{place.name}: {at} cannot be reached ({reason}): is it on, and does `brigade node` "
            "run there? On macOS, allow the terminal under Privacy & Security, Local Network"
        ) from error


@asynccontextmanager
async def conversation(
    connection: asyncssh.SSHClientConnection, service: str
) -> AsyncIterator[Conversation]:
    """Opens a service of a node that is a conversation of messages. Raises NodeError, also if the
    connection is lost during the conversation."""
    try:
        process = await connection.create_process(
            service, encoding=None, window=WINDOW_BYTES, max_pktsize=PACKET_BYTES
        )
    except (asyncssh.Error, OSError) as error:
        raise NodeError(f"it has no service {service} ({error})") from error
    try:
        yield Conversation(process.stdout, process.stdin, FromNode)
    except (asyncssh.Error, OSError) as error:
        raise NodeError(f"the connection was lost ({error})") from error
    finally:
        with suppress(OSError):
            process.stdin.write_eof()
        process.close()


@asynccontextmanager
async def talking(place: NodePlace, files: NodeFiles) -> AsyncIterator[Conversation]:
    """Connects as a member, and opens the conversation of members. Raises NodeError, which names
    the node."""
    connection = await connect(place, files)
    try:
        async with connection, conversation(connection, "node") as talk:
            yield talk
    except NodeError as error:
        raise NodeError(f"{place.name}: {error}") from error
