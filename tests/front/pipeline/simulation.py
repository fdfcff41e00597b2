"""A pipeline without machines: steps take one tick on each stage, in order.

Each stage is a StageModel, so a scheduler that loses track fails.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from serve.core.messages import Result, ToPrefixCache
from serve.core.types import FAILURES, Event, Sampling, Sequence, Step
from serve.front.parts.interface import SchedulerPart
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.scheduler import Scheduler
from serve.rank.outbox import Outbox
from tests.front.pipeline.stage_model import StageModel, next_token, result_of


def make_sequence(
    id: int, prompt: int | list[int], max_tokens: int, eos: frozenset[int] = frozenset()
) -> Sequence:
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    return Sequence(id, tokens, max_tokens, Sampling(temperature=0), eos)


def prompt_of(sequence: Sequence, boundaries: tuple[int, ...] = ()) -> Prompt:
    """What the front end knows of the prompt of a sequence."""
    return Prompt(
        sequence.prompt,
        sequence.max_tokens,
        (sequence.sampling,),
        sequence.end_ids,
        boundaries=boundaries,
    )


@dataclass
class Pipeline:
    """max_num_sequences and prefill_chunk as in the config."""

    num_stages: int
    max_num_sequences: int = 32
    prefill_chunk: int = 8
    max_queue: int = 1000
    num_groups: int | None = None
    cuts_short_prompts: bool = False
    parts: tuple[SchedulerPart, ...] = ()

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.num_stages,
            max_num_sequences=self.max_num_sequences,
            max_queue=self.max_queue,
            prefill_chunk=self.prefill_chunk,
            num_groups=self.num_groups,
            cuts_short_prompts=self.cuts_short_prompts,
            parts=self.parts,
        )
        self.added: dict[int, Sequence] = {}
        # Of the prompts of sequences that will be added, by their ids.
        self.boundaries: dict[int, tuple[int, ...]] = {}
        self._start_engines()
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.num_ticks = self.num_busy = self.num_overlapping = 0
        self.max_held = 0
        self.failing: set[tuple[int, int]] = set()  # (sequence, position) without a token

    def _start_engines(self) -> None:
        self.stages = [self._new_stage() for _ in range(self.num_stages)]
        self.outbox = Outbox(self._send)
        self.queues: list[deque[Step]] = [deque() for _ in range(self.num_stages)]

    def _new_stage(self) -> StageModel:
        return StageModel()

    def kill(self) -> None:
        """The engines and all that is on its way are gone; new ones know nothing."""
        self._start_engines()
        self.scheduler.restart()

    def add(self, sequence: Sequence) -> None:
        self.added[sequence.id] = sequence
        prompt = prompt_of(sequence, self.boundaries.get(sequence.id, ()))
        self.scheduler.add(sequence, prompts={sequence.id: prompt})

    def pump(self) -> None:
        while output := self.scheduler.schedule():
            if isinstance(output, Step):
                self.outbox.put(output)
            else:
                self.send_to_all(output)

    def send_to_all(self, message: ToPrefixCache) -> None:
        """Takes a message to the engines of all ranks, which only parts send."""
        raise NotImplementedError

    def _send(self, step: Step) -> None:
        self.steps.append(step)
        self.queues[0].append(step)

    def tick(self) -> None:
        """Every stage runs one step, if one has arrived."""
        self.pump()
        running = [queue.popleft() if queue else None for queue in self.queues]
        num_busy = sum(step is not None for step in running)
        self.max_held = max(self.max_held, *(stage.num_held for stage in self.stages))
        self.num_ticks += 1
        self.num_busy += num_busy
        self.num_overlapping += num_busy > 1
        for i, step in enumerate(running):
            if step is None:
                continue
            self.stages[i].can_cut = self.scheduler.reuse == "any"
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
        for row in step.rows:
            # What a stage holds is what the sequence says, however it came there.
            held, prompt = self.stages[-1].held[row.sequence], self.added[row.sequence].prompt
            if step.sample:
                held = held[: row.position + 1]
            answer = [max(self._draw(row.sequence, i), 0) for i in range(len(prompt), len(held))]
            assert held == (prompt + answer)[: len(held)]
        result = self._result(step)
        if step.sample:
            self.outbox.sampled(step, result.tokens, result.num_accepted)
        self.events += self.scheduler.update(result)
        sizes = [len(group.sequences) for group in self.scheduler.groups]
        assert not step.sample or max(sizes) - min(sizes) <= 1, f"groups of {sizes} rows"

    def _result(self, step: Step) -> Result:
        return result_of(step, self._draw)

    def _draw(self, sequence: int, position: int) -> int:
        failed = (sequence, position) in self.failing
        failure = list(FAILURES)[position % len(FAILURES)]
        return failure if failed else next_token(sequence, position)

    def output(self, sequence: int) -> list[int]:
        return [e.token for e in self.events if e.sequence == sequence and e.token is not None]

    @property
    def busy_share(self) -> float:
        return self.num_busy / (self.num_ticks * self.num_stages)


def expected(id: int, prompt: int, max_tokens: int) -> list[int]:
    return [next_token(id, position) for position in range(prompt, prompt + max_tokens)]


def live(
    pipeline: Pipeline,
    chance: random.Random,
    next_sequence: Callable[[int], Sequence],
    max_ticks: int = 4,
    drop_share: float = 0.3,
    kill_share: float = 0.0,
) -> set[int]:
    """Adds 25 sequences at random times, and drops some and kills the engines in between. The
    shares are the probabilities of a drop and a kill after each sequence. Returns the ids of the
    dropped sequences."""
    dropped = set()
    for id in range(25):
        pipeline.add(next_sequence(id))
        for _ in range(chance.randint(0, max_ticks)):
            pipeline.tick()
        if chance.random() < kill_share:
            pipeline.kill()
        if chance.random() < drop_share:
            victim = chance.randint(0, id)
            dropped.add(victim)
            pipeline.scheduler.drop(victim, may_keep=chance.random() < 0.7)
    return dropped


def check_outputs(pipeline: Pipeline, dropped: set[int]) -> None:
    """Checks that every sequence has exactly its tokens. A dropped one may have only the first of
    them, and a failed one has those before the failure."""
    failed_at = dict(pipeline.failing)
    for id, sequence in pipeline.added.items():
        output = pipeline.output(id)
        whole = expected(id, len(sequence.prompt), sequence.max_tokens)
        if id in failed_at:
            whole = whole[: failed_at[id] - len(sequence.prompt)]
        if id in dropped:
            whole = whole[: len(output)]
        assert output == whole


def check_examples(
    check: Callable[..., None],
    lives: SearchStrategy[tuple[Any, ...]],
    num_examples: int,
    seed: int | None = None,
) -> None:
    """Calls check with num_examples random tuples of arguments, which a seed determines."""
    test = given(lives)(lambda life: check(*life))
    if seed is not None:
        test = hypothesis.seed(seed)(test)
    settings(max_examples=num_examples)(test)()
