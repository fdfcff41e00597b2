"""Which other ranks are there, and whether they may take part."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve.core.errors import DisagreementError
from serve.core.facts import compare
from serve.parent.control import Joined


@dataclass(slots=True)
class Roster:
    """The other ranks that have joined: their processes, and the facts that must equal rank 0's.
    unfit are the ranks whose engines can never work with the others."""

    facts: dict[str, str]
    joined: dict[int, Joined] = field(default_factory=dict)
    unfit: set[int] = field(default_factory=set)

    @property
    def fit(self) -> set[int]:
        same = {rank for rank, hello in self.joined.items() if hello.facts == self.facts}
        return same - self.unfit

    def missing(self, ring: Sequence[int]) -> list[int]:
        return [rank for rank in ring if rank and rank not in self.joined]

    def disagreement(self) -> DisagreementError | None:
        """Returns the error that names the ranks whose facts differ from rank 0's, or None."""
        others = {rank: self.joined[rank].facts for rank in sorted(self.joined)}
        return compare({0: self.facts, **others})
