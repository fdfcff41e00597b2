"""The socket that the server listens on."""

import errno
import socket

from serve.core.errors import AddressError
from serve.front.http.server import BACKLOG


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises AddressError if the address cannot be used."""
    listening = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # Listens at once: two sockets can be bound to the same port until one of them listens.
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except (OSError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        raise AddressError(_address_message(host, port, error)) from error
    return listening


def _address_message(host: str, port: int, error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return f"--host {host} is not an address: give one of this machine, such as 127.0.0.1."
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use: stop the program that uses it, or give another --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more privileges: give a --port above 1023."
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"--host {host} is not an address of this machine: give another, such as 127.0.0.1."
    return f"{host}:{port} cannot be listened on ({error.strerror}): give another --host or --port."
