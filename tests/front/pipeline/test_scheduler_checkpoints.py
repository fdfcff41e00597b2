"""The scheduler with caches that cannot be cut: sequences begin at checkpoints of others."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st

from serve.core.ops import Forget, Save
from serve.core.types import Sequence
from serve.front.prefixes import checkpoints
from tests.front.pipeline.simulation import (
    Pipeline,
    check_examples,
    check_outputs,
    expected,
    live,
    make_sequence,
)
from tests.front.pipeline.stage_model import VOCABULARY
from tests.front.pipeline.test_scheduler import check_all_ended


def add_chat(
    pipeline: Pipeline,
    id: int,
    prompt: list[int],
    boundary: int,
    max_tokens: int = 5,
) -> None:
    pipeline.boundaries[id] = (boundary,)
    pipeline.add(make_sequence(id, prompt, max_tokens))


def with_checkpoints(num_stages: int = 2, prefill_chunk: int = 512, **more: Any) -> Pipeline:
    pipeline = Pipeline(num_stages, prefill_chunk=prefill_chunk, **more)
    pipeline.scheduler.reuse = "checkpoints"
    return pipeline


def tokens(start: int, count: int) -> list[int]:
    return [(start * 131 + i) % VOCABULARY for i in range(count)]


def check_checkpoints(pipeline: Pipeline) -> None:
    """All stages have exactly those that rank 0 knows of."""
    check_all_ended(pipeline)
    known = sorted(pipeline.scheduler.budget.kept.checkpoints)
    assert all(sorted(stage.checkpoints) == known for stage in pipeline.stages)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_prompt_begins_at_the_boundary_of_the_previous_prompt(num_stages: int) -> None:
    """The answer is not part of the next prompt as it was generated."""
    pipeline = with_checkpoints(num_stages)
    shared = tokens(1, 300)
    add_chat(pipeline, 0, [*shared, 7, 8], 300)
    pipeline.run()
    add_chat(pipeline, 1, [*shared, *tokens(2, 80)], 370)
    pipeline.run()
    assert pipeline.added[1].num_cached == 300
    assert pipeline.output(1) == expected(1, 380, 5)
    check_checkpoints(pipeline)


def test_hardly_any_token_is_computed_twice_in_twenty_turns_with_tools() -> None:
    """Each turn adds a call without the reasoning before it, and the result of the tool."""
    pipeline = with_checkpoints()
    history = tokens(1, 5000)
    num_new, num_computed = len(history), 0
    for turn in range(20):
        prompt = [*history, 7, 8, 9]
        add_chat(pipeline, turn, prompt, len(history), max_tokens=50)
        pipeline.run()
        num_computed += len(prompt) - pipeline.added[turn].num_cached
        added = tokens(turn + 2, 750)
        history += added
        num_new += len(added)
    assert len(history) == 20_000
    assert num_computed <= 1.15 * num_new
    check_checkpoints(pipeline)


def test_checkpoints_are_also_made_at_fixed_distances() -> None:
    """For prompts that share what no boundary says."""
    pipeline = with_checkpoints()
    shared = tokens(1, 5000)
    pipeline.add(make_sequence(0, [*shared, *tokens(2, 100)], 3))
    pipeline.run()
    pipeline.add(make_sequence(1, [*shared, *tokens(3, 100)], 3))
    pipeline.run()
    assert pipeline.added[1].num_cached == 2 * checkpoints.EVERY_TOKENS
    pipeline.add(make_sequence(2, pipeline.added[1].prompt, 3))
    pipeline.run()
    assert pipeline.added[2].num_cached == 5099
    check_checkpoints(pipeline)


def test_a_checkpoint_of_a_decoding_sequence_can_be_used() -> None:
    pipeline = with_checkpoints()
    shared = tokens(1, 300)
    add_chat(pipeline, 0, [*shared, 7, 8], 300, max_tokens=400)
    for _ in range(40):
        pipeline.tick()
    for id in range(1, 4):
        add_chat(pipeline, id, [*shared, *tokens(id + 1, 80)], 370)
        pipeline.tick()
    pipeline.scheduler.drop(0)
    pipeline.run()
    assert [pipeline.added[id].num_cached for id in (1, 2, 3)] == [300, 300, 300]
    check_checkpoints(pipeline)


def test_only_one_checkpoint_is_made_for_the_same_tokens() -> None:
    pipeline = with_checkpoints(max_num_sequences=8)
    shared = tokens(1, 300)
    for id in range(5):
        add_chat(pipeline, id, [*shared, id], 300)
    pipeline.run()
    saved = [save for step in pipeline.steps for save in step.ops(Save)]
    assert len(saved) == 1
    check_checkpoints(pipeline)


def test_the_least_recently_used_checkpoint_is_dropped() -> None:
    """A checkpoint costs as much as 100 tokens here, and there is room for about 1,300."""
    pipeline = with_checkpoints(num_stages=1)
    pipeline.scheduler.settle(1, 1300, state_tokens=100)
    for id in range(6):
        add_chat(pipeline, id, tokens(id, 300), 200)
        pipeline.run()
        assert pipeline.scheduler.num_held_tokens <= 1300
    check_room(pipeline)
    add_chat(pipeline, 9, [*tokens(5, 200), *tokens(77, 40)], 230)
    add_chat(pipeline, 10, [*tokens(0, 200), *tokens(77, 40)], 230)
    pipeline.run()
    assert (pipeline.added[9].num_cached, pipeline.added[10].num_cached) == (200, 0)
    assert any(step.ops(Forget) for step in pipeline.steps)


def check_room(pipeline: Pipeline) -> None:
    """What the scheduler counts is what the stages hold."""
    scheduler = pipeline.scheduler
    num_states = len(list(scheduler.budget.kept)) + len(pipeline.stages[0].checkpoints)
    held = pipeline.stages[0].num_held + 100 * num_states
    assert scheduler.num_held_tokens == held


def test_no_checkpoint_is_made_that_would_evict_all_kept_sequences() -> None:
    pipeline = with_checkpoints(num_stages=1)
    pipeline.scheduler.settle(1, 1000, state_tokens=400)
    add_chat(pipeline, 0, tokens(0, 300), 200)
    pipeline.run()
    assert not any(step.ops(Save) for step in pipeline.steps)


def test_no_checkpoint_is_made_that_another_checkpoint_of_the_same_step_evicts() -> None:
    """Two short prompts share a step, and there is room for one checkpoint."""
    pipeline = with_checkpoints(num_stages=1)
    pipeline.scheduler.settle(1, 480, state_tokens=120)
    pipeline.add(make_sequence(0, tokens(0, 100), 60))
    for _ in range(20):
        pipeline.tick()
    for id in (1, 2):
        pipeline.add(make_sequence(id, tokens(id, 70), 40))
    pipeline.tick()
    pipeline.tick()
    shared = [step for step in pipeline.steps if len(step.rows) == 2 and not step.sample]
    assert [len(step.ops(Save)) for step in shared] == [1]
    pipeline.run()
    assert sorted(pipeline.stages[0].checkpoints) == sorted(
        pipeline.scheduler.budget.kept.checkpoints
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_drop_and_a_kill_at_any_tick_leave_no_checkpoint_behind(num_stages: int) -> None:
    for num_ticks in range(0, 45, 2):
        pipeline = with_checkpoints(num_stages, max_num_sequences=3, prefill_chunk=100)
        shared = tokens(1, 150)
        for id in range(5):
            add_chat(pipeline, id, [*shared, *tokens(id, 70 + id)], 150 + 60 * (id % 2))
        for _ in range(num_ticks):
            pipeline.tick()
        pipeline.scheduler.drop(num_ticks % 5)
        pipeline.run()
        check_checkpoints(pipeline)
        pipeline.kill()
        add_chat(pipeline, 9, [*shared, *tokens(3, 90)], 200)
        for _ in range(num_ticks % 9):
            pipeline.tick()
        pipeline.kill()
        pipeline.run()
        assert pipeline.output(9)[-5:] == expected(9, 240, 5)
        check_checkpoints(pipeline)


# --- random lives


@contextmanager
def small_distances() -> Iterator[None]:
    """Checkpoints as close as random prompts are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MIN_TOKENS", 4)
        patch.setattr(checkpoints, "EVERY_TOKENS", 12)
        patch.setattr(checkpoints, "MAX_CHECKPOINTS", 12)
        yield


def next_prompt(chance: random.Random, pipeline: Pipeline) -> tuple[list[int], tuple[int, ...]]:
    """New, or the next turn of another one, whose answer is kept, changed or left out."""
    rest = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 30))]
    prompt = rest
    if pipeline.added and chance.random() < 0.75:
        other = chance.choice(list(pipeline.added.values()))
        first, *_ = pipeline.boundaries[other.id]
        shared = chance.choice([other.tokens, other.prompt, other.prompt[:first]])
        prompt = [*shared, *rest][-100:] if chance.random() < 0.1 else [*shared, *rest][:100]
    boundaries = {chance.randint(1, len(prompt)) for _ in range(2)}
    return prompt, tuple(sorted(boundaries))


LIVES = st.tuples(
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 20),
    st.sampled_from([None, 150, 250, 600]),
    st.sampled_from([0, 5, 30]),
    st.integers(0, 2**32),
)


def check_random_lives(
    num_stages: int,
    max_num_sequences: int,
    chunk: int,
    held: int | None,
    state_tokens: int,
    seed: int,
) -> None:
    chance = random.Random(seed)
    pipeline = with_checkpoints(num_stages, chunk, max_num_sequences=max_num_sequences)
    pipeline.scheduler.settle(num_stages, held, state_tokens=state_tokens)

    def next_sequence(id: int) -> Sequence:
        prompt, boundaries = next_prompt(chance, pipeline)
        pipeline.boundaries[id] = boundaries
        return make_sequence(id, prompt, chance.randint(1, 12))

    with small_distances():
        dropped = live(
            pipeline,
            chance,
            next_sequence,
            max_ticks=6,
            drop_share=0.2,
            kill_share=0.05,
        )
        pipeline.run()
        pipeline.run()  # the last drops
    check_outputs(pipeline, dropped)
    known = sorted(pipeline.scheduler.budget.kept.checkpoints)
    assert all(sorted(stage.checkpoints) == known for stage in pipeline.stages)
    assert all(set(stage.held) == set(pipeline.scheduler.budget.kept) for stage in pipeline.stages)
    assert held is None or pipeline.scheduler.num_held_tokens <= held
    assert not pipeline.outbox._steps


@pytest.mark.parametrize("num_examples", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_random_requests_with_checkpoints_get_the_right_tokens(num_examples: int) -> None:
    check_examples(check_random_lives, LIVES, num_examples)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_requests_with_checkpoints_get_the_right_tokens(
    part: int,
) -> None:
    check_examples(check_random_lives, LIVES, 500, seed=part)
