"""Sends a step and its tensors from one stage to the next, around a ring of ranks.

Every message goes to the left neighbour: rank r to rank r - 1, rank 0 to the last rank. The header
of a message travels over a TCP connection, and the tensors follow as one packed message over
mx.distributed. A rank posts a receive only when data is coming, so waiting costs no CPU.
"""

import json
import math
import os
import queue
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import mlx.core as mx

from serve.core.addresses import Addresses
from serve.core.errors import ClusterError
from serve.core.messages import Hop, TensorSpec
from serve.core.mlx_errors import is_lost_peer
from serve.core.types import FIRST_WARM_UP_STEP, Step
from serve.ring.peers import Grid, Neighbours, RingLostError
from serve.ring.regroup import clear_groups, closing_failed_connections
from serve.ring.sums import Sums

Received = tuple[Step, list[mx.array]]
"""A step, and the tensors that came with it."""


class Transport(ABC):
    """The connection of one rank to its neighbours. The rank is number shard of the num_shards
    shards of its stage; num_shards is 1 except in GridTransport. waits_on is the hop (from rank, to
    rank) whose tensor this rank waits to receive or hand over; None if there is none. num_hops
    counts received messages with tensors, hop_seconds is the time from their headers to their
    tensors."""

    def __init__(self) -> None:
        self.shard = 0
        self.num_shards = 1
        self.waits_on: tuple[int, int] | None = None
        self.num_hops = 0
        self.hop_seconds = 0.0
        self.sums = Sums()

    @abstractmethod
    def send(self, step: Step, arrays: Sequence[mx.array]) -> None: ...

    @abstractmethod
    def receive(self) -> Received | None:
        """Returns the next step and its tensors; None when the transport was closed."""

    @abstractmethod
    def close(self) -> None: ...

    def leave(self) -> None:
        """Closes the transport, so that this process can join other ranks."""
        self.close()

    def evaluate(self, arrays: Sequence[mx.array]) -> None:
        """Evaluates arrays that the shards of a stage compute together. All shards evaluate the
        same arrays in the same order."""
        mx.eval(*arrays)

    def count(self, step: Step, started: float) -> None:
        """Counts a received hop. `started` is the time.perf_counter() at which its header came."""
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
            kind = RingLostError if is_lost_peer(error) else ClusterError
            raise kind(f"The ring broke: {error}.") from error
        finally:
            self.waits_on = None


# --- inside one process


class LocalTransport(Transport):
    """Passes messages to another transport in the same process, or to itself."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self._seen: list[Received | None] = []
        self._left = self

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None:
        mx.eval(*arrays)
        self._left._inbox.put((step, list(arrays)))

    def receive(self) -> Received | None:
        return self._seen.pop() if self._seen else self._inbox.get()

    def peek(self, seconds: float) -> Step | None:
        """Returns the step that `receive` will return, if it comes within this time."""
        if not self._seen:
            try:
                self._seen.append(self._inbox.get(timeout=seconds))
            except queue.Empty:
                return None
        (message,) = self._seen
        return message[0] if message else None

    def close(self) -> None:
        self._inbox.put(None)


def local_ring(num_ranks: int) -> list[LocalTransport]:
    """Makes a ring inside one process: for a cluster of one rank, and for tests."""
    ring = [LocalTransport() for _ in range(num_ranks)]
    for rank, transport in enumerate(ring):
        transport._left = ring[rank - 1]
    return ring


# --- between processes


class Streams:
    """The streams on which a process sends and receives. MLX ends a stream's thread only with the
    process, so all rings of a process share the streams, in the thread that made them."""

    def __init__(self) -> None:
        # With one stream for both ways, no message could arrive while a sent one waits to be taken.
        self.sends = mx.new_stream(mx.cpu)
        self.receives = mx.new_stream(mx.cpu)


class RingTransport(Transport):
    """A transport between processes, for stages of one rank each. It raises RingLostError at the
    first sign that a neighbour is gone, and ClusterError for a wrong message. streams are those of
    an earlier ring of this process, if there was one."""

    def __init__(
        self,
        grid: Grid,
        neighbours: Neighbours,
        streams: Streams | None = None,
    ) -> None:
        super().__init__()
        self._rank = grid.rank
        self._left_rank = grid.left_in(grid.row)
        self._right_rank = grid.right_in(grid.row)
        self._neighbours = neighbours
        streams = streams or Streams()
        self._sends, self._receives = streams.sends, streams.receives
        self._sending: mx.array | None = None
        self._group: mx.distributed.Group | None = form_group(grid, self._receives)

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None:
        """Starts to send evaluated arrays, and returns. It first waits until the neighbour has
        taken the previous message, so that two messages never overtake each other."""
        specs = tensor_specs(arrays)
        if self._sending is not None:
            with self.waiting_on((self._rank, self._left_rank)):
                mx.eval(self._sending)
        self._neighbours.row_left.send(Hop(step, specs))
        if specs:
            # The thread that sends also packs, and does so while the neighbour wakes up.
            with mx.stream(self._sends):
                packed = pack(step.number, arrays)
                self._sending = mx.distributed.send(packed, self._left_rank, group=self._group)
            # MLX may have seen meanwhile that the neighbour is gone, and then it raises here.
            with self.waiting_on((self._rank, self._left_rank)):
                mx.async_eval(self._sending)

    def receive(self) -> Received | None:
        hop = self._neighbours.row_right.hop()
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
        self._neighbours.close()

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
        clear_groups()


@contextmanager
def among(
    ranks: Sequence[int],
    addresses: Addresses,
    folder: Path,
) -> Iterator[None]:
    """Sets the environment variables from which MLX forms a ring of these ranks of the launch. The
    caller removes the folder of the host file, because this process may be killed."""
    # The folder may be gone, because some systems clean up temporary folders after days.
    folder.mkdir(0o700, parents=True, exist_ok=True)
    own_place = os.environ["MLX_RANK"]
    rank = int(own_place)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json") as file:
        json.dump(addresses.of_ring(ranks), file)
        file.flush()
        os.environ["MLX_HOSTFILE"] = file.name
        os.environ["MLX_RANK"] = str(ranks.index(rank))
        try:
            yield
        finally:
            os.environ["MLX_RANK"] = own_place  # MLX reads this again for the next ring.


def form_group(grid: Grid, stream: mx.Stream) -> mx.distributed.Group:
    """Forms MLX's group of the ranks of a row, which the environment names. Raises ClusterError,
    also if one of them has another nonce: MLX itself lets two rings on the same ports join each
    other."""
    try:
        with closing_failed_connections():
            group = mx.distributed.init(strict=True, backend="ring")
        if group.rank() != grid.shard or group.size() != grid.num_shards:
            raise ClusterError("MLX formed a ring of another size than the hostfile names.")
        mine = mx.array([grid.nonce], dtype=mx.int32)
        nonces = mx.distributed.all_gather(mine, group=group, stream=stream).tolist()
    except RuntimeError as error:
        raise ClusterError(f"The ring broke: {error}.") from error
    if any(nonce != grid.nonce for nonce in cast(list[int], nonces)):
        raise ClusterError(
            "Ranks of two launches met on the same ports: "
            "stop the other cluster or start this one on other ports."
        )
    return group


# --- several tensors in one message, followed by the step's number


def tensor_specs(arrays: Sequence[mx.array]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(_dtype_name(array.dtype), tuple(array.shape)) for array in arrays)


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
    """Evaluates a packed message and returns its arrays. Raises ClusterError for a wrong number."""
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
