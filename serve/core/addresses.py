"""The addresses at which the ranks of a launch find each other, from one rank's point of view."""

from collections.abc import Sequence

import msgspec


class Addresses(msgspec.Struct, frozen=True):
    """The addresses, as "ip:port", between a rank and all ranks of its launch. Each pair of hosts
    may have its own cable: `theirs[r]` is where this rank finds rank r, and `own[r]` is where rank
    r finds this one. More than one address for a pair is for MLX, which then uses all of them."""

    rank: int
    theirs: tuple[tuple[str, ...], ...]
    own: tuple[tuple[str, ...], ...]

    @classmethod
    def known_to_all(cls, rank: int, listed: Sequence[Sequence[str]]) -> "Addresses":
        """Returns the addresses for a launch in which every rank has one address for all others."""
        theirs = tuple(tuple(each) for each in listed)
        return cls(rank, theirs, (theirs[rank],) * len(theirs))

    def own_as_json(self) -> str:
        return msgspec.json.encode(self.own).decode()

    def of_ring(self, ranks: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the content of MLX's hostfile for a ring of these ranks. In MLX's ring, each rank
        connects to the next one."""
        caller = ranks[ranks.index(self.rank) - 1]
        return [self.own[caller] if rank == self.rank else self.theirs[rank] for rank in ranks]
