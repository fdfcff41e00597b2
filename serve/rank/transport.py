"""How a step and its tensors get from a stage to the next. The only user of
mx.distributed.

Every message goes to the left neighbour: rank r to rank r - 1, rank 0 to the last
rank. The header travels over a TCP connection of its own (the doorbell) and the
tensors follow in one packed message over mx.distributed, so that a receive is
posted only when its data is on the way: a waiting rank costs no CPU.
"""

import json
import os
import queue
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import mlx.core as mx

from serve.core import wire
from serve.core.connection import keep_alive
from serve.core.errors import ClusterError
from serve.core.types import FIRST_WARM_UP_STEP, Step


class Transport(Protocol):
    """waits_on is the hop, from rank to rank, on which a tensor is awaited: one that has been
    announced, or has to be taken. None while nothing is on the way."""

    waits_on: tuple[int, int] | None
    num_hops: int  # messages with tensors that were received,
    hop_seconds: float  # and the time from their headers to their tensors

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None: ...

    def receive(self) -> tuple[Step, list[mx.array]] | None:
        """The next step and its tensors; None when the transport was closed."""

    def close(self) -> None: ...


# --- inside one process


class LocalTransport:
    """Passes messages to another one in the same process: a whole pipeline in one
    test, and the way around of a cluster of one rank."""

    def __init__(self) -> None:
        self.waits_on: tuple[int, int] | None = None
        self.num_hops, self.hop_seconds = 0, 0.0
        self._inbox: queue.SimpleQueue[tuple[Step, list[mx.array]] | None] = queue.SimpleQueue()
        self._left = self

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None:
        mx.eval(*arrays)
        self._left._inbox.put((step, list(arrays)))

    def receive(self) -> tuple[Step, list[mx.array]] | None:
        return self._inbox.get()

    def close(self) -> None:
        self._inbox.put(None)


def local_ring(num_ranks: int) -> list[LocalTransport]:
    ring = [LocalTransport() for _ in range(num_ranks)]
    for rank, transport in enumerate(ring):
        transport._left = ring[rank - 1]
    return ring


# --- between processes


@dataclass(frozen=True, slots=True)
class Ring:
    """This rank's place in the ring. nonce tells one start of the ring from another:
    MLX itself lets two rings on the same ports join each other."""

    rank: int
    hosts: tuple[str, ...]
    nonce: int
    timeout_seconds: float


class RingTransport:
    """Raises ClusterError at the first sign that a neighbour is gone. Such an error is
    the end of the process: a group cannot be formed twice in one."""

    def __init__(self, ring: Ring) -> None:
        self.waits_on: tuple[int, int] | None = None
        self.num_hops, self.hop_seconds = 0, 0.0
        self._rank, self._num_ranks = ring.rank, len(ring.hosts)
        # With one for both, no message would come while the one before waits to be taken.
        self._sends, self._receives = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
        self._ready = wire.FrameReader()
        self._frames: list[tuple[wire.Kind, bytes]] = []
        self._sending: mx.array | None = None
        self._group, self._left, self._right = form_ring(ring, self._receives)

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None:
        """Starts to send evaluated arrays, and returns. Before that it waits until the neighbour
        has taken the message before, so that two can never change places."""
        specs, left = tensor_specs(arrays), (self._rank - 1) % self._num_ranks
        if self._sending is not None:
            with self._waiting_on((self._rank, left)):
                mx.eval(self._sending)
        self._write(wire.frame(wire.Kind.HOP, wire.encode_hop(step, specs)))
        if specs:
            # Packed while the neighbour wakes up, and by the thread that sends it.
            with mx.stream(self._sends):
                packed = pack(step.number, arrays)
                self._sending = mx.distributed.send(packed, left, group=self._group)
            mx.async_eval(self._sending)

    def receive(self) -> tuple[Step, list[mx.array]] | None:
        body = self._next_frame()
        if body is None:
            return None
        step, specs = wire.decode_hop(body)
        if not specs:
            return step, []
        started = time.perf_counter()
        right = (self._rank + 1) % self._num_ranks
        with mx.stream(self._receives), self._waiting_on((right, self._rank)):
            packed = mx.distributed.recv((packed_bytes(specs),), mx.uint8, right, group=self._group)
            arrays = unpack(step.number, specs, packed)
        if step.number < FIRST_WARM_UP_STEP:
            self.num_hops += 1
            self.hop_seconds += time.perf_counter() - started
        return step, arrays

    def close(self) -> None:
        for doorbell in (self._left, self._right):
            doorbell.close()

    def _next_frame(self) -> bytes | None:
        while not self._frames:
            try:
                data = self._right.recv(1 << 16)
            except OSError as error:
                raise ClusterError(f"The link to the right neighbour broke: {error}.") from error
            if not data:
                return None
            self._frames += self._ready.feed(data)
        kind, body = self._frames.pop(0)
        if kind != wire.Kind.HOP:
            raise ClusterError(f"A neighbour sent a {kind.name} frame where a HOP was due.")
        return body

    def _write(self, data: bytes) -> None:
        try:
            self._left.sendall(data)
        except OSError as error:
            raise ClusterError(f"The link to the left neighbour broke: {error}.") from error

    @contextmanager
    def _waiting_on(self, hop: tuple[int, int]) -> Iterator[None]:
        """Around the evaluation of a send or a receive. MLX would wait for ever: rank 0's parent
        sees in waits_on what holds the cluster up, and ends this process."""
        self.waits_on = hop
        try:
            yield
        except RuntimeError as error:
            raise ClusterError(f"The ring broke: {error}.") from error
        finally:
            self.waits_on = None


@contextmanager
def among(ranks: Sequence[int], addresses: list[list[str]], folder: Path) -> Iterator[None]:
    """MLX reads from the environment who is in a ring: here these of the launch's ranks are. The
    file for that is in a folder that somebody else removes: this process may be killed."""
    # Systems clean what is temporary, some in days.
    folder.mkdir(0o700, parents=True, exist_ok=True)
    rank = int(os.environ["MLX_RANK"])
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json") as file:
        json.dump([addresses[each] for each in ranks], file)
        file.flush()
        os.environ |= {"MLX_HOSTFILE": file.name, "MLX_RANK": str(ranks.index(rank))}
        yield


def form_ring(
    ring: Ring, stream: mx.Stream
) -> tuple[mx.distributed.Group, socket.socket, socket.socket]:
    """MLX's group, and the doorbells to the left and from the right neighbour."""
    with socket.create_server((ring.hosts[ring.rank], 0), backlog=2) as listening:
        try:
            group = mx.distributed.init(strict=True, backend="ring")
            if (group.rank(), group.size()) != (ring.rank, len(ring.hosts)):
                raise ClusterError("MLX formed a ring of another size than the hostfile says.")
            ports = _exchange(ring.nonce, listening.getsockname()[1], group, stream)
        except RuntimeError as error:
            raise ClusterError(f"The ring broke: {error}.") from error
        return group, *_ring_doorbells(ring, listening, ports)


def _exchange(nonce: int, port: int, group: mx.distributed.Group, stream: mx.Stream) -> list[int]:
    """The first collective: everyone's doorbell port, if all have the same nonce."""
    mine = mx.array([[nonce, port]], dtype=mx.int32)
    everyone = mx.distributed.all_gather(mine, group=group, stream=stream)
    nonces, ports = zip(*cast(list[list[int]], everyone.tolist()), strict=True)
    if set(nonces) != {nonce}:
        raise ClusterError(
            "Ranks of two launches met on the same ports: "
            "stop the other cluster or start this one on other ports."
        )
    return list(ports)


def _ring_doorbells(
    ring: Ring, listening: socket.socket, ports: list[int]
) -> tuple[socket.socket, socket.socket]:
    """The connections to the left and from the right neighbour."""
    left_rank = (ring.rank - 1) % len(ring.hosts)
    greeting = json.dumps({"nonce": ring.nonce, "rank": ring.rank}).encode() + b"\n"
    try:
        left = socket.create_connection(
            (ring.hosts[left_rank], ports[left_rank]), ring.timeout_seconds
        )
        left.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        left.sendall(greeting)
        left.settimeout(None)
        keep_alive(left)
        return left, _accept_neighbour(ring, listening)
    except OSError as error:
        raise ClusterError(f"Rank {ring.rank} cannot reach its neighbours: {error}.") from error


def _accept_neighbour(ring: Ring, listening: socket.socket) -> socket.socket:
    """The first caller that knows the nonce; strangers are sent away."""
    expected = {"nonce": ring.nonce, "rank": (ring.rank + 1) % len(ring.hosts)}
    deadline = time.monotonic() + ring.timeout_seconds
    while True:
        listening.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listening.accept()
        connection.settimeout(max(0.01, min(5.0, deadline - time.monotonic())))
        try:
            if json.loads(_read_line(connection)) == expected:
                connection.settimeout(None)
                keep_alive(connection)
                return connection
        except (OSError, ValueError):
            connection.close()  # A port scanner, not a neighbour: go on waiting.


def _read_line(connection: socket.socket) -> bytes:
    """Byte by byte, because what follows the line belongs to others."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 256:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


# --- several tensors in one message, with the step's number behind them


def tensor_specs(arrays: Sequence[mx.array]) -> list[wire.TensorSpec]:
    return [wire.TensorSpec(_dtype_name(a.dtype), tuple(a.shape)) for a in arrays]


def pack(number: int, arrays: Sequence[mx.array]) -> mx.array:
    parts = [array.reshape(-1).view(mx.uint8) for array in arrays]
    return mx.concatenate([*parts, mx.array([number], dtype=mx.int32).view(mx.uint8)])


def packed_bytes(specs: Sequence[wire.TensorSpec]) -> int:
    return sum(_num_bytes(spec) for spec in specs) + mx.int32.size


def unpack(number: int, specs: Sequence[wire.TensorSpec], packed: mx.array) -> list[mx.array]:
    """Evaluates all at once: each time a thread has to wake up."""
    arrays, at = [], 0
    for spec in specs:
        end = at + _num_bytes(spec)
        arrays.append(packed[at:end].view(DTYPES[spec.dtype]).reshape(spec.shape))
        at = end
    sent_number = packed[at:].view(mx.int32)
    mx.eval(arrays, sent_number)
    if sent_number.item() != number:
        raise ClusterError(f"The tensors of another message came in place of number {number}.")
    return arrays


def _num_bytes(spec: wire.TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    if spec.dtype not in DTYPES:
        raise ClusterError(f"A neighbour announced a tensor of unknown type {spec.dtype!r}.")
    return count * DTYPES[spec.dtype].size


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


DTYPES = {_dtype_name(d): d for d in vars(mx).values() if isinstance(d, mx.Dtype)}
