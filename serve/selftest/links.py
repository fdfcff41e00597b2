"""Measures the links between ranks: TCP at each address, a ring of all ranks, its hops and sums,
and sums over RDMA. Without a hostfile the ranks are two processes of this machine."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as as_host
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from launcher.checks import broken_hop, check_hop
from launcher.doctor import HOP_SECONDS, examine_ring, run_on_all
from launcher.hostfile import Host
from launcher.remote import AgentConnection, connected, find_routes, hop_speed
from launcher.routes import Routes, needed_pairs
from serve.core.errors import ClusterError
from serve.selftest.jaccl import NOT_TRIED
from serve.selftest.machine import by_doctor
from serve.selftest.report import Line, Verdict, not_tried
from serve.selftest.section import Context

_HOPS = "serve.ring.hop_speeds"
_SUMS = "serve.ring.sum_speeds"
_JACCL = "serve.selftest.jaccl"
_SECONDS = 60.0
_JACCL_SECONDS = 60.0
_NUM_RINGS = 3


@contextmanager
def routed(
    context: Context, hosts: Sequence[Host]
) -> Iterator[tuple[list[AgentConnection], Routes]]:
    """Connects to hosts, and chooses the addresses of their ranks as a launch does."""
    with connected(hosts, context.access, lambda _: None) as connections:
        yield connections, find_routes(connections, needed_pairs(len(connections)))


def hops(context: Context) -> Iterator[Line]:
    with routed(context, context.hosts) as (connections, routes):
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
    return replace(line, series=series)


def rings(context: Context) -> Iterator[Line]:
    """Forms a ring of all ranks several times, each time in new processes."""
    for number in range(_NUM_RINGS):
        with routed(context, context.hosts) as (connections, routes):
            finding = examine_ring(connections, routes, lambda _: None)
        yield by_doctor("links.ring", finding, f"start {number + 1}")


def hops_with_steps(context: Context) -> Iterator[Line]:
    with routed(context, context.hosts) as (connections, routes):
        series = _measured(connections, routes, _HOPS, _SECONDS)
    yield Line("links.hop_with_step", series["hop"], series)


def sums(context: Context) -> Iterator[Line]:
    with routed(context, context.hosts) as (connections, routes):
        series = _measured(connections, routes, _SUMS, _SECONDS)
    yield Line("links.sum", series["8 KB"], series)


def jaccl(context: Context) -> Iterator[Line]:
    """Measures sums over RDMA for each pair of neighbouring hosts."""
    for one, other in pairwise(context.hosts):
        where = f"rank {one.rank} and {other.rank}"
        if one.ssh == other.ssh:
            yield replace(not_tried("links.jaccl", "both ranks are on one machine"), where=where)
            continue
        pair = [as_host(host, rank=rank) for rank, host in enumerate((one, other))]
        yield replace(_over_rdma(context, pair), where=where)


def _over_rdma(context: Context, pair: Sequence[Host]) -> Line:
    try:
        with routed(context, pair) as (connections, routes):
            series = _measured(connections, routes, _JACCL, _JACCL_SECONDS)
    except _NotTriedError as error:
        return not_tried("links.jaccl", str(error))
    except ClusterError as error:
        return Line("links.jaccl", str(error), verdict=Verdict.WORSE)
    return Line("links.jaccl", series["8 KB"], series)


class _NotTriedError(ClusterError):
    """A rank says why it cannot take part."""


def _measured(
    connections: list[AgentConnection],
    routes: Routes,
    program: str,
    seconds: float,
) -> dict[str, float]:
    """Runs a program on all ranks, and returns the figures that one of them prints. Ends all ranks
    after the given time. Raises ClusterError if there are no figures."""
    started = time.monotonic()
    code, lines = run_on_all(connections, routes, ["-m", program], seconds)
    for line in lines:
        _, _, said = line.partition("] ")
        if said.startswith(NOT_TRIED):
            raise _NotTriedError(said.removeprefix(NOT_TRIED))
        if said.startswith("{") and not code:
            return msgspec.json.decode(said, type=dict[str, float])
    if time.monotonic() - started > seconds:
        raise ClusterError(f"no end within {seconds:g} s")
    raise ClusterError(lines[-1] if lines else f"a rank ended with code {code}")


MEASUREMENTS = [hops, rings, hops_with_steps, sums, jaccl]
