"""Which step comes next. Pure: no clock, socket, array or asyncio.

`schedule` is called until it returns None, `update` with each result. The stages
run steps in the order in which they are scheduled, so what a step says about the
caches (drop, join, move) holds for every later one without waiting for it.

A prompt is prefilled up to its last token in steps of its own, which need no
result. Then the sequence joins the smallest group, and the last prompt token is
the first one that it feeds there.
"""

from collections import deque
from dataclasses import dataclass

from serve.core.errors import OverloadedError
from serve.core.types import Event, FinishReason, Group, Row, Sequence, Step


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step without a result so far. group is None for prefill."""

    group: Group | None
    sequences: tuple[Sequence, ...]


class Scheduler:
    """num_groups is the number of stages: with fewer groups a stage would idle."""

    def __init__(
        self, num_groups: int, *, max_num_sequences: int, max_queue: int, prefill_chunk: int
    ) -> None:
        self.groups = [Group(id) for id in range(num_groups)]
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.num_steps = 0
        self._max_num_sequences = max_num_sequences
        self._max_queue = max_queue
        self._prefill_chunk = prefill_chunk
        self._live: dict[int, Sequence] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._to_drop: list[int] = []

    @property
    def num_running(self) -> int:
        return len(self._live) - len(self.waiting)

    @property
    def num_in_flight(self) -> int:
        """Steps without a result so far."""
        return len(self._in_flight)

    def sequence(self, sequence_id: int) -> Sequence:
        return self._live[sequence_id]

    def add(self, sequence: Sequence) -> None:
        """Raises OverloadedError if too many wait already."""
        room = self._max_num_sequences - self.num_running
        if len(self.waiting) >= self._max_queue + room:
            raise OverloadedError(
                f"{len(self.waiting)} requests wait already: try again later.", code="queue_full"
            )
        self._live[sequence.id] = sequence
        self.waiting.append(sequence)

    def drop(self, sequence_id: int) -> None:
        """Ends a sequence wherever it is; unknown and ended ones are fine."""
        if sequence := self._live.pop(sequence_id, None):
            for queue in (self.waiting, self.prefilling, *(g.sequences for g in self.groups)):
                if sequence in queue:
                    queue.remove(sequence)
            if sequence.num_computed:
                self._to_drop.append(sequence_id)

    def schedule(self) -> Step | None:
        """The next step, or None until another result or sequence comes."""
        self._admit()
        return self._decode() or self._prefill() or self._drop_only()

    def update(self, number: int, tokens: tuple[int, ...]) -> list[Event]:
        """The events of a step's result: tokens has one for each row that sampled."""
        done = self._in_flight.pop(number)
        if done.group is None:
            return []
        done.group.step_in_flight = None
        events = [
            self._advance(sequence, token)
            for sequence, token in zip(done.sequences, tokens, strict=True)
            if sequence.id in self._live
        ]
        self._balance(done.group)
        return events

    # --- the kinds of steps

    def _admit(self) -> None:
        while self.waiting and self.num_running < self._max_num_sequences:
            sequence = self.waiting.popleft()
            self.prefilling.append(sequence)
            self._join_if_prefilled(sequence)

    def _decode(self) -> Step | None:
        for group in self.groups:
            if group.sequences and group.step_in_flight is None:
                rows = [Row(s.id, s.num_tokens - 1, 1) for s in group.sequences]
                step = self._step(group.id, rows, [s.last_token for s in group.sequences], True)
                group.step_in_flight = step.number
                for sequence in group.sequences:
                    sequence.num_computed = sequence.num_tokens
                self._in_flight[step.number] = _InFlight(group, tuple(group.sequences))
                return step
        return None

    def _prefill(self) -> Step | None:
        """A chunk of the oldest prompt. One chunk for each stage may be under way, so
        that chunks of one prompt follow each other through the stages."""
        num_in_flight = sum(f.group is None for f in self._in_flight.values())
        if not self.prefilling or num_in_flight >= len(self.groups):
            return None
        sequence = self.prefilling[0]
        start = sequence.num_computed
        end = min(start + self._prefill_chunk, sequence.num_tokens - 1)
        sequence.num_computed = end
        alone = len(self.groups) + sequence.id
        row = Row(sequence.id, start, end - start)
        step = self._step(alone, [row], sequence.tokens[start:end], False)
        self._in_flight[step.number] = _InFlight(None, (sequence,))
        self._join_if_prefilled(sequence)
        return step

    def _drop_only(self) -> Step | None:
        if not self._to_drop:
            return None
        step = self._step(0, [], [], False)
        self._in_flight[step.number] = _InFlight(None, ())
        return step

    def _step(self, group: int, rows: list[Row], tokens: list[int], sample: bool) -> Step:
        self.num_steps = (self.num_steps + 1) % 2**31  # int32 on the wire
        drop, self._to_drop = tuple(self._to_drop), []
        return Step(self.num_steps, group, tuple(rows), tuple(tokens), sample, drop)

    # --- what becomes of sequences

    def _join_if_prefilled(self, sequence: Sequence) -> None:
        if sequence.num_computed == sequence.num_tokens - 1:
            self.prefilling.remove(sequence)
            smallest = min(self.groups, key=lambda g: (len(g.sequences), g.step_in_flight or 0))
            smallest.sequences.append(sequence)

    def _advance(self, sequence: Sequence, token: int) -> Event:
        sequence.output.append(token)
        reason: FinishReason | None = None
        if token in sequence.eos_ids:
            reason = "stop"
        elif len(sequence.output) >= sequence.max_tokens:
            reason = "length"
        if reason:
            self.drop(sequence.id)
        return Event(sequence.id, token, reason)

    def _balance(self, group: Group) -> None:
        """Moves rows away while another group has two fewer. Only a group whose
        result has just come can give rows, since its others are being computed."""
        while True:
            smallest = min(self.groups, key=lambda g: len(g.sequences))
            if len(group.sequences) < len(smallest.sequences) + 2:
                return
            smallest.sequences.append(group.sequences.pop())
