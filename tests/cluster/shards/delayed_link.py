"""A link between two network namespaces of this machine that delivers packets late. It needs Linux
and root.

The link has a TUN device at each end. When this module runs as a program, it passes packets from
one device to the other. That is a process of its own, because a busy interpreter would delay the
packets further.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

HERE, THERE = "198.18.78.1", "198.18.78.2"  # a range for tests of networks
MTU = 9000
_MAX_PACKET = 1 << 16
# From linux/if_tun.h: packets without a header of their own, of IP.
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


class NoLinkError(Exception):
    """This machine or this user cannot make such a link."""


@contextmanager
def delayed_link(delay_seconds: float) -> Iterator[str]:
    """Makes a link to another network namespace, and yields the namespace's name. This side has the
    address HERE, and the other side THERE. Raises NoLinkError."""
    space = f"brigade{os.getpid()}"
    devices = [f"bd{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as stack:
        try:
            _ip(f"netns add {space}")
            stack.callback(_ip, f"netns del {space}")
            ends: list[int] = []
            for device in devices:
                end = _open_tun(device)
                stack.callback(os.close, end)
                ends.append(end)
            here, there = devices
            _ip(f"link set {there} netns {space}")
            _ip(f"addr add {HERE}/30 dev {here}")
            _ip(f"link set {here} mtu {MTU} up")
            _ip(f"-n {space} addr add {THERE}/30 dev {there}")
            _ip(f"-n {space} link set {there} mtu {MTU} up")
            _ip(f"-n {space} link set lo up")
        except (OSError, subprocess.SubprocessError) as error:
            raise NoLinkError(f"no network namespaces or no TUN devices here: {error}") from error
        words = [sys.executable, "-m", "tests.cluster.shards.delayed_link", *map(str, ends)]
        # The relay ends when its standard input is closed, also if this process is killed.
        relay = subprocess.Popen(
            [*words, str(delay_seconds)],
            stdin=subprocess.PIPE,
            pass_fds=ends,
        )
        stack.callback(relay.communicate)
        yield space


def in_space(space: str) -> list[str]:
    """Returns the words before a command that make it run in a network namespace."""
    return ["ip", "netns", "exec", space]


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=60)


def _open_tun(name: str) -> int:
    """Makes a TUN device, which is gone when its descriptor is closed."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    request = struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    return device


def relay(left: int, right: int, delay_seconds: float) -> None:
    """Passes packets between two devices, each one delay_seconds after it came. Returns when
    standard input is closed."""
    other = {left: right, right: left}
    stdin = sys.stdin.fileno()
    late: deque[tuple[float, int, bytes]] = deque()  # by the time at which they are due
    while True:
        seconds = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable, _, _ = select.select([left, right, stdin], [], [], seconds)
        if stdin in readable:
            return
        for device in readable:
            packet = os.read(device, _MAX_PACKET)
            late.append((time.monotonic() + delay_seconds, other[device], packet))
        while late and late[0][0] <= time.monotonic():
            _, target, packet = late.popleft()
            os.write(target, packet)


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
