"""Starts the ranks of one machine and keeps them: output, signals, deadlines, exit code.

    running ── a rank ended with 0 ──> waiting ── 5 s ──┐
       │                                  │             │
       ├── a rank failed, or a signal ────┴─────────────┴──> ending ── 3 s (12 s after a signal),
                                                               or a second signal ──> killed

One thread a rank reads its output and one waits for its end; they and the signal handlers put
events into one queue, and `run` sleeps on that queue. Knows no HTTP, no MLX and no command line.
"""

import codecs
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from types import FrameType

from launcher.command import HOST, Ring, exit_code, hostfile_text, rank_environment
from serve.core.errors import AddressError, ClusterError

FOLLOW_SECONDS = 5.0  # how long the others may go on once a rank has ended well
GRACE_SECONDS = 3.0  # how long a rank may take to end by itself when another failed
END_SECONDS = 7.0  # how long after a signal, once rank 0 has let running streams finish
DRAIN_SECONDS = 5.0 + END_SECONDS
GONE_SECONDS = 1.0  # how long the kernel may take to end a killed rank
OUTPUT_SECONDS = 1.0  # how long output may still come after a rank's end
LONGEST_LINE_BYTES = 65536
COLOURS = (36, 33, 35, 32, 34, 31)


@dataclass(frozen=True, slots=True)
class Ended:
    rank: int
    returncode: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A signal that this process got, or None when our own program asks."""

    signum: int | None


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        try:
            for each in sockets:
                each.bind((HOST, 0))
        except OSError as error:
            raise AddressError(f"no free port on {HOST}: {error.strerror}.") from error
        return [each.getsockname()[1] for each in sockets]


def write_line(line: str) -> None:
    # Nobody may be reading any more; the ranks must not block for that.
    with suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class Supervisor:
    """One launch. `run` blocks until every rank has ended; `stop` may be called from any thread.

    `ended` is set when `run` is done, and `interrupted` is true once this process got a signal.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        write: Callable[[str], None] = write_line,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self._command = list(command)
        self._num_ranks = num_ranks
        self._write = write
        self._drain_seconds = drain_seconds
        self._write_lock = threading.Lock()
        self._colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self._events: queue.SimpleQueue[Ended | Asked] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._alive: set[int] = set()
        self._state = "running"
        self._deadline: float | None = None
        self._code = 0
        self._forwarded = 0
        self.ended = threading.Event()
        self.interrupted = False

    def run(self) -> int:
        """Starts the ranks, waits for their end, and returns the first failing rank's code."""
        try:
            with self._signals(), self._ring() as ring:
                try:
                    self._start(ring)
                    while self._alive and self._state != "lost":
                        self._take(self._next_event())
                finally:
                    self._signal_groups(signal.SIGKILL)
        finally:
            self.ended.set()
        return self._code

    def stop(self) -> None:
        """Asks every rank to end; does nothing when they already do."""
        self._events.put(Asked(None))

    # --- events

    def _next_event(self) -> Ended | Asked | None:
        """None when the deadline has passed first."""
        timeout = None if self._deadline is None else max(0.0, self._deadline - monotonic())
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def _take(self, event: Ended | Asked | None) -> None:
        match event:
            case Ended():
                self._rank_ended(event.rank, event.returncode)
            case Asked(signum=None):
                if self._state in ("running", "waiting"):
                    self._end_all(signal.SIGTERM, "asked by the program")
            case Asked(signum=int(signum)):
                self._signalled(signum)
            case None:
                self._deadline_passed()

    def _rank_ended(self, rank: int, returncode: int) -> None:
        self._alive.discard(rank)
        code = exit_code(returncode)
        self._log(f"event=rank_ended rank={rank} code={code}")
        if self._forwarded and returncode == -self._forwarded:
            code = 0  # It was still starting, and ended as it was asked to.
        self._code = self._code or code
        if not self._alive:
            return
        if code and self._state in ("running", "waiting"):
            self._end_all(signal.SIGTERM, f"rank {rank} failed")
        elif self._state == "running":
            self._enter("waiting", FOLLOW_SECONDS)

    def _signalled(self, signum: int) -> None:
        self.interrupted = True
        name = signal.Signals(signum).name
        if self._state in ("running", "waiting"):
            # Only a terminal that goes away sends SIGHUP; to a rank that is a plain end.
            forwarded = signal.SIGTERM if signum == signal.SIGHUP else signal.Signals(signum)
            self._forwarded = int(forwarded)
            self._end_all(forwarded, name, self._drain_seconds)
        else:
            self._kill_all(f"a second {name}")

    def _deadline_passed(self) -> None:
        if self._state == "waiting":
            self._end_all(signal.SIGTERM, f"still running after {FOLLOW_SECONDS:g} s")
        elif self._state == "ending":
            self._kill_all("still running after being asked to end")
        else:
            self._log(f"event=rank_lost ranks={self._alive_text()} reason='not ended by SIGKILL'")
            self._code = self._code or exit_code(-signal.SIGKILL)
            self._state = "lost"

    def _end_all(
        self, signum: signal.Signals, reason: str, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self._log(f"event=ending ranks={self._alive_text()} signal={signum.name} reason='{reason}'")
        self._enter("ending", grace_seconds)
        for rank in self._alive:
            # To the rank alone, not its group: a rank lets its engine finish.
            self._processes[rank].send_signal(signum)

    def _kill_all(self, reason: str) -> None:
        self._log(f"event=killing ranks={self._alive_text()} reason='{reason}'")
        self._enter("killed", GONE_SECONDS)
        self._signal_groups(signal.SIGKILL)

    def _enter(self, state: str, seconds: float) -> None:
        self._state = state
        self._deadline = monotonic() + seconds

    def _signal_groups(self, signum: signal.Signals) -> None:
        for rank in self._alive:
            signal_group(self._processes[rank].pid, signum)

    # --- starting

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def forward(signum: int, _: FrameType | None) -> None:
            self._events.put(Asked(signum))

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [(signum, signal.signal(signum, forward)) for signum in caught]
        try:
            yield
        finally:
            for signum, handler in before:
                signal.signal(signum, handler)

    @contextmanager
    def _ring(self) -> Iterator[Ring]:
        """What the ranks share, for as long as they run."""
        # Both from one call: ports asked for apart could be the same.
        control, *ports = free_ports(1 + self._num_ranks)
        leash, our_end = os.pipe()
        descriptor, hostfile = tempfile.mkstemp(prefix="brigade-", suffix=".json")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(hostfile_text(ports))
            yield Ring(hostfile, f"{HOST}:{control}", secrets.token_hex(16), leash)
        finally:
            os.close(leash)
            os.close(our_end)
            os.unlink(hostfile)

    def _start(self, ring: Ring) -> None:
        for rank in range(self._num_ranks):
            try:
                process = subprocess.Popen(
                    self._command,
                    env=rank_environment(os.environ, ring, rank, self._num_ranks),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(ring.leash,),
                    start_new_session=True,
                )
            except OSError as error:
                raise ClusterError(f"rank {rank} cannot be started: {error}.") from error
            self._processes[rank] = process
            self._alive.add(rank)
            self._log(f"event=rank_started rank={rank} pid={process.pid}")
            self._watch(rank, process)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        reader = threading.Thread(target=self._copy_output, args=(rank, process), daemon=True)
        waiter = threading.Thread(target=self._await, args=(rank, process, reader), daemon=True)
        reader.start()
        waiter.start()

    # --- the threads of a rank

    def _await(self, rank: int, process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        wait_unreaped(process.pid)
        # What the rank left behind. Its number is still taken, so no stranger can be hit.
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(OUTPUT_SECONDS)
        self._events.put(Ended(rank, process.returncode))

    def _copy_output(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        prefix = self._prefix(rank)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with process.stdout as pipe:
            while line := pipe.readline(LONGEST_LINE_BYTES):
                cut = len(line) == LONGEST_LINE_BYTES and not line.endswith(b"\n")
                text = decoder.decode(line, final=not cut)
                self._say(prefix + shown(text))

    def _prefix(self, rank: int) -> str:
        text = f"[rank {rank}]"
        return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m " if self._colour else text + " "

    def _say(self, line: str) -> None:
        with self._write_lock:
            self._write(line)

    def _log(self, text: str) -> None:
        self._say("[launch] " + text)

    def _alive_text(self) -> str:
        return ",".join(map(str, sorted(self._alive)))


def shown(text: str) -> str:
    """What a terminal would show of a line: a progress bar's last state."""
    return text.rstrip("\r\n").rpartition("\r")[2]


def signal_group(group: int, signum: signal.Signals) -> None:
    # macOS answers PermissionError when all that is left of a group is zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def wait_unreaped(pid: int) -> None:
    """Waits for the end of a child but leaves its number taken, where the system can do that."""
    if hasattr(os, "waitid"):
        # Already reaped by a `poll` in the main thread: then it has ended, too.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
