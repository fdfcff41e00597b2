"""The connections between the parents: a star around rank 0's parent.

The connections exist before any engine starts, and stay when engines restart. Rank 0 waits for all
other ranks, has them start engines, receives the engines' reports, and stops them.

Both ends prove that they know the launch's secret, which is never sent. A report carries the life
of its engine: the number of restarts of all engines before it.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from serve.core.config import Address, Cluster
from serve.core.connection import advice
from serve.core.errors import (
    AddressError,
    ClusterError,
)
from serve.core.layouts import Link as LinkSpeed
from serve.core.messages import (
    Challenge,
    FromRank,
    Hello,
    Ping,
    Pong,
    Refused,
    Report,
    Stop,
    ToRank,
    Welcome,
)
from serve.parent.link import Link
from serve.parent.pings import Pings

_RETRY_SECONDS = 0.1
_HELLO_SECONDS = 5.0
_PONG_SECONDS = 2.0
# Limits for callers that have not yet proved that they belong to this launch.
MAX_HELLO_BYTES = 64 << 10
MAX_STRANGERS = 64


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank has joined rank 0: the process of its parent, and its facts, as in a Hello."""

    pid: int
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Gone:
    reason: str


Heard: TypeAlias = Joined | Gone | Report


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one end of a connection. facts are those of serve.core.facts."""

    rank: int
    num_ranks: int
    secret: str = field(repr=False)
    facts: dict[str, str]
    pid: int

    def proof(self, who: str, nonce: str) -> str:
        """Signs the nonce of the other end, as a proof that its sender belongs to this launch."""
        return hmac.digest(self.secret.encode(), f"{who} {nonce}".encode(), "sha256").hex()

    @classmethod
    def of_cluster(cls, cluster: Cluster, facts: dict[str, str], pid: int) -> "Identity":
        return cls(cluster.rank, cluster.num_ranks, cluster.secret, facts, pid)


class ControlServer:
    """Rank 0's end. on_message gets each rank's Joined, its reports, and Gone if it is lost."""

    def __init__(self, mine: Identity, on_message: Callable[[int, Heard], None]) -> None:
        self._mine, self._on_message = mine, on_message
        self._links: dict[int, Link[FromRank]] = {}
        self._heard: dict[int, asyncio.Event] = {}
        self._pings: dict[int, Pings] = {}
        self._connected: dict[asyncio.Task[Any], Link[FromRank]] = {}
        self._servers: list[asyncio.Server] = []
        self._stopping = False

    async def listen(self, address: Address) -> None:
        try:
            # Ports are not shared, so a second cluster on the same ports fails here.
            server = await asyncio.start_server(
                self._serve,
                address.host,
                address.port,
                reuse_port=False,
            )
        except (OSError, UnicodeError) as error:
            raise AddressError(
                f"Rank 0 cannot listen on {address} for the other ranks ({error}): "
                "is another cluster running there? Choose other ports "
                "(mlx.launch --starting-port) or stop it."
            ) from error
        self._servers.append(server)

    @property
    def joined(self) -> set[int]:
        return set(self._links)

    def send(self, rank: int, message: ToRank) -> None:
        """Sends a message to a rank, unless it is gone: then on_message has already got Gone."""
        if link := self._links.get(rank):
            link.send(message)

    def disconnect(self, rank: int) -> None:
        """Ends the connection of a rank that does not answer, so that it can join again."""
        if link := self._links.get(rank):
            self._lose(rank, f"Rank {rank} on {link.peer_host} is silent.")
            link.abort()

    async def close(self) -> None:
        self._stopping = True
        for server in self._servers:
            server.close()
        for link in self._connected.values():
            link.send(Stop())
        for link in list(self._connected.values()):
            await link.close()
        await asyncio.gather(*self._connected, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connected) - len(self._links) >= MAX_STRANGERS:
            writer.transport.abort()  # A rank of this launch would try again.
            return
        link: Link[FromRank] = Link(reader, writer, FromRank, MAX_HELLO_BYTES)
        link.keep_alive()
        task = asyncio.current_task()
        assert task is not None
        self._connected[task] = link
        try:
            await self._attend(link)
        finally:
            await link.close()
            del self._connected[task]

    async def _attend(self, link: Link[FromRank]) -> None:
        rank: int | None = None
        try:
            rank = await self._greet(link)
            if rank is not None:
                await self._listen(rank, link)
            reason = f"Rank {rank} on {link.peer_host} is gone."
        except ClusterError as error:
            reason = str(error)
        if rank is not None and self._links.get(rank) is link and not self._stopping:
            self._lose(rank, reason)

    async def _listen(self, rank: int, link: Link[FromRank]) -> None:
        """Passes reports on until the connection ends. Raises ClusterError for other messages."""
        while message := await link.receive():
            self._heard[rank].set()
            match message:
                case Pong():
                    self._pings[rank].on_pong()
                case Report():
                    self._on_message(rank, message)
                case Hello():
                    raise ClusterError(f"Rank {rank} on {link.peer_host} sent Hello twice.")

    def _lose(self, rank: int, reason: str) -> None:
        del self._links[rank]
        self._pings[rank].on_lost()
        self._on_message(rank, Gone(reason))

    async def _greet(self, link: Link[FromRank]) -> int | None:
        """Returns the rank of a caller that may join, or None after a refusal that says why."""
        nonce = secrets.token_hex()
        link.send(Challenge(nonce))
        try:
            hello = await asyncio.wait_for(link.receive(), _HELLO_SECONDS)
        except TimeoutError:
            return None  # The caller is another program.
        except ClusterError as error:
            link.send(Refused(f"its greeting cannot be read ({str(error).rstrip('.')})"))
            return None
        if not isinstance(hello, Hello):
            return None
        reason = self._objection(hello, nonce)
        if reason is None and hello.rank in self._links:
            reason = await self._make_room(hello.rank)
        if reason is not None:
            link.send(Refused(reason))
            return None
        link.allow_large_messages()
        link.send(Welcome(self._mine.proof("rank 0", hello.nonce)))
        rank = hello.rank
        self._links[rank] = link
        self._heard[rank] = asyncio.Event()
        self._pings[rank] = Pings(link)
        self._on_message(rank, Joined(hello.pid, hello.facts))
        return rank

    def _objection(self, hello: Hello, nonce: str) -> str | None:
        mine, rank = self._mine, hello.rank
        proof = mine.proof(f"rank {rank}", nonce)
        if not hmac.compare_digest(hello.proof.encode(), proof.encode()):
            return "it belongs to another launch: two clusters use the same ports"
        if hello.num_ranks != mine.num_ranks or rank not in range(1, mine.num_ranks):
            return f"it is rank {rank} of {hello.num_ranks}, not of {mine.num_ranks}"
        return None

    async def _make_room(self, rank: int) -> str | None:
        """Drops the old connection of a rank that returns, for example after its host lost power,
        which closes no connection. Without a secret, the caller could be a stranger."""
        if not self._mine.secret or await self.answers(rank):
            return f"there is a rank {rank} already: two clusters use the same ports"
        self.disconnect(rank)
        return None

    async def answers(self, rank: int) -> bool:
        """Whether a rank's parent runs, and can be reached."""
        heard = self._heard[rank]
        heard.clear()
        self.send(rank, Ping())
        try:
            return await asyncio.wait_for(heard.wait(), _PONG_SECONDS)
        except TimeoutError:
            return False

    async def measure(self, rank: int) -> LinkSpeed | None:
        """Measures the link to a rank's parent; None without a timely answer. Raises
        ClusterError."""
        if rank not in self._links:
            raise ClusterError(f"Rank {rank} is gone.")
        return await self._pings[rank].measure()


async def join(
    address: Address,
    mine: Identity,
    timeout_seconds: float,
    refused_seconds: float | None = None,
) -> Link[ToRank]:
    """Connects this rank to rank 0, which may start later, but must accept connections within
    refused_seconds (default: timeout_seconds) of the first attempt. A host that refuses connections
    is up, so timeout_seconds count from the last refusal. Raises ClusterError."""
    started = silent_since = time.monotonic()
    if refused_seconds is None:
        refused_seconds = timeout_seconds
    while True:
        try:
            # A host without power does not answer, and neither does a stopped process.
            return await asyncio.wait_for(_join_once(address, mine), _HELLO_SECONDS)
        except (TimeoutError, OSError) as error:
            now = time.monotonic()
            if isinstance(error, ConnectionRefusedError):
                silent_since = now
                seconds, max_seconds = now - started, refused_seconds
            else:
                seconds, max_seconds = now - silent_since, timeout_seconds
            if seconds > max_seconds:
                reason = getattr(error, "strerror", None) or "nobody answers"
                hint = advice(error) if isinstance(error, OSError) else ""
                raise ClusterError(
                    f"Rank {mine.rank} could not reach rank 0 at {address} within "
                    f"{max_seconds:g} s ({reason}): did rank 0 start? Does another program use "
                    f"that port?{hint}",
                    code="unreachable",
                ) from error
        await asyncio.sleep(_RETRY_SECONDS)


async def _join_once(address: Address, mine: Identity) -> Link[ToRank]:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    link: Link[ToRank] = Link(reader, writer, ToRank)
    link.keep_alive()
    try:
        await _introduce(link, mine, address)
    except BaseException:
        await link.close()
        raise
    return link


async def _introduce(link: Link[ToRank], mine: Identity, address: Address) -> None:
    challenge = await link.receive()
    if challenge is None:
        # A port forwarder accepts connections even before rank 0 has started.
        raise ConnectionError(0, "the connection was closed at once")
    if not isinstance(challenge, Challenge):
        raise _not_rank_0(address)
    nonce = secrets.token_hex()
    proof = mine.proof(f"rank {mine.rank}", challenge.nonce)
    link.send(Hello(mine.rank, mine.num_ranks, mine.pid, mine.facts, nonce, proof))
    match await link.receive():
        case Refused(reason):
            raise ClusterError(f"Rank 0 refused this rank: {reason}.", code="rank_refused")
        case Welcome(proof) if hmac.compare_digest(
            proof.encode(),
            mine.proof("rank 0", nonce).encode(),
        ):
            return
        case _:
            raise _not_rank_0(address)


def _not_rank_0(address: Address) -> ClusterError:
    return ClusterError(
        f"What listens on {address} is not rank 0 of this launch: does another program or "
        "cluster use that port? Choose other ports.",
        code="other_launch",
    )
