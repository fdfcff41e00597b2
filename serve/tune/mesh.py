"""The groups of ranks in a layout of stages, shards and replicas, and the links among them.

MLX's ring is left to a stage's shards, for the sums inside their layers: a ring has links to two
neighbours only, and a process can be in only one ring."""

import faulthandler
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from serve.core.config import TRAINING_JOIN_SECONDS, Cluster
from serve.core.errors import BrigadeError, ClusterError
from serve.ring.peers import Grid, grid_of, meet_all
from serve.ring.transport import among, form_group
from serve.tune.layout import Layout
from serve.tune.transport import Links, Notes, Payload, TcpLinks, local_links


class Subset:
    """The links among some of the ranks, which are numbered by their places in `ranks`. name is
    part of the tags of its messages."""

    def __init__(self, links: Links, name: str, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(links.rank)
        self.num_ranks = len(ranks)
        self._links = links
        self._name = name
        self._ranks = ranks

    def send(self, to: int, tag: str, notes: Notes, arrays: Sequence[mx.array]) -> None:
        self._links.send(self._ranks[to], f"{self._name} {tag}", notes, arrays)

    def receive(self, tag: str) -> Payload:
        return self._links.receive(f"{self._name} {tag}")

    def close(self, error: BrigadeError | None = None) -> None:
        self._links.close(error)


@dataclass(frozen=True, slots=True)
class Groups:
    """The links of a rank to all ranks of the run, and within its groups: its pipeline, the shards
    of its stage, and the ranks with the same weights in other replicas. ring is MLX's group of the
    shards, None if there is only one."""

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
    its stage's shards, None without shards."""
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
    """Joins all ranks of a run, in the main thread. Raises ClusterError."""
    if cluster.num_ranks == 1:
        return groups_of(layout, local_links(1)[0])
    nonce = zlib.crc32(cluster.secret.encode()) >> 1
    everybody = range(cluster.num_ranks)
    grid = grid_of(everybody, cluster.addresses, layout.num_shards, nonce, timeout_seconds)
    connections = meet_all(grid, layout.peers(cluster.rank))
    group = None
    if layout.num_shards > 1:
        with _forming(cluster, grid):
            group = form_group(grid, mx.default_stream(mx.cpu))
    sockets = {rank: connection.tcp_socket for rank, connection in connections.items()}
    links = TcpLinks(
        cluster.rank,
        cluster.num_ranks,
        sockets,
        stall_seconds,
        has_sums=group is not None,
    )
    return groups_of(layout, links, group)


@contextmanager
def _forming(cluster: Cluster, grid: Grid) -> Iterator[None]:
    """Prepares everything from which MLX forms the ring of a row of the grid."""
    # MLX holds the interpreter's lock while it waits for neighbours, so no signal would be heeded.
    faulthandler.dump_traceback_later(TRAINING_JOIN_SECONDS, exit=True)
    try:
        with TemporaryDirectory() as folder, among(grid.row, cluster.addresses, Path(folder)):
            yield
    except RuntimeError as error:
        raise ClusterError(f"MLX's ring broke: {error}.") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
