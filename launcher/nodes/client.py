"""What commands ask of the nodes, each in one call that waits for the answer."""

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from launcher.command import HOST, NEIGHBOURS
from launcher.nodes.door import STRANGER
from launcher.nodes.group import NodeFiles, node_folder, public, since_now
from launcher.nodes.link import (
    NodePlace,
    NotMemberError,
    connect,
    conversation,
    host_key,
    talking,
)
from launcher.nodes.messages import (
    Code,
    Exchange,
    ListSeen,
    Machine,
    Machines,
    NodeError,
    NodeHello,
    NodeMessage,
    PairingStart,
    SeenList,
    SeenNode,
    ShowCode,
    StopLaunch,
    Stopped,
)
from launcher.nodes.pairing import pair as prove
from launcher.nodes.running import own_node
from serve import __version__
from serve.core.errors import ClusterError

State = Literal["here", "paired", "found", "away"]
STOP_SECONDS = 300.0
Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=NodeMessage)


@dataclass(frozen=True, slots=True)
class Node:
    """A node that this machine's node knows. state is "here" for this machine, "found" for one that
    is not paired, and "away" for a paired one that has not announced itself. Addresses and version
    of a node that is not paired are unproved, and "" or empty if unknown."""

    name: str
    key: str
    addresses: tuple[str, ...]
    port: int
    state: State
    version: str

    @property
    def place(self) -> NodePlace:
        return NodePlace(self.name, self.addresses, self.port, self.key)


def known_nodes() -> list[Node]:
    """Returns all nodes, this machine's first. Raises ClusterError."""
    return _run(_known_nodes())


def node_named(name: str) -> Node:
    """Returns the node with this name. Raises ClusterError."""
    nodes = known_nodes()
    named = [node for node in nodes if node.name == name]
    if len(named) > 1 and named[0].state == "found":
        raise ClusterError(
            f"several nodes have the name {name}: start one of them with another --name."
        )
    if named:
        return named[0]
    names = ", ".join(node.name for node in nodes)
    raise ClusterError(
        f"{name} is not known here, only {names}: run `brigade node` there, with --join if it is "
        "not in the same network."
    )


def neighbours() -> dict[str, str]:
    """Returns the variables with which a process of this machine finds the weights of others.
    Raises ClusterError."""
    return {NEIGHBOURS: own_node(node_folder()).neighbours}


def own_code() -> str:
    """Returns the code with which another machine pairs with this one. Raises ClusterError."""
    return _run(_ask(_own_place(), ShowCode(), Code)).code


def pair(node: Node, code: str) -> None:
    """Pairs this machine with a node by the code that it shows. Raises ClusterError."""
    digits = re.sub(r"[\s-]", "", code)
    if not re.fullmatch(r"[0-9]{6}", digits):
        # Sending it would cost a try, and a pause.
        raise ClusterError(
            f"a code has six digits: {node.name} shows it, as does `brigade node --code` there."
        )
    _run(_pair(node, digits))


def is_member_at(node: Node) -> bool:
    """Whether a paired node still takes this machine as one of its group. Raises ClusterError if it
    does not answer."""
    return _run(_is_member_at(node.place))


def forget(node: Node) -> None:
    """Revokes a node's key on this machine, and on all others of the group. Raises ClusterError."""
    if node.state not in ("paired", "away"):
        raise ClusterError(f"{node.name} is not paired: there is nothing to forget.")
    since = since_now(NodeFiles(node_folder()).machines(), node.key)
    revoked = Machine(node.key, node.name, since, is_revoked=True)
    _run(_ask(_own_place(), Exchange([revoked]), Machines))


def stop_launches(node: Node) -> list[str]:
    """Ends what `brigade up` has started on a node's machine, and returns the commands. Raises
    ClusterError."""
    return _run(_ask(node.place, StopLaunch(), Stopped, STOP_SECONDS)).commands


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    try:
        return asyncio.run(work)
    except NodeError as error:
        raise ClusterError(f"{error}.") from error


def _own_place() -> NodePlace:
    folder = node_folder()
    port = own_node(folder).port
    return NodePlace("this machine's node", (HOST,), port, public(NodeFiles(folder).own_key()))


async def _ask(
    place: NodePlace,
    question: NodeMessage,
    expected: type[Answer],
    seconds: float = 10.0,
) -> Answer:
    async with talking(place, NodeFiles(node_folder())) as talk:
        answer: Answer = await talk.ask(question, expected, seconds)
    return answer  # noqa: RET504 (mypy cannot see that `async with` hides no error)


async def _is_member_at(place: NodePlace) -> bool:
    try:
        async with talking(place, NodeFiles(node_folder())):
            return True
    except NotMemberError:
        return False


async def _known_nodes() -> list[Node]:
    place = _own_place()
    async with talking(place, NodeFiles(node_folder())) as talk:
        own = await talk.ask(NodeHello("-", __version__, 0), NodeHello)
        machines = (await talk.ask(Exchange([]), Machines)).machines
        seen = (await talk.ask(ListSeen(), SeenList)).nodes
    here = Node(own.name, place.key, (HOST,), own.port, "here", own.version)
    return [here, *_sorted(machines, seen)]


def _sorted(machines: list[Machine], seen: list[SeenNode]) -> list[Node]:
    """Returns the paired nodes, those that are there first, and then the others."""
    announced = {node.key: node for node in seen}
    there, away = [], []
    for machine in machines:
        if machine.is_revoked:
            continue
        node = announced.pop(machine.key, None)
        if node is None:
            addresses = tuple(machine.addresses)
            away.append(Node(machine.name, machine.key, addresses, machine.port, "away", ""))
        else:
            addresses = tuple(dict.fromkeys([*node.addresses, *machine.addresses]))
            there.append(
                Node(machine.name, machine.key, addresses, node.port, "paired", node.version)
            )
    found = [
        Node(node.name, node.key, tuple(node.addresses), node.port, "found", node.version)
        for node in announced.values()
    ]
    return [*there, *away, *found]


async def _pair(node: Node, code: str) -> None:
    own = _own_place()
    files = NodeFiles(node_folder())
    place = NodePlace(node.name, node.addresses, node.port, node.key)
    own_key = public(files.own_key())
    connection = await connect(place, files, STRANGER)
    async with connection, conversation(connection, "pair") as talk:
        their_key = host_key(connection)
        own_name = (await _ask(own, NodeHello("-", __version__, 0), NodeHello)).name

        def start(element: bytes) -> PairingStart:
            return PairingStart(own_name, own.port, element)

        try:
            name = await prove(talk, code, start, own_key, their_key)
        except NodeError as error:
            raise NodeError(f"{node.name}: {error}") from error
        address = str(connection.get_extra_info("peername")[0])
    since = since_now(files.machines(), their_key)
    machine = Machine(their_key, name, since, addresses=[address], port=node.port)
    await _ask(own, Exchange([machine]), Machines)
