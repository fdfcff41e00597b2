"""The TCP connections between the engines of a grid of stages and shards. MLX is not involved."""

import selectors
import socket
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from serve.core.addresses import Addresses
from serve.core.config import Address, parse_address
from serve.core.connection import advice, keep_alive
from serve.core.errors import ClusterError
from serve.core.messages import AroundRing, Greeting, Hop
from serve.core.wire import FrameReader, frame

_RETRY_SECONDS = 0.05
_MIN_WAIT_SECONDS = 0.01
_LISTEN_SECONDS = 0.05
_MAX_SILENT = 64  # the most connections that have not greeted yet
_READ_BYTES = 1 << 16


class RingLostError(ClusterError):
    """A neighbour or a link is gone. Everything that this process holds is still intact."""

    code = "lost_rank"


@dataclass(frozen=True, slots=True)
class Grid:
    """The place of this rank in a grid. Each row is a stage, and each column holds the same shard
    of all stages. A ring without shards is a single row. addresses lists where this rank finds each
    rank, row by row, and `own` lists where each rank finds this one (by default, at its entry in
    addresses). nonce distinguishes this start of the grid from others."""

    rank: int
    num_shards: int
    addresses: tuple[Address, ...]
    nonce: int
    timeout_seconds: float
    own: tuple[Address, ...] = ()

    @property
    def listens_on(self) -> tuple[Address, ...]:
        return self.own or (self.addresses[self.rank],)

    @property
    def num_stages(self) -> int:
        return len(self.addresses) // self.num_shards

    @property
    def stage(self) -> int:
        return self.rank // self.num_shards

    @property
    def shard(self) -> int:
        return self.rank % self.num_shards

    @property
    def row(self) -> list[int]:
        first = self.stage * self.num_shards
        return list(range(first, first + self.num_shards))

    @property
    def column(self) -> list[int]:
        return list(range(self.shard, len(self.addresses), self.num_shards))

    def left_in(self, ranks: Sequence[int]) -> int:
        """Returns the rank before this one in a row or a column; the last rank for the first."""
        return ranks[ranks.index(self.rank) - 1]

    def right_in(self, ranks: Sequence[int]) -> int:
        """Returns the rank after this one in a row or a column; the first rank for the last."""
        return ranks[(ranks.index(self.rank) + 1) % len(ranks)]


class PeerConnection:
    """One end of a connection between two engines. It carries messages, and the bytes of tensors
    that a message announces. tcp_socket is for code that sends other kinds of messages."""

    def __init__(self, tcp_socket: socket.socket) -> None:
        tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(tcp_socket)
        self.tcp_socket = tcp_socket
        self._reader: FrameReader[AroundRing] = FrameReader(AroundRing)

    def send(self, message: AroundRing, announced: memoryview | None = None) -> None:
        """Blocks until the system has taken all bytes. Raises ClusterError."""
        try:
            self.tcp_socket.sendall(frame(message))
            if announced is not None:
                self.tcp_socket.sendall(announced)
        except OSError as error:
            raise RingLostError(f"The link to a neighbour broke: {error}.") from error

    def receive(self) -> AroundRing | None:
        """Waits for the next message; None if the neighbour is gone. Raises ClusterError."""
        while True:
            data = self.read(self._reader.num_missing)
            if data is None:
                return None
            for message in self._reader.feed(data):
                return message

    def receive_some(self) -> AroundRing | None:
        """Reads the part of the next message that has arrived. Returns the message once it is
        complete. Raises ClusterError if the neighbour is gone or sends something else."""
        try:
            data = self.tcp_socket.recv(min(self._reader.num_missing, _READ_BYTES))
        except OSError as error:
            raise RingLostError(f"The link to a neighbour broke: {error}.") from error
        if not data:
            raise ClusterError("A neighbour is gone.")
        for message in self._reader.feed(data):
            return message
        return None

    def hop(self) -> Hop | None:
        """Waits for the next hop; returns None when the neighbour is gone. Raises ClusterError."""
        message = self.receive()
        if isinstance(message, Greeting):
            raise ClusterError("A neighbour sent a second Greeting.")
        return message

    def read(self, num_bytes: int) -> bytearray | None:
        """Reads num_bytes bytes; None if the connection ends earlier. Raises ClusterError."""
        data = bytearray(num_bytes)
        view = memoryview(data)
        try:
            while view:
                num_read = self.tcp_socket.recv_into(view)
                if not num_read:
                    return None
                view = view[num_read:]
        except OSError as error:
            raise RingLostError(f"The link to a neighbour broke: {error}.") from error
        return data

    def set_timeout(self, seconds: float | None) -> None:
        self.tcp_socket.settimeout(seconds)

    def close(self) -> None:
        with suppress(OSError):  # The neighbour may have closed it already.
            self.tcp_socket.shutdown(socket.SHUT_RDWR)
        self.tcp_socket.close()


def grid_of(
    ring: Sequence[int],
    addresses: Addresses,
    num_shards: int,
    nonce: int,
    timeout_seconds: float,
) -> Grid:
    """Returns a rank's place in the grid of these ranks of its launch. Raises UsageError."""
    theirs = [parse_address(addresses.theirs[rank][0], "MLX_HOSTFILE") for rank in ring]
    callers = [rank for rank in ring if rank != addresses.rank]
    own = [parse_address(addresses.own[rank][0], "BRIGADE_LISTEN") for rank in callers]
    place = ring.index(addresses.rank)
    unique = tuple(dict.fromkeys(own))
    return Grid(place, num_shards, tuple(theirs), nonce, timeout_seconds, unique)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The connections to the left and from the right, in the row and (if any) the column."""

    row_left: PeerConnection
    row_right: PeerConnection
    column_left: PeerConnection | None
    column_right: PeerConnection | None

    def close(self) -> None:
        for connection in (self.row_left, self.row_right, self.column_left, self.column_right):
            if connection:
                connection.close()


def meet(grid: Grid) -> Neighbours:
    """Connects this rank to its neighbours, at the ports of the hostfile. When it returns, all
    ranks of the row are ready, and none listens on its port any more, so that MLX can use it.
    Waiting for a late rank in MLX would hold the interpreter's lock, try again only after 1, 3, 7
    and 15 seconds, and leak a descriptor each time. Raises ClusterError."""
    deadline = time.monotonic() + grid.timeout_seconds
    row_left, row_right = grid.left_in(grid.row), grid.right_in(grid.row)
    column_left, column_right = grid.left_in(grid.column), grid.right_in(grid.column)
    has_column = grid.num_stages > 1
    called = {row_left, column_left} if has_column else {row_left}
    callers = {row_right, column_right} if has_column else {row_right}
    with ExitStack() as on_failure:
        left, right = _connect(grid, called, callers, deadline, on_failure)
        neighbours = Neighbours(
            left[row_left],
            right[row_right],
            left[column_left] if has_column else None,
            right[column_right] if has_column else None,
        )
        _wait_for_row(grid, neighbours, deadline)
        on_failure.pop_all()
    if grid.shard == grid.num_shards - 1:
        time.sleep(_LISTEN_SECONDS)  # The last rank connects first, and rank 0 has to listen.
    return neighbours


def meet_all(grid: Grid, peers: Set[int]) -> dict[int, PeerConnection]:
    """Connects this rank to these other ranks, in the same way as `meet`. Raises ClusterError."""
    deadline = time.monotonic() + grid.timeout_seconds
    below = {peer for peer in peers if peer < grid.rank}
    with ExitStack() as on_failure:
        left, right = _connect(grid, below, peers - below, deadline, on_failure)
        connections = left | right
        for connection in connections.values():
            connection.send(Greeting(grid.nonce, grid.rank))
        for rank, connection in connections.items():
            connection.set_timeout(_seconds_until(deadline))
            if connection.receive() is None:
                raise ClusterError(f"Rank {rank} is gone.")
            connection.set_timeout(None)
        on_failure.pop_all()
    return connections


def _connect(
    grid: Grid,
    called: Set[int],
    callers: Set[int],
    deadline: float,
    on_failure: ExitStack,
) -> tuple[dict[int, PeerConnection], dict[int, PeerConnection]]:
    left: dict[int, PeerConnection] = {}
    right: dict[int, PeerConnection] = {}
    with Reception(grid) as reception:
        for rank in sorted(called):
            left[rank] = _call(grid, rank, deadline)
            on_failure.callback(left[rank].close)
        while missing := callers - right.keys():
            rank, connection = reception.answer(missing, deadline)
            right[rank] = connection
            on_failure.callback(connection.close)
    return left, right


class Reception:
    """Answers the ranks that connect to this one. A slow rank may greet until the deadline."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._silent: dict[socket.socket, PeerConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._listening: dict[int, socket.socket] = {}  # by their descriptors
        with ExitStack() as on_failure:
            for address in grid.listens_on:
                listening = on_failure.enter_context(_listening(grid, address))
                self._listening[listening.fileno()] = listening
                self._selector.register(listening, selectors.EVENT_READ)
            on_failure.pop_all()

    def __enter__(self) -> "Reception":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._silent.values():
            connection.close()
        self._selector.close()
        for listening in self._listening.values():
            listening.close()

    def answer(self, expected: Set[int], deadline: float) -> tuple[int, PeerConnection]:
        """Returns the first of the expected ranks that greets with the nonce. Closes the
        connections of other callers. Raises ClusterError at the deadline."""
        while True:
            for connection in self._readable(expected, deadline):
                try:
                    greeting = connection.receive_some()
                except ClusterError:  # A port scanner, not a neighbour.
                    self._stop_watching(connection)
                    connection.close()
                    continue
                if greeting is None:
                    continue
                self._stop_watching(connection)
                if (
                    isinstance(greeting, Greeting)
                    and greeting.nonce == self._grid.nonce
                    and greeting.rank in expected
                ):
                    connection.set_timeout(None)
                    return greeting.rank, connection
                connection.close()

    def _readable(self, expected: Set[int], deadline: float) -> Iterator[PeerConnection]:
        """Accepts new callers, and yields those from which something can be read."""
        ready = self._selector.select(_seconds_until(deadline))
        if not ready or time.monotonic() > deadline:
            raise ClusterError(
                f"Rank {self._grid.rank} waited in vain for its neighbours {sorted(expected)}: "
                "timed out.",
                code="missing_rank",
            )
        for key, _ in ready:
            if listening := self._listening.get(key.fd):
                self._accept(listening)
            elif key.fileobj in self._silent:  # Otherwise a newer caller has taken its place.
                yield self._silent[key.fileobj]

    def _accept(self, listening: socket.socket) -> None:
        try:
            tcp_socket, _ = listening.accept()
        except OSError:  # The caller has gone again.
            return
        connection = PeerConnection(tcp_socket)
        connection.set_timeout(0)
        if len(self._silent) >= _MAX_SILENT:
            oldest = next(iter(self._silent.values()))
            self._stop_watching(oldest)
            oldest.close()
        self._silent[tcp_socket] = connection
        self._selector.register(tcp_socket, selectors.EVENT_READ)

    def _stop_watching(self, connection: PeerConnection) -> None:
        self._selector.unregister(connection.tcp_socket)
        del self._silent[connection.tcp_socket]


def _listening(grid: Grid, address: Address) -> socket.socket:
    try:
        made = socket.create_server((address.host, address.port), backlog=len(grid.addresses))
    except OSError as error:
        raise ClusterError(
            f"Rank {grid.rank} cannot listen on {address} ({error.strerror}): is another cluster "
            "running there? Choose other ports or stop it."
        ) from error
    made.setblocking(False)
    return made


def _call(grid: Grid, rank: int, deadline: float) -> PeerConnection:
    """Connects to another rank, which may not listen yet."""
    address = grid.addresses[rank]
    while True:
        seconds_left = _seconds_until(deadline)
        try:
            tcp_socket = socket.create_connection((address.host, address.port), seconds_left)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Rank {grid.rank} cannot reach rank {rank} at {address}: {error}."
                    f"{advice(error)}"
                ) from error
        time.sleep(_RETRY_SECONDS)
    connection = PeerConnection(tcp_socket)
    connection.send(Greeting(grid.nonce, grid.rank))
    connection.set_timeout(None)
    return connection


def _wait_for_row(grid: Grid, neighbours: Neighbours, deadline: float) -> None:
    """Returns when all ranks of the row have called this: a greeting goes around the row twice."""
    greeting = Greeting(grid.nonce, grid.rank)
    neighbours.row_right.set_timeout(_seconds_until(deadline))
    for _ in range(2):
        if grid.shard == 0:
            neighbours.row_left.send(greeting)
        if neighbours.row_right.receive() is None:
            raise ClusterError(f"Rank {grid.right_in(grid.row)} is gone.")
        if grid.shard:
            neighbours.row_left.send(greeting)
    neighbours.row_right.set_timeout(None)


def _seconds_until(deadline: float) -> float:
    return max(_MIN_WAIT_SECONDS, deadline - time.monotonic())
