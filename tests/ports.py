"""Ports for the servers that tests start.

An operating system gives the ports of its ephemeral range to everybody who connects somewhere or
asks for any port. One from there may be taken before the server that should have it has started. So
these lie below that range (Linux: 32768, macOS: 49152), and each process has a block of them to
itself for as long as it holds the block's first port.
"""

import atexit
import functools
import itertools
import random
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"
BLOCK_SIZE = 100
BLOCKS = range(20_000, 32_000, BLOCK_SIZE)


def free_ports(count: int, address: str = HOST) -> list[int]:
    """Returns consecutive ports of an address of this machine that nobody uses."""
    for first in itertools.islice(_own_ports(), BLOCK_SIZE):
        ports = list(range(first, first + count))
        if _in_one_block(ports) and all(_is_free(port, address) for port in ports):
            # The next call begins after these.
            for _ in ports[1:]:
                next(_own_ports())
            return ports
    raise AssertionError(f"this process has no {count} consecutive free ports left")


def _in_one_block(ports: list[int]) -> bool:
    return ports[0] // BLOCK_SIZE == ports[-1] // BLOCK_SIZE


def _is_free(port: int, address: str) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind((address, port))
        except OSError:
            return False
    return True


@functools.cache
def _own_ports() -> Iterator[int]:
    """The ports of this process's block, again and again."""
    first = _held_port().getsockname()[1]
    return itertools.cycle(range(first + 1, first + BLOCK_SIZE))


@functools.cache
def _held_port() -> socket.socket:
    """Keeps other processes out of a block."""
    # Not the order that a test with a seed would get.
    chance = random.SystemRandom()
    for first in chance.sample(BLOCKS, len(BLOCKS)):
        held = socket.socket()
        try:
            held.bind((HOST, first))
        except OSError:
            held.close()
            continue
        atexit.register(held.close)
        return held
    raise AssertionError(f"all ports from {BLOCKS.start} to {BLOCKS.stop} are in use")
