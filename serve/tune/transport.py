"""Sends activations, gradients and notes from rank to rank in training.

The receiver selects messages by tag when its schedule needs them, so they may arrive in any order
and a send does not wait for its receiver's turn. Each neighbour has a sending and a receiving
thread, so two large messages can pass each other. A receive is posted when its header has come
over TCP, because a waiting receive uses a core. Nothing here is a collective of MLX."""

import math
import queue
import socket
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from threading import Condition, Thread
from typing import Protocol, TypeVar

import mlx.core as mx

from serve.core.errors import ClusterError
from serve.core.messages import (
    Alive,
    AnyNote,
    BetweenTrainers,
    Parting,
    TaggedTensors,
    TensorNames,
    TensorSpec,
)
from serve.core.wire import FrameReader, frame
from serve.ring.transport import (
    DTYPES,
    Ring,
    RingLostError,
    form_ring,
    pack,
    packed_bytes,
    tensor_specs,
    unpack,
)

Payload = tuple[tuple[AnyNote, ...], list[mx.array]]
"""Notes and arrays."""
AnyKind = TypeVar("AnyKind", bound=AnyNote)
_FLUSH_SECONDS = 5.0
_BEAT_SECONDS = 5.0
_TICK_SECONDS = 1.0
_PART_BYTES = 256 << 20  # of a message over the ring: MLX counts elements with 32 bits


class Inbox:
    """Received messages of all neighbours, by tag."""

    def __init__(self, num_peers: int = 1, stall_seconds: float = math.inf) -> None:
        self._num_peers = num_peers
        self._stall_seconds = stall_seconds
        self._silent_seconds: dict[int, float] = {}
        self._num_heard: Counter[int] = Counter()
        self._messages: dict[str, deque[Payload]] = defaultdict(deque)
        self._changed = Condition()
        self._error: ClusterError | None = None

    def put(self, tag: str, payload: Payload) -> None:
        with self._changed:
            self._messages[tag].append(payload)
            self._changed.notify_all()

    def fail(self, error: ClusterError) -> None:
        """Makes each later `take` of a message that has not arrived raise this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def has_lost(self) -> bool:
        """Whether a neighbour or a link was lost."""
        return isinstance(self._error, RingLostError)

    def hear(self, peer: int) -> None:
        """Notes that a neighbour is alive. After its first call, a neighbour has to be heard
        within every stall_seconds."""
        with self._changed:
            self._silent_seconds[peer] = 0.0
            self._num_heard[peer] += 1

    def num_heard(self) -> dict[int, int]:
        """Returns how often each neighbour that has not finished was heard."""
        with self._changed:
            return {peer: self._num_heard[peer] for peer in self._silent_seconds}

    def part(self, peer: int) -> None:
        """Notes that a neighbour has finished. Other neighbours may still send messages."""
        with self._changed:
            self._silent_seconds.pop(peer, None)
            self._num_peers -= 1
            if self._num_peers <= 0:
                self.fail(ClusterError(f"Rank {peer} has ended."))

    def take(self, tag: str) -> Payload:
        """Waits for a message. Raises RingLostError if a neighbour is lost or silent, and
        ClusterError if it has ended by itself or something else is wrong."""
        with self._changed:
            arrived = self._messages[tag]
            while not arrived:
                if self._error:
                    raise self._error
                is_changed = self._changed.wait(_TICK_SECONDS)
                if not is_changed:
                    self._count_silence()
            return arrived.popleft()

    def _count_silence(self) -> None:
        # Only this rank's own waiting counts: after it was stopped itself, it blames nobody.
        for peer in self._silent_seconds:
            self._silent_seconds[peer] += _TICK_SECONDS
            if self._silent_seconds[peer] <= self._stall_seconds:
                continue
            raise RingLostError(silence(peer, self._stall_seconds))


def silence(peer: int, seconds: float) -> str:
    return (
        f"Rank {peer} has been silent for {seconds:g} s: is it stopped, or its host or network "
        "down? See --stall-timeout."
    )


class Links(Protocol):
    """A rank's connections to its neighbours: rank - 1 to the left, rank + 1 to the right."""

    rank: int
    num_ranks: int

    def send(
        self,
        to: int,
        tag: str,
        notes: tuple[AnyNote, ...],
        arrays: Sequence[mx.array],
    ) -> None:
        """Starts to send evaluated arrays to a neighbour, and returns at once."""

    def receive(self, tag: str) -> Payload: ...

    def close(self) -> None: ...


# --- what all ranks do together: every message goes to the left


def all_reduce(
    links: Links,
    mine: Payload,
    add: Callable[[Payload, Payload], Payload],
) -> Payload:
    """Adds up the payloads of all ranks, from the last rank to rank 0, and returns the sum on
    every rank. `add` gets a rank's own payload and the sum of the ranks above it."""
    total = reduce(links, mine, add)
    return broadcast(links, total)


def reduce(
    links: Links,
    mine: Payload,
    add: Callable[[Payload, Payload], Payload],
) -> Payload:
    """Adds up the payloads of all ranks on rank 0. Each other rank gets the sum of its own payload
    and those of the ranks above it."""
    if links.rank < links.num_ranks - 1:
        above = links.receive("reduce")
        mine = add(mine, above)
        mx.eval(mine[1])  # Here, because a lazy array cannot leave the thread that made it.
    if links.rank:
        links.send(links.rank - 1, "reduce", *mine)
    return mine


def broadcast(links: Links, mine: Payload) -> Payload:
    """Returns rank 0's payload on every rank. It travels to the left, so rank 1 is the last."""
    if links.rank:
        mine = links.receive("broadcast")
    if links.rank != 1 and links.num_ranks > 1:
        left = (links.rank - 1) % links.num_ranks
        mx.eval(mine[1])  # Here, because a lazy array cannot leave the thread that made it.
        links.send(left, "broadcast", *mine)
    return mine


def exchange(links: Links, note: AnyKind) -> list[AnyKind]:
    """Returns the notes of all ranks, rank 0's first. No rank returns before all have called."""

    def add(own: Payload, above: Payload) -> Payload:
        own_notes, _ = own
        notes_above, _ = above
        return own_notes + notes_above, []

    notes, _ = all_reduce(links, ((note,), []), add)
    kind = type(note)
    return [_expected(kind, each) for each in notes]


def announce(links: Links, note: AnyKind | None, kind: type[AnyKind]) -> AnyKind:
    """Returns rank 0's note, which is of this kind, on every rank."""
    own_notes = (note,) if note else ()
    notes, _ = broadcast(links, (own_notes, []))
    return _expected(kind, *notes)


def _expected(kind: type[AnyKind], note: AnyNote) -> AnyKind:
    """Returns the note if it is of this kind. Raises ClusterError if it is of another, as from a
    rank that does something else."""
    if isinstance(note, kind):
        return note
    found = type(note).__name__
    raise ClusterError(
        f"A rank sent {found} instead of {kind.__name__}: the ranks are out of step."
    )


def sum_arrays(links: Links, arrays: Sequence[mx.array]) -> list[mx.array]:
    """Returns the sums of the arrays of all ranks, on every rank."""

    def add(own: Payload, above: Payload) -> Payload:
        _, own_arrays = own
        _, sums_above = above
        pairs = zip(own_arrays, sums_above, strict=True)
        return (), [a + b for a, b in pairs]

    _, sums = all_reduce(links, ((), list(arrays)), add)
    return sums


def share(links: Links, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Returns rank 0's named arrays, on every rank."""
    payload = broadcast(links, _payload(named))
    return _named(payload)


def gather(links: Links, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Returns the named arrays of all ranks on rank 0, and those of some ranks elsewhere."""

    def add(own: Payload, above: Payload) -> Payload:
        gathered = _named(above) | _named(own)
        return _payload(gathered)

    payload = reduce(links, _payload(named), add)
    return _named(payload)


def _payload(named: Mapping[str, mx.array]) -> Payload:
    names = TensorNames(list(named))
    return (names,), list(named.values())


def _named(payload: Payload) -> dict[str, mx.array]:
    notes, arrays = payload
    names = _expected(TensorNames, *notes).names
    return dict(zip(names, arrays, strict=True))


# --- inside one process


class LocalLinks:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, inboxes: Sequence[Inbox]) -> None:
        self.rank = rank
        self.num_ranks = len(inboxes)
        self._inboxes = inboxes

    def send(
        self,
        to: int,
        tag: str,
        notes: tuple[AnyNote, ...],
        arrays: Sequence[mx.array],
    ) -> None:
        self._inboxes[to].put(tag, (notes, list(arrays)))

    def receive(self, tag: str) -> Payload:
        return self._inboxes[self.rank].take(tag)

    def close(self) -> None:
        """Ends this rank. Neighbours that wait for more of its messages get an error."""
        for peer in _neighbours(self.rank, self.num_ranks):
            self._inboxes[peer].part(self.rank)


def local_links(num_ranks: int) -> list[LocalLinks]:
    """Makes the links of a ring of threads, rank 0's first."""
    inboxes = []
    for rank in range(num_ranks):
        peers = _neighbours(rank, num_ranks)
        inboxes.append(Inbox(len(peers)))
    return [LocalLinks(rank, inboxes) for rank in range(num_ranks)]


def _neighbours(rank: int, num_ranks: int) -> set[int]:
    left = (rank - 1) % num_ranks
    right = (rank + 1) % num_ranks
    return {left, right} - {rank}


# --- between processes


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A message that waits to be sent, with its tensors as the links prepare them."""

    tag: str
    notes: tuple[AnyNote, ...]
    specs: tuple[TensorSpec, ...]
    tensors: list[mx.array]


class ProcessLinks(ABC):
    """The links of a rank that is a process of its own.

    Headers travel over sockets. How the bytes of tensors travel is up to the subclass. `receive`
    raises RingLostError when a neighbour is lost, or silent for stall_seconds.
    """

    def __init__(self, rank: int, num_ranks: int, num_peers: int, stall_seconds: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._inbox = Inbox(num_peers, stall_seconds)
        self._beat_seconds = min(_BEAT_SECONDS, stall_seconds / 4)
        self._outboxes: dict[int, queue.SimpleQueue[_Outgoing | None]] = {}
        self._senders: list[Thread] = []
        self._sockets: set[socket.socket] = set()

    @abstractmethod
    def _prepare(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Prepares evaluated arrays for `_send_tensors`, in the thread that calls `send`."""

    @abstractmethod
    def _send_tensors(self, peer: int, header: bytes, number: int, tensors: list[mx.array]) -> None:
        """Sends the header of a message and its prepared tensors, in the thread of the link."""

    @abstractmethod
    def _receive_part(self, peer: int, num_bytes: int) -> mx.array: ...

    def _open(
        self,
        writers: Mapping[int, socket.socket],
        readers: Mapping[int, socket.socket],
    ) -> None:
        """Starts to send to and to receive from neighbours, by their ranks."""
        self._sockets = {*writers.values(), *readers.values()}
        for peer, connection in writers.items():
            self._outboxes[peer] = queue.SimpleQueue()
            sender = self._start(self._send_all, peer, connection)
            self._senders.append(sender)
        for peer, connection in readers.items():
            self._inbox.hear(peer)
            self._start(self._receive_all, peer, connection)

    def send(
        self,
        to: int,
        tag: str,
        notes: tuple[AnyNote, ...],
        arrays: Sequence[mx.array],
    ) -> None:
        if to == self.rank:
            self._inbox.put(tag, (notes, list(arrays)))
            return
        message = _Outgoing(tag, notes, tensor_specs(arrays), self._prepare(arrays))
        self._outboxes[to].put(message)

    def receive(self, tag: str) -> Payload:
        return self._inbox.take(tag)

    def close(self) -> None:
        """Closes the links, after it has sent all waiting messages to neighbours that still
        receive. After a loss it closes them at once, so that the neighbours lose this rank too."""
        if not self._inbox.has_lost:
            for outbox in self._outboxes.values():
                outbox.put(None)
            for sender in self._senders:
                sender.join(_FLUSH_SECONDS)
        for connection in self._sockets:
            with suppress(OSError):  # The neighbour may have closed it already.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _start(
        self,
        run: Callable[..., None],
        peer: int,
        connection: socket.socket,
    ) -> Thread:
        def top() -> None:
            stream = mx.new_stream(mx.cpu)
            try:
                run(peer, connection, stream)
            except Exception as error:  # Whatever it is, somebody waits for this thread.
                kind = RingLostError if _is_loss(error) else ClusterError
                broken = kind(f"The link to rank {peer} broke: {error}.")
                self._inbox.fail(broken)

        thread = Thread(target=top, name=f"{run.__name__} {peer}", daemon=True)
        thread.start()
        return thread

    def _send_all(self, peer: int, connection: socket.socket, stream: mx.Stream) -> None:
        for number in count():
            message = self._next(peer, connection)
            if message is None:
                connection.sendall(frame(Parting()))
                return
            header = TaggedTensors(number, message.tag, message.notes, message.specs)
            with mx.stream(stream):
                self._send_tensors(peer, frame(header), number, message.tensors)
            del message  # Before the next one is waited for.

    def _next(self, peer: int, connection: socket.socket) -> "_Outgoing | None":
        """Waits for the next message to send, and tells the peer meanwhile that this rank is
        alive."""
        outbox = self._outboxes[peer]
        while True:
            try:
                return outbox.get(timeout=self._beat_seconds)
            except queue.Empty:
                # The receiving thread notices when the peer is gone.
                with suppress(OSError):
                    connection.sendall(frame(Alive()))

    def _receive_all(self, peer: int, connection: socket.socket, stream: mx.Stream) -> None:
        frames: FrameReader[BetweenTrainers] = FrameReader(BetweenTrainers)
        while data := connection.recv(frames.num_missing):
            self._inbox.hear(peer)
            for message in frames.feed(data):
                match message:
                    case Parting():
                        self._inbox.part(peer)
                        return
                    case TaggedTensors(tag=tag, notes=notes):
                        arrays = self._arrays(peer, message, stream)
                        self._inbox.put(tag, (notes, arrays))
                    case Alive():
                        continue
        lost = RingLostError(f"Rank {peer} has ended: look at its log.")
        self._inbox.fail(lost)

    def _arrays(
        self,
        peer: int,
        header: TaggedTensors,
        stream: mx.Stream,
    ) -> list[mx.array]:
        arrays: list[mx.array] = []
        with mx.stream(stream):
            for spec in header.tensors:
                parts: list[mx.array] = []
                num_elements = math.prod(spec.shape)
                item_bytes = DTYPES[spec.dtype].size
                for start, end in split_parts(num_elements, item_bytes):
                    part = [TensorSpec(spec.dtype, (end - start,))]
                    packed = self._receive_part(peer, packed_bytes(part))
                    parts += unpack(header.number, part, packed)
                    mx.eval(parts)  # Here: a lazy array cannot leave the thread that made it.
                    self._inbox.hear(peer)
                flat = mx.concatenate(parts)
                arrays.append(flat.reshape(spec.shape))
            mx.eval(arrays)
        return arrays


class RingLinks(ProcessLinks):
    """The links of a ring: to both neighbours. Tensors travel over MLX's own ring."""

    def __init__(self, ring: Ring, stall_seconds: float) -> None:
        num_ranks = len(ring.hosts)
        num_peers = len(_neighbours(ring.rank, num_ranks))
        super().__init__(ring.rank, num_ranks, num_peers, stall_seconds)
        self._group, to_left, to_right = form_ring(ring, mx.default_stream(mx.cpu))
        left = (ring.rank - 1) % num_ranks
        right = (ring.rank + 1) % num_ranks
        writers = {left: to_left}
        readers = {right: to_right}
        if left != right:
            writers[right] = to_right
            readers[left] = to_left
        self._writers = writers
        self._open(writers, readers)

    def _prepare(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        return list(arrays)

    def _send_tensors(self, peer: int, header: bytes, number: int, tensors: list[mx.array]) -> None:
        parts = []
        for array in tensors:
            flat = array.reshape(-1)
            for start, end in split_parts(flat.size, flat.itemsize):
                part = pack(number, [flat[start:end]])
                parts.append(part)
        mx.eval(parts[:1])  # Before the header: a receive that waits uses a core.
        self._writers[peer].sendall(header)
        while parts:
            part = parts.pop(0)
            mx.eval(mx.distributed.send(part, peer, group=self._group))

    def _receive_part(self, peer: int, num_bytes: int) -> mx.array:
        return mx.distributed.recv((num_bytes,), mx.uint8, peer, group=self._group)


def _is_loss(error: Exception) -> bool:
    """Whether an error of a link means that the other rank is gone."""
    is_ring_broken = isinstance(error, RuntimeError) and "[ring]" in str(error)
    return is_ring_broken or isinstance(error, OSError | RingLostError)


def bytes_of(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Returns the evaluated bytes of each array."""
    tensors = [array.reshape(-1).view(mx.uint8) for array in arrays]
    mx.eval(tensors)  # Here: a lazy array cannot leave the thread that made it.
    return tensors


def split_parts(num_elements: int, item_bytes: int) -> list[tuple[int, int]]:
    """Cuts the elements of a tensor into ranges [start, end) that each fit into one message."""
    step = _PART_BYTES // item_bytes
    starts = range(0, max(1, num_elements), step)
    return [(start, min(start + step, num_elements)) for start in starts]
