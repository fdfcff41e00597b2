"""The sequences that wait to be computed, the groups in which they decode, and the steps under way.
Pure."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from serve.core.types import Group, Sequence
from serve.front.pipeline.prefill_order import PrefillOrder


class Waiting:
    """The sequences that wait: first those that were put back, in their order, then new ones. Two
    kinds are blocked: copies, until the prompt of their original is prefilled, and sequences that
    wait for a part of the scheduler."""

    def __init__(self, order: PrefillOrder) -> None:
        self._order = order
        self.new: list[Sequence] = []  # new sequences, the oldest first
        self._put_back: deque[Sequence] = deque()
        self._copies: list[Sequence] = []
        self._blocked: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._put_back) + len(self.new) + len(self._copies) + len(self._blocked)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._put_back
        yield from self.new
        yield from self._copies
        yield from self._blocked

    def next(self, prefilling: list[Sequence], sequence_id: int | None = None) -> Sequence | None:
        """Returns the next sequence that is not blocked, or the one with this id, if any."""
        if sequence_id is not None:
            free = (*self._put_back, *self.new)
            return next((sequence for sequence in free if sequence.id == sequence_id), None)
        if self._put_back:
            return self._put_back[0]
        return self._order.next_to_admit(self.new, prefilling)

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence. A copy is blocked by its original."""
        (self._copies if sequence.original else self.new).append(sequence)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Puts sequences before all others, in this order."""
        ordered = list(sequences)
        self._put_back.extendleft(reversed(ordered))

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence if it waits."""
        for queue in (self._put_back, self.new, self._copies, self._blocked):
            if sequence in queue:
                queue.remove(sequence)

    def block(self, sequence: Sequence) -> None:
        """Blocks a sequence that waits for a part."""
        self.remove(sequence)
        self._blocked.append(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """Moves a blocked sequence to the front of the queue, if it still waits."""
        if sequence in self._blocked:
            self._blocked.remove(sequence)
            self.put_back([sequence])

    def free_copies(self, original: Sequence) -> None:
        """Moves the copies of a sequence to the front: they begin before it decodes."""
        copies = [copy for copy in self._copies if copy.original is original]
        for copy in copies:
            self._copies.remove(copy)
        self.put_back(copies)

    def restart(self) -> None:
        """Unblocks the sequences that wait for parts, because the engines have ended."""
        self.put_back(self._blocked)
        self._blocked.clear()


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


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step whose result has not come back. group is None for prefill. `ends` lists, for each
    sequence, the number of tokens that are computed once the step has run. num_drafts lists the
    number of drafts of each row; it is empty if there are none."""

    group: Group | None
    sequences: tuple[Sequence, ...]
    ends: tuple[int, ...]
    num_drafts: tuple[int, ...] = ()

    @property
    def last_of(self) -> list[Sequence]:
        """The sequences without an answer that end with the step's result."""
        pairs = zip(self.sequences, self.ends, strict=True)
        return [s for s, end in pairs if not s.has_answer and end == s.num_to_prefill]


def common_position(
    sequence: Sequence,
    held: Iterable[Mapping[int, int]],
    can_rewind: bool,
) -> int:
    """Returns the position from which a sequence can go on after a fault, or 0 if it has to be
    computed again. `held` gives, by stage, how many tokens of each sequence it holds.

    The newest token is fed again, because its result was lost. Stages that cannot forget tokens
    have to agree. A prompt is computed again if its output needs all its hidden states or logits.
    """
    is_read_whole = not sequence.has_answer or (
        sequence.sampling.prompt_logprobs is not None and not sequence.output
    )
    numbers = [positions.get(sequence.id, 0) for positions in held]
    if is_read_whole or not numbers:
        return 0
    position = min(*numbers, sequence.num_to_prefill)
    if not can_rewind and max(numbers) > position:
        return 0
    return position
