"""The transport of stages with several shards each.

A stage is a row of a grid. The shards of a stage sum up their partial results in MLX's ring of the
row. Steps and hidden states travel along the columns over TCP, because a process can be in only one
ring of MLX. No rank waits in MLX between steps, so an idle cluster costs no CPU.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from serve.core.errors import ClusterError
from serve.core.layouts import Link
from serve.core.messages import Hop
from serve.core.mlx_errors import is_lost_peer
from serve.core.types import Step
from serve.ring.peers import Grid, Neighbours, PeerConnection
from serve.ring.transport import (
    Received,
    Transport,
    form_group,
    pack,
    packed_bytes,
    tensor_specs,
    unpack,
)

_NUM_GATHERED = 1 << 17  # four-byte numbers, about as many as a token's logits
# Many, because the fastest one counts: if the system delays one process, all others wait for it.
_NUM_MEASUREMENTS = 24
_MIN_GATHER_SECONDS = 1e-6

_logger = logging.getLogger(__name__)


class GridTransport(Transport):
    """The transport of one rank of a grid. A step goes from rank 0 along its row, from shard to
    shard, and each shard starts it in its own column. Raises ClusterError."""

    def __init__(self, grid: Grid, neighbours: Neighbours) -> None:
        super().__init__()
        self.shard = grid.shard
        self.num_shards = grid.num_shards
        self._grid = grid
        self._left_rank = grid.left_in(grid.column)
        self._right_rank = grid.right_in(grid.column)
        self._neighbours = neighbours
        # In a grid of one stage, the inbox replaces the column.
        self._inbox: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self.group = form_group(grid, mx.default_stream(mx.cpu))
        self.link = self._measured_link()
        self.sums.install(grid.num_shards, self.evaluate)
        self.sums.choose(self._exchange, self.group)
        self._sender: _Sender | None = None
        if grid.stage:
            assert neighbours.column_left is not None
            self._sender = _Sender(neighbours.column_left)
        elif grid.shard:
            threading.Thread(target=self._relay, name="relay", daemon=True).start()

    def evaluate(self, arrays: Sequence[mx.array]) -> None:
        try:
            mx.eval(*arrays)
        except RuntimeError as error:
            if is_lost_peer(error):
                raise ClusterError(f"The ring of the shards broke: {error}.") from error
            raise

    def gather(self, own: mx.array) -> mx.array:
        """Concatenates, lazily, the arrays (n, ...) of all shards in this stage."""
        gathered: mx.array = mx.distributed.all_gather(own, group=self.group)
        return gathered

    def _exchange(self, number: float) -> list[float]:
        gathered = self.gather(mx.array([number]))
        self.evaluate([gathered])
        return cast(list[float], gathered.tolist())

    def _measured_link(self) -> Link:
        """Measures how fast the shards gather arrays. All shards of a row do this together."""
        small = self._gather_seconds(1)
        large = self._gather_seconds(_NUM_GATHERED)
        num_messages = self.num_shards - 1
        num_bytes = num_messages * _NUM_GATHERED * mx.float32.size
        seconds = max(large - small, _MIN_GATHER_SECONDS)
        return Link(2 * small / num_messages, num_bytes / seconds)

    def _gather_seconds(self, size: int) -> float:
        own = mx.zeros(size)
        times: list[float] = []
        for _ in range(_NUM_MEASUREMENTS):
            started = time.perf_counter()
            # Logits come from the GPU, if there is one, and so does this array.
            self.evaluate([self.gather(own + 1)])
            seconds = time.perf_counter() - started
            times.append(seconds)
        return min(times)

    def send(self, step: Step, arrays: Sequence[mx.array]) -> None:
        """Starts a step, if this is rank 0. Ranks of other stages start to send evaluated arrays to
        the next stage, once the neighbour has taken earlier messages."""
        if self._sender is None:
            self._start(step)
            return
        specs = tensor_specs(arrays)
        announced = None
        if specs:
            packed = pack(step.number, arrays)
            mx.eval(packed)
            announced = memoryview(cast(Any, packed))
        with self.waiting_on((self._grid.rank, self._left_rank)):
            self._sender.send(Hop(step, specs), announced)

    def receive(self) -> Received | None:
        right = self._neighbours.column_right
        if right is None:
            return self._inbox.get()
        hop = right.hop()
        if hop is None:
            return None
        if not hop.tensors:
            return hop.step, []
        started = time.perf_counter()
        with self.waiting_on((self._right_rank, self._grid.rank)):
            data = right.read(packed_bytes(hop.tensors))
        if data is None:
            return None
        arrays = unpack(hop.step.number, hop.tensors, mx.array(cast(Any, data)))
        self.count(hop.step, started)
        return hop.step, arrays

    def close(self) -> None:
        self._neighbours.close()
        self._inbox.put(None)

    def _start(self, step: Step) -> None:
        """Passes a step on in the row of rank 0, and starts it in this rank's column."""
        first, *_ = self._grid.row
        if self._grid.left_in(self._grid.row) != first:
            self._neighbours.row_left.send(Hop(step, ()))
        if self._neighbours.column_left is None:
            self._inbox.put((step, []))
        else:
            self._neighbours.column_left.send(Hop(step, ()))

    def _relay(self) -> None:
        """Starts the steps that rank 0 sends, on the other shards of rank 0's stage."""
        try:
            while (hop := self._neighbours.row_right.hop()) is not None:
                self._start(hop.step)
        except ClusterError as error:
            _logger.warning("event=link_lost reason=%s", json.dumps(str(error)))
        finally:
            self.close()  # Now receive() returns None, and the process ends.


class _Sender:
    """A thread that sends messages to a neighbour. One message can wait while another is sent."""

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection
        self._waiting: queue.Queue[tuple[Hop, memoryview | None]] = queue.Queue(1)
        self._error: ClusterError | None = None
        threading.Thread(target=self._run, name="sender", daemon=True).start()

    def send(self, hop: Hop, announced: memoryview | None) -> None:
        """Queues a message. Raises ClusterError if an earlier one could not be sent."""
        if self._error:
            raise self._error
        self._waiting.put((hop, announced))

    def _run(self) -> None:
        while True:
            hop, announced = self._waiting.get()
            try:
                self._connection.send(hop, announced)
            except ClusterError as error:
                self._error = self._error or error  # The thread goes on: no send() may block.
