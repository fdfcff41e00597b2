"""Neighbours that meet over TCP, with callers that greet late or never."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from serve.core.config import Address
from serve.core.errors import ClusterError
from serve.core.messages import Greeting
from serve.core.wire import frame
from serve.ring.peers import Grid, PeerConnection, Reception, meet_all
from tests.errors import fails
from tests.ports import free_ports

NONCE = 7
OLD_LIMIT = 5.5  # seconds, a little more than a neighbour once had for its greeting


def grid(timeout_seconds: float = 60.0) -> Grid:
    """As rank 0 of two sees it: rank 1 calls."""
    addresses = tuple(Address("127.0.0.1", port) for port in free_ports(2))
    return Grid(0, 1, addresses, NONCE, timeout_seconds)


def call(address: Address) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((address.host, address.port), 30)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextmanager
def meeting(own: Grid) -> Iterator[None]:
    """Lets rank 0 meet rank 1 in a thread, and expects that it succeeds."""
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(meet_all, own, {1})
        yield
        connections = met.result(timeout=60)
    assert connections.keys() == {1}
    connections[1].close()


def greet(connection: socket.socket, nonce: int = NONCE) -> None:
    connection.sendall(frame(Greeting(nonce, 1)))


def is_answered(connection: socket.socket) -> bool:
    return PeerConnection(connection).receive() == Greeting(NONCE, 0)


@pytest.mark.slow
def test_a_neighbour_that_greets_late_is_awaited() -> None:
    own = grid()
    with meeting(own), call(own.addresses[0]) as neighbour:
        time.sleep(OLD_LIMIT)
        greet(neighbour)
        greet(neighbour)  # The second one says that rank 1 has met all.
        assert is_answered(neighbour)


def test_a_neighbour_is_answered_although_foreign_programs_connect() -> None:
    own = grid(1000.0)
    with meeting(own), call(own.addresses[0]) as silent, call(own.addresses[0]) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with call(own.addresses[0]) as other_start:
            greet(other_start, NONCE + 1)
            assert other_start.recv(1) == b""
        with call(own.addresses[0]) as neighbour:
            neighbour.settimeout(60)  # Nobody waits a thousand seconds for the silent one.
            first, rest = frame(Greeting(NONCE, 1))[:9], frame(Greeting(NONCE, 1))[9:]
            neighbour.sendall(first)
            neighbour.sendall(rest)
            greet(neighbour)
            assert is_answered(neighbour)
        assert silent.recv(1) == b""


def test_foreign_programs_that_connect_do_not_count_as_neighbours() -> None:
    own = grid()
    # The time begins once the caller is there.
    with Reception(own) as reception, call(own.addresses[0]) as foreign:
        foreign.sendall(frame(Greeting(NONCE, 1))[:5])
        with fails(ClusterError, "missing_rank"):
            reception.answer({1}, time.monotonic() + 1.0)
