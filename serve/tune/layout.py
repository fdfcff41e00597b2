"""The division of a run's work among its ranks: replicas of a pipeline, whose stages may have
several shards. Pure."""

from dataclasses import dataclass

from serve.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of the ranks: num_replicas pipelines of pipeline_size stages (or groups of stages,
    with an interleaved schedule), each on num_shards ranks.

    A stage's shards have consecutive numbers, as do a replica's ranks. The first ranks of a replica
    hold the last layers, as in a run of one pipeline.
    """

    pipeline_size: int = 1
    num_shards: int = 1
    num_replicas: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pipeline_size * self.num_shards * self.num_replicas

    @property
    def replica_size(self) -> int:
        return self.pipeline_size * self.num_shards

    def replica(self, rank: int) -> int:
        return rank // self.replica_size

    def shard(self, rank: int) -> int:
        return rank % self.num_shards

    def place(self, rank: int) -> int:
        """Returns the rank's place in its pipeline. Place 0 holds the last layers."""
        return rank % self.replica_size // self.num_shards

    def pipeline(self, rank: int) -> list[int]:
        """Returns the ranks that pass activations on to each other: equal shards of all stages."""
        first = self.replica(rank) * self.replica_size + self.shard(rank)
        return [first + place * self.num_shards for place in range(self.pipeline_size)]

    def shards(self, rank: int) -> list[int]:
        """Returns the ranks that share the layers of a stage."""
        first = rank - self.shard(rank)
        return list(range(first, first + self.num_shards))

    def replicas(self, rank: int) -> list[int]:
        """Returns the ranks that hold the same weights: at the same place in each replica."""
        return list(range(rank % self.replica_size, self.num_ranks, self.replica_size))

    def peers(self, rank: int) -> set[int]:
        """Returns the ranks with which a rank exchanges messages: its neighbours in each group."""
        peers: set[int] = set()
        everybody = list(range(self.num_ranks))
        groups = (everybody, self.pipeline(rank), self.shards(rank), self.replicas(rank))
        for group in groups:
            at = group.index(rank)
            peers |= {group[at - 1], group[(at + 1) % len(group)]}
        return peers - {rank}

    def __str__(self) -> str:
        """The layout in words, such as "2 replicas of 2 stages with 2 shards each"."""
        words = f"{self.pipeline_size} stage" + "s" * (self.pipeline_size > 1)
        if self.num_shards > 1:
            words += f" with {self.num_shards} shards" + " each" * (self.pipeline_size > 1)
        if self.num_replicas > 1:
            words = f"{self.num_replicas} replicas of {words}"
        return words


def layout_of(num_ranks: int, num_shards: int, num_replicas: int) -> Layout:
    """Divides the ranks into replicas and shards. Raises UsageError for a remainder."""
    size = num_shards * num_replicas
    if num_ranks % size == 0:
        return Layout(num_ranks // size, num_shards, num_replicas)
    flags = []
    if num_shards > 1:
        flags.append(f"--tensor-parallel-size {num_shards}")
    if num_replicas > 1:
        flags.append(f"--data-parallel-size {num_replicas}")
    together = f" (together {size})" if len(flags) > 1 else ""
    verb = "do" if len(flags) > 1 else "does"
    raise UsageError(
        f"{' and '.join(flags)}{together} {verb} not divide the number of ranks: start {size} "
        f"ranks, or a multiple of {size}, not {num_ranks}.",
        code="uneven_ranks",
    )


def check_shares(num_micro_batches: int, num_replicas: int) -> None:
    """Raises UsageError if the replicas cannot divide the micro-batches of an update evenly."""
    if num_micro_batches % num_replicas:
        raise UsageError(
            f"--data-parallel-size {num_replicas} does not divide the number of micro-batches of "
            f"an update, {num_micro_batches}: see --micro-batches, --batch-size and "
            "--grad-accumulation-steps.",
            code="uneven_batches",
        )
