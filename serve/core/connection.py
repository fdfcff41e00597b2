"""What a connection between ranks asks of the system."""

import socket

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_KEEP_ALIVE |= {"TCP_USER_TIMEOUT": 25_000}  # ms, of a peer that was sent something


def keep_alive(connection: socket.socket) -> None:
    """Has the system find out whether the peer is there: one that lost its power, or whose
    cable was pulled for long, is gone after 25 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # macOS calls the first one otherwise, and lacks the last.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
