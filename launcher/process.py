"""A rank from its supervisor's point of view, and the ranks of this machine."""

import codecs
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Protocol

from launcher.command import HOST, Ring, rank_environment
from launcher.hostfile import write_hostfile
from serve.core.errors import AddressError, LostRankError
from serve.core.folder import own_folder

LONGEST_LINE_BYTES = 65536
_AWAKE_SECONDS = 5.0  # how long `caffeinate` may take to end


class Process(Protocol):
    """The process of a rank, on this host or another. name is the prefix of its log lines, pid its
    process id on its own host."""

    name: str
    pid: int

    @property
    def lost(self) -> bool:
        """Whether a signal ended the process, or it ended because another rank was lost."""

    def lines(self) -> Iterator[str]:
        """Yields the lines that the process writes. The last lines may come after its end."""

    def signal(self, signum: int) -> None: ...

    def kill(self) -> None:
        """Kills the process and everything that it has started."""

    def wait(self) -> int:
        """Blocks until the process has ended, and returns its code as subprocess does."""


Start = Callable[[], Process]


class LocalProcess:
    """A process of this machine, in its own process group. Raises OSError if it cannot start."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        leash: int,
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(leash,),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._awake = _keep_awake(self.pid)

    @property
    def lost(self) -> bool:
        return is_loss(self._process.returncode or 0)

    def lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with self._process.stdout as pipe:
            while line := pipe.readline(LONGEST_LINE_BYTES):
                cut = len(line) == LONGEST_LINE_BYTES and not line.endswith(b"\n")
                yield shown(decoder.decode(line, final=not cut))

    def signal(self, signum: int) -> None:
        # Only to the rank, not to its group: the rank lets its engine finish.
        self._process.send_signal(signum)

    def kill(self) -> None:
        signal_group(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if hasattr(os, "waitid"):
            # A `poll` in the main thread has reaped the process already, so it has ended.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # On macOS before Python 3.13. macOS does not reuse a process id soon.
            self._process.wait()
        # Kills processes that the rank left behind. The rank still has its id, so no other process
        # is hit.
        self.kill()
        code = self._process.wait()
        if self._awake:
            self._awake.terminate()
            with suppress(subprocess.TimeoutExpired):  # It also ends with the rank by itself.
                self._awake.wait(_AWAKE_SECONDS)
        return code


def _keep_awake(pid: int) -> subprocess.Popen[bytes] | None:
    """Keeps a Mac awake until a process has ended, even if nobody waits for its end. Returns None
    where that is not possible."""
    caffeinate = shutil.which("caffeinate") if sys.platform == "darwin" else None
    if caffeinate is None:
        return None
    try:
        return subprocess.Popen(
            [caffeinate, "-ims", "-w", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at a terminal does not end it.
        )
    except OSError:
        return None


def is_loss(returncode: int) -> bool:
    """Whether a process that ended with this code, in subprocess's form, may be started again."""
    return returncode < 0 or returncode == LostRankError.exit_code


@contextmanager
def local_ranks(
    command: Sequence[str],
    num_ranks: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[Start]]:
    """Prepares ranks of this machine, which must start and end inside of the context."""
    # All ports come from one call: separate calls could return the same port twice.
    control, *ports = free_ports(1 + num_ranks)
    base = os.environ if environment is None else environment
    addresses = [[f"{HOST}:{port}"] for port in ports]
    num_starts: Counter[int] = Counter()
    with shared_ring(addresses, f"{HOST}:{control}", secrets.token_hex(16)) as ring:

        def start(rank: int) -> LocalProcess:
            # Written again for a rank that comes back, because systems clean their temporary
            # folders. A file that exists stays as it is: other ranks may be reading it.
            if not os.path.exists(ring.hostfile):
                write_hostfile(ring.hostfile, addresses)
            environment = rank_environment(base, ring, rank, num_ranks, num_starts[rank])
            num_starts[rank] += 1
            return LocalProcess(f"rank {rank}", command, environment, ring.leash)

        yield [partial(start, rank) for rank in range(num_ranks)]


@contextmanager
def shared_ring(
    addresses: Sequence[Sequence[str]],
    control: str,
    secret: str,
    listen: str = "",
) -> Iterator[Ring]:
    """Writes the files that ranks on this machine read, and removes them at the end."""
    leash, our_end = os.pipe()
    try:
        with own_folder() as folder:
            hostfile = f"{folder}/hosts.json"
            write_hostfile(hostfile, addresses)
            yield Ring(hostfile, control, secret, leash, listen)
    finally:
        os.close(leash)
        os.close(our_end)


def free_ports(count: int, address: str = HOST) -> list[int]:
    """Returns different ports of this machine that nobody uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(bound(address)) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def bound(address: str) -> socket.socket:
    """Returns a socket that reserves a free port of this address. Raises AddressError."""
    held = socket.socket()
    try:
        held.bind((address, 0))
    except OSError as error:
        held.close()
        raise AddressError(f"no free port on {address}: {error.strerror}.") from error
    return held


def shown(text: str) -> str:
    """Returns what a terminal would show of a line: only the last state of a progress bar."""
    return text.rstrip("\r\n").rpartition("\r")[2]


def signal_group(group: int, signum: signal.Signals) -> None:
    # macOS answers PermissionError when all that is left of a group is zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)
