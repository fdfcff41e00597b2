"""A request that ends engines is found and goes, and takes no other one with it."""

import random
from typing import Any

import pytest
from hypothesis import strategies as st

from serve.core.errors import EngineError
from serve.core.types import Step
from serve.front.pipeline.fault_blame import MAX_FAULTS_ALONE, MAX_SHARED_FAULTS, Blame, FaultBlame
from serve.front.pipeline.scheduler import Reuse
from serve.parent.restarts import Restarts
from tests.front.pipeline.simulation import Pipeline, check_examples, expected, make_sequence
from tests.front.pipeline.stage_model import StageModel
from tests.front.pipeline.test_scheduler import check_all_ended, copies

MAX_RESTARTS = 5
NUM_FAULTS = MAX_SHARED_FAULTS + MAX_FAULTS_ALONE
FAULT = EngineError("The engine of rank 0 ended by signal 11.")


def test_suspected_requests_run_alone_beginning_with_the_youngest() -> None:
    fault_blame = FaultBlame(MAX_RESTARTS)
    assert fault_blame.on_fault([1, 2]) is None
    assert fault_blame.alone is None
    assert fault_blame.on_fault([1, 2, 3]) is None
    assert fault_blame.alone == 2, "3 has seen one fault only"
    fault_blame.clear(2)
    assert fault_blame.alone == 1
    fault_blame.clear(1)
    assert fault_blame.alone is None


def test_the_request_that_ran_alone_is_blamed_for_repeated_faults() -> None:
    fault_blame = FaultBlame(MAX_RESTARTS)
    for _ in range(MAX_SHARED_FAULTS):
        fault_blame.on_fault([1, 2])
    assert fault_blame.on_fault([2]) is None, "it may have been a kill"
    assert fault_blame.on_fault([2]) == Blame(2, num_faults=4, num_explained=4)
    fault_blame.remove(2)
    assert fault_blame.alone == 1
    assert fault_blame.on_fault([1]) is None
    assert fault_blame.on_fault([1]) == Blame(1, num_faults=4, num_explained=2)


def test_a_fault_that_no_request_caused_can_be_taken_back() -> None:
    fault_blame = FaultBlame(MAX_RESTARTS)
    fault_blame.on_fault([1, 2])
    fault_blame.on_fault([1, 2])
    assert fault_blame.alone == 2
    fault_blame.pardon()
    assert fault_blame.alone is None
    fault_blame.on_fault([1])
    assert fault_blame.alone == 1, "the first fault still counts"
    fault_blame.on_fault([1])
    fault_blame.pardon()
    assert fault_blame.on_fault([1]) is None
    assert fault_blame.on_fault([1]) == Blame(1, num_faults=4, num_explained=4)


@pytest.mark.parametrize(("max_restarts", "num_faults"), [(1, 2), (2, 3), (3, 4), (9, 4)])
def test_a_request_is_blamed_before_all_restarts_are_used_up(
    max_restarts: int, num_faults: int
) -> None:
    fault_blame = FaultBlame(max_restarts)
    blamed = [fault_blame.on_fault([1]) for _ in range(num_faults)]
    assert blamed == [None] * (num_faults - 1) + [Blame(1, num_faults, num_faults)]


def test_no_request_is_blamed_that_has_not_run_alone() -> None:
    fault_blame = FaultBlame(MAX_RESTARTS)
    for _ in range(MAX_SHARED_FAULTS):
        fault_blame.on_fault([1, 2])
    assert fault_blame.on_fault([1, 2]) is None
    assert fault_blame.on_fault([]) is None


def test_faults_of_a_request_are_forgotten_once_it_gets_a_token() -> None:
    fault_blame = FaultBlame(MAX_RESTARTS)
    for _ in range(10):
        assert fault_blame.on_fault([1, 2]) is None
        assert fault_blame.alone is None
        fault_blame.clear(1)
        fault_blame.clear(2)


def test_a_long_prompt_that_advances_between_faults_is_not_blamed() -> None:
    """A link that broke four times in the prefill of a long prompt made it a crash of the
    engines."""
    fault_blame = FaultBlame(MAX_RESTARTS)
    for num_tokens in range(100, 1000, 100):
        assert fault_blame.on_fault([1]) is None
        fault_blame.clear_if_further(1, num_tokens)
        assert fault_blame.alone is None
    for _ in range(MAX_SHARED_FAULTS):
        fault_blame.on_fault([1])
        fault_blame.clear_if_further(1, 900)
    assert fault_blame.alone == 1, "it gets no further"


def test_faults_of_ended_sequences_are_forgotten() -> None:
    fault_blame = FaultBlame(MAX_RESTARTS)
    for number in range(0, 900, 3):
        for _ in range(NUM_FAULTS):
            fault_blame.on_fault([number])
            fault_blame.clear_if_further(number, 5)
        fault_blame.remove(number)
    assert [fault_blame._faults, fault_blame._explained, fault_blame._queue] == [{}, set(), []]
    assert not fault_blame._num_kept


class DiedError(Exception):
    """A stage ran what it cannot."""


class FragileStage(StageModel):
    """Ends when it is fed a fatal sequence from a position on."""

    def __init__(self, fatal: dict[int, int]) -> None:
        super().__init__()
        self.fatal = fatal

    def run(self, step: Step) -> None:
        super().run(step)
        for row in step.rows:
            if row.position + row.num_tokens > self.fatal.get(row.sequence, 10**9):
                raise DiedError


class Fragile(Pipeline):
    """fatal has a position of each sequence from which on it ends the engines. What Engine does
    about it is done here."""

    def __init__(self, num_stages: int, fatal: dict[int, int], **options: Any) -> None:
        self.fatal = fatal
        self.fault_blame = FaultBlame(MAX_RESTARTS)
        self.restarts = Restarts(MAX_RESTARTS, 300)
        self.given_up: dict[int, int] = {}
        self.left: set[int] = set()  # whose clients have gone
        super().__init__(num_stages, **options)

    def _new_stage(self) -> StageModel:
        return FragileStage(self.fatal)

    def _send(self, step: Step) -> None:
        super()._send(step)
        rows = {row.sequence for queue in self.queues for step in queue for row in step.rows}
        if self.fault_blame.alone in rows:
            assert rows == {self.fault_blame.alone}, "a suspect is not alone"

    def _finish(self, step: Step) -> None:
        num_before = len(self.events)
        super()._finish(step)
        for event in self.events[num_before:]:
            self.fault_blame.clear(event.sequence)
            if event.finish_reason:
                self.fault_blame.remove(event.sequence)
            self.scheduler.run_alone(self.fault_blame.alone)

    def leave(self, sequence: int) -> None:
        self.left.add(sequence)
        self.scheduler.drop(sequence)
        self.fault_blame.remove(sequence)
        self.scheduler.run_alone(self.fault_blame.alone)

    def tick(self) -> None:
        try:
            super().tick()
        except DiedError:
            self.fail()

    def fail(self) -> None:
        held = [s.id for s in self.scheduler._live.values() if s.is_held]
        blame = self.fault_blame.on_fault(sorted(held))
        self.kill()
        num_explained = blame.num_explained if blame else 0
        self.restarts.wait_seconds(FAULT, True, 0, num_explained)
        if blame:
            self.given_up[blame.sequence] = blame.num_faults
            self.scheduler.drop(blame.sequence)
            self.fault_blame.remove(blame.sequence)
        self.scheduler.run_alone(self.fault_blame.alone)
        self.pump()

    def check(self) -> None:
        """All sequences but those that were given up or left got exactly their tokens."""
        for id, sequence in list(self.added.items()):
            whole = expected(id, len(sequence.prompt), sequence.max_tokens)
            if id in self.left.union(self.given_up):
                assert self.output(id) == whole[: len(self.output(id))]
                del self.added[id]
            else:
                assert self.output(id) == whole
        check_all_ended(self)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("fatal_at", [0, 7, 11, 12, 13, 16])
def test_a_fatal_request_is_found_whenever_it_arrives(num_stages: int, fatal_at: int) -> None:
    for comes_at in range(0, 30, 3):
        pipeline = Fragile(num_stages, {9: fatal_at}, max_num_sequences=4)
        for id in range(5):
            pipeline.add(make_sequence(id, 12 + id, 8))
        for _ in range(comes_at):
            pipeline.tick()
        pipeline.add(make_sequence(9, 12, 8))
        pipeline.run()
        assert list(pipeline.given_up) == [9]
        assert pipeline.given_up[9] == NUM_FAULTS
        assert pipeline.restarts.num_left(0) >= MAX_RESTARTS - NUM_FAULTS + 1
        pipeline.check()


def test_other_requests_wait_while_a_suspected_request_runs_alone() -> None:
    pipeline = Fragile(2, {0: 14})
    for id in range(3):
        pipeline.add(make_sequence(id, 12, 500))
    while not pipeline.given_up:
        pipeline.tick()
    assert list(pipeline.given_up) == [0]
    assert all(len(pipeline.output(id)) < 10 for id in (1, 2))
    pipeline.run()
    pipeline.check()


def test_many_fatal_requests_are_given_up_without_ending_the_cluster() -> None:
    """Far more than max_restarts, at once and one after the other, beside others."""
    pipeline = Fragile(2, {id: 5 + id % 20 for id in range(100, 130)}, max_num_sequences=8)
    for id in range(6):
        pipeline.add(make_sequence(id, 12 + id, 200))
    for id in range(100, 130):
        pipeline.add(make_sequence(id, 14, 20))
        for _ in range(id % 3 * 10):
            pipeline.tick()
    pipeline.run()
    assert set(pipeline.given_up) == set(range(100, 130))
    pipeline.check()


def test_the_fatal_request_among_several_copies_of_a_prompt_is_found() -> None:
    for fatal in range(4):
        pipeline = Fragile(2, {fatal: 41})
        copies(pipeline, 0, 40, 4)
        pipeline.add(make_sequence(7, 30, 12))
        pipeline.run()
        assert list(pipeline.given_up) == [fatal]
        pipeline.check()


CASES = st.tuples(
    st.integers(1, 4),
    st.integers(1, 10),
    st.sampled_from([None, 150, 400]),
    st.sampled_from(["any", "checkpoints", "none"]),
    st.integers(0, 2**32),
)


def check_random_life(
    num_stages: int, max_num_sequences: int, held: int | None, reuse: Reuse, seed: int
) -> None:
    """Blames no request but those that end engines."""
    chance = random.Random(seed)
    fatal = {id: chance.randint(0, 60) for id in range(25) if chance.random() < 0.3}
    pipeline = Fragile(num_stages, fatal, max_num_sequences=max_num_sequences)
    pipeline.scheduler.budget.max_tokens, pipeline.scheduler.reuse = held, reuse
    for id in range(25):
        pipeline.add(make_sequence(id, chance.randint(1, 50), chance.randint(1, 15)))
        for _ in range(chance.randint(0, 5)):
            pipeline.tick()
    for id in range(25):
        is_clear = pipeline.fault_blame.is_clear(id)  # Suspects stay for a token, as in Engine.
        if chance.random() < 0.2 and is_clear and id in pipeline.scheduler._live:
            pipeline.leave(id)
    pipeline.run()
    assert set(pipeline.given_up) <= set(fatal)
    pipeline.check()


@pytest.mark.parametrize("num_examples", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_random_fatal_requests_are_found(num_examples: int) -> None:
    check_examples(check_random_life, CASES, num_examples)
