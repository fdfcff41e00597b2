"""Sends activations, gradients and notes from rank to rank in training.

A message has a tag, by which the receiver takes it when its schedule wants it: they may come in
any order, and no send waits for its receiver's turn. Each neighbour has a thread that sends and
one that receives, so that two large messages pass each other. A receive is posted when its
doorbell rings, because one that waits costs a core. Nothing here is a collective of MLX."""

import math
import queue
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from serve.ring.transport import DTYPES, Ring, form_ring, pack, packed_bytes, tensor_specs, unpack

Payload = tuple[tuple[AnyNote, ...], list[mx.array]]
"""Notes and arrays."""
Said = TypeVar("Said", bound=AnyNote)
_FLUSH_SECONDS = 5.0
_BEAT_SECONDS = 5.0
_TICK_SECONDS = 1.0
_PART_BYTES = 256 << 20  # of a message over the ring: MLX counts elements with 32 bits


class Inbox:
    """Messages that have come from so many neighbours, by their tags."""

    def __init__(self, num_peers: int = 1, stall_seconds: float = math.inf) -> None:
        self._num_peers = num_peers
        self._stall_seconds = stall_seconds
        self._silent_seconds: dict[int, float] = {}
        self._messages: dict[str, deque[Payload]] = defaultdict(deque)
        self._changed = Condition()
        self._error: ClusterError | None = None

    def put(self, tag: str, payload: Payload) -> None:
        with self._changed:
            self._messages[tag].append(payload)
            self._changed.notify_all()

    def fail(self, error: ClusterError) -> None:
        """Whoever waits from here on for what has not come gets the error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def hear(self, peer: int) -> None:
        """Notes that a neighbour lives. From the first time on it must be heard regularly."""
        with self._changed:
            self._silent_seconds[peer] = 0.0

    def part(self, peer: int) -> None:
        """A neighbour has done all that it had to. Another one may still have something."""
        with self._changed:
            self._silent_seconds.pop(peer, None)
            self._num_peers -= 1
            if self._num_peers <= 0:
                self.fail(ClusterError(f"Rank {peer} has ended."))

    def take(self, tag: str) -> Payload:
        with self._changed:
            while not self._messages[tag]:
                if self._error:
                    raise self._error
                if self._changed.wait(_TICK_SECONDS):
                    continue
                # By its own waiting: a rank that was stopped itself blames nobody.
                for peer in self._silent_seconds:
                    self._silent_seconds[peer] += _TICK_SECONDS
                    if self._silent_seconds[peer] > self._stall_seconds:
                        raise ClusterError(
                            f"Rank {peer} has been silent for {self._stall_seconds:g} s: is it "
                            "stopped, or its host or network down? See --stall-timeout."
                        )
            return self._messages[tag].popleft()


class Links(Protocol):
    """This rank's neighbours: rank - 1 to the left, rank + 1 to the right."""

    rank: int
    num_ranks: int

    def send(
        self, to: int, tag: str, notes: tuple[AnyNote, ...], arrays: Sequence[mx.array]
    ) -> None:
        """Starts to send evaluated arrays to a neighbour, and returns."""

    def receive(self, tag: str) -> Payload: ...

    def close(self) -> None: ...


# --- what all ranks do together, made of messages to the left


def all_reduce(links: Links, mine: Payload, add: Callable[[Payload, Payload], Payload]) -> Payload:
    """The payloads of all ranks added up from the last rank to rank 0, on every rank. add
    gets the rank's own and that of the ranks above."""
    return broadcast(links, reduce(links, mine, add))


def reduce(links: Links, mine: Payload, add: Callable[[Payload, Payload], Payload]) -> Payload:
    """The same, on rank 0; each other rank gets the sum of itself and those above."""
    if links.rank < links.num_ranks - 1:
        mine = add(mine, links.receive("reduce"))
        mx.eval(mine[1])  # Here, because lazy arrays cannot leave the thread they are from.
    if links.rank:
        links.send(links.rank - 1, "reduce", *mine)
    return mine


def broadcast(links: Links, mine: Payload) -> Payload:
    """Rank 0's payload on every rank. It goes to the left, so rank 1 is the last to get it."""
    if links.rank:
        mine = links.receive("broadcast")
    if links.rank != 1 and links.num_ranks > 1:
        mx.eval(mine[1])  # Here, because lazy arrays cannot leave the thread they are from.
        links.send((links.rank - 1) % links.num_ranks, "broadcast", *mine)
    return mine


def exchange(links: Links, note: Said) -> list[Said]:
    """The note of every rank, rank 0's first. No rank returns before all have called."""

    def add(own: Payload, above: Payload) -> Payload:
        return own[0] + above[0], []

    notes, _ = all_reduce(links, ((note,), []), add)
    return [_expected(type(note), each) for each in notes]


def announce(links: Links, note: Said | None, kind: type[Said]) -> Said:
    """Rank 0's note, which is of this kind, on every rank."""
    notes, _ = broadcast(links, ((note,) if note else (), []))
    return _expected(kind, *notes)


def _expected(kind: type[Said], note: AnyNote) -> Said:
    """Raises ClusterError for a note of another kind, as from a rank that does something else."""
    if isinstance(note, kind):
        return note
    raise ClusterError(
        f"A rank sent {type(note).__name__} instead of {kind.__name__}: the ranks are out of step."
    )


def sum_arrays(links: Links, arrays: Sequence[mx.array]) -> list[mx.array]:
    def add(own: Payload, above: Payload) -> Payload:
        pairs = zip(own[1], above[1], strict=True)
        return (), [a + b for a, b in pairs]

    return all_reduce(links, ((), list(arrays)), add)[1]


def share(links: Links, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Rank 0's named arrays, on every rank."""
    return _named(broadcast(links, _payload(named)))


def gather(links: Links, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """On rank 0 the named arrays of all ranks."""

    def add(own: Payload, above: Payload) -> Payload:
        return _payload(_named(above) | _named(own))

    return _named(reduce(links, _payload(named), add))


def _payload(named: Mapping[str, mx.array]) -> Payload:
    return (TensorNames(list(named)),), list(named.values())


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
        self, to: int, tag: str, notes: tuple[AnyNote, ...], arrays: Sequence[mx.array]
    ) -> None:
        self._inboxes[to].put(tag, (notes, list(arrays)))

    def receive(self, tag: str) -> Payload:
        return self._inboxes[self.rank].take(tag)

    def close(self) -> None:
        """The others get an error if they wait for more."""
        for peer in _neighbours(self.rank, self.num_ranks):
            self._inboxes[peer].part(self.rank)


def local_links(num_ranks: int) -> list[LocalLinks]:
    inboxes = [Inbox(len(_neighbours(rank, num_ranks))) for rank in range(num_ranks)]
    return [LocalLinks(rank, inboxes) for rank in range(num_ranks)]


def _neighbours(rank: int, num_ranks: int) -> set[int]:
    return {(rank - 1) % num_ranks, (rank + 1) % num_ranks} - {rank}


# --- between processes


class RingLinks:
    """Raises ClusterError from receive when a neighbour is gone, or silent for so long. That is
    the end of the process: a group cannot be formed twice in one."""

    def __init__(self, ring: Ring, stall_seconds: float) -> None:
        self.rank = ring.rank
        self.num_ranks = len(ring.hosts)
        self._inbox = Inbox(len(_neighbours(self.rank, self.num_ranks)), stall_seconds)
        self._beat_seconds = min(_BEAT_SECONDS, stall_seconds / 4)
        self._group, self._left, self._right = form_ring(ring, mx.new_stream(mx.cpu))
        left = (ring.rank - 1) % self.num_ranks
        right = (ring.rank + 1) % self.num_ranks
        writers = {left: self._left}
        readers = {right: self._right}
        if left != right:
            writers[right], readers[left] = self._right, self._left
        self._outboxes: dict[int, queue.SimpleQueue[tuple[str, Payload] | None]] = {}
        self._senders = []
        for peer, doorbell in writers.items():
            self._outboxes[peer] = queue.SimpleQueue()
            self._senders.append(self._start(self._send_all, peer, doorbell))
        for peer, doorbell in readers.items():
            self._inbox.hear(peer)
            self._start(self._receive_all, peer, doorbell)

    def send(
        self, to: int, tag: str, notes: tuple[AnyNote, ...], arrays: Sequence[mx.array]
    ) -> None:
        self._outboxes[to].put((tag, (notes, list(arrays))))

    def receive(self, tag: str) -> Payload:
        return self._inbox.take(tag)

    def close(self) -> None:
        """Closes the links. Messages that were sent go out first, if the neighbours still take
        them."""
        for outbox in self._outboxes.values():
            outbox.put(None)
        for sender in self._senders:
            sender.join(_FLUSH_SECONDS)
        for doorbell in (self._left, self._right):
            doorbell.close()

    def _start(self, run: Callable[..., None], peer: int, doorbell: socket.socket) -> Thread:
        def top() -> None:
            try:
                run(peer, doorbell, mx.new_stream(mx.cpu))
            except Exception as error:  # Whatever it is, somebody waits for this thread.
                self._inbox.fail(ClusterError(f"The link to rank {peer} broke: {error}."))

        thread = Thread(target=top, name=f"{run.__name__} {peer}", daemon=True)
        thread.start()
        return thread

    def _send_all(self, peer: int, doorbell: socket.socket, stream: mx.Stream) -> None:
        for number in count():
            message = self._next(peer, doorbell)
            if message is None:
                doorbell.sendall(frame(Parting()))
                return
            tag, (notes, arrays) = message
            header = TaggedTensors(number, tag, notes, tensor_specs(arrays))
            with mx.stream(stream):
                flat = [(array.reshape(-1), array.itemsize) for array in arrays]
                parts = []
                for a, size in flat:
                    for i, j in _parts(a.size, size):
                        parts.append(pack(number, [a[i:j]]))
                mx.eval(parts[:1])  # Before the doorbell: a receive that waits costs a core.
                doorbell.sendall(frame(header))
                while parts:
                    part = parts.pop(0)
                    mx.eval(mx.distributed.send(part, peer, group=self._group, stream=stream))

    def _next(self, peer: int, doorbell: socket.socket) -> tuple[str, Payload] | None:
        """Waits for the next message to send. Until there is one, the peer hears that this rank
        lives."""
        while True:
            try:
                return self._outboxes[peer].get(timeout=self._beat_seconds)
            except queue.Empty:
                # Whether the peer is gone is seen by the thread that listens to it.
                with suppress(OSError):
                    doorbell.sendall(frame(Alive()))

    def _receive_all(self, peer: int, doorbell: socket.socket, stream: mx.Stream) -> None:
        frames: FrameReader[BetweenTrainers] = FrameReader(BetweenTrainers)
        while data := doorbell.recv(1 << 16):
            self._inbox.hear(peer)
            for message in frames.feed(data):
                match message:
                    case Parting():
                        self._inbox.part(peer)
                        return
                    case TaggedTensors(tag=tag, notes=notes):
                        self._inbox.put(tag, (notes, self._arrays(peer, message, stream)))
                    case Alive():
                        continue
        self._inbox.fail(ClusterError(f"Rank {peer} has ended: look at its log."))

    def _arrays(self, peer: int, header: TaggedTensors, stream: mx.Stream) -> list[mx.array]:
        arrays: list[mx.array] = []
        with mx.stream(stream):
            for spec in header.tensors:
                parts: list[mx.array] = []
                for start, end in _parts(math.prod(spec.shape), DTYPES[spec.dtype].size):
                    part = [TensorSpec(spec.dtype, (end - start,))]
                    size = (packed_bytes(part),)
                    group = self._group
                    packed = mx.distributed.recv(size, mx.uint8, peer, group=group, stream=stream)
                    parts += unpack(header.number, part, packed)
                    mx.eval(parts)  # Here: lazy arrays cannot leave the thread they are from.
                    self._inbox.hear(peer)
                arrays.append(mx.concatenate(parts).reshape(spec.shape))
            mx.eval(arrays)
        return arrays


def _parts(count: int, item_bytes: int) -> list[tuple[int, int]]:
    """The elements of a tensor, from and to, that go over the ring together."""
    step = _PART_BYTES // item_bytes
    starts = range(0, max(1, count), step)
    return [(start, min(start + step, count)) for start in starts]
