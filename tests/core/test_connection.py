"""The options of connections between ranks, on Linux and as on macOS."""

import errno
import socket
from collections.abc import Iterator

import pytest

from serve.core import connection
from serve.core.connection import advice, keep_alive


class Recorder:
    """A socket that notes its options."""

    def __init__(self) -> None:
        self.options: dict[int, int] = {}

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if level == socket.IPPROTO_TCP:
            self.options[option] = value


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as made:
        yield made


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a name of Linux")
def test_a_peer_without_power_counts_as_lost_after_25_seconds(connected: socket.socket) -> None:
    keep_alive(connected)
    read = [
        connected.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    ]
    assert read[0] + read[1] * read[2] == 25
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_macos_drops_a_connection_whose_data_is_not_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its keep-alive probes wait while data is under way."""
    monkeypatch.setattr(connection.sys, "platform", "darwin")
    for name in ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT"):
        monkeypatch.delattr(socket, name, raising=False)
    monkeypatch.setattr(socket, "TCP_KEEPALIVE", 0x10, raising=False)
    recorder = Recorder()
    keep_alive(recorder)  # type: ignore[arg-type]
    assert recorder.options[0x10] == 10
    assert recorder.options[0x80] == 25


def test_only_errors_about_a_route_mention_the_network_privacy_of_macos() -> None:
    assert "Local Network" in advice(OSError(errno.EHOSTUNREACH, "No route to host"))
    assert advice(OSError(errno.ECONNREFUSED, "Connection refused")) == ""
