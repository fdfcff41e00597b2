"""The file by which commands of this machine find its running node, and which only one node holds.

Commands import this module and not the node, which needs the packages of its servers."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from serve.core.errors import ClusterError


class Running(msgspec.Struct, frozen=True):
    """Where commands of this machine reach the node, and its folder of sockets to neighbours."""

    port: int
    neighbours: str


@contextmanager
def only_node(folder: Path) -> Iterator[Callable[[Running], None]]:
    """Holds the lock of this user's node. Yields a function that tells commands where the node can
    be reached. Raises ClusterError."""
    path = folder / "node"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ClusterError(f"{path} cannot be written ({error.strerror}): delete it.") from error

    def tell(running: Running) -> None:
        os.pwrite(descriptor, msgspec.json.encode(running), 0)

    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                "your node runs on this machine already: `brigade nodes` shows what it sees."
            ) from None
        os.ftruncate(descriptor, 0)
        yield tell
    finally:
        os.close(descriptor)


def own_node(folder: Path) -> Running:
    """Returns this user's node on this machine. Raises ClusterError if none runs."""
    with suppress(OSError), (folder / "node").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return msgspec.json.decode(file.read(), type=Running)
            except msgspec.DecodeError:
                raise ClusterError("the node of this machine is starting: try again.") from None
    raise ClusterError("no node runs on this machine: run `brigade node` in another terminal.")
