"""Measures a hop: the round-trip time and the bandwidth between two hosts.

Like the ring, a measurement uses plain TCP. A message is a length and as many bytes; the answer is
one byte.
"""

import socket
import struct
import threading
import time
from contextlib import suppress
from statistics import median

from launcher.process import bound
from serve.core.agent_messages import HopSpeed

_LENGTH = struct.Struct("!Q")
_MAX_BYTES = 8 << 20
_NUM_PINGS = 20
_TIMEOUT_SECONDS = 5.0
_IDLE_SECONDS = 30.0


class Echo:
    """Answers on a free port of an address, until nobody has called for half a minute."""

    def __init__(self, ip: str) -> None:
        self._listening = bound(ip)
        self._listening.listen()
        self._listening.settimeout(_IDLE_SECONDS)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listening, suppress(TimeoutError):
            while True:
                connection, _ = self._listening.accept()
                # If a measurement breaks off, its caller reports that.
                with connection, suppress(OSError, struct.error):
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_TIMEOUT_SECONDS)
        while header := connection.recv(_LENGTH.size, socket.MSG_WAITALL):
            (left,) = _LENGTH.unpack(header)
            while left > 0 and (data := connection.recv(min(left, 1 << 18))):
                left -= len(data)
            connection.sendall(b"\n")


def measure_hop(ip: str, port: int, seconds: float) -> HopSpeed:
    """Measures a hop to the Echo at this address, by sending for some seconds. Raises OSError."""
    with socket.create_connection((ip, port), _TIMEOUT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trip = median(_send(connection, 0) for _ in range(_NUM_PINGS))
        num_bytes = 0
        started = time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds:
            size = min(_MAX_BYTES, max(1 << 16, num_bytes))
            _send(connection, size)
            num_bytes += size
    return HopSpeed(round_trip, num_bytes / passed)


def _send(connection: socket.socket, size: int) -> float:
    started = time.perf_counter()
    connection.sendall(_LENGTH.pack(size) + bytes(size))
    if connection.recv(1) != b"\n":
        raise ConnectionError("the connection was lost")
    return time.perf_counter() - started
