"""Breaks servers while they answer: the answer has to continue, with the same text. The servers run
the embedded model, as two ranks on this machine or, for a lost link, on the hosts."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import psutil
from msgspec.structs import replace

from launcher.facts import interface
from serve.selftest.endings import wired_gb
from serve.selftest.launched import Server, Story, launched, on_hosts
from serve.selftest.links import routed
from serve.selftest.report import Line, not_tried
from serve.selftest.section import Context, Told
from serve.selftest.system import yes

_LOCAL = ["-n", "2"]
_ENGINE = "serve.rank.worker"
_NUM_TOKENS = 160
_BREAK_AFTER = 40
_STOP_SECONDS = 10.0
_DELAY_SECONDS = 1  # An answer has to run when the interface goes down.
_DOWN_SECONDS = 30
_LONG_SECONDS = 5.0
_PULL_SECONDS = 60.0  # how long a user may take to find the cable


def engine_killed(context: Context) -> Iterator[Line]:
    def kill(server: Server) -> None:
        _engine(server, 1).kill()

    yield from _broken(context, "engine killed", kill)


def rank_killed(context: Context) -> Iterator[Line]:
    def kill(server: Server) -> None:
        _parent(server, 1).kill()

    yield from _broken(context, "rank killed", kill)


def shard_stopped(context: Context) -> Iterator[Line]:
    """Stops one of two shards for longer than a GPU waits for another."""

    def stop(server: Server) -> None:
        engine = _engine(server, 1)
        engine.suspend()
        threading.Timer(_STOP_SECONDS, _resume, (engine,)).start()

    flags = ("--tensor-parallel-size", "2")
    yield from _broken(context, "shard stopped for 10 s", stop, *flags)


def link_lost(context: Context) -> Iterator[Line | Told]:
    """Takes the interface to rank 1 down for 30 s, or asks the user to pull its cable."""
    name = _interface(context)
    if name is None:
        yield not_tried("faults.cable_pause", "it needs a cable to another machine")
        return
    with launched(replace(context, model=None), on_hosts(context)) as server:
        whole = server.ask(_NUM_TOKENS)
        if not _take_down(name):
            yield Told(f"Pull the cable of {name} now, and plug it in again after 30 s.")
        broken = _first_broken(server)
        server.end()
    if broken is None:
        yield not_tried("faults.cable_pause", f"no answer paused while {name} was down")
        return
    yield Line("faults.cable_pause", broken.longest_gap_seconds)
    yield replace(Line("faults.text", yes(broken.text == whole.text)), where="link lost for 30 s")


def _interface(context: Context) -> str | None:
    """Returns the interface of this machine, as rank 0, to rank 1 on another one."""
    if not context.has_hosts or len({host.ssh for host in context.hosts}) == 1:
        return None
    with routed(context, context.hosts) as (_, routes):
        (ip, *_) = routes[1, 0].ips
    return None if ip_address(ip).is_loopback else interface(ip)


def _take_down(name: str) -> bool:
    """Takes an interface down for 30 s, if this user may do that without a password. The process
    that brings it up again outlives this one."""
    down, up = (f"ip link set {name} {state}" for state in ("down", "up"))
    if sys.platform == "darwin":
        down, up = (f"ifconfig {name} {state}" for state in ("down", "up"))
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if sudo and subprocess.run([*sudo, "true"], capture_output=True).returncode:
        return False
    script = f"sleep {_DELAY_SECONDS}; {down}; sleep {_DOWN_SECONDS}; {up}"
    subprocess.Popen(
        [*sudo, "sh", "-c", script],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return True


def _first_broken(server: Server) -> Story | None:
    """Asks again and again. Returns the first answer that pauses, or None if none does in time."""
    deadline = time.monotonic() + _PULL_SECONDS
    while time.monotonic() < deadline:
        answer = server.ask(_NUM_TOKENS)
        if answer.longest_gap_seconds > _LONG_SECONDS:
            return answer
    return None


def _resume(process: psutil.Process) -> None:
    if process.is_running():  # The process may have been replaced.
        process.resume()


def _parent(server: Server, rank: int) -> psutil.Process:
    (stage,) = [stage for stage in server.stages() if stage.rank == rank]
    return psutil.Process(stage.pid)


def _engine(server: Server, rank: int) -> psutil.Process:
    """Returns the engine that works. A spare one is younger."""
    children = _parent(server, rank).children()
    engines = [child for child in children if _ENGINE in child.cmdline()]
    return min(engines, key=psutil.Process.create_time)


def _broken(
    context: Context,
    name: str,
    break_it: Callable[[Server], None],
    *flags: str,
) -> Iterator[Line]:
    embedded = replace(context, model=None, hostfile=None, nodes=())
    wired = wired_gb()
    with launched(embedded, _LOCAL, *flags) as server:
        whole = server.ask(_NUM_TOKENS)
        answer = server.ask(_NUM_TOKENS, _BREAK_AFTER, lambda: break_it(server))
        server.end()
        left_over = server.left_over()
    after = wired_gb()
    lines = [
        Line("faults.pause", answer.longest_gap_seconds),
        Line("faults.text", yes(answer.text == whole.text)),
        *left_over,
    ]
    if wired is not None and after is not None:
        lines.append(Line("faults.wired", after - wired))
    for line in lines:
        yield replace(line, where=name)


MEASUREMENTS = [engine_killed, rank_killed, shard_stopped, link_lost]
