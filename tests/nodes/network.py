"""Network namespaces that stand for machines on one switch, over which multicast passes."""

import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.cluster.recovery.test_namespaces import ip

_numbers = itertools.count()
_NETWORK = 0x40000000  # CLONE_NEWNET


def inside(namespace: str) -> list[str]:
    """Returns the beginning of a command that runs in a namespace."""
    return ["ip", "netns", "exec", namespace]


def enter(namespace: str) -> None:
    """Lets only this thread, and those that it starts, use the network of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


class Network:
    """Machines by number, each with the address 198.19.0.(number + 1) on its interface `lan`."""

    def __init__(self, num_machines: int) -> None:
        own = f"{os.getpid()}-{next(_numbers)}"  # A process may have several networks.
        self._space = f"bgsw{own}"
        self.names = [f"bgnode{own}-{number}" for number in range(num_machines)]

    def make(self) -> None:
        ip(f"netns add {self._space}")
        ip(f"-n {self._space} link add switch type bridge mcast_snooping 0")
        ip(f"-n {self._space} link set switch up")
        for number, name in enumerate(self.names):
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
            ip(f"link add lan netns {name} type veth peer name port{number} netns {self._space}")
            ip(f"-n {self._space} link set port{number} master switch up")
            self.plug(number, self.address(number))

    def remove(self) -> None:
        for name in [*self.names, self._space]:
            with suppress(OSError, subprocess.CalledProcessError):  # It was not made.
                ip(f"netns del {name}")

    def address(self, number: int) -> str:
        return f"198.19.0.{number + 1}"

    def plug(self, number: int, address: str) -> None:
        """Gives a machine this address on the switch, in place of any other."""
        name = self.names[number]
        ip(f"-n {name} addr flush dev lan")
        ip(f"-n {name} addr add {address}/24 dev lan")
        ip(f"-n {name} link set lan up")
        ip(f"-n {name} route replace 224.0.0.0/4 dev lan")

    def inside(self, number: int) -> list[str]:
        """Returns the beginning of a command that runs on a machine."""
        return inside(self.names[number])

    def delay(self, number: int, words: str) -> None:
        """Shapes what a machine sends, in tc's words, such as `delay 5ms rate 100mbit`."""
        tc = ["tc", "qdisc", "replace", "dev", "lan", "root", "netem", *words.split()]
        subprocess.run([*self.inside(number), *tc], check=True, capture_output=True, timeout=60)


@contextmanager
def network(num_machines: int) -> Iterator[Network]:
    """Makes a network, or skips the test where that is not possible."""
    made = Network(num_machines)
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        made.remove()
