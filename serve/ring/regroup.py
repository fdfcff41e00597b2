"""Lets a process form another group of MLX after it has left one.

Once `mx.distributed.init` has formed a group, it returns only that group until MLX's C++ function
`clear_backends` is called. mlx.core calls this function only at exit, so this module finds it by
its name in MLX's library.
"""

import ctypes
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

_MAX_SHARE_OF_DESCRIPTORS = 0.5
_CLEAR_BACKENDS = "_ZN3mlx4core11distributed14clear_backendsEv"


def clear_groups() -> None:
    """Makes MLX drop its references to the groups that it has formed. A group closes its
    connections with its last reference. Raises OSError or AttributeError if MLX cannot do that."""
    _clear_backends()()


def objection() -> str | None:
    """Returns the reason why this process should not form another group, or None. Whether
    MLX has `clear_backends` is checked here, whether it works by `brigade doctor`."""
    num_open = len(os.listdir("/dev/fd"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and num_open > _MAX_SHARE_OF_DESCRIPTORS * limit:
        return f"{num_open} of {limit} descriptors are open"
    try:
        _clear_backends()
    except (OSError, AttributeError) as error:
        return f"this MLX does not offer clear_backends ({type(error).__name__})"
    return None


@contextmanager
def closing_failed_connections() -> Iterator[None]:
    """Closes the sockets that MLX leaves open when it forms a group in this context: one for each
    attempt to connect to a neighbour that does not listen yet."""
    before = _open_descriptors()
    try:
        yield
    finally:
        for descriptor in _open_descriptors() - before:
            if _is_failed_connection(descriptor):
                os.close(descriptor)


def _open_descriptors() -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the listing's own descriptor, which is closed again
            os.fstat(int(name))
            found.add(int(name))
    return found


def _is_failed_connection(descriptor: int) -> bool:
    """Whether this is a socket that MLX has given up. MLX sets TCP_NODELAY on all connections of a
    group, so a connection that the peer has closed meanwhile is not mistaken for a failed one."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        examined = socket.socket(fileno=descriptor)
    except OSError:  # Some systems say nothing about a connection that was refused.
        return False
    try:
        if examined.family != socket.AF_INET or examined.type != socket.SOCK_STREAM:
            return False
        is_listening = examined.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        has_no_delay = examined.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        return not is_listening and not has_no_delay and not _has_peer(examined)
    except OSError:  # Some systems say nothing about a connection that has ended.
        return False
    finally:
        examined.detach()


def _has_peer(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _clear_backends() -> Callable[[], Any]:
    name = "libmlx.dylib" if sys.platform == "darwin" else "libmlx.so"
    library = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / name))
    clear = library[_CLEAR_BACKENDS]
    clear.restype = None
    return clear
