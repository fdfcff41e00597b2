"""`brigade node`: announces this machine, pairs it with others, and serves the machines of its
group: agents for launches, and the weights in its cache."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.nodes import weights
from launcher.nodes.discovery import Seen, announce
from launcher.nodes.door import (
    STRANGER,
    Connections,
    Process,
    Services,
    Visitor,
    bridge,
    listen,
    run_agent,
)
from launcher.nodes.group import (
    MAX_NAME_BYTES,
    NodeFiles,
    is_name,
    node_folder,
    public,
    since_now,
)
from launcher.nodes.link import NodePlace, connect, conversation, host_key, talking
from launcher.nodes.messages import (
    Code,
    Conversation,
    Exchange,
    ListSeen,
    Machine,
    Machines,
    NodeError,
    NodeHello,
    PairingStart,
    Refusal,
    SeenList,
    SeenNode,
    ShowCode,
    StopLaunch,
    Stopped,
    ToNode,
)
from launcher.nodes.neighbours import NeighbourSockets
from launcher.nodes.pairing import EXCHANGE_SECONDS, Codes, answer_pairing
from launcher.nodes.running import Running, only_node
from launcher.nodes.serving import serving
from launcher.record import stop_up
from launcher.supervisor import write_line
from serve import __version__
from serve.core.errors import BrigadeError, ClusterError, UsageError
from serve.core.folder import own_folder

DEFAULT_PORT = 8422
IDLE_SECONDS = 600.0  # how long a member's conversation may be silent
JOIN_SECONDS = 60.0
RETELL_SECONDS = 60.0
TOUCH_SECONDS = 3600.0
AGENTS_END_SECONDS = 60.0
EVERYBODY = "all"  # the value of --nodes that stands for all names
_HOST_AND_PORT = re.compile(r"([\w.-]{1,253})(?::(\d{1,5}))?", re.ASCII)
_logger = logging.getLogger(__name__)


def default_name() -> str:
    """Returns this machine's host name, without its domain and signs that a name cannot have."""
    host = socket.gethostname().partition(".")[0]
    name = "".join(letter if letter.isalnum() or letter == "-" else "-" for letter in host)
    return name.encode()[:MAX_NAME_BYTES].decode(errors="ignore") or "node"


@dataclass(eq=False)
class NodeServer:
    """The running node of one user on one machine."""

    files: NodeFiles
    name: str
    port: int
    neighbours: NeighbourSockets
    weights_path: str
    seen: Seen = field(default_factory=Seen)
    codes: Codes = field(default_factory=Codes)
    visitors: Connections = field(default_factory=set)
    agents: set[asyncio.Task[None]] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _behind: set[str] = field(default_factory=set)  # keys of machines that missed news

    def __post_init__(self) -> None:
        self.key = public(self.files.own_key())
        self.had_agent = asyncio.Event()

    # --- services

    @property
    def services(self) -> Services:
        for_strangers = {"hello": self._hello, "pair": self._pair}
        for_members = {"node": self._converse, "agent": self._agent}
        return Services(for_strangers, for_members, self._weights)

    async def _hello(self, visitor: Visitor, process: Process) -> None:
        talk = Conversation(process.stdin, process.stdout, ToNode)
        with suppress(NodeError):
            hello = await talk.hear(NodeHello, EXCHANGE_SECONDS)
            if is_name(hello.name) and is_name(hello.version) and 0 < hello.port < 65536:
                self.seen.greeted(
                    SeenNode(visitor.key, hello.name, hello.version, [visitor.address], hello.port)
                )
            talk.say(self._own_hello())

    def _own_hello(self) -> NodeHello:
        return NodeHello(self.name, __version__, self.port)

    async def _pair(self, visitor: Visitor, process: Process) -> None:
        talk = Conversation(process.stdin, process.stdout, ToNode)
        code = self.codes.code
        try:
            start = await talk.hear(PairingStart, EXCHANGE_SECONDS)
            problem = self._objection(visitor, start) or self.codes.refusal()
            if problem:
                talk.say(Refusal(problem))
                return
            keys = self.key, visitor.key
            is_right = await answer_pairing(talk, self.codes, start, self.name, *keys)
        except NodeError as error:
            reason = json.dumps(str(error))
            _logger.warning("event=pairing_failed address=%s reason=%s", visitor.address, reason)
            return
        finally:
            if self.codes.code != code:
                self.show_code()
        if is_right:
            address = [visitor.address]
            since = since_now(self.files.machines(), visitor.key)
            new = Machine(visitor.key, start.name, since, addresses=address, port=start.port)
            self.exchange([new], visitor.key)
            write_line(f"Paired with {start.name}.")
        else:
            _logger.warning("event=wrong_code address=%s", visitor.address)

    def _objection(self, visitor: Visitor, start: PairingStart) -> str:
        if not is_name(start.name) or not 0 <= start.port < 65536:
            return "its name or port cannot be used"
        if start.name == self.name:
            return f"it has the name {self.name}, too: start one of them with another --name"
        others = [each for each in self.files.members() if each.key != visitor.key]
        if start.name in [each.name for each in others]:
            return (
                f"the group has another machine with the name {start.name}: start the node there "
                f"with another --name, or run `brigade nodes --forget {start.name}` here first"
            )
        return ""

    def show_code(self) -> None:
        """Shows the code at a terminal. A log must not hold it: `brigade node --code` tells it."""
        if sys.stderr.isatty():
            write_line(f"Code for pairing: {self.codes.code}")

    async def _agent(self, _: Visitor, process: Process) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.agents.add(task)
        self.had_agent.set()
        try:
            await self.neighbours.refresh(self.places())
            await run_agent(process, self.neighbours.environment())
        finally:
            self.agents.discard(task)

    async def _weights(self, reader: Any, writer: Any) -> None:
        local = await asyncio.open_unix_connection(self.weights_path)
        await bridge((reader, writer), local)

    # --- conversations with members

    async def _converse(self, visitor: Visitor, process: Process) -> None:
        talk = Conversation(process.stdin, process.stdout, ToNode)
        while True:
            try:
                message = await talk.hear_any(IDLE_SECONDS)
            except NodeError:
                return
            try:
                talk.say(await self._answer(visitor, message))
            except BrigadeError as error:
                talk.say(Refusal(str(error).rstrip(".")))

    async def _answer(self, visitor: Visitor, message: Any) -> Any:
        is_own = visitor.key == self.key
        match message:
            case NodeHello():
                return self._own_hello()
            case Exchange(machines):
                self.exchange(machines, visitor.key)
                return Machines(self.files.machines())
            case ListSeen() if is_own:
                return SeenList(self.seen.nodes())
            case ShowCode() if is_own:
                return Code(self.codes.code)
            case StopLaunch():
                return Stopped(await asyncio.to_thread(stop_up))
            case _:
                return Refusal(f"this node does not answer {type(message).__name__} to you")

    def exchange(self, machines: list[Machine], sender: str = "") -> None:
        """Merges a list of machines into this one's, and tells the others if it has changed."""
        if not self.files.merge(each for each in machines if each.key != self.key):
            return
        for visitor in list(self.visitors):
            if visitor.is_member and not visitor.may_be_member():
                visitor.close()
        self._start(self.neighbours.refresh(self.places()))
        self._start(self._spread(sender))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- other nodes

    def places(self) -> list[NodePlace]:
        """Returns where the other machines of the group may be: where they have announced
        themselves, then where they were seen before."""
        seen = {node.key: node for node in self.seen.nodes()}
        found = []
        for machine in self.files.members():
            addresses = list(machine.addresses)
            port = machine.port
            if node := seen.get(machine.key):
                addresses = [*node.addresses, *addresses]
                port = node.port
            found.append(
                NodePlace(machine.name, tuple(dict.fromkeys(addresses)), port, machine.key)
            )
        return found

    async def _spread(self, sender: str) -> None:
        """Tells the other machines what is new. keep_telling tells those that are away."""
        places = [place for place in self.places() if place.key != sender]
        await asyncio.gather(*map(self._tell, places))

    async def _tell(self, place: NodePlace) -> None:
        try:
            async with talking(place, self.files) as talk:
                answer = await talk.ask(Exchange(self.files.machines()), Machines)
            self.exchange(answer.machines, place.key)
        except (NodeError, BrigadeError) as error:
            if place.key not in self._behind:
                _logger.info("event=not_told reason=%s", json.dumps(str(error)))
            self._behind.add(place.key)
        else:
            self._behind.discard(place.key)

    async def keep_telling(self) -> None:
        """Tells machines that were away what they have missed, such as that one is revoked."""
        while True:
            await asyncio.sleep(RETELL_SECONDS)
            with suppress(BrigadeError):  # Commands report files that cannot be read.
                places = [place for place in self.places() if place.key in self._behind]
                await asyncio.gather(*map(self._tell, places))

    async def keep_sockets(self) -> None:
        """Touches the node's sockets. macOS removes temporary files that were not used for three
        days, and a node may run for months."""
        folder = Path(self.weights_path).parent
        while True:
            await asyncio.sleep(TOUCH_SECONDS)
            for path in (folder, *folder.rglob("*")):
                with suppress(OSError):  # A socket to a neighbour has just been removed.
                    os.utime(path)

    async def join(self, host: str, port: int) -> None:
        """Says NodeHello to a node again and again, because neither hears the other's multicast."""
        place = NodePlace(host, (host,), port, "")
        before = ""
        while True:
            problem = ""
            try:
                connection = await connect(place, self.files, STRANGER)
                async with connection, conversation(connection, "hello") as talk:
                    hello = await talk.ask(self._own_hello(), NodeHello)
                    key = host_key(connection)
                    self.seen.greeted(SeenNode(key, hello.name, hello.version, [host], hello.port))
            except NodeError as error:
                problem = str(error)
            if problem and problem != before:
                _logger.warning("event=not_joined reason=%s", json.dumps(problem))
            before = problem
            await asyncio.sleep(JOIN_SECONDS)

    async def run(
        self,
        joined: tuple[str, int] | None,
        over: asyncio.Event,
        *,
        once: bool,
    ) -> None:
        """Serves until `over` is set or, with once, until the first launch has ended."""
        self._start(self._spread(""))
        work = [
            asyncio.create_task(announce(self._own_seen(), self.seen)),
            asyncio.create_task(self.keep_telling()),
            asyncio.create_task(self.keep_sockets()),
        ]
        if joined:
            work.append(asyncio.create_task(self.join(*joined)))
        if once:
            work.append(asyncio.create_task(self._after_launch(over)))
        ended = asyncio.create_task(over.wait())
        try:
            done, _ = await asyncio.wait([ended, *work], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._end([ended, *work])

    async def _after_launch(self, over: asyncio.Event) -> None:
        await self.had_agent.wait()
        while self.agents:
            await asyncio.wait(self.agents)
        over.set()
        await asyncio.Event().wait()

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Ends the agents, which give their ranks time to end, and then all else."""
        for task in [*tasks, *self._tasks]:
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        agents = list(self.agents)
        for visitor in list(self.visitors):
            visitor.close()
        if agents:
            await asyncio.wait(agents, timeout=AGENTS_END_SECONDS)

    def _own_seen(self) -> SeenNode:
        return SeenNode(self.key, self.name, __version__, [], self.port)


def run(name: str, port: int, joined: str | None, *, once: bool) -> None:
    """Runs this machine's node until a signal comes or, with once, until the first launch has
    ended. joined is HOST or HOST:PORT of a node in another network. Raises BrigadeError."""
    if not is_name(name) or name == EVERYBODY:
        raise UsageError(
            f"--name {name!r} cannot be used: take at most {MAX_NAME_BYTES} bytes of letters, "
            "digits, dots, dashes and underscores, but not 'all'.",
            code="malformed",
        )
    logging.basicConfig(level=logging.INFO, format="[node] %(asctime)s %(levelname)s %(message)s")
    # These speak of each connection.
    for library in ("asyncssh", "uvicorn", "zeroconf"):
        logging.getLogger(library).setLevel(logging.ERROR)
    asyncio.run(_run(name, port, _joined(joined), once=once))


def _joined(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    found = _HOST_AND_PORT.fullmatch(text)
    host, port = found.groups() if found else ("", None)
    number = DEFAULT_PORT if port is None else int(port)
    if not host or not 0 < number < 65536:
        raise UsageError(f"--join {text!r} is not HOST or HOST:PORT.", code="malformed")
    return host, number


async def _run(name: str, port: int, joined: tuple[str, int] | None, *, once: bool) -> None:
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    folder = node_folder()
    files = NodeFiles(folder)
    async with AsyncExitStack() as stack:
        tell = stack.enter_context(only_node(folder))
        sockets = Path(stack.enter_context(own_folder()))
        weights_path = str(sockets / "weights")
        await stack.enter_async_context(serving(weights.app(), weights_path))
        neighbours = NeighbourSockets(sockets / "neighbours", files)
        await stack.enter_async_context(neighbours)
        node = NodeServer(files, name, port, neighbours, weights_path)
        try:
            door = await listen(files, node.services, port, node.visitors)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ClusterError(
                f"port {port} cannot be used ({reason}): choose another --port."
            ) from error
        stack.push_async_callback(door.wait_closed)
        stack.callback(door.close)
        node.port = door.get_port()
        tell(Running(node.port, str(sockets / "neighbours")))
        await neighbours.refresh(node.places())
        write_line(f"Node {name} listens on port {node.port}.")
        node.show_code()
        await node.run(joined, over, once=once)
