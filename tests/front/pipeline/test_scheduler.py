"""The scheduler by simulation: the slow, obvious answer is next_token at each position."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import strategies as st

from serve.core.errors import OverloadedError
from serve.core.ops import Copy
from serve.core.types import FAILURES
from serve.front.pipeline.scheduler import Reuse
from tests.errors import fails
from tests.front.pipeline.simulation import (
    Pipeline,
    check_examples,
    check_outputs,
    expected,
    live,
    make_sequence,
)
from tests.front.pipeline.stage_model import VOCABULARY, next_token


def check_all_ended(pipeline: Pipeline) -> None:
    """Nothing may be left: no sequence, no step, no cache on any stage."""
    ends = [e.sequence for e in pipeline.events if e.finish_reason]
    assert len(ends) == len(set(ends)), "a request ended twice"
    pipeline.run()
    assert all(set(stage.held) == set(pipeline.scheduler.budget.kept) for stage in pipeline.stages)
    surplus = pipeline.stages[0].num_held - pipeline.scheduler.num_held_tokens
    # A kept sequence may have ended with drafts that were not right.
    num_kept = len(list(pipeline.scheduler.budget.kept))
    has_drafts = any(step.num_drafts for step in pipeline.steps)
    assert surplus == 0 or (has_drafts and 0 < surplus <= 4 * num_kept)
    assert not pipeline.outbox._steps
    assert pipeline.scheduler.num_running == 0
    assert not any(group.sequences for group in pipeline.scheduler.groups)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
@pytest.mark.parametrize("prompt", [1, 2, 8, 9, 10, 100])
def test_a_single_sequence_gets_its_tokens(num_stages: int, prompt: int) -> None:
    pipeline = Pipeline(num_stages)
    pipeline.add(make_sequence(5, prompt, 4))
    pipeline.run()
    assert pipeline.output(5) == expected(5, prompt, 4)
    assert [e.finish_reason for e in pipeline.events] == [None, None, None, "length"]
    check_all_ended(pipeline)


def test_every_arrival_order_gives_the_same_tokens() -> None:
    shapes = [(0, 1, 3), (1, 9, 5), (2, 20, 2), (3, 17, 7)]
    for order in itertools.permutations(shapes):
        for gap in (0, 1, 3):
            pipeline = Pipeline(2)
            for id, prompt, max_tokens in order:
                pipeline.add(make_sequence(id, prompt, max_tokens))
                for _ in range(gap):
                    pipeline.tick()
            pipeline.run()
            for id, prompt, max_tokens in shapes:
                assert pipeline.output(id) == expected(id, prompt, max_tokens)
            check_all_ended(pipeline)


def test_a_drop_at_any_tick_frees_all_rows_and_changes_no_other_answer() -> None:
    for num_ticks in range(40):
        pipeline = Pipeline(3, max_num_sequences=4)
        for id in range(6):
            pipeline.add(make_sequence(id, 12 + id, 6))
        for _ in range(num_ticks):
            pipeline.tick()
        pipeline.scheduler.drop(2)
        num_before = len(pipeline.output(2))
        pipeline.run()
        assert len(pipeline.output(2)) == num_before, "a dropped sequence went on"
        for id in (0, 1, 3, 4, 5):
            assert pipeline.output(id) == expected(id, 12 + id, 6)
        check_all_ended(pipeline)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_row_that_fails_at_any_token_ends_only_its_own_sequence(num_stages: int) -> None:
    for position in range(12, 18):
        pipeline = Pipeline(num_stages)
        pipeline.failing = {(1, position)}
        for id in range(4):
            pipeline.add(make_sequence(id, 12, 6))
        pipeline.run()
        assert pipeline.output(1) == expected(1, 12, 6)[: position - 12]
        ends = [e.finish_reason for e in pipeline.events if e.sequence == 1 and e.finish_reason]
        assert ends == [list(FAILURES.values())[position % len(FAILURES)]]
        assert 1 not in pipeline.scheduler.budget.kept
        for id in (0, 2, 3):
            assert pipeline.output(id) == expected(id, 12, 6)
        check_all_ended(pipeline)


def make_prompt(chance: random.Random, pipeline: Pipeline) -> list[int]:
    """New, or like the beginning of another one, or going on where a chat has ended."""
    kind = chance.random()
    tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 40))]
    if kind < 0.4 or not pipeline.added:
        return tokens
    other = chance.choice(list(pipeline.added.values()))
    whole = other.tokens if kind < 0.7 else other.prompt
    return whole[: chance.randint(1, len(whole))] + tokens


LIVES = st.tuples(
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 20),
    st.sampled_from([None, 130, 200, 500]),
    st.sampled_from(["any", "checkpoints", "none"]),
    st.sampled_from([None, 1, 3]),
    st.integers(0, 2**32),
)


def check_random_lives(
    num_stages: int,
    max_num_sequences: int,
    chunk: int,
    held: int | None,
    reuse: Reuse,
    num_groups: int | None,
    seed: int,
) -> None:
    chance = random.Random(seed)
    pipeline = Pipeline(
        num_stages,
        max_num_sequences=max_num_sequences,
        prefill_chunk=chunk,
        num_groups=num_groups,
    )
    pipeline.scheduler.budget.max_tokens, pipeline.scheduler.reuse = held, reuse
    dropped = live(
        pipeline,
        chance,
        lambda id: make_sequence(id, make_prompt(chance, pipeline)[:100], chance.randint(1, 12)),
    )
    pipeline.run()
    check_outputs(pipeline, dropped)
    # A copy may wait for its source, and what makes room for it behind it.
    assert held is None or pipeline.max_held <= held + 100
    check_all_ended(pipeline)


TEN_THOUSAND = pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.mark.parametrize("num_examples", [50, TEN_THOUSAND])
def test_random_arrivals_and_drops_give_every_sequence_its_tokens(num_examples: int) -> None:
    check_examples(check_random_lives, LIVES, num_examples)


@pytest.mark.parametrize("reuse", ["any", "checkpoints"])
def test_computed_tokens_are_kept_after_a_drop_at_any_tick(reuse: Reuse) -> None:
    """Of the prompt, and of the answer: also the tokens of steps that were under way."""
    num_kept_answers = 0
    for num_ticks in range(30):
        pipeline = Pipeline(2)
        pipeline.scheduler.reuse = reuse
        pipeline.add(make_sequence(0, 60, 20))
        for _ in range(num_ticks):
            pipeline.tick()
        pipeline.scheduler.drop(0, may_keep=True)
        pipeline.run()
        check_all_ended(pipeline)
        held = pipeline.stages[0].held.get(0, [])
        num_kept_answers += len(held) > 62
        prompt = [*(held or [5] * 60), 1, 2, 3]
        pipeline.add(make_sequence(1, prompt, 3))
        pipeline.run()
        assert pipeline.output(1) == expected(1, len(prompt), 3)
        assert pipeline.added[1].num_cached == (len(held) if len(held) >= 16 else 0)
        check_all_ended(pipeline)
    assert num_kept_answers > 5


def test_a_dropped_sequence_whose_numbers_overflow_later_is_not_kept() -> None:
    """The client leaves before the token comes that says so."""
    outcomes = set()
    for num_ticks in range(20):
        pipeline = Pipeline(2)
        pipeline.scheduler.reuse = "any"
        pipeline.failing.add((0, 43))
        pipeline.add(make_sequence(0, 40, 9))
        for _ in range(num_ticks):
            pipeline.tick()
        pipeline.scheduler.drop(0, may_keep=True)
        pipeline.run()
        rows = [step.rows[0] for step in pipeline.steps if step.sample]
        has_failed = any(row.position == 42 for row in rows)
        is_kept = 0 in pipeline.scheduler.budget.kept
        assert not (has_failed and is_kept)
        outcomes.add((has_failed, is_kept))
        check_all_ended(pipeline)
    assert outcomes >= {(False, True), (True, False)}


def test_an_end_token_ends_a_sequence_and_counts_as_its_last_token() -> None:
    eos = next_token(0, 12)
    pipeline = Pipeline(2)
    pipeline.add(make_sequence(0, 10, 100, frozenset({eos})))
    pipeline.run()
    assert pipeline.output(0) == expected(0, 10, 3)
    assert pipeline.events[-1].finish_reason == "stop"


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_as_many_sequences_as_stages_keep_the_stages_busy(num_stages: int) -> None:
    pipeline = Pipeline(num_stages)
    for id in range(num_stages):
        pipeline.add(make_sequence(id, 2, 200))
    pipeline.run()
    assert pipeline.busy_share > 0.9


@pytest.mark.long
@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("num_clients_of_a_stage", [1, 4])
def test_prefill_and_decoding_together_keep_the_stages_busy(
    num_stages: int, num_clients_of_a_stage: int
) -> None:
    """Each client asks again after its answer. A step takes equally long on all stages."""
    chance, pipeline = random.Random(7), Pipeline(num_stages, prefill_chunk=32)
    num_clients, num_ended = num_stages * num_clients_of_a_stage, 0
    for id in range(12 * num_clients):
        while id - num_ended >= num_clients:
            pipeline.tick()
            num_ended = sum(event.finish_reason is not None for event in pipeline.events)
        pipeline.add(make_sequence(id, chance.randint(2, 400), chance.randint(4, 120)))
    assert pipeline.busy_share > 0.98


def test_a_single_group_leaves_the_stages_mostly_idle() -> None:
    """Its steps follow each other only when all stages have run."""
    pipeline = Pipeline(4, num_groups=1)
    for id in range(8):
        pipeline.add(make_sequence(id, 2, 200))
    pipeline.run()
    assert pipeline.busy_share < 0.3


def test_no_two_steps_of_a_single_sequence_overlap() -> None:
    pipeline = Pipeline(4)
    pipeline.add(make_sequence(0, 1, 50))
    pipeline.run()
    assert pipeline.num_overlapping == 0


def test_chunks_of_one_prompt_keep_all_stages_busy() -> None:
    pipeline = Pipeline(4, prefill_chunk=10)
    pipeline.add(make_sequence(0, 1001, 1))
    pipeline.run()
    assert pipeline.busy_share > 0.85


def test_a_long_prompt_does_not_stop_answers_that_are_decoded() -> None:
    pipeline = Pipeline(2, prefill_chunk=4)
    pipeline.add(make_sequence(0, 2, 300))
    for _ in range(10):
        pipeline.tick()
    before = len(pipeline.output(0))
    pipeline.add(make_sequence(1, 401, 1))
    for _ in range(100):
        pipeline.tick()
    # Alone, a token takes two ticks; beside chunks it may take five.
    assert len(pipeline.output(0)) - before >= 20


@pytest.mark.parametrize("num_stages", [1, 2, 8])
def test_every_stage_gets_a_chunk_of_a_prompt_that_is_alone(num_stages: int) -> None:
    pipeline = Pipeline(num_stages, prefill_chunk=4)
    pipeline.add(make_sequence(0, 401, 1))
    pipeline.pump()
    assert len(pipeline.queues[0]) == num_stages


def test_short_prompts_share_a_step_while_other_sequences_decode() -> None:
    pipeline = Pipeline(2, prefill_chunk=512)
    pipeline.scheduler.chunk_beside_decoding = 8
    pipeline.add(make_sequence(0, 2, 100))
    for _ in range(4):
        pipeline.tick()
    for id in range(1, 7):
        pipeline.add(make_sequence(id, 66, 5))
    pipeline.run()
    shared = [len(step.rows) for step in pipeline.steps if not step.sample and step.rows]
    assert shared == [1, 2, 2, 2]


def test_chunks_have_the_size_for_decoding_only_while_a_sequence_decodes() -> None:
    pipeline = Pipeline(2, prefill_chunk=512)
    pipeline.scheduler.chunk_beside_decoding = 20
    pipeline.scheduler.chunk_without_decoding = 90
    pipeline.add(make_sequence(0, 2001, 3))
    for _ in range(4):
        pipeline.tick()
    pipeline.add(make_sequence(1, 2, 1000))
    for _ in range(10):
        pipeline.tick()
    sizes = [step.rows[0].num_tokens for step in pipeline.steps if not step.sample]
    assert sizes == [90] * sizes.count(90) + [1] + [20] * sizes.count(20)
    assert sizes.count(90) > 3 < sizes.count(20)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_short_prompts_that_arrive_together_share_larger_steps(
    num_stages: int,
) -> None:
    pipeline = Pipeline(num_stages, prefill_chunk=512)
    pipeline.scheduler.chunk_without_decoding = 90
    for id in range(32):
        pipeline.add(make_sequence(id, 66, 5))
    pipeline.pump()
    assert len(pipeline.steps[0].rows) == (7 if num_stages == 1 else 4)
    pipeline.run()
    check_all_ended(pipeline)


def test_short_prompts_are_split_if_the_time_between_tokens_is_limited() -> None:
    pipeline = Pipeline(2, prefill_chunk=512, cuts_short_prompts=True)
    pipeline.scheduler.chunk_beside_decoding = 20
    pipeline.add(make_sequence(0, 2, 100))
    for _ in range(4):
        pipeline.tick()
    pipeline.add(make_sequence(1, 66, 5))
    pipeline.run()
    fed = [len(step.tokens) for step in pipeline.steps if not step.sample and step.rows]
    assert fed == [1, 20, 20, 25]
    assert pipeline.output(1) == expected(1, 66, 5)


@pytest.mark.parametrize(("num_stages", "max_chunks"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_few_chunks_are_scheduled_between_two_steps_of_a_group(
    num_stages: int, max_chunks: int
) -> None:
    pipeline = Pipeline(num_stages, prefill_chunk=4)
    for id in range(2 * num_stages):
        pipeline.add(make_sequence(id, 1, 60))
    for _ in range(10):
        pipeline.tick()
    pipeline.add(make_sequence(98, 401, 1))
    pipeline.add(make_sequence(99, 100, 1))
    num_before = len(pipeline.steps)
    for _ in range(40):
        pipeline.tick()
    num_chunks: Counter[int] = Counter()
    found = 0
    for step in pipeline.steps[num_before:]:
        if step.sample:
            found = max(found, num_chunks.pop(step.group, 0))
        elif step.rows:
            num_chunks.update(range(num_stages))
    assert found == max_chunks
    pipeline.run()
    check_all_ended(pipeline)


def test_short_prompts_run_first_until_a_long_prompt_tolerates_no_more_delay() -> None:
    pipeline = Pipeline(2, prefill_chunk=512)
    pipeline.scheduler.chunk_beside_decoding = 8
    pipeline.add(make_sequence(0, 2, 1000))
    pipeline.add(make_sequence(1, 401, 1))  # 50 chunks beside the other
    for _ in range(10):
        pipeline.tick()
    pipeline.add(make_sequence(2, 66, 1))
    for _ in range(20):
        pipeline.tick()
    assert pipeline.output(2), "a short prompt waits until a long one is through"
    for id in range(3, 103):
        pipeline.add(make_sequence(id, 66, 1))
        pipeline.tick()
    pipeline.run()
    read = [row for step in pipeline.steps if not step.sample for row in step.rows]
    end = max(n for n, row in enumerate(read) if row.sequence == 1)
    num_before = sum(row.num_tokens for row in read[:end] if row.sequence > 1)
    assert 200 < num_before <= 400 + 132, "as many tokens as its own, and one step"
    check_all_ended(pipeline)


def test_a_prompt_does_not_evict_the_prefix_that_it_continues() -> None:
    pipeline = Pipeline(2)
    pipeline.scheduler.reuse, pipeline.scheduler.budget.max_tokens = "any", 160
    for id in range(3):
        pipeline.add(make_sequence(id, [id] * 40, 5))
        pipeline.run()
    assert list(pipeline.scheduler.budget.kept) == [0, 1, 2]
    pipeline.add(make_sequence(3, [0] * 40 + [7] * 20, 5))
    pipeline.run()
    assert pipeline.added[3].num_cached == 40
    assert list(pipeline.scheduler.budget.kept) == [2, 0, 3]
    check_all_ended(pipeline)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_group_stays_empty_while_other_groups_are_full(num_stages: int) -> None:
    """Whoever leaves, rows move to a group that has run empty."""
    pipeline = Pipeline(num_stages)
    for id in range(4 * num_stages):
        pipeline.add(make_sequence(id, 3, 10 + 5 * (id % num_stages)))
    while pipeline.scheduler.num_running or pipeline.scheduler.waiting:
        pipeline.tick()
        # A group can give rows only when its step is back.
        idle = [g for g in pipeline.scheduler.groups if not g.sequences]
        if idle and not pipeline.scheduler.prefilling:
            assert all(len(g.sequences) <= 2 for g in pipeline.scheduler.groups if g not in idle)
    check_all_ended(pipeline)


def test_a_full_queue_refuses_requests() -> None:
    pipeline = Pipeline(2, max_num_sequences=2, max_queue=3)
    for id in range(5):
        pipeline.add(make_sequence(id, 5, 5))
    with fails(OverloadedError, "queue_full"):
        pipeline.add(make_sequence(5, 5, 5))
    pipeline.run()
    assert sorted(e.sequence for e in pipeline.events if e.finish_reason) == [0, 1, 2, 3, 4]


def test_only_as_many_sequences_begin_as_fit_into_memory() -> None:
    pipeline = Pipeline(2)
    pipeline.scheduler.budget.max_tokens = 150
    for id in range(4):
        pipeline.add(make_sequence(id, 60, 5))
    pipeline.pump()
    assert (pipeline.scheduler.num_running, pipeline.scheduler.num_waiting) == (2, 2)
    pipeline.run()
    fed = sum(len(step.tokens) for step in pipeline.steps if not step.sample)
    assert fed == 4 * 59, "some were sent back and computed twice"
    check_all_ended(pipeline)


# --- copies


def copies(pipeline: Pipeline, first: int, prompt: int, num: int) -> list[int]:
    """Adds a sequence and copies of it, as one request."""
    sequences = [make_sequence(first + i, prompt, 3 + i) for i in range(num)]
    for copy in sequences[1:]:
        copy.original = sequences[0]
    pipeline.added |= {sequence.id: sequence for sequence in sequences}
    pipeline.scheduler.add(*sequences)
    return [sequence.id for sequence in sequences]


@pytest.mark.parametrize("reuse", ["any", "checkpoints", "none"])
@pytest.mark.parametrize("prompt", [1, 2, 9, 100])
def test_a_prompt_is_computed_only_once_for_all_its_copies(reuse: Reuse, prompt: int) -> None:
    pipeline = Pipeline(3)
    pipeline.scheduler.reuse = reuse
    ids = copies(pipeline, 0, prompt, 4)
    pipeline.run()
    for i, id in enumerate(ids):
        assert pipeline.output(id) == expected(id, prompt, 3 + i)
    fed = sum(len(step.tokens) for step in pipeline.steps if not step.sample)
    assert fed == prompt - 1
    assert sum(len(step.ops(Copy)) for step in pipeline.steps) == (3 if prompt > 1 else 0)
    check_all_ended(pipeline)


def test_copies_are_answered_after_a_drop_of_their_original_at_any_tick() -> None:
    for num_ticks in range(30):
        pipeline = Pipeline(2)
        ids = copies(pipeline, 0, 40, 3)
        for _ in range(num_ticks):
            pipeline.tick()
        pipeline.scheduler.drop(0)
        pipeline.run()
        for i, id in enumerate(ids[1:], 1):
            assert pipeline.output(id) == expected(id, 40, 3 + i)
        check_all_ended(pipeline)


def test_all_copies_are_answered_even_if_few_fit_at_once() -> None:
    pipeline = Pipeline(2, max_num_sequences=4)
    pipeline.scheduler.budget.max_tokens = 100
    first, second = copies(pipeline, 0, 40, 5), copies(pipeline, 10, 30, 5)
    pipeline.run()
    for ids, prompt in ((first, 40), (second, 30)):
        for i, id in enumerate(ids):
            assert pipeline.output(id) == expected(id, prompt, 3 + i)
    check_all_ended(pipeline)


def test_either_all_sequences_of_a_request_are_queued_or_no_sequence() -> None:
    pipeline = Pipeline(2, max_num_sequences=2, max_queue=4)
    copies(pipeline, 0, 10, 4)
    with pytest.raises(OverloadedError):
        copies(pipeline, 10, 10, 3)
    assert (pipeline.scheduler.num_running, pipeline.scheduler.num_waiting) == (0, 4)
    copies(pipeline, 30, 10, 2)
    pipeline.run()
    check_all_ended(pipeline)


def test_copies_are_answered_before_requests_that_came_later() -> None:
    pipeline = Pipeline(2, max_num_sequences=2)
    copies(pipeline, 0, 30, 3)
    for id in (10, 11):
        pipeline.add(make_sequence(id, 40, 3))
    pipeline.run()
    begun = list(dict.fromkeys(event.sequence for event in pipeline.events))
    assert begun.index(1) < begun.index(2) < begun.index(11)
    check_all_ended(pipeline)
