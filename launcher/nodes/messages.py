"""The messages between nodes, and between a command and its machine's node: lines of JSON."""

import asyncio
from typing import Any, Protocol, TypeAlias, TypeVar

import asyncssh
import msgspec

HUNG_UP = "it hung up: run `brigade node` there again"


class NodeMessage(msgspec.Struct, frozen=True, tag=True):
    """The base of these messages. The receiver ignores unknown fields, so that nodes of other
    versions can be told apart from strangers."""


class Machine(msgspec.Struct, frozen=True):
    """A machine of the group. key is its public key in OpenSSH's form. since is the time of the
    last change in seconds since the epoch: of two entries with one key, the later one counts.
    addresses are those at which it was last seen."""

    key: str
    name: str
    since: float
    is_revoked: bool = False
    addresses: list[str] = []
    port: int = 0


class SeenNode(msgspec.Struct, frozen=True):
    """A node that has announced itself in the network. Nothing of this is proved."""

    key: str
    name: str
    version: str
    addresses: list[str]
    port: int


class NodeHello(NodeMessage, frozen=True):
    """A node tells another one, or a stranger, that it is here. The answer is NodeHello."""

    name: str
    version: str
    port: int


class PairingStart(NodeMessage, frozen=True):
    """The connecting machine begins a pairing, with its message of SPAKE2."""

    name: str
    port: int
    element: bytes


class PairingReply(NodeMessage, frozen=True):
    """A node answers with its own message of SPAKE2."""

    name: str
    element: bytes


class PairingProof(NodeMessage, frozen=True):
    """One side proves to the other that it has computed the same key. The node's proof comes
    second, and ends the pairing."""

    proof: bytes


class Refusal(NodeMessage, frozen=True):
    """A node says why it does not do what it was asked."""

    reason: str


class Exchange(NodeMessage, frozen=True):
    """A machine tells a node which machines it knows. The answer is Machines."""

    machines: list[Machine]


class Machines(NodeMessage, frozen=True):
    """A node answers with the machines that it knows."""

    machines: list[Machine]


class ListSeen(NodeMessage, frozen=True):
    """A command asks for the nodes that have announced themselves. The answer is SeenList."""


class SeenList(NodeMessage, frozen=True):
    nodes: list[SeenNode]


class ShowCode(NodeMessage, frozen=True):
    """A command of this machine asks for the code of the next pairing. The answer is Code."""


class Code(NodeMessage, frozen=True):
    code: str


class StopLaunch(NodeMessage, frozen=True):
    """A machine of the group asks to end what `brigade up` has started on this machine. The answer
    is Stopped."""


class Stopped(NodeMessage, frozen=True):
    """A node answers with the commands of the launches that have ended, one for each launch."""

    commands: list[str]


ToNode: TypeAlias = (
    NodeHello | PairingStart | PairingProof | Exchange | ListSeen | ShowCode | StopLaunch
)
FromNode: TypeAlias = (
    NodeHello | PairingReply | PairingProof | Refusal | Machines | SeenList | Code | Stopped
)
Received = TypeVar("Received", bound=NodeMessage)


class NodeError(Exception):
    """A peer did not answer as expected, or refused. The text is one line for the user."""


class Lines(Protocol):
    """A stream of lines, such as those of asyncio and asyncssh."""

    async def readline(self) -> bytes: ...


class Conversation:
    """Sends and receives messages over one channel. Raises NodeError."""

    def __init__(self, reader: Any, writer: Any, received: Any) -> None:
        self._reader: Lines = reader
        self._writer = writer
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(received)

    def say(self, message: NodeMessage) -> None:
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def hear(self, expected: type[Received], seconds: float) -> Received:
        """Returns the next message, which must have this type."""
        message = await self.hear_any(seconds)
        if isinstance(message, Refusal):
            raise NodeError(message.reason)
        if not isinstance(message, expected):
            raise NodeError(f"it sent {type(message).__name__} instead of {expected.__name__}")
        return message

    async def hear_any(self, seconds: float) -> NodeMessage:
        try:
            line = await asyncio.wait_for(self._reader.readline(), seconds)
        except TimeoutError as error:
            raise NodeError(f"it did not answer within {seconds:g} s") from error
        except (asyncssh.Error, OSError) as error:
            raise NodeError(HUNG_UP) from error
        if not line.endswith(b"\n"):
            raise NodeError(HUNG_UP)
        try:
            message: NodeMessage = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NodeError(f"it sent a message that cannot be read ({error})") from error
        return message

    async def ask(
        self,
        question: NodeMessage,
        expected: type[Received],
        seconds: float = 10.0,
    ) -> Received:
        try:
            self.say(question)
        except OSError as error:
            raise NodeError(HUNG_UP) from error
        return await self.hear(expected, seconds)
