"""Decides which request may have crashed the engines. Pure.

A request that crashes an engine would crash the next one too, until no restart is left. A request
is a suspect after two faults without a token for it. Then it runs alone until it gets a token. If
the engines end twice more, the request is given up. A single fault may have another cause, such as
a kill or a broken link. (`serve.front.pipeline.watch` finds out which rank delays a step.)
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

MAX_SHARED_FAULTS = 2
MAX_FAULTS_ALONE = 2


@dataclass(frozen=True, slots=True)
class Blame:
    """The sequence that ended the engines num_faults times. No earlier blame has explained
    num_explained of these faults."""

    sequence: int
    num_faults: int
    num_explained: int


class FaultBlame:
    """The suspects, and the faults that each sequence saw. If max_restarts is less than the number
    of faults that a proof takes, fewer faults suffice."""

    def __init__(self, max_restarts: int) -> None:
        self._max_shared_faults = max(1, min(MAX_SHARED_FAULTS, max_restarts))
        left = max_restarts + 1 - self._max_shared_faults
        self._max_faults_alone = max(1, min(MAX_FAULTS_ALONE, left))
        self._num_faults = 0
        self._num_faults_alone = 0
        self._faults: dict[int, list[int]] = {}  # the faults that each sequence saw
        self._num_since_token: Counter[int] = Counter()
        self._num_kept: dict[int, int] = {}  # the tokens that outlived a fault, by sequence
        self._explained: set[int] = set()
        self._queue: list[int] = []
        self._latest: list[int] = []  # the sequences that saw the latest fault

    @property
    def alone(self) -> int | None:
        """The sequence that runs while all others wait; None if there is no suspect."""
        return self._queue[0] if self._queue else None

    def is_clear(self, sequence_id: int) -> bool:
        """Whether the engines have not ended since the sequence's last token."""
        return sequence_id not in self._num_since_token

    def clear(self, sequence_id: int) -> None:
        """Clears a sequence that has got a token."""
        self._num_since_token.pop(sequence_id, None)
        if sequence_id == self.alone:
            self._num_faults_alone = 0
        if sequence_id in self._queue:
            self._queue.remove(sequence_id)

    def clear_if_further(self, sequence_id: int, num_tokens: int) -> None:
        """Clears a sequence if all engines hold num_tokens of its tokens after a fault, and held
        fewer after each earlier fault. Then its steps have succeeded, and a long prompt may be
        computed for minutes before its first token."""
        if num_tokens > self._num_kept.get(sequence_id, 0):
            self._num_kept[sequence_id] = num_tokens
            self.clear(sequence_id)

    def remove(self, sequence_id: int) -> None:
        """Removes a sequence that has ended."""
        self.clear(sequence_id)
        self._num_kept.pop(sequence_id, None)
        self._faults.pop(sequence_id, None)
        if not self._faults:
            self._explained.clear()

    def on_fault(self, running: Iterable[int]) -> Blame | None:
        """Counts a fault. `running` lists the sequences in the stages' caches, the oldest first.
        Returns the sequence to give up, which the caller ends and removes, or None."""
        ids = self._latest = list(running)
        self._num_faults += 1
        for id in ids:
            self._faults.setdefault(id, []).append(self._num_faults)
            self._num_since_token[id] += 1
        if ids and ids == [self.alone]:
            self._num_faults_alone += 1
            is_proved = self._num_faults_alone >= self._max_faults_alone
            return self._blame(ids[0]) if is_proved else None
        # The youngest sequence first, because older ones did no harm before it came.
        for id in reversed(ids):
            is_suspect = self._num_since_token[id] >= self._max_shared_faults
            if is_suspect and id not in self._queue:
                self._queue.append(id)
        return None

    def pardon(self) -> None:
        """Takes the latest fault back: no request is to blame for it."""
        for id in self._latest:
            if id not in self._faults:
                continue  # The sequence was given up.
            self._faults[id].pop()
            self._num_since_token[id] -= 1
            if id in self._queue and self._num_since_token[id] < self._max_shared_faults:
                self._queue.remove(id)
            if not self._num_since_token[id]:
                self.clear(id)
        self._num_faults_alone = max(0, self._num_faults_alone - 1)
        self._latest = []

    def _blame(self, sequence_id: int) -> Blame:
        faults = self._faults[sequence_id]
        num_explained = len(set(faults) - self._explained)
        self._explained.update(faults)
        return Blame(sequence_id, len(faults), num_explained)
