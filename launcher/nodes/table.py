"""`brigade nodes`: a table of all machines, and who belongs to the group."""

import os
import sys
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from launcher.doctor import print_table, query_host
from launcher.links import MeasuredHop, measure_hops, not_measured
from launcher.nodes import client
from launcher.nodes.access import NodeAccess
from launcher.nodes.client import Node
from launcher.nodes.up import ask_at_terminal, hosts_of, pair_by_asking, speed_words
from launcher.remote import HostError, LostHostError, connected, on_each
from serve.core.agent_messages import HopSpeed, HostFacts
from serve.core.amounts import format_bytes
from serve.core.errors import ClusterError
from serve.core.facts import VERSIONS

_STATES = {"here": "this machine", "found": "not paired"}
_DIFFERENT = "≠"


class NodeReport(msgspec.Struct, frozen=True):
    """What is known of a node: the facts of its machine, and the speed of the fastest link to it
    from this machine. problem says why one of them is missing, and what to do."""

    name: str
    state: str
    address: str
    versions: dict[str, str]
    facts: HostFacts | None = None
    speed: HopSpeed | None = None
    problem: str = ""


def pair(name: str) -> str:
    """Pairs with a machine by its code, from the terminal or from a line of standard input, and
    says so. Raises ClusterError."""
    node = client.node_named(name)
    if node.state == "here":
        raise ClusterError(f"{name} is this machine: name another one.")
    # Another machine of the group may have revoked this one, which then has to pair again.
    if node.state != "found" and client.is_member_at(node):
        raise ClusterError(f"{name} is paired already: `brigade nodes` lists it.")
    if os.isatty(0):
        if not pair_by_asking(node, ask_at_terminal):
            raise ClusterError(f"{name} was not paired, because no code was entered.")
    else:
        client.pair(node, sys.stdin.readline().strip())
    return f"{name} is paired."


def forget(name: str) -> str:
    """Revokes a machine's key, and says so. Raises ClusterError."""
    client.forget(client.node_named(name))
    return f"{name} is forgotten. Machines that are away hear it when they are back."


def show(*, as_json: bool) -> None:
    """Shows all nodes that this machine's node knows. Raises ClusterError."""
    rows = ask_all(client.known_nodes())
    console = Console(highlight=False)
    if as_json:
        console.print_json(msgspec.json.encode(rows).decode())
        return
    for table in (activities(rows), resources(rows), installations(rows)):
        print_table(console, table)
        console.print()
    problems = [f"{row.name}: {row.problem}" for row in rows if row.problem]
    if any(is_different(row, rows[0]) for row in rows):
        problems.append(f"{_DIFFERENT} is another version than here: `brigade up` names a remedy")
    for problem in problems:
        console.print(problem, soft_wrap=True)  # Commands can then be copied.


def ask_all(nodes: Sequence[Node]) -> list[NodeReport]:
    """Asks the machines of the group for their facts, and measures the link to each, one after the
    other. Raises ClusterError if this machine does not answer."""
    problems: dict[str, str] = {}

    def leave_out(error: HostError) -> bool:
        problems[error.where] = f"{error.what}: {error.fix}"
        return error.where != nodes[0].name

    members = [node for node in nodes if node.state in ("here", "paired")]
    with connected(hosts_of(members), NodeAccess(), lambda _: None, leave_out=leave_out) as there:
        facts = {own.host: own for own, _ in on_each(there, query_host)}
        measured = not_measured(there, {node.name: node.addresses for node in members})
        hops = {}
        for at, name in enumerate(facts):
            if at:
                try:
                    measure_hops(measured, there, 0, at)
                except LostHostError as error:
                    if not leave_out(error):
                        raise
            hops[name] = measured.links.get((0, at))
            if at and hops[name] is None and name not in problems:
                reason = measured.failures.get((0, at), "")
                problems[name] = f"it has no network in common with this machine{reason}"
    reports = []
    for node in nodes:
        if node in members:
            name = node.name
            reports.append(report(node, facts.get(name), hops.get(name), problems.get(name, "")))
        else:  # A stranger may have the name of a member.
            to_pair = f"to use it, run `brigade nodes --pair {node.name}`"
            reports.append(report(node, None, None, to_pair if node.state == "found" else ""))
    return reports


def report(
    node: Node,
    facts: HostFacts | None,
    hop: MeasuredHop | None,
    problem: str,
) -> NodeReport:
    """Returns the report of a node. hop is the way to it, and address where it leads."""
    address = next(iter(node.addresses), "")
    if hop:
        address = hop.route.ips[0]
    state = _STATES.get(node.state, node.state)
    if node.state == "paired" and facts is None:
        state = "no answer"
    versions = facts.versions if facts else {VERSIONS[0]: node.version}
    speed = hop.speed if hop else None
    return NodeReport(node.name, state, address, versions, facts, speed, problem)


def activities(rows: Sequence[NodeReport]) -> Table:
    """Builds the table of what each machine does, and of how fast it is reached."""
    table = Table("machine", "state", "link from here", "does", box=None)
    for row in rows:
        link = does = ""
        if row.facts:
            does = "\n".join(dict.fromkeys(row.facts.ranks)) or "idle"
        if row.speed:
            link = "{}, {} MB/s".format(*speed_words(row.speed))
        table.add_row(row.name, row.state, link, does)
    return table


def resources(rows: Sequence[NodeReport]) -> Table:
    """Builds the table of memory, load and power of each machine."""
    table = Table("machine", "address", "memory free", "load", "power", box=None)
    for row in rows:
        memory = load = power = ""
        if row.facts:
            total = format_bytes(row.facts.memory_bytes)
            memory = f"{format_bytes(row.facts.free_memory_bytes)} of {total}"
            load = f"{row.facts.load:.1f}"
            power = power_words(row.facts)
        table.add_row(row.name, row.address, memory, load, power)
    return table


def installations(rows: Sequence[NodeReport]) -> Table:
    """Builds the table of systems and installed versions."""
    table = Table("machine", "system", *VERSIONS, box=None)
    for row in rows:
        system = system_words(row.facts) if row.facts else ""
        table.add_row(row.name, system, *marked(row.versions, rows[0].versions))
    return table


def marked(versions: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Returns the versions of the packages, with a mark where they differ from this machine's."""
    found = []
    for name in VERSIONS:
        version = versions.get(name, "")
        is_other = version and version != here.get(name)
        found.append(f"{version} {_DIFFERENT}" if is_other else version)
    return found


def is_different(row: NodeReport, here: NodeReport) -> bool:
    return any(_DIFFERENT in version for version in marked(row.versions, here.versions))


def system_words(facts: HostFacts) -> str:
    if facts.mac:
        return f"macOS {facts.mac.version}, {facts.chip}"
    return f"{facts.system}, {facts.chip}"


def power_words(facts: HostFacts) -> str:
    """Returns a Mac's settings of power and sleep, which only Macs tell."""
    if facts.mac is None:
        return "-"
    if facts.mac.sleep in ("", "0"):
        words = "does not sleep"
    else:
        words = f"sleeps after {facts.mac.sleep} min"
    if facts.mac.power_mode == "1":
        words += ", low power mode"
    return words
