"""A pipeline without machines: steps take one tick on each stage, in order.

Each stage keeps what a real one would (which sequence is where, how many tokens of it
are held) and refuses a step that does not fit, so a scheduler that loses track fails.
"""

from collections import deque
from dataclasses import dataclass, field

from serve.core.types import Event, Sampling, Sequence, Step
from serve.front.scheduler import Scheduler

VOCABULARY = 997


def next_token(sequence: int, position: int) -> int:
    """Stands for the model: what comes at a position depends on nothing else."""
    return (sequence * 31 + position * 7) % VOCABULARY


def make_sequence(id: int, prompt: int, max_tokens: int, eos: frozenset[int] = frozenset()):
    return Sequence(id, list(range(1, prompt + 1)), max_tokens, Sampling(temperature=0), eos)


@dataclass
class StageModel:
    held: dict[int, int] = field(default_factory=dict)

    def run(self, step: Step) -> None:
        for sequence in step.drop:
            assert sequence in self.held, f"step {step.number} drops {sequence}, which is not here"
            del self.held[sequence]
        assert len({row.sequence for row in step.rows}) == len(step.rows)
        for row in step.rows:
            assert self.held.get(row.sequence, 0) == row.position, f"out of step at {step}"
            self.held[row.sequence] = row.position + row.num_tokens


@dataclass
class Pipeline:
    """max_num_sequences and prefill_chunk as in the config."""

    num_stages: int
    max_num_sequences: int = 32
    prefill_chunk: int = 8
    max_queue: int = 1000

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.num_stages,
            max_num_sequences=self.max_num_sequences,
            max_queue=self.max_queue,
            prefill_chunk=self.prefill_chunk,
        )
        self.stages = [StageModel() for _ in range(self.num_stages)]
        self.queues: list[deque[Step]] = [deque() for _ in range(self.num_stages)]
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.num_ticks = self.num_busy = self.num_overlapping = 0

    def pump(self) -> None:
        while step := self.scheduler.schedule():
            self.steps.append(step)
            self.queues[0].append(step)

    def tick(self) -> None:
        """Every stage runs one step, if one has arrived."""
        self.pump()
        running = [queue.popleft() if queue else None for queue in self.queues]
        num_busy = sum(step is not None for step in running)
        self.num_ticks += 1
        self.num_busy += num_busy
        self.num_overlapping += num_busy > 1
        for i, step in enumerate(running):
            if step is None:
                continue
            self.stages[i].run(step)
            if i + 1 < self.num_stages:
                self.queues[i + 1].append(step)
            else:
                self._finish(step)
        self.pump()

    def run(self, max_ticks: int = 100_000) -> None:
        while any(self.queues) or self.scheduler.num_running or self.scheduler.waiting:
            self.tick()
            max_ticks -= 1
            assert max_ticks, "the scheduler does not come to an end"

    def _finish(self, step: Step) -> None:
        tokens = [next_token(r.sequence, r.position + r.num_tokens) for r in step.rows]
        self.events += self.scheduler.update(step.number, tuple(tokens) if step.sample else ())

    def output(self, sequence: int) -> list[int]:
        return [e.token for e in self.events if e.sequence == sequence and e.token is not None]

    @property
    def busy_share(self) -> float:
        return self.num_busy / (self.num_ticks * self.num_stages)
