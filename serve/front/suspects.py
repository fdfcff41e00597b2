"""Which request may be what ends the engines. Pure.

A request that ends an engine would end the next one too, and the cluster after some. Those under
which engines ended twice without a token for them are suspects: each runs alone until it gets a
token. One under which the engines end again then is given up.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_SHARED_FAULTS = 2


@dataclass(frozen=True, slots=True)
class Blame:
    """The sequence that ended the engines num_faults times. num_explained of these faults had no
    explanation before."""

    sequence: int
    num_faults: int
    num_explained: int


class Suspects:
    """max_shared_faults are how many faults a sequence may see beside others without a token."""

    def __init__(self, max_shared_faults: int = MAX_SHARED_FAULTS) -> None:
        self._max_shared_faults = max_shared_faults
        self._num_faults = 0
        self._faults: dict[int, list[int]] = {}  # of each sequence, since its last token
        self._explained: set[int] = set()
        self._queue: list[int] = []

    @property
    def alone(self) -> int | None:
        """The sequence that runs while all others wait, if there is a suspect."""
        return self._queue[0] if self._queue else None

    def is_clear(self, sequence_id: int) -> bool:
        """Whether the engines did not end since its last token."""
        return sequence_id not in self._faults

    def clear(self, sequence_id: int) -> None:
        """It got a token, or has ended."""
        if self._faults.pop(sequence_id, None) is None:
            return
        if sequence_id in self._queue:
            self._queue.remove(sequence_id)
        if not self._faults:
            self._explained.clear()

    def after_fault(self, running: Iterable[int]) -> Blame | None:
        """running are the sequences of which the stages held something, the oldest first.
        Returns the one to give up, if it is known; the caller ends and clears it."""
        ids = list(running)
        self._num_faults += 1
        for id in ids:
            self._faults.setdefault(id, []).append(self._num_faults)
        if ids and ids == [self.alone]:
            return self._blame(ids[0])
        # The youngest first: before it came, the others were fine.
        self._queue += [
            id
            for id in reversed(ids)
            if id not in self._queue and len(self._faults[id]) >= self._max_shared_faults
        ]
        return None

    def _blame(self, sequence_id: int) -> Blame:
        faults = self._faults[sequence_id]
        num_explained = len(set(faults) - self._explained)
        self._explained.update(faults)
        return Blame(sequence_id, len(faults), num_explained)
