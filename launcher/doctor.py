"""`brigade doctor`: asks every host, measures every hop, and has all ranks compute a sum."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.access import HostAccess
from launcher.checks import (
    Finding,
    broken_hop,
    check_clock,
    check_hop,
    check_hosts,
    check_kinds,
    check_shell,
    exit_code,
    named,
    with_variables,
)
from launcher.command import RING_CHECK
from launcher.hostfile import Host
from launcher.remote import (
    AgentConnection,
    HostError,
    HostsError,
    connected,
    find_routes,
    hop_speed,
    on_each,
    remote_ranks,
)
from launcher.routes import Pair, Routes, needed_pairs
from launcher.supervisor import Supervisor, event_line, write_line
from serve.core.agent_messages import (
    DescribeHost,
    HostFacts,
)
from serve.core.errors import ClusterError

RING_SECONDS = 60.0
HOP_SECONDS = 0.5
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}

Tell = Callable[[str], None]
QueryHost = Callable[[AgentConnection], tuple[HostFacts, float]]


def diagnose(
    hosts: Sequence[Host],
    access: HostAccess,
    model: Path | None,
    port: int,
    *,
    as_json: bool,
    prefix_cache_dir: Path | None = None,
) -> int:
    """Shows the findings about hosts. Returns 0 if all is well, 1 for warnings, 2 for failures."""
    with Console(stderr=True, highlight=False).status("") as status:
        query = partial(query_host, model=model, prefix_cache_dir=prefix_cache_dir, port=port)
        findings = list(examine(hosts, access, query, status.update))
    show(findings, as_json)
    return exit_code(findings)


def check_before(facts: Sequence[HostFacts], environment: Mapping[str, str]) -> None:
    """Makes the quick checks before a launch. Logs warnings, raises ClusterError for failures."""
    findings = list(check_hosts([with_variables(each, environment) for each in facts]))
    log_warnings(findings)
    failed = [f for f in findings if f.status == "fail"]
    if failed:
        raise ClusterError("; ".join(f"{f.where}: {f.what}: {f.fix}" for f in failed) + ".")


def log_warnings(findings: Iterable[Finding]) -> None:
    for finding in findings:
        if finding.status == "warn":
            what = f"what={json.dumps(finding.what)} fix={json.dumps(finding.fix)}"
            write_line(event_line(f"event=warning host={finding.where} {what}", "WARNING"))


def query_host(
    connection: AgentConnection,
    model: Path | None = None,
    prefix_cache_dir: Path | None = None,
    port: int | None = None,
) -> tuple[HostFacts, float]:
    """Returns one host's facts, under its name in the hostfile, and the seconds by which its clock
    is ahead of this machine's. The port is that of rank 0."""
    host = connection.host
    question = DescribeHost(
        str(model) if model else None,
        list(host.ips),
        str(prefix_cache_dir) if prefix_cache_dir else None,
        None if host.rank else port,
    )
    asked = time.time()
    facts = connection.request(question, HostFacts)
    return named(facts, str(host)), facts.time - (asked + time.time()) / 2


def examine(
    hosts: Sequence[Host], access: HostAccess, query: QueryHost, tell: Tell
) -> Iterator[Finding]:
    """Yields each finding as soon as it is made. The last may be an unreachable host."""
    try:
        with connected(hosts, access, tell) as connections:
            yield from examine_connected(connections, query, tell)
    except HostsError as error:
        yield from in_findings(error)
    except HostError as error:
        yield Finding("fail", error.where, error.what, error.fix)


def examine_connected(
    connections: list[AgentConnection],
    query: QueryHost,
    tell: Tell,
) -> Iterator[Finding]:
    has_several = len(connections) > 1
    facts = []
    notes = []
    for connection, (own, ahead_seconds) in zip(
        connections, on_each(connections, query), strict=True
    ):
        label = connection.host.label if has_several else own.host
        facts.append(named(own, label))
        if not connection.host.is_local:
            notes.append(check_shell(label, connection.noise, connection.reached))
            notes.append(check_clock(label, ahead_seconds))
    findings = [*check_hosts(facts), *notes]
    routes: Routes = {}
    if has_several:
        needed = needed_pairs(len(connections))
        try:
            routes = find_routes(connections, needed)
            findings += check_kinds([each.host for each in connections], routes, needed)
            findings += examine_hops(connections, routes, needed, tell)
        except HostsError as error:
            findings += in_findings(error)
    yield from findings
    if any(each.status == "fail" for each in findings):
        yield Finding("warn", "ring", "not tried", "fix the failures above first")
    elif has_several:
        yield examine_ring(connections, routes, tell)


def in_findings(error: HostsError) -> Iterator[Finding]:
    for each in error.errors:
        yield Finding("fail", each.where, each.what, each.fix)


def examine_hops(
    connections: Sequence[AgentConnection],
    routes: Routes,
    needed: Sequence[Pair],
    tell: Tell,
) -> Iterator[Finding]:
    """Measures the needed hops one after the other, because they may share a cable."""
    for pair in needed:
        here, there = (connections[rank] for rank in pair)
        for ip in routes[pair].ips:
            tell(f"measuring {here.host} to {there.host}")
            yield examine_hop(here, there, ip)


def examine_hop(here: AgentConnection, there: AgentConnection, ip: str) -> Finding:
    where = f"{here.host} → {there.host} ({ip})"
    try:
        return check_hop(where, hop_speed(here, there, ip, HOP_SECONDS))
    except ClusterError as error:
        return broken_hop(where, str(error).rstrip("."))


def examine_ring(
    connections: list[AgentConnection],
    routes: Routes,
    tell: Tell,
) -> Finding:
    """Starts a real MLX ring, in which the ranks compute a sum."""
    tell("forming a ring")
    code, output = run_on_all(connections, routes, ["-m", RING_CHECK], RING_SECONDS)
    if code:
        last = output[-1] if output else f"no answer within {RING_SECONDS:g} s"
        return Finding("fail", "ring", last, "fix the failures above, or try again")
    result = next(line for line in output if "sum" in line)
    _, _, message = result.partition("] ")
    return Finding("ok", "ring", message)


def run_on_all(
    connections: list[AgentConnection],
    routes: Routes,
    words: Sequence[str],
    max_seconds: float,
) -> tuple[int, list[str]]:
    """Runs the Python of each host with these words, as a rank. Returns the code of the first rank
    that failed, and the lines of all ranks, each after its rank's name. The agents end with their
    ranks."""
    lines: list[str] = []
    ranks = remote_ranks(connections, routes, words, {}, 0.0)
    supervisor = Supervisor(ranks, lines.append)
    timer = threading.Timer(max_seconds, supervisor.stop)
    timer.start()
    try:
        code = supervisor.run()
    finally:
        timer.cancel()
    if supervisor.interrupted:
        sys.exit(128 + supervisor.interrupted)
    return code, [line for line in lines if not line.startswith("[launch]")]


def show(findings: Sequence[Finding], as_json: bool) -> None:
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps([asdict(finding) for finding in findings]))
    else:
        show_tables(console, findings)


def show_tables(console: Console, findings: Sequence[Finding]) -> None:
    for where in dict.fromkeys(finding.where for finding in findings):
        console.print(Text(where, "bold"))
        table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
        for finding in (each for each in findings if each.where == where):
            what = Text(finding.what)
            if finding.fix:
                what.append(f"\n→ {finding.fix}", "bold")
            table.add_row(Text(finding.status, _COLOURS[finding.status]), what)
        print_table(console, table)
    counts = {status: sum(f.status == status for f in findings) for status in _COLOURS}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))


def print_table(console: Console, table: Table) -> None:
    """Prints a table without the blanks with which it pads its lines."""
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)
