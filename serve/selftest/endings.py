"""Ends servers as users do: engines must end by themselves, and nothing may be left over."""

import platform
import signal
import socket
import time
from collections.abc import Iterator

from msgspec.structs import replace

from launcher.facts import wired_bytes
from launcher.record import launches
from serve.selftest.launched import launched, on_hosts, run_brigade
from serve.selftest.report import Line, not_tried
from serve.selftest.section import Context
from serve.selftest.system import yes

_KILLED = "event=engine_killed"
_WIRED_SECONDS = 10.0
_LITTLE_GB = 0.5
_POLL_SECONDS = 0.5
_NUM_TOKENS = 8


def wired_gb() -> float | None:
    wired = wired_bytes()
    return None if wired is None else wired / 1e9


def by_signal(context: Context) -> Iterator[Line]:
    yield from _ended(context, "SIGTERM", signal.SIGTERM)


def by_ctrl_c(context: Context) -> Iterator[Line]:
    yield from _ended(context, "Ctrl-C", signal.SIGINT)


def _ended(context: Context, how: str, number: signal.Signals) -> Iterator[Line]:
    before = wired_gb()
    with launched(context, on_hosts(context)) as server:
        server.ask(_NUM_TOKENS)
        code = server.end(number)
        lines = [
            Line("endings.code", "none" if code is None else str(code)),
            Line("endings.killed", server.log.count(_KILLED)),
            *server.left_over(),
            _wired(before),
        ]
    for line in lines:
        yield replace(line, where=how)


def _wired(before: float | None) -> Line:
    if before is None:
        return not_tried("endings.wired", "this system does not say what is wired")
    deadline = time.monotonic() + _WIRED_SECONDS
    lost = (wired_gb() or 0.0) - before
    while lost > _LITTLE_GB and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        lost = (wired_gb() or 0.0) - before
    return Line("endings.wired", max(0.0, lost))


def by_command(context: Context) -> Iterator[Line]:
    """Ends a server with `--stop`. Before that, `--status` must list it, also under another name of
    this Mac: macOS changes the name with the network."""
    with launched(context, on_hosts(context)) as server:
        pid = server.process.pid
        shown = run_brigade("launch", "--status").stdout
        yield _renamed(pid)
        run_brigade("launch", "--stop", str(pid))
        code = server.wait()
    is_right = f"launch {pid}:" in shown and code == 0
    yield Line("endings.listed", yes(is_right))


def _renamed(pid: int) -> Line:
    """Looks for a launch under another name. Only this process sees that name."""
    if platform.system() != "Darwin":
        return not_tried("endings.renamed", "only macOS changes the name of a machine")
    original = socket.gethostname
    socket.gethostname = lambda: "renamed"
    try:
        is_found = pid in [launch.pid for launch in launches()]
    finally:
        socket.gethostname = original
    return Line("endings.renamed", yes(is_found))


MEASUREMENTS = [by_signal, by_ctrl_c, by_command]
