"""`brigade up`: serves a model on the machines of a group."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from launcher.checks import check_kinds
from launcher.command import LAUNCHER, forwarded, rank_words
from launcher.doctor import check_before, log_warnings, print_table, query_host
from launcher.hostfile import Host
from launcher.links import Measured, measure, place
from launcher.nodes import client
from launcher.nodes.access import NodeAccess
from launcher.nodes.client import Node
from launcher.program import check_words, model_folder, supervise, with_published_model
from launcher.record import stop_up
from launcher.remote import (
    AgentConnection,
    HostError,
    check_routes,
    connected,
    on_each,
    remote_ranks,
    while_connected,
)
from launcher.routes import needed_pairs
from launcher.supervisor import event_line, write_line
from serve.core.agent_messages import HopSpeed, HostFacts
from serve.core.amounts import format_bytes
from serve.core.errors import ClusterError, UsageError

Ask = Callable[[str], str]


def up(
    command: Sequence[str],
    names: Sequence[str],
    shown: Sequence[str],
    variables: Mapping[str, str],
) -> int:
    """Starts one rank on each of the machines with these names, or on all, with these environment
    variables. command begins with the name of a program; the list of launches shows other words.
    Returns the exit code. Raises BrigadeError."""
    words = rank_words(command)
    serves = command[0] == "serve"
    program_flags = check_words(command, None)
    # The model is checked here, too, and another machine may be the only one that has it.
    os.environ.update(client.neighbours())
    nodes = members(names, ask_at_terminal if os.isatty(0) else None)
    here = nodes[0].name
    leave_out = may_go_on((here, *names))
    with connected(
        hosts_of(nodes), NodeAccess(), write_line, serves=serves, leave_out=leave_out
    ) as connections:
        environment = {**_forwarded(), **variables, LAUNCHER: here}
        facts = [facts for facts, _ in on_each(connections, query_host)]
        check_before(facts, environment)
        if serves:
            words = rank_words(with_reachable_model(command, connections))
        else:
            while_connected(connections, partial(check_words, command, len(connections)))
        note_rdma(facts)
        measured = measure(connections, {node.name: node.addresses for node in nodes})
        order = place(connections, measured, program_flags.num_shards)
        hosts = [each.host for each in connections]
        networks = [measured.networks[host] for host in order]
        routes = measured.routes(order)
        needed = needed_pairs(len(hosts), program_flags.num_shards, serves=serves)
        check_routes(hosts, networks, routes, needed, measured.failures)
        log_warnings(check_kinds(hosts, routes, needed))
        show_choice(facts, measured, order)
        drain_seconds = program_flags.drain_seconds
        ranks = remote_ranks(connections, routes, words, environment, drain_seconds)
        return supervise(command, [host.ssh for host in hosts], ranks, program_flags, shown)


def _forwarded() -> dict[str, str]:
    """Returns the variables of this terminal that all ranks get. Whether a machine may ask the hub
    is said by its node."""
    own = forwarded(os.environ)
    own.pop("HF_HUB_OFFLINE", None)
    return own


def with_reachable_model(
    command: Sequence[str],
    connections: Sequence[AgentConnection],
) -> Sequence[str]:
    """Returns a command whose model all ranks can read: a folder that not all machines have is
    published by this one. Raises BrigadeError."""
    while_connected(connections, partial(check_words, command, len(connections)))
    folder = model_folder(command)
    if folder is None:
        return command
    query = partial(query_host, model=folder)
    models = [facts.model for facts, _ in on_each(connections, query)]
    if all(model == models[0] for model in models):
        return [*command, "--model", str(folder)]  # Other machines work in other folders.
    _note(f"not all machines have {folder}: they read it from this one")
    return with_published_model(command)


def members(names: Sequence[str], ask: Ask | None) -> list[Node]:
    """Returns the nodes that take part, this machine's first: those with these names, or all that
    are paired and there. A node that was found but is not paired is paired with the code that `ask`
    returns for a question; ask is None if nobody can answer. Raises ClusterError."""
    nodes = client.known_nodes()
    _check_names(names, nodes)
    taken = {node.name for node in nodes if node.state != "found"}
    for node in nodes:
        if node.state == "found" and (not names or node.name in names):
            if node.name in taken:
                # Perhaps a stranger that wants to be taken for it.
                _note(f"another machine has the name {node.name}: start one with another --name")
            else:
                _offer_pairing(node, ask, is_named=node.name in names)
    nodes = client.known_nodes()
    for node in nodes:
        if node.state == "away" and not names:
            _note(f"{node.name} is away: run `brigade node` there, if it shall take part")
    wanted = ("here", "paired", "away") if names else ("here", "paired")
    return [
        node
        for node in nodes
        if node.state in wanted and (node.state == "here" or not names or node.name in names)
    ]


def _check_names(names: Sequence[str], nodes: Sequence[Node]) -> None:
    known = [node.name for node in nodes]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--nodes: {name} is not known here, only {', '.join(known)}: run `brigade node` "
                "there, with --join if it is not in the same network."
            )


def _offer_pairing(node: Node, ask: Ask | None, *, is_named: bool) -> None:
    """Pairs with a node, if its code is entered. Raises ClusterError if it has to take part."""
    if ask is not None and pair_by_asking(node, ask):
        return
    what = f"{node.name} is not paired: to use it, run `brigade nodes --pair {node.name}`"
    if is_named:
        raise ClusterError(f"{what}.")
    _note(what)


def ask_at_terminal(question: str) -> str:
    try:
        return input(question)
    except EOFError:
        return ""


def pair_by_asking(node: Node, ask: Ask) -> bool:
    """Asks for the code of a node until it is right. Returns false if none is entered."""
    while code := ask(f"Code that {node.name} shows (Enter leaves it out): ").strip():
        try:
            client.pair(node, code)
        except ClusterError as error:
            write_line(str(error))
        else:
            return True
    return False


def hosts_of(nodes: Sequence[Node]) -> list[Host]:
    return [Host(at, node.name, (), has_rank=False) for at, node in enumerate(nodes)]


def may_go_on(needed: Sequence[str]) -> Callable[[HostError], bool]:
    """Returns a function that says whether to go on without a machine that cannot be reached."""

    def leave_out(error: HostError) -> bool:
        if error.where in needed:
            return False
        write_line(event_line(f"event=left_out what={json.dumps(str(error))}", "WARNING"))
        return True

    return leave_out


def note_rdma(facts: Sequence[HostFacts]) -> None:
    hosts = [each.host for each in facts if each.rdma]
    if hosts:
        _note(f"{', '.join(hosts)} can use RDMA: ranks use TCP over the same cables instead")


def _note(what: str) -> None:
    write_line(event_line(f"event=note what={json.dumps(what)}"))


def speed_words(speed: HopSpeed) -> tuple[str, str]:
    """Returns a round trip in ms, and a bandwidth in MB/s."""
    return f"{speed.round_trip_seconds * 1e3:.2f} ms", f"{speed.bytes_per_second / 1e6:,.0f}"


def show_choice(facts: Sequence[HostFacts], measured: Measured, order: Sequence[int]) -> None:
    """Shows the ranks. The address of a rank is where the rank before it in the ring sends its
    steps; round trip and bandwidth are of that hop."""
    table = Table("rank", "machine", "address", "round trip", "MB/s", "memory free", box=None)
    for rank, host in enumerate(order):
        caller = order[(rank + 1) % len(order)]
        link = measured.links.get((caller, host))
        hop = ["-", "-", "-"]
        if link is not None:
            hop = [link.route.ips[0], *speed_words(link.speed)]
        own = facts[host]
        memory = f"{format_bytes(own.free_memory_bytes)} of {format_bytes(own.memory_bytes)}"
        table.add_row(str(rank), own.host, *hop, memory)
    print_table(Console(stderr=True, highlight=False), table)


def down() -> str:
    """Ends what `brigade up` has started on this machine, or else on another one of the group, and
    returns what has ended. Raises BrigadeError."""
    if ended := stop_up():
        return f"ended here: {'; '.join(ended)}"
    problems = []
    for node in client.known_nodes():
        if node.state == "paired":
            try:
                commands = client.stop_launches(node)
            except ClusterError as error:
                problems.append(str(error).rstrip("."))
                continue
            if commands:
                return f"ended on {node.name}: {'; '.join(commands)}"
    nothing = "nothing that `brigade up` has started runs on"
    if problems:
        raise ClusterError(f"{nothing} the machines that answer, but {'; '.join(problems)}.")
    raise UsageError(f"{nothing} any machine of the group.")
