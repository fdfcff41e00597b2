"""A pipeline without machines: steps take one tick on each stage, in order.

Each stage keeps what a real one would (which sequence is where, how many tokens of it
are held) and refuses a step that does not fit, so a scheduler that loses track fails.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from serve.core.messages import Result, ToPrefixCache
from serve.core.ops import NO_CHECKPOINT, Copy, Drop, Forget, Load, Save
from serve.core.types import FAILURES, OVERFLOWED_TOKEN, Event, Sampling, Sequence, Step
from serve.front.parts.interface import SchedulerPart
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.scheduler import Scheduler
from serve.rank.outbox import Outbox

VOCABULARY = 997


def next_token(sequence: int, position: int) -> int:
    """Stands for the model: what comes at a position depends on nothing else."""
    return (sequence * 31 + position * 7) % VOCABULARY


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
class StageModel:
    """held has the tokens whose keys and values it would hold, checkpoints those whose states. If
    can_cut is false, a sequence can begin only at a checkpoint or as all of another one. loaded are
    the tokens that were read from disk for new sequences."""

    held: dict[int, list[int]] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)
    checkpoints: dict[int, list[int]] = field(default_factory=dict)
    can_cut: bool = True
    loaded: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_held(self) -> int:
        return sum(map(len, self.held.values()))

    def run(self, step: Step) -> None:
        for load in step.ops(Load):
            self.held[load.sequence] = list(self.loaded.pop(load.sequence))
            assert len(self.held[load.sequence]) == load.num_tokens
        for copy in step.ops(Copy):
            assert len(self.held[copy.source]) >= copy.num_tokens, f"{copy} of too little"
            assert copy.sequence not in self.held
            tokens = self.held[copy.source][: copy.num_tokens]
            if copy.checkpoint != NO_CHECKPOINT:
                assert self.checkpoints[copy.checkpoint] == tokens, f"{copy} of another prefix"
            elif not self.can_cut:
                assert tokens == self.held[copy.source], f"{copy} without a checkpoint"
            self.held[copy.sequence] = list(tokens)
        for forget in step.ops(Forget):
            del self.checkpoints[forget.checkpoint]
        for drop in step.ops(Drop):
            sequence = drop.sequence
            assert sequence in self.held, f"step {step.number} drops {sequence}, which is not here"
            del self.held[sequence]
            self.floors.pop(sequence, None)
        assert len({row.sequence for row in step.rows}) == len(step.rows)
        start = 0
        for row in step.rows:
            held = self.held.setdefault(row.sequence, [])
            floor = self.floors.pop(row.sequence, len(held))
            assert floor <= row.position <= len(held), f"out of step at {step}"
            del held[row.position :]
            held += step.tokens[start : start + row.num_tokens]
            start += row.num_tokens
            if step.sample and row.num_tokens > 1:
                self.floors[row.sequence] = row.position
        if len({row.num_tokens for row in step.rows}) > 1 and not step.sample:
            assert not any(row.position for row in step.rows), "begun rows of different lengths"
        for save in step.ops(Save):
            assert save.checkpoint not in self.checkpoints
            self.checkpoints[save.checkpoint] = list(self.held[save.sequence])


def result_of(step: Step, draw: Callable[[int, int], int]) -> Result:
    """The result of a step. draw gives the token of a sequence at a position."""
    if not step.sample:
        return Result(step.number, ())
    tokens: list[int] = []
    num_accepted: list[int] = []
    start = 0
    for row in step.rows:
        drafts = step.tokens[start + 1 : start + row.num_tokens]
        start += row.num_tokens
        num_before = len(tokens)
        for position, draft in enumerate([*drafts, None], row.position + 1):
            token = draw(row.sequence, position)
            if token == OVERFLOWED_TOKEN and drafts:
                break  # A draft may be the cause, so the row is computed again without drafts.
            tokens.append(token)
            if token != draft:
                break
        num_accepted.append(len(tokens) - num_before - 1)
    if not step.num_drafts:
        return Result(step.number, tuple(tokens))
    num_drafts = tuple(row.num_tokens - 1 for row in step.rows)
    return Result(
        step.number,
        tuple(tokens),
        num_accepted=tuple(num_accepted),
        num_drafts=num_drafts,
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
    # A busy machine is no reason to fail.
    slow_is_fine = [HealthCheck.too_slow]
    settings(max_examples=num_examples, suppress_health_check=slow_is_fine)(test)()
