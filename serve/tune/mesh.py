"""Links between any two ranks of a run, and the groups of ranks that a layout of shards and
replicas has.

A ring of MLX has links to two neighbours only, and a process can be in only one. So with shards or
replicas everything between ranks travels over TCP, and the ring is left to the shards of a stage,
for the sums inside their layers."""

import faulthandler
import logging
import os
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, cast

import mlx.core as mx

from serve.core.config import TRAINING_JOIN_SECONDS, Cluster, parse_address
from serve.core.errors import ClusterError, LostRankError
from serve.core.messages import AnyNote
from serve.ring.peers import Grid, await_row, meet_all
from serve.ring.transport import Ring, RingLostError, among, exchange, form_group
from serve.tune.layout import Layout
from serve.tune.transport import (
    Links,
    Payload,
    ProcessLinks,
    RingLinks,
    bytes_of,
    local_links,
    silence,
    split_parts,
)

_logger = logging.getLogger(__name__)
_TICK_SECONDS = 1.0
_STUCK_SECONDS = 15.0  # how long a rank that has lost another one may compute


class MeshLinks(ProcessLinks):
    """The links of a rank to all others: one connection to each, which also carries the bytes of
    tensors."""

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], stall_seconds: float) -> None:
        super().__init__(rank, len(peers) + 1, len(peers), stall_seconds)
        self._peers = peers
        self._stall_seconds = stall_seconds
        self._is_closed = Event()
        self._open(peers, peers)

    def watch(self) -> None:
        """Ends this process when another rank is lost or silent while this one is in a sum of MLX
        with it, which cannot be interrupted and may never return."""
        Thread(target=self._watch, name="watch", daemon=True).start()

    def _watch(self) -> None:
        silent = dict.fromkeys(self._peers, 0.0)
        heard: dict[int, int] = {}
        seconds_since_loss = 0.0
        while not self._is_closed.wait(_TICK_SECONDS):
            if self._inbox.has_lost:
                seconds_since_loss += _TICK_SECONDS
            if seconds_since_loss > _STUCK_SECONDS:
                _end("This rank is in a sum with a rank that is lost, and cannot interrupt it.")
            before, heard = heard, self._inbox.num_heard()
            # Only seconds in which this process ran count: after it was stopped, it blames nobody.
            for peer, count in heard.items():
                silent[peer] = silent[peer] + _TICK_SECONDS if before.get(peer) == count else 0.0
                if silent[peer] > self._stall_seconds + _TICK_SECONDS:
                    _end(silence(peer, self._stall_seconds))

    def close(self) -> None:
        self._is_closed.set()
        super().close()

    def _prepare(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        # The thread of the link must evaluate nothing: MLX makes it wait while other streams have
        # much to do, and this rank may be in a sum with the one that waits for this message.
        return bytes_of(arrays)

    def _send_tensors(self, peer: int, header: bytes, number: int, tensors: list[mx.array]) -> None:
        link = self._peers[peer]
        link.sendall(header)
        ending = number.to_bytes(mx.int32.size, sys.byteorder)
        for tensor in tensors:
            data = memoryview(cast(Any, tensor))
            # The receiver expects the same parts: their size is a multiple of that of an element.
            for start, end in split_parts(len(data), 1):
                link.sendall(data[start:end])
                link.sendall(ending)

    def _receive_part(self, peer: int, num_bytes: int) -> mx.array:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            num_read = self._peers[peer].recv_into(view)
            if not num_read:
                raise RingLostError("it ended in the middle of a message")
            view = view[num_read:]
        return mx.array(cast(Any, data))


def _end(reason: str) -> None:
    """Ends this process, for a reason that it logs."""
    _logger.error("%s", reason)
    os._exit(LostRankError.exit_code)


class Subset:
    """The links among some of the ranks, which are numbered by their places in `ranks`. name is
    part of the tags of its messages."""

    def __init__(self, links: Links, name: str, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(links.rank)
        self.num_ranks = len(ranks)
        self._links = links
        self._name = name
        self._ranks = ranks

    def send(
        self,
        to: int,
        tag: str,
        notes: tuple[AnyNote, ...],
        arrays: Sequence[mx.array],
    ) -> None:
        self._links.send(self._ranks[to], f"{self._name} {tag}", notes, arrays)

    def receive(self, tag: str) -> Payload:
        return self._links.receive(f"{self._name} {tag}")

    def close(self) -> None:
        self._links.close()


@dataclass(frozen=True, slots=True)
class Groups:
    """The links of a rank to all ranks of the run and to those of its groups: its pipeline, the
    shards of its stage, and the ranks with the same weights in other replicas. ring is MLX's group
    of the shards, None if there is only one."""

    layout: Layout
    everybody: Links
    pipeline: Links
    shards: Links
    replicas: Links
    ring: Any = None

    @property
    def rank(self) -> int:
        return self.everybody.rank

    @property
    def shard(self) -> int:
        return self.layout.shard(self.rank)

    @property
    def replica(self) -> int:
        return self.layout.replica(self.rank)


def groups_of(
    layout: Layout,
    links: Links,
    ring: Any = None,
) -> Groups:
    """Makes the groups to which the rank of these links belongs in a layout. ring is MLX's ring of
    the shards of its stage, None without shards."""
    rank = links.rank
    return Groups(
        layout,
        links,
        _subset(links, "pipeline", layout.pipeline(rank)),
        _subset(links, "shards", layout.shards(rank)),
        _subset(links, "replicas", layout.replicas(rank)),
        ring,
    )


def _subset(links: Links, name: str, ranks: Sequence[int]) -> Links:
    if len(ranks) == links.num_ranks:
        return links
    return Subset(links, name, ranks)


def join(
    cluster: Cluster,
    layout: Layout,
    stall_seconds: float,
    timeout_seconds: float = TRAINING_JOIN_SECONDS,
) -> Groups:
    """Joins all ranks of a run, in the main thread. timeout_seconds is how long a rank waits for
    the others. Raises ClusterError."""
    if cluster.num_ranks == 1:
        return groups_of(layout, local_links(1)[0])
    nonce = zlib.crc32(cluster.secret.encode()) >> 1
    addresses = tuple(parse_address(first, "MLX_HOSTFILE") for first, *_ in cluster.addresses)
    if layout.pipeline_size == cluster.num_ranks:
        row = Grid(cluster.rank, cluster.num_ranks, addresses, nonce, timeout_seconds)
        await_row(row)
        ring = Ring(cluster.rank, cluster.hosts, nonce, TRAINING_JOIN_SECONDS)
        with _forming(cluster, row):
            return groups_of(layout, RingLinks(ring, stall_seconds))
    grid = Grid(cluster.rank, layout.num_shards, addresses, nonce, timeout_seconds)
    connections = meet_all(grid)
    group = None
    if layout.num_shards > 1:
        with _forming(cluster, grid):
            group = form_group(grid.shard, grid.num_shards)
            exchange(grid.nonce, 0, group, mx.default_stream(mx.cpu))
    peers = {rank: connection.tcp_socket for rank, connection in connections.items()}
    links = MeshLinks(cluster.rank, peers, stall_seconds)
    if group is not None:
        links.watch()
    return groups_of(layout, links, group)


@contextmanager
def _forming(cluster: Cluster, grid: Grid) -> Iterator[None]:
    """Prepares everything from which MLX forms the ring of a row of the grid."""
    addresses = [list(each) for each in cluster.addresses]
    # MLX holds the interpreter's lock while it waits for neighbours, so no signal would be heeded.
    faulthandler.dump_traceback_later(TRAINING_JOIN_SECONDS, exit=True)
    try:
        with TemporaryDirectory() as folder, among(grid.row, addresses, Path(folder)):
            yield
    except RuntimeError as error:
        raise ClusterError(f"MLX's ring broke: {error}.") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
