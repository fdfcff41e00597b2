"""Breaks servers while they answer: the answer has to continue, with the same text. The servers run
on this machine, as two ranks of the embedded model."""

import threading
from collections.abc import Callable, Iterator

import psutil
from msgspec.structs import replace

from serve.selftest.endings import wired_gb
from serve.selftest.launched import Server, launched
from serve.selftest.report import Line
from serve.selftest.section import Context
from serve.selftest.system import yes

_LOCAL = ["-n", "2"]
_ENGINE = "serve.rank.worker"
_NUM_TOKENS = 160
_BREAK_AFTER = 40
_STOP_SECONDS = 10.0


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
    embedded = replace(context, model=None, hostfile=None)
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


MEASUREMENTS = [engine_killed, rank_killed, shard_stopped]
