"""Measures the links between ranks: TCP at each address, a ring of all ranks, and its sums. Without
a hostfile the ranks are two processes of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from launcher.checks import broken_hop, check_hop
from launcher.doctor import HOP_SECONDS, examine_ring, run_on_all
from launcher.remote import AgentConnection, connected, find_routes, hop_speed
from launcher.routes import Routes, needed_pairs
from serve.core.errors import ClusterError
from serve.selftest.machine import by_doctor
from serve.selftest.report import Line, failed
from serve.selftest.section import Context

_SUMS = "serve.ring.sum_speeds"
_SUMS_SECONDS = 60.0
_NUM_RINGS = 3


@contextmanager
def _routed(context: Context) -> Iterator[tuple[list[AgentConnection], Routes]]:
    """Connects to all hosts, and chooses the addresses of their ranks as a launch does."""
    with connected(context.hosts, context.access, lambda _: None) as connections:
        yield connections, find_routes(connections, needed_pairs(len(connections)))


def hops(context: Context) -> Iterator[Line]:
    with _routed(context) as (connections, routes):
        for one, other in needed_pairs(len(connections)):
            for number, ip in enumerate(routes[one, other].ips):
                where = f"rank {one} → {other}, address {number}"
                yield _hop(connections[one], connections[other], ip, where)


def _hop(here: AgentConnection, there: AgentConnection, ip: str, where: str) -> Line:
    names = f"{here.host} → {there.host} ({ip})"
    try:
        speed = hop_speed(here, there, ip, HOP_SECONDS)
    except ClusterError as error:
        return by_doctor("links.hop", broken_hop(names, str(error).rstrip(".")), where)
    line = by_doctor("links.hop", check_hop(names, speed), where)
    series = {
        "round trip (ms)": speed.round_trip_seconds * 1e3,
        "MB/s": speed.bytes_per_second / 1e6,
    }
    return msgspec.structs.replace(line, series=series)


def rings(context: Context) -> Iterator[Line]:
    """Forms a ring of all ranks several times, each time in new processes."""
    for number in range(_NUM_RINGS):
        with _routed(context) as (connections, routes):
            finding = examine_ring(connections, routes, lambda _: None)
        yield by_doctor("links.ring", finding, f"start {number + 1}")


def sums(context: Context) -> Iterator[Line]:
    with _routed(context) as (connections, routes):
        code, lines = run_on_all(connections, routes, ["-m", _SUMS], _SUMS_SECONDS)
    results = [line.partition("] sums ")[2] for line in lines if "] sums " in line]
    if code or not results:
        last = lines[-1] if lines else f"no answer within {_SUMS_SECONDS:g} s"
        yield failed("links.sum", last)
        return
    series = msgspec.json.decode(results[0], type=dict[str, float])
    yield Line("links.sum", series["8 KB"], series)


MEASUREMENTS = [hops, rings, sums]
