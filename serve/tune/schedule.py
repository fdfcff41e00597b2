"""Pipeline schedules as data: what each rank does in which order, the proof that it can
be run, and how busy it keeps the ranks. Pure.

A pipeline has S stages in the order of the layers, v on each rank: stage g is on position g mod P,
and position 0 is the last rank, which holds the first layers. Three ops a micro-batch and stage:
F runs it forward, B gives the gradient of its input, W those of its parameters. Stages below the
first trained one only have F."""

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
    """Seconds, or any unit, of one micro-batch in a stage."""

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0

    def of(self, kind: str) -> float:
        return {"F": self.forward, "B": self.backward, "W": self.weights}[kind]


@dataclass(frozen=True)
class Shape:
    """num_chunks is the number of stages of each rank."""

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
        return list(range(self.num_ranks - 1 - rank, self.num_stages, self.num_ranks))


@dataclass(frozen=True)
class Schedule:
    """ops are those of each position."""

    kind: str
    shape: Shape
    ops: tuple[tuple[Op, ...], ...]

    def of_rank(self, rank: int) -> tuple[Op, ...]:
        return self.ops[self.shape.num_ranks - 1 - rank]

    @cached_property
    def in_flight(self) -> list[int]:
        """The most micro-batches, times stages, whose activations each position holds at
        once: from F to W."""
        return [max(_held(ops, self.shape.first_trained), default=0) for ops in self.ops]


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
    positions = range(shape.num_ranks)
    ops = tuple(
        tuple(op for op in _ORDERS[kind](shape, p) if _has_op(op, shape)) for p in positions
    )
    return Schedule(kind, shape, ops)


def _has_op(op: Op, shape: Shape) -> bool:
    return op.kind == "F" or op.stage >= shape.first_trained


def _naive(shape: Shape, position: int) -> Iterator[Op]:
    for i in range(shape.num_micro_batches):
        yield from (Op(kind, i, position) for kind in "FBW")


def _gpipe(shape: Shape, position: int) -> Iterator[Op]:
    yield from (Op("F", i, position) for i in range(shape.num_micro_batches))
    for i in range(shape.num_micro_batches):
        yield from (Op("B", i, position), Op("W", i, position))


def _one_forward_one_backward(shape: Shape, position: int, delay: int = 0) -> Iterator[Op]:
    """1F1B (PipeDream-flush, arXiv:2104.04473); W comes `delay` micro-batches after B."""
    count = shape.num_micro_batches
    warm = min(shape.num_ranks - 1 - position, count)
    yield from (Op("F", i, position) for i in range(warm))
    for i in range(count):
        if warm + i < count:
            yield Op("F", warm + i, position)
        yield Op("B", i, position)
        if i >= delay:
            yield Op("W", i - delay, position)
    first = max(0, count - delay)
    for i in range(first, count):
        yield Op("W", i, position)


def _zero_bubble(shape: Shape, position: int) -> Iterator[Op]:
    """ZB-H1 (arXiv:2401.10241): a later stage fills its wait for forwards with the W of
    earlier micro-batches."""
    return _one_forward_one_backward(shape, position, delay=position)


def _interleaved(shape: Shape, position: int) -> Iterator[Op]:
    """Megatron's interleaved 1F1B (arXiv:2104.04473, section 2.2): P micro-batches go
    through a stage of the rank, then the same ones through its next."""
    ranks = shape.num_ranks
    chunks = shape.num_chunks
    total = shape.num_micro_batches * chunks
    warm = min((ranks - position - 1) * 2 + (chunks - 1) * ranks, total)

    def unit(k: int, backward: bool) -> tuple[int, int]:
        chunk = k % (ranks * chunks) // ranks
        if backward:
            chunk = chunks - 1 - chunk
        else:
            chunk = chunk
        micro_batch = k // (ranks * chunks) * ranks + k % ranks
        return micro_batch, chunk * ranks + position

    yield from (Op("F", *unit(k, False)) for k in range(warm))
    for k in range(total):
        if warm + k < total:
            yield Op("F", *unit(warm + k, False))
        yield Op("B", *unit(k, True))
        yield Op("W", *unit(k, True))


def _forward(shape: Shape, position: int) -> Iterator[Op]:
    """P micro-batches at a time, as in the interleaved one: else a rank would wait for each
    to go round."""
    for first in range(0, shape.num_micro_batches, shape.num_ranks):
        group = range(first, min(first + shape.num_ranks, shape.num_micro_batches))
        for stage in range(position, shape.num_stages, shape.num_ranks):
            yield from (Op("F", i, stage) for i in group)


_ORDERS: dict[str, Callable[[Shape, int], Iterator[Op]]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "forward": _forward,  # of validation
}
SCHEDULES = tuple(kind for kind in _ORDERS if kind != "forward")


def most_in_flight(kind: str, shape: Shape, position: int) -> int:
    """Returns the promised limit of Schedule.in_flight, if all stages are trained."""
    ranks = shape.num_ranks
    count = shape.num_micro_batches
    most = {
        "naive": 1,
        "gpipe": count,
        "1f1b": ranks - position,
        "zero-bubble": ranks,
        "interleaved": (ranks - position - 1) * 2 + (shape.num_chunks - 1) * ranks + 1,
        "forward": 0,
    }[kind]
    return min(most, count * shape.num_chunks)


# --- the proof


def check(schedule: Schedule) -> None:
    """Raises PlanError unless every op is there once, after what it needs, no rank waits
    forever, and none holds more than the schedule promises."""
    shape = schedule.shape
    for position, ops in enumerate(schedule.ops):
        missing = Counter(_all_ops(schedule, position))
        missing.subtract(ops)
        wrong = [op for op, count in missing.items() if count]
        if wrong:
            raise PlanError(f"{schedule.kind}: position {position} does not do {wrong[0]} once.")
        promised = most_in_flight(schedule.kind, shape, position)
        if schedule.in_flight[position] > promised:
            raise PlanError(f"{schedule.kind}: position {position} holds more than {promised}.")
    simulate(schedule, [OpCost()] * shape.num_stages)


def _all_ops(schedule: Schedule, position: int) -> Iterator[Op]:
    shape = schedule.shape
    for stage in range(position, shape.num_stages, shape.num_ranks):
        for i in range(shape.num_micro_batches):
            yield from (op for k in "FBW" if _has_op(op := Op(k, i, stage), shape))


def needs(op: Op, shape: Shape) -> list[Op]:
    """The ops that must be done before this one, on whatever rank."""
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
        held += (op.kind == "F" and op.stage >= first_trained) - (op.kind == "W")
        yield held


# --- how busy it keeps the ranks


@dataclass(frozen=True, slots=True)
class Timeline:
    """spans are (op, start, end) of each position."""

    spans: list[list[tuple[Op, float, float]]]

    @property
    def makespan(self) -> float:
        return max(end for spans in self.spans for _, _, end in spans)

    @property
    def utilisation(self) -> float:
        """The share of the ranks' time in which they work; the rest is the bubble."""
        work = sum(end - start for spans in self.spans for _, start, end in spans)
        if work:
            return work / (len(self.spans) * self.makespan)
        return 1.0


def simulate(schedule: Schedule, costs: Sequence[OpCost], hop: float = 0.0) -> Timeline:
    """When each op would run, by the costs of each stage; hop is the time from one rank to
    the next. Raises PlanError if the ranks wait for each other forever."""
    shape = schedule.shape
    done: dict[Op, float] = {}
    timeline = Timeline([[] for _ in schedule.ops])
    left = [list(reversed(ops)) for ops in schedule.ops]
    while any(left):
        before = len(done)
        for ops, spans in zip(left, timeline.spans, strict=True):
            while ops and all(need in done for need in needs(ops[-1], shape)):
                op = ops.pop()
                start = max(
                    spans[-1][2] if spans else 0.0,
                    *(done[n] + hop * (n.stage != op.stage) for n in needs(op, shape)),
                    0.0,
                )
                done[op] = start + costs[op.stage].of(op.kind)
                spans.append((op, start, done[op]))
        if len(done) == before:
            stuck = next(ops[-1] for ops in left if ops)
            raise PlanError(f"{schedule.kind}: {stuck} waits forever.")
    return timeline
