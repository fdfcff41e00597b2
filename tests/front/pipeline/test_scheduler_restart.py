"""Engines that end at any moment, by simulation: nothing is lost, nothing comes twice."""

import random
from typing import Any

import pytest
from hypothesis import strategies as st

from serve.core.ops import Drop
from serve.core.types import LAST_TOKEN, Sampling, Sequence
from serve.front.pipeline.prefill_order import PrefillOrder
from serve.front.pipeline.queues import Waiting
from serve.front.pipeline.scheduler import Reuse
from tests.front.pipeline.simulation import (
    Pipeline,
    check_examples,
    check_outputs,
    expected,
    live,
    make_sequence,
)
from tests.front.pipeline.test_scheduler import check_all_ended, copies, make_prompt


def check_whole(pipeline: Pipeline) -> None:
    """Each sequence got exactly its tokens, and one end."""
    for id, sequence in pipeline.added.items():
        prompt = len(sequence.prompt)
        assert pipeline.output(id) == expected(id, prompt, sequence.max_tokens)
        assert [e.finish_reason for e in pipeline.events if e.sequence == id].count("length") == 1
    check_all_ended(pipeline)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("reuse", ["any", "checkpoints", "none"])
def test_a_kill_at_any_tick_loses_and_repeats_no_token(num_stages: int, reuse: Any) -> None:
    for num_ticks in range(45):
        pipeline = Pipeline(num_stages, max_num_sequences=4)
        pipeline.scheduler.reuse = reuse
        for id in range(6):
            pipeline.add(make_sequence(id, 12 + id, 6))
        for _ in range(num_ticks):
            pipeline.tick()
        pipeline.kill()
        pipeline.run()
        check_whole(pipeline)


def test_a_kill_at_any_tick_loses_and_repeats_no_token_of_copies() -> None:
    for num_ticks in range(40):
        pipeline = Pipeline(2)
        copies(pipeline, 0, 40, 4)
        for _ in range(num_ticks):
            pipeline.tick()
        pipeline.kill()
        pipeline.run()
        check_whole(pipeline)


def test_tokens_answered_before_a_kill_are_prefilled_and_not_sampled_again() -> None:
    pipeline = Pipeline(2)
    pipeline.add(make_sequence(0, 9, 10))
    while len(pipeline.output(0)) < 4:
        pipeline.tick()
    pipeline.kill()
    num_before = len(pipeline.steps)
    pipeline.run()
    after = pipeline.steps[num_before:]
    prompt_and_answer = list(range(1, 10)) + expected(0, 9, 3)
    fed = [token for step in after if not step.sample for token in step.tokens]
    assert fed == prompt_and_answer
    assert sum(step.sample for step in after) == 6
    assert LAST_TOKEN not in fed


def test_running_sequences_are_queued_before_waiting_sequences_after_a_kill() -> None:
    pipeline = Pipeline(2, max_num_sequences=2)
    for id in range(5):
        pipeline.add(make_sequence(id, 10, 3))
    for _ in range(6):
        pipeline.tick()
    pipeline.kill()
    assert [sequence.id for sequence in pipeline.scheduler.waiting] == [0, 1, 2, 3, 4]
    pipeline.run()
    check_whole(pipeline)


def test_a_sequence_dropped_while_engines_restart_does_not_run_again() -> None:
    pipeline = Pipeline(2)
    for id in range(3):
        pipeline.add(make_sequence(id, 10, 5))
    for _ in range(8):
        pipeline.tick()
    pipeline.kill()
    num_before = len(pipeline.steps)
    pipeline.scheduler.drop(1)
    pipeline.run()
    fed = {row.sequence for step in pipeline.steps[num_before:] for row in step.rows}
    assert fed == {0, 2}
    assert not any(step.before == (Drop(1),) for step in pipeline.steps[num_before:])
    check_all_ended(pipeline)


LIVES = st.tuples(
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 20),
    st.sampled_from([None, 130, 200, 500]),
    st.sampled_from(["any", "checkpoints", "none"]),
    st.integers(0, 2**32),
)


def check_random_kills(
    num_stages: int,
    max_num_sequences: int,
    chunk: int,
    held: int | None,
    reuse: Reuse,
    seed: int,
) -> None:
    chance = random.Random(seed)
    pipeline = Pipeline(num_stages, max_num_sequences=max_num_sequences, prefill_chunk=chunk)
    pipeline.scheduler.budget.max_tokens, pipeline.scheduler.reuse = held, reuse
    dropped = live(
        pipeline,
        chance,
        lambda id: make_sequence(id, make_prompt(chance, pipeline)[:100], chance.randint(1, 12)),
        drop_share=0.2,
        kill_share=0.3,
    )
    for _ in range(chance.randint(0, 30)):
        pipeline.tick()
    pipeline.kill()
    pipeline.run()
    check_outputs(pipeline, dropped)
    assert held is None or pipeline.max_held <= held + 100
    for id in dropped:
        del pipeline.added[id]
    check_whole(pipeline)


@pytest.mark.long
@pytest.mark.parametrize("num_examples", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_random_kills_lose_and_repeat_no_token(num_examples: int) -> None:
    check_examples(check_random_kills, LIVES, num_examples)


def with_copy() -> tuple[Sequence, Sequence]:
    first = Sequence(1, [5, 6, 7], 4, Sampling(), frozenset())
    second = Sequence(2, first.prompt, 4, Sampling(), frozenset())
    second.original = first
    return first, second


def test_a_copy_can_run_once_the_prompt_of_its_original_is_computed() -> None:
    waiting = Waiting(PrefillOrder())
    first, second = with_copy()
    waiting.add(first)
    waiting.add(second)
    waiting.remove(first)
    waiting.restart()
    assert waiting.next([]) is None, "its original has to begin again"
    waiting.free_copies(first)
    assert waiting.next([]) is second


def test_blocked_sequences_can_run_again_after_a_restart_of_the_engines() -> None:
    waiting = Waiting(PrefillOrder())
    first, second = with_copy()
    for sequence in (first, second):
        waiting.add(sequence)
    waiting.free_copies(first)
    waiting.block(second)  # The original may have ended long before.
    waiting.block(first)
    waiting.free_copies(first)
    assert waiting.next([]) is None
    assert len(waiting) == 2
    waiting.restart()
    assert list(waiting) == [second, first]
    assert waiting.next([]) is second
