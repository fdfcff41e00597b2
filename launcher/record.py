"""The list of running launches: one file for each launch of this user, locked while its launcher
lives.

A killed launcher loses the lock, so no record remains for a process that is gone, or for another
process that got its id.
"""

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from launcher.supervisor import Observer
from serve.core.errors import ClusterError, UsageError

STOP_SECONDS = 5.0  # how long a launcher may take to end, after its ranks
_POLL_SECONDS = 0.1

# The events of rank 0 that give its URL or its state. A single stage that is ready does not count.
# The event comes first in its line: a client may have written what comes later.
_EVENT = re.compile(
    r"[^=]*\bevent=(?:listening url=(\S+)|(?:stage_(?=[fl]))?(fetching|loading|ready|recovering)\b)"
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The content of a launch's file. state is starting, fetching, loading, ready, recovering or
    ending. `since` is in seconds since the epoch."""

    pid: int
    words: list[str]
    hosts: list[str]
    since: float
    end_seconds: float = 60.0  # how long the launch's ranks may take to end
    state: str = "starting"
    url: str = ""
    ranks: dict[str, str] = field(default_factory=dict)  # the state of each rank's process, by rank


class LaunchRecord(Observer):
    """Keeps the file of this launch up to date."""

    def __init__(self, launch: Launch, descriptor: int) -> None:
        self._launch = launch
        self._descriptor = descriptor
        self._lock = threading.Lock()  # Each rank is observed from its own thread.
        self._save()

    def started(self, rank: int, pid: int) -> None:
        self._save(ranks={**self._launch.ranks, str(rank): f"runs as {pid}"})

    def said(self, rank: int, line: str) -> None:
        event = _EVENT.match(line)
        if rank > 0 or event is None:
            return
        url, state = event.groups()
        if state != "recovering" and self._launch.state == "ready":
            return
        if url:
            self._save(url=url)
        else:
            self._save(state=state)

    def ended(self, rank: int, code: int, then: str = "") -> None:
        how = ", ".join(filter(None, [f"ended with {code}", then]))
        # If the other ranks go on, the log lines of rank 0 set the state.
        state = self._launch.state if then else "ending"
        self._save(ranks={**self._launch.ranks, str(rank): how}, state=state)

    def _save(self, **changes: Any) -> None:
        """Updates the file. On a full disk the file stays incomplete, and the ranks go on."""
        with self._lock, suppress(OSError):
            self._launch = replace(self._launch, **changes)
            data = json.dumps(asdict(self._launch)).encode()
            # Writes in place, because the file is locked. Readers stop at the JSON object's end.
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))


@contextmanager
def recorded(
    words: Sequence[str],
    hosts: Sequence[str],
    end_seconds: float,
) -> Iterator[LaunchRecord]:
    file = state_folder() / f"{os.getpid()}.launch"
    new = file.with_suffix(".new")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        launch = Launch(os.getpid(), list(words), list(hosts), time.time(), end_seconds)
        record = LaunchRecord(launch, descriptor)
        new.rename(file)  # Other processes see it only when it is locked and written.
        yield record
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def launches() -> list[Launch]:
    """Lists the running launches, the oldest first, and removes the records of dead launchers."""
    found = [launch for file in state_folder().glob("*.launch") if (launch := _read(file))]
    return sorted(found, key=lambda launch: launch.since)


def stop(pid: int | None) -> Launch:
    """Makes a launcher end its ranks, and waits for it. Raises UsageError, ClusterError."""
    launch = _chosen(pid)
    with suppress(ProcessLookupError):
        os.kill(launch.pid, signal.SIGTERM)
    max_seconds = launch.end_seconds + STOP_SECONDS
    deadline = time.monotonic() + max_seconds
    while launch.pid in [each.pid for each in launches()]:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"launch {launch.pid} has not ended within {max_seconds:g} s "
                "(--drain-timeout): wait, or run --stop again, which kills its ranks."
            )
        time.sleep(_POLL_SECONDS)
    return launch


def stop_up() -> list[str]:
    """Ends what `brigade up` has started on this machine, and returns the commands. Raises
    BrigadeError."""
    own = [launch for launch in launches() if launch.words[:1] == ["up"]]
    return [shlex.join(stop(launch.pid).words) for launch in own]


def _chosen(pid: int | None) -> Launch:
    running = launches()
    chosen = [launch for launch in running if pid in (None, launch.pid)]
    if len(chosen) == 1:
        return chosen[0]
    numbers = ", ".join(str(launch.pid) for launch in running)
    if not running:
        raise UsageError("you have no running launch on this machine: there is nothing to stop.")
    if chosen:
        raise UsageError(
            f"launches {numbers} are running: choose one, as in --stop {running[0].pid} "
            "(--status shows what each one serves).",
            code="several_launches",
        )
    raise UsageError(f"you have no running launch {pid} on this machine, only {numbers}.")


def _read(file: Path) -> Launch | None:
    with suppress(OSError), file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            record, _ = json.JSONDecoder().raw_decode(opened.read().decode())
            # Another version of Brigade may have written the file.
            known = {each.name for each in fields(Launch)} & record.keys()
            return Launch(**{name: record[name] for name in known})
        file.unlink()
    return None


def state_folder() -> Path:
    """Returns this user's folder for this host. Raises ClusterError."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    # The name of a Mac changes with its network, so it cannot tell Macs apart.
    host = "this-mac" if sys.platform == "darwin" else socket.gethostname()
    folder = Path(base) / "brigade" / host
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{folder} cannot be created ({error.strerror})"
        raise ClusterError(f"{reason}: set XDG_STATE_HOME to a folder of yours.") from error
    return folder
