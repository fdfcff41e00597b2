"""The connections between ranks: when a peer counts as lost, and what macOS may have forbidden."""

import errno
import socket
import sys

# A peer that does not answer counts as lost after 10 + 3 * 5 = 25 seconds. macOS calls the first
# option TCP_KEEPALIVE, and has no TCP_USER_TIMEOUT.
_OPTIONS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPALIVE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,  # in milliseconds, for data that is not acknowledged
}

# TCP_USER_TIMEOUT's counterpart on macOS, in seconds, from <netinet/tcp.h>: Python lacks it.
_TCP_RXT_CONNDROPTIME = 0x80
_DROP_SECONDS = 25


def keep_alive(connection: socket.socket) -> None:
    """Makes the system notice within 25 s when the peer has lost its power or its cable."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if sys.platform == "darwin":
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, _DROP_SECONDS)


def advice(error: OSError) -> str:
    """Returns what to do about an error that macOS gives to a program without access to the local
    network, or an empty string. Programs started from Terminal or over ssh always have access."""
    if error.errno != errno.EHOSTUNREACH:
        return ""
    return (
        " If other programs reach that host: on macOS, allow access under Privacy & Security, "
        "Local Network, or start the ranks from Terminal."
    )
