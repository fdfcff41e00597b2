"""Starts ranks and supervises them: output, signals, deadlines, exit code.

    running ── a rank ended with 0 ──> waiting ── 5 s ──┐
       │                                  │             │
       ├── a rank failed, or a signal ────┴─────────────┴──> ending ── --drain-timeout and 7 s,
                                                               or a second signal ──> killed

While running, a rank above 0 that was lost is started again, a limited number of times. A start
that fails, as on a host that is still booting, is repeated until rank 0 gives up waiting. A
suspended rank does not end: rank 0 logs that the rank does not answer, and the supervisor kills it.
The ranks of a training run depend on each other: if one is lost, all end, and then all start again.

If a server replans, its other ranks can take over the layers of a rank above 0. Once the server has
been ready, a rank that is lost too often, or fails by itself, is left out, and the others go on.

Each rank has two threads: one reads its output, and one waits for its end. The threads and the
signal handlers put events into one queue, for which `run` waits. It knows no HTTP, MLX or command
line.
"""

import json
import math
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any, TypeAlias

from launcher.command import exit_code
from launcher.process import Process, Start
from serve.core.errors import ClusterError, LostRankError
from serve.core.restart_window import RestartWindow

FOLLOW_SECONDS = 5.0  # how long other ranks may go on after one has ended with code 0
END_SECONDS = 7.0  # how long a rank may take to end after a signal, besides --drain-timeout
DRAIN_SECONDS = 5.0 + END_SECONDS
GONE_SECONDS = 2.0  # how long a killed rank may take to disappear, on another host too
LEFT_SECONDS = 10.0  # replaces GONE_SECONDS if all ranks restart; then silent hosts are ignored
RESTART_SECONDS = 1.0  # the pause before each restart of a rank but the first
RETRY_SECONDS = 2.0  # the pause between attempts at one restart
RESTART_WINDOW_SECONDS = 300.0
MAX_RESTARTS = 5  # how often a rank may restart within a window
EARLY_SECONDS = 60.0  # If a returned rank ends sooner, its host was not ready.
OUTPUT_SECONDS = 1.0  # how long output may still come after a rank's end
COLOURS = (36, 33, 35, 32, 34, 31)
_READY = "Ready on "  # the beginning of the line that rank 0 of a server writes when it is ready
_READY_COLOUR = "1;32"  # bold, green

# Rank 0's log line about a rank whose parent does not answer. The pattern matches whole lines, so
# nothing that a client sends can match.
_SILENT = re.compile(r"[\d-]+ [\d:,]+ WARNING event=rank_silent rank=(\d+) pid=(\d+)")

# The whole log line of a server's rank 0 when it can answer.
_READY_EVENT = re.compile(r"[\d-]+ [\d:,]+ INFO event=ready num_ranks=\d+ url=\S+")

# The signals of a closed terminal and of Ctrl-\, which are passed to ranks as SIGTERM.
_AS_SIGTERM = (signal.SIGHUP, signal.SIGQUIT)

_DEFAULT_HANDLERS = (None, signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)

# The one line in which a rank says why it ends.
_ERROR = re.compile(r"brigade [a-z-]+: (.+)")


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's process has ended. `lost` says that a signal or the loss of another rank was the
    cause; a lost rank may be started again."""

    rank: int
    returncode: int
    lost: bool


@dataclass(frozen=True, slots=True)
class Returned:
    """A rank was started again, or could not be (process is None) before all were asked to end."""

    rank: int
    process: Process | None


@dataclass(frozen=True, slots=True)
class Silent:
    """Rank 0 has logged that a rank does not answer. pid is the process id on the rank's host."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Rank 0 has logged that the server is ready."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody asked the ranks to end: by a signal to this process, or (None) by calling stop."""

    signum: int | None


Event: TypeAlias = Ended | Returned | Silent | ServerReady | Asked


def write_line(line: str) -> None:
    """Writes a line to standard error. If nobody reads it, it is lost: ranks must not block."""
    with suppress(OSError, ValueError):
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except BrokenPipeError:
            # At exit, Python would fail to write the rest of its buffer, and return 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def event_line(text: str, level: str = "INFO") -> str:
    """Returns a log line of the launcher itself, with time and level as in the lines of `serve`."""
    now = time.time()
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"[launch] {clock},{int(now * 1000) % 1000:03d} {level} {text}"


class Observer:
    """Its methods are called from a rank's thread when the rank starts, writes a line or ends."""

    def started(self, rank: int, pid: int) -> None: ...

    def said(self, rank: int, line: str) -> None: ...

    def ended(self, rank: int, code: int, then: str = "") -> None: ...


class Supervisor:
    """One launch. `run` blocks until every rank has ended; `stop` may be called from any thread.

    ranks yields the functions that start the ranks; its context outlives the ranks. `serves` says
    that the program is a server: if a signal ends one of its ranks before the rank can handle
    signals, that is a normal end. `replans` says that the server goes on without a rank above 0.
    `trains` says that the program is a training run, whose ranks are all started again if one is
    lost. join_seconds is the time for which a rank tries to reach rank 0, and drain_seconds the
    time that a rank may take to end. `ended` is set when `run` is done, and `interrupted` is the
    first signal that this process got.
    """

    def __init__(
        self,
        ranks: AbstractContextManager[Sequence[Start]],
        write: Callable[[str], None] = write_line,
        drain_seconds: float = DRAIN_SECONDS,
        observer: Observer | None = None,
        max_restarts: int = 0,
        serves: bool = False,
        replans: bool = False,
        trains: bool = False,
        join_seconds: float = 0.0,
    ) -> None:
        self._ranks = ranks
        self._write = write
        self._observer = observer or Observer()
        self._drain_seconds = drain_seconds
        self._write_lock = threading.Lock()
        self._colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._starts: Sequence[Start] = ()
        self._processes: dict[int, Process] = {}
        self._alive: set[int] = set()
        self._returning: set[int] = set()
        self._unreachable: dict[int, str] = {}  # why a rank that is waited for cannot be started
        self._unwanted: set[int] = set()  # ranks that came back too late
        self._came_back_at: dict[int, float] = {}
        self._max_restarts = max_restarts
        self._serves = serves
        self._replans = replans
        self._trains = trains
        self._is_restarting = False  # whether all ranks of a training run end to start again
        self._has_been_ready = False
        self._have_started = False  # whether each rank has been started once
        self._early_seconds = EARLY_SECONDS + join_seconds
        self._losses: dict[int, RestartWindow] = {}
        self._ending = threading.Event()
        self._errors: dict[int, str] = {}  # the reason that a rank last gave for its end
        self._unwritten: dict[int, str] = {}  # the line with a rank's reason, until it is written
        self._first_failed: tuple[int, int] | None = None
        self._is_done = False  # whether rank 0 of a server or a training run has ended with code 0
        self._state = "running"
        self._deadline: float | None = None
        self._code = 0
        self._forwarded = 0
        self.ended = threading.Event()
        self.interrupted = 0

    def run(self) -> int:
        """Starts the ranks, waits for their end, and returns the first failing rank's code."""
        try:
            with self._signals(), self._ranks as starts:
                try:
                    self._start(starts)
                    self._have_started = True
                    while self._is_running():
                        self._handle(self._next_event())
                finally:
                    self._kill_alive()
        finally:
            self.ended.set()
        self._log_failure()
        return self._code

    def _is_running(self) -> bool:
        """Whether there is something to wait for. Starts a training run again if that is due."""
        if self._state == "lost":
            return False
        if not self._alive and not self._returning and self._is_restarting:
            self._start_all_again()
        return bool(self._alive or self._returning)

    def _log_failure(self) -> None:
        """Writes the reason of the failure as the last line, below the lines of other ranks."""
        for rank in list(self._unwritten):
            self._write_reason(rank)
        if self._first_failed:
            rank, code = self._first_failed
            reason = " ".join(filter(None, [self._errors.get(rank), *self._unreachable.values()]))
            if reason:
                reason = f" reason={json.dumps(reason)}"
            self._log(f"event=failed rank={rank} code={code}{reason}", "ERROR")

    def _write_reason(self, rank: int) -> None:
        """Writes why a rank ends, unless the last line of the launch says the same."""
        line = self._unwritten.pop(rank, None)
        last_reason = None
        if self._first_failed:
            failed, _ = self._first_failed
            last_reason = self._errors.get(failed)
        if line is not None and self._errors.get(rank) != last_reason:
            self._say(line)

    def stop(self) -> None:
        """Asks every rank to end. Does nothing if they are ending already."""
        self._events.put(Asked(None))

    # --- events

    def _next_event(self) -> Event | None:
        """Waits for the next event; returns None if the deadline passes first."""
        if self._deadline is None or not self._alive:
            timeout = None
        else:
            timeout = max(0.0, self._deadline - monotonic())
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def _handle(self, event: Event | None) -> None:
        match event:
            case Ended():
                self._rank_ended(event)
            case Returned():
                self._returned(event)
            case Silent():
                self._replace(event)
            case ServerReady():
                self._has_been_ready = True
            case Asked(signum):
                if signum is not None:
                    self._signalled(signum)
                elif self._state in ("running", "waiting"):
                    self._end_all(signal.SIGTERM, "asked by the program")
            case None:
                self._deadline_passed()

    def _returned(self, event: Returned) -> None:
        rank = event.rank
        self._returning.discard(rank)
        if event.process is None:
            return
        self._came_back_at[rank] = monotonic()
        self._adopt(rank, event.process)
        if self._ending.is_set():
            self._unwanted.add(rank)
            event.process.kill()

    def _rank_ended(self, event: Ended) -> None:
        rank = event.rank
        returncode = event.returncode
        self._alive.discard(rank)
        self._returning.discard(rank)
        code = exit_code(returncode)
        is_ended_from_here = self._first_failed and returncode == -signal.SIGTERM
        if not is_ended_from_here:
            self._log(f"event=rank_ended rank={rank} code={code}")
        if self._trains and self._ends_to_restart(event):
            self._observer.ended(rank, code, "comes back")
            self._write_reason(rank)
            return
        # A rank that comes back may find that a disk or an interface of its host is not ready yet.
        back_seconds = monotonic() - self._came_back_at.get(rank, -math.inf)
        is_early = code != 0 and back_seconds < self._early_seconds and self._is_awaited(rank)
        if event.lost:
            comes_back = self._has_restarts_left(rank) and self._is_awaited(rank)
        else:
            comes_back = is_early
        if not comes_back and self._is_dispensable(rank, code):
            self._leave_out(rank, code, event.lost)
            return
        self._observer.ended(rank, code, "comes back" if comes_back else "")
        if comes_back:
            self._write_reason(rank)
            self._come_back(rank, is_early)
            return
        if rank in self._unwanted or self._as_asked(returncode) or self._follows(code):
            code = 0
        if rank == 0 and (self._serves or self._trains) and code == 0:
            self._is_done = True
        if code and not self._code and not self.interrupted:
            self._first_failed = rank, code
        self._code = self._code or code
        self._write_reason(rank)
        if not self._alive and not self._is_rank_0_to_follow(code):
            self._give_up_waiting()
            return
        if code and self._state in ("running", "waiting"):
            self._end_all(signal.SIGTERM, f"rank {rank} failed")
        elif self._state == "running" and not (self._trains and rank):
            self._enter("waiting", FOLLOW_SECONDS)

    def _is_rank_0_to_follow(self, code: int) -> bool:
        """Whether a rank of a training run has ended with code 0, and rank 0 is still to be started
        again."""
        return self._trains and code == 0 and 0 in self._returning

    def _ends_to_restart(self, event: Ended) -> bool:
        """Whether all ranks of a training run are started again, because this one or another one
        was lost. If another rank was lost, it does not matter how this one has ended."""
        is_loss = event.lost and self._state == "running"
        if is_loss and self._has_restarts_left(0):
            self._is_restarting = True
            self._end_all(signal.SIGTERM, f"rank {event.rank} was lost: all are started again")
        return self._is_restarting

    def _start_all_again(self) -> None:
        self._is_restarting = False
        self._ending.clear()
        self._unwanted.clear()
        self._errors.clear()
        self._state = "running"
        self._deadline = None
        for rank in range(len(self._starts)):
            self._come_back(rank)

    def _is_dispensable(self, rank: int, code: int) -> bool:
        """Whether the others go on without a rank that has ended and does not come back."""
        goes_on = self._replans and self._has_been_ready and self._is_awaited(rank)
        return goes_on and rank > 0 and code != 0

    def _leave_out(self, rank: int, code: int, is_lost: bool) -> None:
        why = "it ended by itself"
        if is_lost:
            why = f"it was lost more than {self._max_restarts} times"
            why += f" in {RESTART_WINDOW_SECONDS:g} s"
        reason = f"{why}: rank 0 goes on without it (--replan), until the next launch"
        self._observer.ended(rank, code, "left out")
        self._write_reason(rank)
        self._log(f"event=rank_left_out rank={rank} reason={json.dumps(reason)}", "WARNING")

    def _as_asked(self, returncode: int) -> bool:
        return bool(self._serves and self._forwarded and returncode == -self._forwarded)

    def _follows(self, code: int) -> bool:
        """Whether a rank ended only because rank 0 had done all its work. A rank without a
        connection to rank 0 does not learn this: it fails to connect, or the launcher ends it."""
        codes = (ClusterError.exit_code, LostRankError.exit_code)
        signals = (exit_code(-signal.SIGTERM), exit_code(-signal.SIGKILL))
        return self._is_done and code in codes + signals

    def _replace(self, silent: Silent) -> None:
        """Kills a rank that does not answer; it is started again like any lost rank. Does nothing
        if the process has already ended: another one may have replaced it."""
        rank = silent.rank
        is_there = rank in self._alive and self._processes[rank].pid == silent.pid
        if is_there and self._is_awaited(rank):
            self._log(f'event=rank_killed rank={rank} reason="it does not answer rank 0"')
            self._processes[rank].kill()

    def _signalled(self, signum: int) -> None:
        self.interrupted = self.interrupted or signum
        name = signal.Signals(signum).name
        if self._state in ("running", "waiting") or self._is_restarting:
            self._is_restarting = False
            if self._trains and not self._alive:
                self._code = exit_code(-signum)
            if signum in _AS_SIGTERM:
                forwarded = signal.SIGTERM
            else:
                forwarded = signal.Signals(signum)
            self._forwarded = int(forwarded)
            self._end_all(forwarded, name)
        else:
            self._kill_all(f"a second {name}")

    def _deadline_passed(self) -> None:
        if self._state == "waiting":
            self._end_all(signal.SIGTERM, f"still running after {FOLLOW_SECONDS:g} s")
        elif self._state == "ending":
            self._kill_all("still running after being asked to end")
        else:
            ranks = self._alive_text()
            self._log(f'event=rank_lost ranks={ranks} reason="not ended by SIGKILL"')
            self._code = self._code or exit_code(-signal.SIGKILL)
            self._state = "lost"

    def _end_all(self, signum: signal.Signals, reason: str) -> None:
        self._give_up_waiting()
        ranks = self._alive_text()
        quoted = json.dumps(reason)
        self._log(f"event=ending ranks={ranks} signal={signum.name} reason={quoted}")
        self._enter("ending", self._drain_seconds)
        for rank in self._alive:
            self._processes[rank].signal(signum)

    def _give_up_waiting(self) -> None:
        """Stops waiting for ranks that are away. A rank that comes back later is turned away."""
        self._ending.set()
        if not self._is_restarting:
            self._returning.clear()

    def _kill_all(self, reason: str) -> None:
        self._log(f"event=killing ranks={self._alive_text()} reason={json.dumps(reason)}")
        self._enter("killed", LEFT_SECONDS if self._is_restarting else GONE_SECONDS)
        self._kill_alive()

    def _enter(self, state: str, seconds: float) -> None:
        self._state = state
        self._deadline = monotonic() + seconds

    def _kill_alive(self) -> None:
        for rank in self._alive:
            self._processes[rank].kill()

    # --- starting

    @contextmanager
    def _signals(self) -> Iterator[None]:
        former: dict[int, Any] = {}

        def forward(signum: int, frame: FrameType | None) -> None:
            self._events.put(Asked(signum))
            handler = former.get(signum)
            # While a host is asked to start its rank, nothing reads the queue. The handler from
            # before closes the connections to the hosts.
            if not self._have_started and handler not in _DEFAULT_HANDLERS:
                handler(signum, frame)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = [signal.SIGINT, signal.SIGTERM]
        for number in _AS_SIGTERM:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                caught.append(number)
        for number in caught:
            former[number] = signal.getsignal(number)
            signal.signal(number, forward)
        try:
            yield
        finally:
            for caught_number, handler in former.items():
                signal.signal(caught_number, handler)

    def _start(self, starts: Sequence[Start]) -> None:
        self._starts = starts
        for rank, start in enumerate(starts):
            try:
                self._adopt(rank, start())
            except OSError as error:
                fix = ": name another Python with --python" if error.filename else ""
                raise ClusterError(f"rank {rank} cannot be started: {error}{fix}.") from error

    def _adopt(self, rank: int, process: Process) -> None:
        self._processes[rank] = process
        self._alive.add(rank)
        self._log(f"event=rank_started rank={rank} pid={process.pid}")
        self._observer.started(rank, process.pid)
        reader = threading.Thread(
            target=self._copy_output,
            args=(rank, process),
            daemon=True,
        )
        waiter = threading.Thread(
            target=self._await,
            args=(rank, process, reader),
            daemon=True,
        )
        reader.start()
        waiter.start()

    def _has_restarts_left(self, rank: int) -> bool:
        """Counts a restart, and returns whether it is allowed. Rank 0 stands for all ranks."""
        now = monotonic()
        losses = self._losses.setdefault(
            rank,
            RestartWindow(self._max_restarts, RESTART_WINDOW_SECONDS),
        )
        losses.add(now)
        return losses.num_left(now) >= 0

    def _is_awaited(self, rank: int) -> bool:
        """Whether the other ranks wait for this one, as in a server, unless it is rank 0."""
        others_wait = rank > 0 and 0 in self._alive and not self._trains
        return others_wait and self._state == "running"

    def _come_back(self, rank: int, is_early: bool = False) -> None:
        self._returning.add(rank)
        threading.Thread(target=self._bring_back, args=(rank, is_early), daemon=True).start()

    def _bring_back(self, rank: int, is_early: bool) -> None:
        """Starts a rank again, in a thread: another host may be slow or unreachable."""
        num_losses = len(self._losses.get(rank, ()))
        seconds = RESTART_SECONDS * (num_losses - 1)
        if is_early:
            seconds = max(seconds, RETRY_SECONDS)
        self._ending.wait(max(0.0, seconds))
        logged = ""
        while not self._ending.is_set():
            try:
                self._events.put(Returned(rank, self._starts[rank]()))
                self._unreachable.pop(rank, None)
                return
            except (OSError, ClusterError) as error:
                self._unreachable[rank] = str(error)
                if str(error) != logged:
                    logged = str(error)
                    self._log(f"event=rank_waited_for rank={rank} reason={json.dumps(logged)}")
            self._ending.wait(RETRY_SECONDS)
        self._events.put(Returned(rank, None))

    # --- the threads of a rank

    def _await(self, rank: int, process: Process, reader: threading.Thread) -> None:
        returncode = process.wait()
        reader.join(OUTPUT_SECONDS)
        self._events.put(Ended(rank, returncode, process.lost))

    def _copy_output(self, rank: int, process: Process) -> None:
        prefix = self._prefix(rank)
        for line in process.lines():
            if rank == 0 and _READY_EVENT.fullmatch(line):
                self._events.put(ServerReady())
            self._write_reason(rank)
            error = _ERROR.fullmatch(line)
            if error:
                self._errors[rank] = error[1]
                self._unwritten[rank] = prefix + line
            else:
                self._say(prefix + self._highlighted(rank, line))
            self._observer.said(rank, line)
            silent = _SILENT.fullmatch(line)
            if rank == 0 and silent:
                self._events.put(Silent(int(silent[1]), int(silent[2])))

    def _prefix(self, rank: int) -> str:
        text = f"[{self._processes[rank].name}]"
        if self._colour:
            return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m "
        return text + " "

    def _highlighted(self, rank: int, line: str) -> str:
        """Highlights the line that people wait for."""
        if self._colour and self._serves and rank == 0 and line.startswith(_READY):
            return f"\x1b[{_READY_COLOUR}m{line}\x1b[0m"
        return line

    def _say(self, line: str) -> None:
        with self._write_lock:
            self._write(line)

    def _log(self, text: str, level: str = "INFO") -> None:
        self._say(event_line(text, level))

    def _alive_text(self) -> str:
        return ",".join(map(str, sorted(self._alive)))
