"""The sequences that wait to be computed, and the groups in which they decode. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator

from serve.core.types import Group, Sequence


class Waiting:
    """The sequences that wait, the oldest first. Some are blocked: until the prompt of their
    original is prefilled, or until their prefix has been read from disk."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._blocked: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue) + len(self._blocked)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queue
        yield from self._blocked

    def next(self, sequence_id: int | None = None) -> Sequence | None:
        """Returns the oldest sequence that is not blocked, or the one with this id."""
        for sequence in self._queue:
            if sequence_id is None or sequence.id == sequence_id:
                return sequence
        return None

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence. A copy is blocked by its original."""
        (self._blocked if sequence.original else self._queue).append(sequence)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Puts sequences before all others, in this order."""
        ordered = list(sequences)
        self._queue.extendleft(reversed(ordered))

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence if it waits."""
        for queue in (self._queue, self._blocked):
            if sequence in queue:
                queue.remove(sequence)

    def block(self, sequence: Sequence) -> None:
        """Blocks a sequence until `unblock` is called."""
        self._queue.remove(sequence)
        self._blocked.append(sequence)

    def unblock(self, sequences: Iterable[Sequence]) -> None:
        """Moves those of these sequences that are blocked to the front of the queue."""
        free = [sequence for sequence in sequences if sequence in self._blocked]
        for sequence in free:
            self._blocked.remove(sequence)
        self.put_back(free)

    def free_copies(self, original: Sequence) -> None:
        """Moves the copies of a sequence to the front of the queue, so that they begin before it
        decodes."""
        self.unblock([copy for copy in self._blocked if copy.original is original])

    def restart(self) -> None:
        """Unblocks the sequences whose prefix was being read: no engine reads it any more."""
        self.unblock([sequence for sequence in self._blocked if not sequence.original])


def smallest(groups: Iterable[Group]) -> Group:
    """Returns the group that the next sequence joins."""
    return min(groups, key=lambda group: (len(group.sequences), group.num_in_flight))


def balance(groups: list[Group]) -> None:
    """Moves rows from the largest to the smallest group until they differ by at most one."""
    while True:
        fewest = min(groups, key=lambda group: len(group.sequences))
        largest = max(groups, key=lambda group: len(group.sequences))
        if len(largest.sequences) < len(fewest.sequences) + 2:
            return
        fewest.sequences.append(largest.sequences.pop())


def unfinished(group: Group) -> list[Sequence]:
    """Returns the sequences of a group for which another token may be sampled."""
    return [sequence for sequence in group.sequences if sequence.num_left > 0]
