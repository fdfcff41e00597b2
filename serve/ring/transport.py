"""Sends a step and its tensors from one stage to the next, around a ring of ranks.

Every message goes to the left neighbour: rank r to rank r - 1, rank 0 to the last rank. Its
header travels over a TCP connection, and its tensors follow as one packed message over
mx.distributed. A rank posts a receive only when data is coming, so waiting costs no CPU.
"""

import json
import math
import os
import queue
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import mlx.core as mx

from serve.core.connection import keep_alive
from serve.core.errors import ClusterError
from serve.core.messages import Greeting, Hop, TensorSpec
from serve.core.types import FIRST_WARM_UP_STEP, Step
from serve.core.wire import FrameReader, frame
from serve.ring.peers import Reception
from serve.ring.regroup import closing_failed_connections, forget_groups
from serve.ring.sums import Sums


class RingLostError(ClusterError):
    """A neighbour or a link is gone. Everything that this process holds is still intact."""


Received = tuple[Step, list[mx.array]]
"""A step, and the tensors that came with it."""


class Transport(Protocol):
    """The connection of one rank to its neighbours.

    This rank has the shard with number shard, of the num_shards shards of its stage.
    waits_on is the hop (from rank, to rank) that this rank waits for: its tensor has been
    announced, or has still to be taken. It is None while nothing is on the way. num_hops counts
    received messages with tensors, hop_seconds is the time from their headers to their tensors.
    sums counts the sums between the shards of this stage.
    """

    shard: int
    num_shards: int
    waits_on: tuple[int, int] | None
    num_hops: int
    hop_seconds: float
    sums: Sums

    def evaluate(self, arrays: Sequence[mx.array]) -> None:
        """Evaluates arrays that the shards of a stage compute together. All shards evaluate the
        same arrays in the same order."""

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None: ...

    def receive(self) -> Received | None:
        """Returns the next step and its tensors; None when the transport was closed."""

    def close(self) -> None: ...


class Hops:
    """The base of all transports. It counts hops, and notes which one this rank waits for. Stages
    have one shard each, except in GridTransport."""

    def __init__(self) -> None:
        self.shard = 0
        self.num_shards = 1
        self.waits_on: tuple[int, int] | None = None
        self.num_hops = 0
        self.hop_seconds = 0.0
        self.sums = Sums()

    def evaluate(self, arrays: Sequence[mx.array]) -> None:
        mx.eval(*arrays)

    def count(self, step: Step, started: float) -> None:
        """Counts a received hop. started is the time.perf_counter() at which its header came."""
        if step.number < FIRST_WARM_UP_STEP:
            self.num_hops += 1
            self.hop_seconds += time.perf_counter() - started

    @contextmanager
    def waiting_on(self, hop: tuple[int, int]) -> Iterator[None]:
        """Sets waits_on during a send or a receive, which may block forever. The parent of rank 0
        reads waits_on, so it knows which hop is stuck and can end this process."""
        self.waits_on = hop
        try:
            yield
        except RuntimeError as error:
            kind = RingLostError if "[ring]" in str(error) else ClusterError
            raise kind(f"The ring broke: {error}.") from error
        finally:
            self.waits_on = None


# --- inside one process


class LocalTransport(Hops):
    """Passes messages to another transport in the same process, or to itself."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self._left = self

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None:
        mx.eval(*arrays)
        self._left._inbox.put((step, list(arrays)))

    def receive(self) -> Received | None:
        return self._inbox.get()

    def close(self) -> None:
        self._inbox.put(None)

    def leave(self) -> None:
        """Does nothing, because no other process knows of this transport."""


def local_ring(num_ranks: int) -> list[LocalTransport]:
    """Makes the transports of a ring inside one process. A cluster of one rank has a ring of one
    transport; tests run whole pipelines with more."""
    ring = [LocalTransport() for _ in range(num_ranks)]
    for rank, transport in enumerate(ring):
        transport._left = ring[rank - 1]
    return ring


# --- between processes


@dataclass(frozen=True, slots=True)
class Ring:
    """The place of this rank in a ring. nonce tells one start of the ring from another: MLX
    itself lets two rings on the same ports join each other."""

    rank: int
    hosts: tuple[str, ...]
    nonce: int
    timeout_seconds: float


class Streams:
    """The streams on which a process sends and receives. Each has a thread that lasts as long as
    the process, so all rings of a process use the same ones, in the thread that made them."""

    def __init__(self) -> None:
        # On one common stream, no message could come in while a sent one waits to be taken.
        self.sends = mx.new_stream(mx.cpu)
        self.receives = mx.new_stream(mx.cpu)


class RingTransport(Hops):
    """A transport between processes, for stages of one rank each.

    It raises RingLostError at the first sign that a neighbour is gone, and ClusterError if what
    comes is wrong. streams are those of an earlier ring of this process, if there was one.
    """

    def __init__(self, ring: Ring, streams: Streams | None = None) -> None:
        super().__init__()
        num_ranks = len(ring.hosts)
        self._rank = ring.rank
        self._left_rank = (ring.rank - 1) % num_ranks
        self._right_rank = (ring.rank + 1) % num_ranks
        streams = streams or Streams()
        self._sends, self._receives = streams.sends, streams.receives
        self._reader: FrameReader[Hop] = FrameReader(Hop)
        self._hops: list[Hop] = []
        self._sending: mx.array | None = None
        self._group: mx.distributed.Group | None
        self._group, self._left, self._right = form_ring(ring, self._receives)

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None:
        """Starts to send evaluated arrays, and returns. It first waits until the neighbour has
        taken the previous message, so that two messages never overtake each other."""
        specs = tensor_specs(arrays)
        if self._sending is not None:
            with self.waiting_on((self._rank, self._left_rank)):
                mx.eval(self._sending)
        self._write(frame(Hop(step, specs)))
        if specs:
            # The thread that sends also packs, and does so while the neighbour wakes up.
            with mx.stream(self._sends):
                packed = pack(step.number, arrays)
                self._sending = mx.distributed.send(packed, self._left_rank, group=self._group)
            # MLX may have seen meanwhile that the neighbour is gone, and then it raises here.
            with self.waiting_on((self._rank, self._left_rank)):
                mx.async_eval(self._sending)

    def receive(self) -> Received | None:
        hop = self._next_hop()
        if hop is None:
            return None
        step, specs = hop.step, hop.tensors
        if not specs:
            return step, []
        started = time.perf_counter()
        right = self._right_rank
        shape = (packed_bytes(specs),)
        with mx.stream(self._receives), self.waiting_on((right, self._rank)):
            packed = mx.distributed.recv(shape, mx.uint8, right, group=self._group)
            arrays = unpack(step.number, specs, packed)
        self.count(step, started)
        return step, arrays

    def close(self) -> None:
        """Closes the connections, and wakes up a thread that waits for a header."""
        for connection in (self._left, self._right):
            with suppress(OSError):  # The neighbour may have closed it already.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def leave(self) -> None:
        """Closes the ring, so that this process can form another one. It must be called in the
        thread that sends and receives. It blocks while a message is on its way on an open link."""
        self.close()
        for stream in (self._sends, self._receives):
            # MLX frees a group without checking whether a stream still uses it.
            with suppress(RuntimeError):  # The neighbour did not take the last message.
                mx.synchronize(stream)
        self._sending = None
        self._group = None
        forget_groups()

    def _next_hop(self) -> Hop | None:
        while not self._hops:
            try:
                data = self._right.recv(1 << 16)
            except OSError as error:
                raise RingLostError(f"The link to the right neighbour broke: {error}.") from error
            if not data:
                return None
            self._hops += self._reader.feed(data)
        return self._hops.pop(0)

    def _write(self, data: bytes) -> None:
        try:
            self._left.sendall(data)
        except OSError as error:
            raise RingLostError(f"The link to the left neighbour broke: {error}.") from error


@contextmanager
def among(
    ranks: Sequence[int],
    addresses: list[list[str]],
    folder: Path,
) -> Iterator[None]:
    """Sets the environment variables from which MLX forms a ring, here of some of the launch's
    ranks.

    MLX_RANK is the rank within the launch, before and after. The caller removes the folder of the
    host file, because this process may be killed.
    """
    # The folder may be gone, because some systems clean up temporary folders after days.
    folder.mkdir(0o700, parents=True, exist_ok=True)
    own_place = os.environ["MLX_RANK"]
    rank = int(own_place)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json") as file:
        json.dump([addresses[each] for each in ranks], file)
        file.flush()
        os.environ["MLX_HOSTFILE"] = file.name
        os.environ["MLX_RANK"] = str(ranks.index(rank))
        try:
            yield
        finally:
            os.environ["MLX_RANK"] = own_place  # It is read again for the next ring.


def form_ring(
    ring: Ring,
    stream: mx.Stream,
) -> tuple[mx.distributed.Group, socket.socket, socket.socket]:
    """Forms MLX's group, and connects to the left and from the right neighbour.

    Raises ClusterError.
    """
    with socket.create_server((ring.hosts[ring.rank], 0), backlog=2) as listening:
        try:
            group = form_group(ring.rank, len(ring.hosts))
            port = listening.getsockname()[1]
            ports = exchange(ring.nonce, port, group, stream)
        except RuntimeError as error:
            raise ClusterError(f"The ring broke: {error}.") from error
        left, right = _connect_neighbours(ring, listening, ports)
        return group, left, right


def form_group(rank: int, num_ranks: int) -> mx.distributed.Group:
    """Forms MLX's group of the ranks that the environment names. Raises ClusterError, or
    RuntimeError if a neighbour is gone."""
    with closing_failed_connections():
        group = mx.distributed.init(strict=True, backend="ring")
    if group.rank() != rank or group.size() != num_ranks:
        raise ClusterError("MLX formed a ring of another size than the hostfile has.")
    return group


def exchange(
    nonce: int,
    port: int,
    group: mx.distributed.Group,
    stream: mx.Stream,
) -> list[int]:
    """Runs the first collective, in which ranks of the same nonce learn each other's ports.

    Raises ClusterError if a rank has another nonce.
    """
    mine = mx.array([[nonce, port]], dtype=mx.int32)
    gathered = mx.distributed.all_gather(mine, group=group, stream=stream)
    rows = cast(list[list[int]], gathered.tolist())
    ports: list[int] = []
    for each_nonce, each_port in rows:
        if each_nonce != nonce:
            raise ClusterError(
                "Ranks of two launches met on the same ports: "
                "stop the other cluster or start this one on other ports."
            )
        ports.append(each_port)
    return ports


def _connect_neighbours(
    ring: Ring,
    listening: socket.socket,
    ports: list[int],
) -> tuple[socket.socket, socket.socket]:
    """Returns the connections to the left and from the right neighbour."""
    left_rank = (ring.rank - 1) % len(ring.hosts)
    address = (ring.hosts[left_rank], ports[left_rank])
    greeting = frame(Greeting(ring.nonce, ring.rank))
    try:
        left = socket.create_connection(address, ring.timeout_seconds)
        left.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        left.sendall(greeting)
        left.settimeout(None)
        keep_alive(left)
    except OSError as error:
        raise ClusterError(f"Rank {ring.rank} cannot reach its neighbours: {error}.") from error
    right_rank = (ring.rank + 1) % len(ring.hosts)
    deadline = time.monotonic() + ring.timeout_seconds
    with Reception(listening, ring.rank, ring.nonce) as reception:
        _, right = reception.answer({right_rank}, deadline)
    return left, right.tcp_socket


# --- several tensors in one message, followed by the step's number


def tensor_specs(arrays: Sequence[mx.array]) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    for array in arrays:
        dtype = _dtype_name(array.dtype)
        specs.append(TensorSpec(dtype, tuple(array.shape)))
    return tuple(specs)


def pack(number: int, arrays: Sequence[mx.array]) -> mx.array:
    """Returns the bytes of the arrays, one after the other, and of the step's number (int32)."""
    flat = [array.reshape(-1) for array in arrays]
    parts = [array.view(mx.uint8) for array in flat]
    ending = mx.array([number], dtype=mx.int32)
    parts.append(ending.view(mx.uint8))
    return mx.concatenate(parts)


def packed_bytes(specs: Sequence[TensorSpec]) -> int:
    tensor_bytes = sum(_num_bytes(spec) for spec in specs)
    return tensor_bytes + mx.int32.size


def unpack(
    number: int,
    specs: Sequence[TensorSpec],
    packed: mx.array,
) -> list[mx.array]:
    """Evaluates a packed message and returns its arrays. Raises ClusterError if it belongs to
    another step than number."""
    arrays: list[mx.array] = []
    start = 0
    for spec in specs:
        end = start + _num_bytes(spec)
        flat = packed[start:end].view(DTYPES[spec.dtype])
        arrays.append(flat.reshape(spec.shape))
        start = end
    sent_number = packed[start:].view(mx.int32)
    # One evaluation of everything, because each evaluation has to wake up a thread.
    mx.eval(arrays, sent_number)
    if sent_number.item() != number:
        raise ClusterError(
            f"The tensors of another step arrived instead of those of step {number}."
        )
    return arrays


def _num_bytes(spec: TensorSpec) -> int:
    if spec.dtype not in DTYPES:
        raise ClusterError(f"A neighbour announced a tensor of unknown type {spec.dtype!r}.")
    return math.prod(spec.shape) * DTYPES[spec.dtype].size


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


DTYPES: dict[str, mx.Dtype] = {}
for _value in vars(mx).values():
    if isinstance(_value, mx.Dtype):
        DTYPES[_dtype_name(_value)] = _value
