"""Which request may be what ends the engines. Pure.

A request that breaks an engine would break the next one too, and the cluster in the end. Of
those under which engines ended again and again without a token for them the youngest is given
up: before it came, the others were fine.
"""

from collections import Counter
from collections.abc import Iterable

MOST_FAULTS = 4


class Suspects:
    def __init__(self) -> None:
        self._num_faults: Counter[int] = Counter()

    def clear(self, sequence_id: int) -> None:
        """It got a token, or has ended."""
        self._num_faults.pop(sequence_id, None)

    def after_fault(self, running: Iterable[int]) -> int | None:
        """running are the sequences of which the stages held something, the oldest first.
        Returns the one to give up, if any."""
        ids = list(running)
        self._num_faults.update(ids)
        guilty = [id for id in ids if self._num_faults[id] >= MOST_FAULTS]
        return guilty[-1] if guilty else None
