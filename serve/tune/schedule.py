"""Pipeline schedules as data: what each rank does in which order, the proof that it can
be run, and how busy it keeps the ranks. Pure.

A pipeline has S stages in the order of the layers, v on each rank: stage g is on position g mod P,
and position 0 is the last rank, which holds the first layers. Each micro-batch has three ops in a
stage: F runs it forward, B computes the gradient of its input, W those of its parameters. Stages
below the first trained one only have F."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from serve.core.errors import PlanError, UsageError


class Op(NamedTuple):
    kind: str
    micro_batch: int
    stage: int


@dataclass(frozen=True, slots=True)
class OpCost:
    """The costs of one micro-batch in a stage, in seconds or any other unit."""

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0

    def of_kind(self, kind: str) -> float:
        return {
            "F": self.forward,
            "B": self.backward,
            "W": self.weights,
        }[kind]


@dataclass(frozen=True)
class Shape:
    """The size of a pipeline. num_chunks is the number of stages of each rank."""

    num_ranks: int
    num_micro_batches: int
    num_chunks: int = 1
    first_trained: int = 0

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def position(self, stage: int) -> int:
        return stage % self.num_ranks

    def rank(self, stage: int) -> int:
        return self.num_ranks - 1 - self.position(stage)

    def stages(self, rank: int) -> list[int]:
        position = self.num_ranks - 1 - rank
        return self.stages_at(position)

    def stages_at(self, position: int) -> list[int]:
        return list(range(position, self.num_stages, self.num_ranks))


@dataclass(frozen=True)
class Schedule:
    """The ops of each position, in the order in which it runs them."""

    kind: str
    shape: Shape
    ops: tuple[tuple[Op, ...], ...]

    def of_rank(self, rank: int) -> tuple[Op, ...]:
        position = self.shape.num_ranks - 1 - rank
        return self.ops[position]

    @cached_property
    def in_flight(self) -> list[int]:
        """The maximum number of activations that each position holds at once. Those of one
        micro-batch in one stage are held from F to W."""
        maxima = []
        for ops in self.ops:
            held = _held(ops, self.shape.first_trained)
            maxima.append(max(held, default=0))
        return maxima


# --- the schedules


def make_schedule(kind: str, shape: Shape) -> Schedule:
    """Raises UsageError if there is no such schedule for these ranks and micro-batches."""
    if shape.num_chunks > 1 and kind not in ("interleaved", "forward"):
        raise UsageError(f"Several stages per rank need --schedule interleaved, not {kind}.")
    if kind == "interleaved" and shape.num_micro_batches % shape.num_ranks:
        raise UsageError(
            f"--schedule interleaved needs a multiple of {shape.num_ranks} micro-batches (one "
            f"or more for each rank), not {shape.num_micro_batches}: see --micro-batches."
        )
    if kind == "forward":
        shape = replace(shape, first_trained=shape.num_stages)
    order = _ORDERS[kind]
    ops = []
    for position in range(shape.num_ranks):
        own = tuple(op for op in order(shape, position) if _has_op(op, shape))
        ops.append(own)
    return Schedule(kind, shape, tuple(ops))


def _has_op(op: Op, shape: Shape) -> bool:
    return op.kind == "F" or op.stage >= shape.first_trained


def _naive(shape: Shape, position: int) -> Iterator[Op]:
    for i in range(shape.num_micro_batches):
        for kind in "FBW":
            yield Op(kind, i, position)


def _gpipe(shape: Shape, position: int) -> Iterator[Op]:
    for i in range(shape.num_micro_batches):
        yield Op("F", i, position)
    for i in range(shape.num_micro_batches):
        yield Op("B", i, position)
        yield Op("W", i, position)


def _one_forward_one_backward(
    shape: Shape,
    position: int,
    delay: int = 0,
) -> Iterator[Op]:
    """1F1B (PipeDream-flush, arXiv:2104.04473); W comes `delay` micro-batches after B."""
    count = shape.num_micro_batches
    num_ahead = min(shape.num_ranks - 1 - position, count)
    for i in range(num_ahead):
        yield Op("F", i, position)
    for i in range(count):
        if num_ahead + i < count:
            yield Op("F", num_ahead + i, position)
        yield Op("B", i, position)
        if i >= delay:
            yield Op("W", i - delay, position)
    first = max(0, count - delay)
    for i in range(first, count):
        yield Op("W", i, position)


def _zero_bubble(shape: Shape, position: int) -> Iterator[Op]:
    """ZB-H1 (arXiv:2401.10241): while a later stage waits for forwards, it computes the W of
    earlier micro-batches."""
    return _one_forward_one_backward(shape, position, delay=position)


def _interleaved(shape: Shape, position: int) -> Iterator[Op]:
    """Megatron's interleaved 1F1B (arXiv:2104.04473, section 2.2): P micro-batches go
    through a stage of the rank, then the same ones through its next."""
    ranks = shape.num_ranks
    chunks = shape.num_chunks
    total = shape.num_micro_batches * chunks
    num_ahead = min((ranks - position - 1) * 2 + (chunks - 1) * ranks, total)

    def unit(k: int, backward: bool) -> tuple[int, int]:
        """Returns the micro-batch and the stage of the position's k-th F, or B and W."""
        num_rounds, in_round = divmod(k, ranks * chunks)
        chunk, in_group = divmod(in_round, ranks)
        if backward:
            chunk = chunks - 1 - chunk
        micro_batch = num_rounds * ranks + in_group
        return micro_batch, chunk * ranks + position

    for k in range(num_ahead):
        yield Op("F", *unit(k, False))
    for k in range(total):
        if num_ahead + k < total:
            yield Op("F", *unit(num_ahead + k, False))
        yield Op("B", *unit(k, True))
        yield Op("W", *unit(k, True))


def _forward(shape: Shape, position: int) -> Iterator[Op]:
    """Yields the schedule of a validation, which has only forwards. P micro-batches go through each
    stage together, as in the interleaved schedule: a rank would otherwise wait for each one to go
    around the ring."""
    for first in range(0, shape.num_micro_batches, shape.num_ranks):
        end = min(first + shape.num_ranks, shape.num_micro_batches)
        for stage in shape.stages_at(position):
            for i in range(first, end):
                yield Op("F", i, stage)


_ORDERS: dict[str, Callable[[Shape, int], Iterator[Op]]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "forward": _forward,  # of validation
}
SCHEDULES = tuple(kind for kind in _ORDERS if kind != "forward")


def max_in_flight(kind: str, shape: Shape, position: int) -> int:
    """Returns the promised maximum of Schedule.in_flight when all stages are trained."""
    ranks = shape.num_ranks
    count = shape.num_micro_batches
    promised = {
        "naive": 1,
        "gpipe": count,
        "1f1b": ranks - position,
        "zero-bubble": ranks,
        "interleaved": (ranks - position - 1) * 2 + (shape.num_chunks - 1) * ranks + 1,
        "forward": 0,
    }[kind]
    return min(promised, count * shape.num_chunks)


# --- the proof


def check(schedule: Schedule) -> None:
    """Raises PlanError unless each op is there once and after those that it needs, no rank waits
    forever, and none holds more activations than the schedule promises."""
    shape = schedule.shape
    for position, ops in enumerate(schedule.ops):
        missing = Counter(_all_ops(schedule, position))
        missing.subtract(ops)
        wrong = [op for op, count in missing.items() if count]
        if wrong:
            raise PlanError(f"{schedule.kind}: position {position} does not do {wrong[0]} once.")
        promised = max_in_flight(schedule.kind, shape, position)
        if schedule.in_flight[position] > promised:
            raise PlanError(f"{schedule.kind}: position {position} holds more than {promised}.")
    equal_costs = [OpCost()] * shape.num_stages
    simulate(schedule, equal_costs)


def _all_ops(schedule: Schedule, position: int) -> Iterator[Op]:
    shape = schedule.shape
    for stage in shape.stages_at(position):
        for i in range(shape.num_micro_batches):
            ops = (Op(kind, i, stage) for kind in "FBW")
            yield from (op for op in ops if _has_op(op, shape))


def needs(op: Op, shape: Shape) -> list[Op]:
    """Returns the ops that have to be done before this one, on any rank."""
    if op.kind == "F":
        if op.stage:
            return [op._replace(stage=op.stage - 1)]
        return []
    if op.kind == "W":
        return [op._replace(kind="B")]
    if op.stage + 1 < shape.num_stages:
        after = [op._replace(stage=op.stage + 1)]
    else:
        after = []
    return [op._replace(kind="F"), *after]


def _held(ops: Sequence[Op], first_trained: int) -> Iterator[int]:
    held = 0
    for op in ops:
        if op.kind == "F" and op.stage >= first_trained:
            held += 1
        if op.kind == "W":
            held -= 1
        yield held


# --- how busy it keeps the ranks


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times at which each position runs its ops, as (op, start, end)."""

    spans: list[list[tuple[Op, float, float]]]

    @property
    def makespan(self) -> float:
        ends = (end for spans in self.spans for _, _, end in spans)
        return max(ends)

    @property
    def utilisation(self) -> float:
        """The share of the ranks' time in which they work; the rest is the bubble."""
        durations = (end - start for spans in self.spans for _, start, end in spans)
        work = sum(durations)
        if work:
            return work / (len(self.spans) * self.makespan)
        return 1.0


def simulate(schedule: Schedule, costs: Sequence[OpCost], hop: float = 0.0) -> Timeline:
    """Returns when each op would run, from the costs of each stage; hop is the time from one rank
    to the next. Raises PlanError if the ranks wait for each other forever."""
    shape = schedule.shape
    ends: dict[Op, float] = {}
    timeline = Timeline([[] for _ in schedule.ops])
    left = [list(reversed(ops)) for ops in schedule.ops]

    def arrival(need: Op, op: Op) -> float:
        """Returns the time at which the result of one op reaches another."""
        if need.stage == op.stage:
            return ends[need]
        return ends[need] + hop

    while any(left):
        num_before = len(ends)
        for ops, spans in zip(left, timeline.spans, strict=True):
            while ops and all(need in ends for need in needs(ops[-1], shape)):
                op = ops.pop()
                earliest = [0.0]
                if spans:
                    _, _, previous_end = spans[-1]
                    earliest.append(previous_end)
                for need in needs(op, shape):
                    earliest.append(arrival(need, op))
                start = max(earliest)
                ends[op] = start + costs[op.stage].of_kind(op.kind)
                spans.append((op, start, ends[op]))
        if len(ends) == num_before:
            stuck = next(ops[-1] for ops in left if ops)
            raise PlanError(f"{schedule.kind}: {stuck} waits forever.")
    return timeline
