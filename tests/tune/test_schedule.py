"""Every schedule for up to 8 ranks and 16 micro-batches, and broken ones that must be seen."""

import dataclasses
import itertools

import pytest

from serve.core.errors import PlanError, UsageError
from serve.tune.schedule import (
    SCHEDULES,
    OpCost,
    PipelineOp,
    Schedule,
    Shape,
    check,
    make_schedule,
    simulate,
)
from tests.errors import fails

RANKS, MICRO_BATCHES = range(1, 9), range(1, 17)


def chunks_of(kind: str) -> tuple[int, ...]:
    return {"interleaved": (1, 2, 3), "forward": (1, 2)}.get(kind, (1,))


@pytest.mark.parametrize("kind", [*SCHEDULES, "forward"])
def test_every_schedule_passes_its_checks(kind: str) -> None:
    """check proves completeness, order, memory and that nobody waits forever."""
    num_checked = 0
    for ranks, count, chunks in itertools.product(RANKS, MICRO_BATCHES, chunks_of(kind)):
        if kind == "interleaved" and count % ranks:
            continue
        for first_trained in {0, 1, ranks * chunks - 1} & set(range(ranks * chunks)):
            check(make_schedule(kind, Shape(ranks, count, chunks, first_trained)))
            num_checked += 1
    assert num_checked > 60


def rebuilt(schedule: Schedule, position: int, ops: list[PipelineOp]) -> Schedule:
    changed = list(schedule.ops)
    changed[position] = tuple(ops)
    return dataclasses.replace(schedule, ops=tuple(changed))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_broken_schedule_is_detected(kind: str) -> None:
    schedule = make_schedule(kind, Shape(3, 6, 2 if kind == "interleaved" else 1))
    for position, ops in enumerate(schedule.ops):
        for index in range(len(ops)):
            without = [*ops[:index], *ops[index + 1 :]]
            with fails(PlanError, "task_not_once"):
                check(rebuilt(schedule, position, without))
            with fails(PlanError, "task_not_once"):
                check(rebuilt(schedule, position, [*without, ops[index], ops[index]]))
        backwards = list(reversed(ops))
        with pytest.raises(PlanError):
            check(rebuilt(schedule, position, backwards))


def test_ranks_that_wait_for_each_other_are_detected() -> None:
    schedule = make_schedule("naive", Shape(2, 2))
    first = [PipelineOp(k, i, 0) for i in (0, 1) for k in "FBW"]
    second = [PipelineOp(k, i, 1) for i in (1, 0) for k in "FBW"]
    with fails(PlanError, "deadlock"):
        check(rebuilt(rebuilt(schedule, 0, first), 1, second))


def test_a_schedule_that_holds_too_many_activations_is_detected() -> None:
    gpipe = make_schedule("gpipe", Shape(2, 8))
    with fails(PlanError, "too_many_held"):
        check(dataclasses.replace(gpipe, kind="1f1b"))


def test_each_schedule_holds_the_expected_number_of_activations() -> None:
    """1F1B holds a micro-batch for each stage that follows, GPipe all of them."""
    shape = Shape(4, 8)
    assert make_schedule("naive", shape).in_flight == [1, 1, 1, 1]
    assert make_schedule("gpipe", shape).in_flight == [8, 8, 8, 8]
    assert make_schedule("1f1b", shape).in_flight == [4, 3, 2, 1]
    assert make_schedule("zero-bubble", shape).in_flight == [4, 4, 4, 4]
    assert make_schedule("1f1b", Shape(4, 8, first_trained=2)).in_flight == [0, 0, 2, 1]


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 16), (3, 7)])
def test_utilisation_of_schedules_equals_the_textbook_formulas(ranks: int, count: int) -> None:
    """The bubble of GPipe and 1F1B is (P - 1) / (M + P - 1). With v stages a rank, ranks idle a
    v-th as long. The naive schedule keeps one rank busy."""
    lora = [OpCost(1, 2, 0)] * ranks
    for kind in ("gpipe", "1f1b"):
        busy = simulate(make_schedule(kind, Shape(ranks, count)), lora).utilisation
        assert busy == pytest.approx(count / (count + ranks - 1))
    naive = simulate(make_schedule("naive", Shape(ranks, count)), lora).utilisation
    assert naive == pytest.approx(1 / ranks)
    if count % ranks == 0:
        interleaved = make_schedule("interleaved", Shape(ranks, count, 2))
        busy = simulate(interleaved, [OpCost(1, 2, 0)] * 2 * ranks).utilisation
        assert busy == pytest.approx(count / (count + (ranks - 1) / 2))


def test_zero_bubble_schedule_is_busier_than_1f1b_in_full_tuning() -> None:
    shape, costs = Shape(4, 8), [OpCost(1, 1, 1)] * 4
    plain = simulate(make_schedule("1f1b", shape), costs).utilisation
    filled = simulate(make_schedule("zero-bubble", shape), costs).utilisation
    # ZB-H1 leaves (P - 1)(F + B - W) of the bubble, 1F1B (P - 1)(F + B) with dx sent before W.
    assert filled == pytest.approx(24 / 27)
    assert filled > plain + 0.05


@pytest.mark.parametrize(("ranks", "count", "chunks"), [(4, 8, 1), (4, 8, 2), (2, 6, 3)])
def test_validation_keeps_ranks_with_several_stages_busy(
    ranks: int, count: int, chunks: int
) -> None:
    """But for the first and the last micro-batch every rank always has something to do."""
    forward = make_schedule("forward", Shape(ranks, count, chunks))
    makespan = simulate(forward, [OpCost()] * ranks * chunks).makespan
    assert makespan == count * chunks + ranks - 1


def test_hops_and_frozen_stages_change_the_simulated_time_as_calculated() -> None:
    schedule = make_schedule("naive", Shape(2, 1))
    assert simulate(schedule, [OpCost(1, 2, 3)] * 2, hop=0.5).makespan == pytest.approx(10)
    frozen = make_schedule("naive", Shape(2, 3, first_trained=1))
    assert simulate(frozen, [OpCost()] * 2).makespan == pytest.approx(10)


def test_impossible_schedules_are_refused() -> None:
    with fails(UsageError, "uneven_batches"):
        make_schedule("interleaved", Shape(4, 6, 2))
    with fails(UsageError, "needs_flag"):
        make_schedule("1f1b", Shape(4, 8, 2))


def test_each_rank_has_the_expected_stages() -> None:
    shape = Shape(3, 3, 2)
    assert [shape.rank(stage) for stage in range(6)] == [2, 1, 0, 2, 1, 0]
    assert shape.stages(0) == [2, 5]
    assert make_schedule("interleaved", shape).of_rank(0)[0] == PipelineOp("F", 0, 2)
