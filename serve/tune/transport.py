"""Sends activations, gradients and notes from rank to rank in training, over TCP.

The receiver selects messages by tag when its schedule needs them, so they may arrive in any order
and a send does not wait for its receiver's turn. Each link has a sending and a receiving thread,
so two large messages can pass each other. Nothing here is a collective of MLX."""

import logging
import math
import os
import queue
import select
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Condition, Event, Thread
from typing import Any, Generic, Protocol, TypeVar, cast

import mlx.core as mx
import numpy as np

from serve.core.errors import BrigadeError, ClusterError, LostRankError, from_exit_code
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
from serve.ring.peers import RingLostError
from serve.ring.transport import DTYPES, tensor_specs

Notes = tuple[AnyNote, ...]
Payload = tuple[Notes, list[mx.array]]
"""Notes and arrays."""
Message = TypeVar("Message")
AnyKind = TypeVar("AnyKind", bound=AnyNote)
_FLUSH_SECONDS = 5.0
_BEAT_SECONDS = 5.0
_TICK_SECONDS = 1.0
_STUCK_SECONDS = 15.0  # how long a rank that has lost another one may compute
_PART_BYTES = 256 << 20  # the most bytes in one system call
# The integer type for each size of a number: NumPy has no bfloat16.
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_logger = logging.getLogger(__name__)


class Inbox(Generic[Message]):
    """Received messages of all neighbours, by tag."""

    def __init__(self, num_peers: int = 1) -> None:
        self._num_peers = num_peers
        self._messages: dict[str, deque[Message]] = defaultdict(deque)
        self._changed = Condition()
        self.error: BrigadeError | None = None

    def put(self, tag: str, message: Message) -> None:
        with self._changed:
            self._messages[tag].append(message)
            self._changed.notify_all()

    def fail(self, error: BrigadeError) -> None:
        """Makes each later `get` of a message that has not arrived raise this error."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    @property
    def has_lost(self) -> bool:
        """Whether a neighbour or a link was lost."""
        return isinstance(self.error, RingLostError)

    def peer_finished(self, peer: int) -> None:
        """Records that a neighbour has finished. Other neighbours may still send messages."""
        with self._changed:
            self._num_peers -= 1
            if self._num_peers <= 0:
                self.fail(ClusterError(f"Rank {peer} has ended.", code="lost_rank"))

    def get(self, tag: str) -> Message:
        """Waits for a message and removes it. Raises RingLostError if a neighbour is lost, a
        neighbour's error if this has ended the run, and ClusterError if something else is wrong."""
        with self._changed:
            arrived = self._messages[tag]
            while not arrived:
                if self.error:
                    raise self.error
                self._changed.wait()
            return arrived.popleft()


class Links(Protocol):
    """A rank's connections to others, at least to rank - 1 and rank + 1."""

    rank: int
    num_ranks: int

    def send(self, to: int, tag: str, notes: Notes, arrays: Sequence[mx.array]) -> None:
        """Evaluates arrays, starts to send them, and returns."""

    def receive(self, tag: str) -> Payload: ...

    def close(self, error: BrigadeError | None = None) -> None:
        """Ends this rank's part. Other ranks that wait for more of its messages raise error."""


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
    """Adds up the payloads of all ranks on rank 0. Other ranks return the sum of their own payload
    and those of all higher ranks."""
    if links.rank < links.num_ranks - 1:
        mine = add(mine, links.receive("reduce"))
    if links.rank:
        links.send(links.rank - 1, "reduce", *mine)
    return mine


def broadcast(links: Links, mine: Payload) -> Payload:
    """Returns rank 0's payload on every rank. The payload travels to the left, and reaches rank 1
    last."""
    if links.rank:
        mine = links.receive("broadcast")
    if links.rank != 1 and links.num_ranks > 1:
        left = (links.rank - 1) % links.num_ranks
        links.send(left, "broadcast", *mine)
    return mine


def exchange(links: Links, note: AnyKind) -> list[AnyKind]:
    """Returns the notes of all ranks, rank 0's first. No rank returns before all have called."""

    def add(own: Payload, above: Payload) -> Payload:
        return own[0] + above[0], []

    notes, _ = all_reduce(links, ((note,), []), add)
    kind = type(note)
    return [_expected(kind, each) for each in notes]


def announce(links: Links, note: AnyKind | None, kind: type[AnyKind]) -> AnyKind:
    """Returns rank 0's note, which is of this kind, on every rank."""
    own_notes = (note,) if note else ()
    notes, _ = broadcast(links, (own_notes, []))
    return _expected(kind, *notes)


def _expected(kind: type[AnyKind], note: AnyNote) -> AnyKind:
    """Returns the note if it is of this kind. Otherwise raises ClusterError: the sending rank is at
    another point."""
    if isinstance(note, kind):
        return note
    found = type(note).__name__
    raise ClusterError(
        f"A rank sent {found} instead of {kind.__name__}: the ranks are out of step.",
        code="out_of_step",
    )


def sum_arrays(links: Links, arrays: Sequence[mx.array]) -> list[mx.array]:
    """Returns the sums of the arrays of all ranks, on every rank."""

    def add(own: Payload, above: Payload) -> Payload:
        pairs = zip(own[1], above[1], strict=True)
        return (), [a + b for a, b in pairs]

    _, sums = all_reduce(links, ((), list(arrays)), add)
    return sums


def share(links: Links, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Returns rank 0's named arrays, on every rank."""
    payload = broadcast(links, _payload(named))
    return _named(payload)


def gather(links: Links, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Returns the named arrays of all ranks on rank 0. Other ranks get only some arrays."""

    def add(own: Payload, above: Payload) -> Payload:
        return _payload(_named(above) | _named(own))

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

    def __init__(self, rank: int, inboxes: Sequence[Inbox[Payload]]) -> None:
        self.rank = rank
        self.num_ranks = len(inboxes)
        self._inboxes = inboxes

    def send(self, to: int, tag: str, notes: Notes, arrays: Sequence[mx.array]) -> None:
        mx.eval(arrays)  # A lazy array cannot leave the thread that made it.
        self._inboxes[to].put(tag, (notes, list(arrays)))

    def receive(self, tag: str) -> Payload:
        return self._inboxes[self.rank].get(tag)

    def close(self, error: BrigadeError | None = None) -> None:
        """Ends this rank. Neighbours that wait for more of its messages get an error."""
        for peer in _neighbours(self.rank, self.num_ranks):
            if error:
                self._inboxes[peer].fail(error)
            self._inboxes[peer].peer_finished(self.rank)


def local_links(num_ranks: int) -> list[LocalLinks]:
    """Makes the links of a ring of threads, rank 0's first."""
    inboxes: list[Inbox[Payload]] = []
    for rank in range(num_ranks):
        peers = _neighbours(rank, num_ranks)
        inboxes.append(Inbox(len(peers)))
    return [LocalLinks(rank, inboxes) for rank in range(num_ranks)]


def _neighbours(rank: int, num_ranks: int) -> set[int]:
    left = (rank - 1) % num_ranks
    right = (rank + 1) % num_ranks
    return {left, right} - {rank}


# --- between processes


Encoded = tuple[Notes, list[tuple[TensorSpec, memoryview]]]
"""Notes, and the bytes of arrays."""


class TcpLinks:
    """The links of a rank that is a separate process, to other ranks.

    `receive` raises RingLostError when one of these ranks is lost, or silent for stall_seconds.
    has_sums says that shards of a stage add up results over MLX's ring: such a sum cannot be
    interrupted and may never return after a loss, so the process ends if it does not end by itself.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        connections: Mapping[int, socket.socket],
        stall_seconds: float,
        *,
        has_sums: bool = False,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._connections = connections
        self._stall_seconds = stall_seconds
        self._has_sums = has_sums
        self._is_closed = Event()
        self._parting = Parting()
        self._inbox: Inbox[Encoded] = Inbox(len(connections))
        self._outboxes: dict[int, queue.SimpleQueue[tuple[str, Encoded] | None]] = {}
        self._senders: list[Thread] = []
        for peer in connections:
            self._outboxes[peer] = queue.SimpleQueue()
            self._senders.append(self._start(self._send_all, peer))
            self._start(self._receive_all, peer)

    def send(self, to: int, tag: str, notes: Notes, arrays: Sequence[mx.array]) -> None:
        # The thread of the link must evaluate nothing: MLX makes it wait while other streams are
        # busy, and this rank may be in a sum with the one that waits for this message.
        views = [_bytes_of(array) for array in arrays]
        message = notes, list(zip(tensor_specs(arrays), views, strict=True))
        if to == self.rank:
            self._inbox.put(tag, message)
        else:
            self._outboxes[to].put((tag, message))

    def receive(self, tag: str) -> Payload:
        notes, tensors = self._inbox.get(tag)
        return notes, [_array_of(spec, data) for spec, data in tensors]

    def close(self, error: BrigadeError | None = None) -> None:
        """Sends all waiting messages to neighbours that still receive, then the error that ends the
        run, if there is one, and closes the links. Without the error, ranks that wait would keep
        each other waiting by heartbeats. After a loss, closes the links at once, so that the
        neighbours lose this rank too."""
        self._is_closed.set()
        self._parting = self._parting_with(error)
        if not self._inbox.has_lost:
            for outbox in self._outboxes.values():
                outbox.put(None)
            for sender in self._senders:
                sender.join(_FLUSH_SECONDS)
        for connection in self._connections.values():
            with suppress(OSError):  # The neighbour may have closed it already.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _parting_with(self, error: BrigadeError | None) -> Parting:
        if error is None:
            return Parting()
        message = str(error)
        if error is not self._inbox.error:  # Otherwise the error names the rank that ended first.
            message = f"Rank {self.rank}: {message}"
        return Parting(error.exit_code, error.code, message)

    # --- the threads of a link

    def _start(self, run: Callable[[int], None], peer: int) -> Thread:
        def top() -> None:
            try:
                run(peer)
            except BrigadeError as error:
                self._lose(error)
            except OSError as error:
                self._lose(RingLostError(f"The link to rank {peer} broke: {error}."))
            except Exception as error:  # Other ranks wait for messages of this thread.
                self._inbox.fail(ClusterError(f"The link to rank {peer} broke: {error}."))

        thread = Thread(target=top, name=f"{run.__name__} {peer}", daemon=True)
        thread.start()
        return thread

    def _lose(self, error: BrigadeError) -> None:
        self._inbox.fail(error)
        if self._has_sums and not self._is_closed.wait(_STUCK_SECONDS):
            _logger.error("%s This rank is in a sum with it, and cannot interrupt that.", error)
            is_loss = isinstance(error, RingLostError)
            os._exit(LostRankError.exit_code if is_loss else error.exit_code)

    def _send_all(self, peer: int) -> None:
        with suppress(OSError):  # the receiving thread learns why the peer is gone
            self._send_until_closed(peer)

    def _send_until_closed(self, peer: int) -> None:
        connection = self._connections[peer]
        while waiting := self._next(peer):
            tag, (notes, tensors) = waiting
            specs = tuple(spec for spec, _ in tensors)
            connection.sendall(frame(TaggedTensors(tag, notes, specs)))
            for _, data in tensors:
                for start in range(0, len(data), _PART_BYTES):
                    connection.sendall(data[start : start + _PART_BYTES])
            del waiting, tensors  # frees them before waiting for the next message
        connection.sendall(frame(self._parting))

    def _next(self, peer: int) -> tuple[str, Encoded] | None:
        """Waits for the next message to send. Meanwhile, tells the peer that this rank is alive."""
        beat_seconds = min(_BEAT_SECONDS, self._stall_seconds / 4)
        while True:
            try:
                return self._outboxes[peer].get(timeout=beat_seconds)
            except queue.Empty:
                self._connections[peer].sendall(frame(Alive()))

    def _receive_all(self, peer: int) -> None:
        frames: FrameReader[BetweenTrainers] = FrameReader(BetweenTrainers)
        while True:
            header = bytearray(frames.num_missing)
            num_read = self._read_into(peer, memoryview(header))
            for message in frames.feed(header[:num_read]):
                match message:
                    case Parting(exit_code, code, text):
                        if exit_code:
                            raise from_exit_code(exit_code, text, code)
                        self._inbox.peer_finished(peer)
                        return
                    case TaggedTensors(tag, notes, specs):
                        tensors = [(spec, self._read(peer, _num_bytes(spec))) for spec in specs]
                        self._inbox.put(tag, (notes, tensors))
                    case Alive():
                        continue

    def _read(self, peer: int, num_bytes: int) -> memoryview:
        data = memoryview(bytearray(num_bytes))
        num_read = 0
        while num_read < num_bytes:
            num_read += self._read_into(peer, data[num_read : num_read + _PART_BYTES])
        return data

    def _read_into(self, peer: int, view: memoryview) -> int:
        """Reads some bytes, and returns how many. Raises RingLostError if the peer is lost."""
        connection = self._connections[peer]
        silent_seconds = 0.0
        # Only seconds in which this process ran count: while it was stopped, no peer was silent.
        while not select.select([connection], [], [], _TICK_SECONDS)[0]:
            silent_seconds += _TICK_SECONDS
            if silent_seconds >= self._stall_seconds:
                raise RingLostError(
                    f"Rank {peer} has been silent for {self._stall_seconds:g} s: is it stopped, or "
                    "its host or network down? See --stall-timeout."
                )
        num_read = connection.recv_into(view)
        if not num_read:
            raise RingLostError(f"Rank {peer} has ended: look at its log.", code="lost_rank")
        return num_read


def _bytes_of(array: mx.array) -> memoryview:
    """Evaluates an array and returns its bytes."""
    if not array.size:
        return memoryview(b"")
    flat = array.reshape(-1).view(_BITS[array.itemsize])
    mx.eval(flat)
    return memoryview(cast(Any, flat)).cast("B")


def _array_of(spec: TensorSpec, data: memoryview) -> mx.array:
    dtype = DTYPES[spec.dtype]
    numbers = np.frombuffer(data, f"u{dtype.size}")
    return mx.array(numbers).view(dtype).reshape(spec.shape)


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPES[spec.dtype].size
