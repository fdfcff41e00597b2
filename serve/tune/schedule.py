"""Pipeline schedules as data: the ops of each rank in their order, the proof that a schedule can
be run, and how busy it keeps the ranks. Pure.

A pipeline has S stages in the order of the layers, v on each of P ranks: stage g is on position g
mod P, and position 0 is the last rank, which holds the first layers. Each micro-batch has three ops
in a stage: F is the forward pass, B computes the input's gradient, W the parameters' gradients.
Stages below the first trained one only have F.

All training schedules are 1F1B with two parameters for each position: how many F it runs before its
first B, and how many B before its first W."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from serve.core.errors import PlanError, UsageError


class PipelineOp(NamedTuple):
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
    """The ops of each position, in the order in which the position runs them."""

    kind: str
    shape: Shape
    ops: tuple[tuple[PipelineOp, ...], ...]

    def of_rank(self, rank: int) -> tuple[PipelineOp, ...]:
        position = self.shape.num_ranks - 1 - rank
        return self.ops[position]

    @cached_property
    def in_flight(self) -> list[int]:
        """The maximum number of activations that each position holds at once. A micro-batch's
        activations in a stage are held from F to W."""
        maxima = []
        for ops in self.ops:
            counts = _num_in_flight(ops, self.shape.first_trained)
            maxima.append(max(counts, default=0))
        return maxima


# --- the schedules

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")


def make_schedule(kind: str, shape: Shape) -> Schedule:
    """Makes a schedule. Raises UsageError if none exists for these ranks and micro-batches."""
    if shape.num_chunks > 1 and kind not in ("interleaved", "forward"):
        raise UsageError(
            f"Several stages per rank need --schedule interleaved, not {kind}.", code="needs_flag"
        )
    if kind == "interleaved" and shape.num_micro_batches % shape.num_ranks:
        raise UsageError(
            f"--schedule interleaved needs a multiple of {shape.num_ranks} micro-batches (one "
            f"or more for each rank), not {shape.num_micro_batches}: see --micro-batches.",
            code="uneven_batches",
        )
    if kind == "forward":
        shape = replace(shape, first_trained=shape.num_stages)
    ops = []
    for position in range(shape.num_ranks):
        if kind == "forward":
            order = _forward(shape, position)
        else:
            order = _one_forward_one_backward(kind, shape, position)
        ops.append(tuple(op for op in order if _has_op(op, shape)))
    return Schedule(kind, shape, tuple(ops))


def _has_op(op: PipelineOp, shape: Shape) -> bool:
    return op.kind == "F" or op.stage >= shape.first_trained


def _num_ahead(kind: str, shape: Shape, position: int) -> int:
    """Returns the number of forward passes (F) that a position runs before its first backward pass
    (B). If the result is larger than the number of all F, the position runs all F first."""
    ranks = shape.num_ranks
    return {
        "naive": 0,
        "gpipe": shape.num_micro_batches,
        # PipeDream-flush, arXiv:2104.04473
        "1f1b": ranks - position - 1,
        # section 2.2 of the same paper
        "interleaved": 2 * (ranks - position - 1) + (shape.num_chunks - 1) * ranks,
        # ZB-H1, arXiv:2401.10241
        "zero-bubble": ranks - position - 1,
    }[kind]


def _num_delayed(kind: str, position: int) -> int:
    """Returns how many B a position runs before its first W. In the zero-bubble schedule it runs
    the W of earlier micro-batches while a later stage waits for F."""
    return position if kind == "zero-bubble" else 0


def _one_forward_one_backward(kind: str, shape: Shape, position: int) -> Iterator[PipelineOp]:
    total = shape.num_micro_batches * shape.num_chunks
    num_ahead = min(_num_ahead(kind, shape, position), total)
    num_delayed = _num_delayed(kind, position)
    for k in range(total + num_ahead + num_delayed):
        backward = k - num_ahead
        weights = backward - num_delayed
        if k < total:
            yield _op("F", k, shape, position)
        if 0 <= backward < total:
            yield _op("B", backward, shape, position)
        if 0 <= weights < total:
            yield _op("W", weights, shape, position)


def _op(kind: str, k: int, shape: Shape, position: int) -> PipelineOp:
    """Returns the position's k-th op of this kind. P micro-batches go through a stage of the rank,
    then the same P through the rank's next stage."""
    ranks = shape.num_ranks
    num_rounds, in_round = divmod(k, ranks * shape.num_chunks)
    chunk, in_group = divmod(in_round, ranks)
    if kind != "F":
        chunk = shape.num_chunks - 1 - chunk
    return PipelineOp(kind, num_rounds * ranks + in_group, chunk * ranks + position)


def _forward(shape: Shape, position: int) -> Iterator[PipelineOp]:
    """Yields the schedule of a validation: only forward passes. P micro-batches go through each
    stage together, as in the interleaved schedule. Otherwise a rank would wait while a micro-batch
    goes around the ring."""
    for first in range(0, shape.num_micro_batches, shape.num_ranks):
        end = min(first + shape.num_ranks, shape.num_micro_batches)
        for stage in shape.stages_at(position):
            for i in range(first, end):
                yield PipelineOp("F", i, stage)


def max_in_flight(kind: str, shape: Shape, position: int) -> int:
    """Returns the promised maximum of Schedule.in_flight when all stages are trained."""
    if kind == "forward":
        return 0
    promised = _num_ahead(kind, shape, position) + 1 + _num_delayed(kind, position)
    return min(promised, shape.num_micro_batches * shape.num_chunks)


# --- the proof


def check(schedule: Schedule) -> None:
    """Raises PlanError unless each op occurs once and after the ops that it needs, no rank waits
    forever, and none holds more activations than the schedule promises."""
    shape = schedule.shape
    for position, ops in enumerate(schedule.ops):
        missing = Counter(_all_ops(schedule, position))
        missing.subtract(ops)
        wrong = [op for op, count in missing.items() if count]
        if wrong:
            raise PlanError(
                f"{schedule.kind}: position {position} does not do {wrong[0]} once.",
                code="task_not_once",
            )
        promised = max_in_flight(schedule.kind, shape, position)
        if schedule.in_flight[position] > promised:
            raise PlanError(
                f"{schedule.kind}: position {position} holds more than {promised}.",
                code="too_many_held",
            )
    equal_costs = [OpCost()] * shape.num_stages
    simulate(schedule, equal_costs)


def _all_ops(schedule: Schedule, position: int) -> Iterator[PipelineOp]:
    shape = schedule.shape
    for stage in shape.stages_at(position):
        for i in range(shape.num_micro_batches):
            ops = (PipelineOp(kind, i, stage) for kind in "FBW")
            yield from (op for op in ops if _has_op(op, shape))


def needs(op: PipelineOp, shape: Shape) -> list[PipelineOp]:
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


def _num_in_flight(ops: Sequence[PipelineOp], first_trained: int) -> Iterator[int]:
    count = 0
    for op in ops:
        if op.kind == "F" and op.stage >= first_trained:
            count += 1
        if op.kind == "W":
            count -= 1
        yield count


# --- how busy it keeps the ranks


@dataclass(frozen=True, slots=True)
class Simulation:
    """The times at which each position runs its ops, as (op, start, end)."""

    spans: list[list[tuple[PipelineOp, float, float]]]

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


def simulate(schedule: Schedule, costs: Sequence[OpCost], hop: float = 0.0) -> Simulation:
    """Returns when each op would run, from the costs of each stage; hop is the time from one rank
    to the next. Raises PlanError if the ranks wait for each other forever."""
    shape = schedule.shape
    ends: dict[PipelineOp, float] = {}
    timeline = Simulation([[] for _ in schedule.ops])
    left = [list(reversed(ops)) for ops in schedule.ops]

    def arrival(need: PipelineOp, op: PipelineOp) -> float:
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
            raise PlanError(f"{schedule.kind}: {stuck} waits forever.", code="deadlock")
    return timeline
