"""Which prompt is read next, and how much younger prompts may delay an older one."""

import random

import pytest
from hypothesis import strategies as st

from serve.core.types import Row, Sequence
from serve.front.pipeline.prefill_order import PrefillOrder, work
from tests.front.pipeline.simulation import Pipeline, check_examples, expected, make_sequence
from tests.front.pipeline.test_scheduler import check_all_ended


def prompt(id: int, num_left: int, num_computed: int = 0) -> Sequence:
    sequence = make_sequence(id, num_left + num_computed + 1, 1)
    sequence.num_computed = num_computed
    return sequence


def ids(sequences: list[Sequence]) -> list[int]:
    return [sequence.id for sequence in sequences]


def begun_in_order(pipeline: Pipeline, num_before: int = 0) -> list[int]:
    """The sequences whose prompts were read, in the order in which that began."""
    steps = [step for step in pipeline.steps[num_before:] if not step.sample]
    return list(dict.fromkeys(row.sequence for step in steps for row in step.rows))


def test_prompts_are_ordered_by_tokens_left_and_then_by_age() -> None:
    prompts = [prompt(3, 250), prompt(0, 400, 100), prompt(2, 250), prompt(1, 300)]
    assert ids(PrefillOrder().in_order(prompts)) == [2, 3, 1, 0]


def test_short_prompts_keep_their_order_so_that_they_can_share_steps() -> None:
    prompts = [prompt(2, 20), prompt(0, 300), prompt(3, 10), prompt(1, 120)]
    assert ids(PrefillOrder().in_order(prompts)) == [1, 2, 3, 0]
    pipeline = Pipeline(2, prefill_chunk=512)
    pipeline.add(make_sequence(0, 2, 100))
    for _ in range(4):
        pipeline.tick()
    pipeline.scheduler.chunk_beside_decoding = 8
    for id in range(1, 25):
        pipeline.add(make_sequence(id, 67 - id % 2, 1))
    pipeline.run()
    num_rows = [len(step.rows) for step in pipeline.steps if not step.sample and step.rows]
    assert num_rows == [1] + [2] * 12
    check_all_ended(pipeline)


def test_a_token_after_many_other_tokens_counts_as_more_work() -> None:
    assert work(0, 3000) == pytest.approx(3150)
    assert work(60_000, 61_000) > work(0, 2500)
    assert work(0, 1000) + work(1000, 9000) == pytest.approx(work(0, 9000))
    behind_a_prefix = prompt(0, 1000)
    behind_a_prefix.prompt = [1] * 61_001
    order = PrefillOrder()
    order.note_copied(0, 60_000)
    assert ids(order.in_order([behind_a_prefix, prompt(1, 2000)])) == [1, 0]


def test_younger_prompts_wait_once_they_have_delayed_an_older_prompt_enough() -> None:
    prompts = [prompt(2, 10), prompt(1, 400, 100), prompt(0, 900)]
    order = PrefillOrder()
    order.note_overtaking(prompt(3, 600), 499, prompts)
    assert ids(order.in_order(prompts)) == [2, 1, 0]
    order.note_overtaking(prompt(3, 600, 499), 2, prompts)
    assert ids(order.in_order(prompts)) == [1, 0]


def test_a_prompt_is_admitted_before_older_prompts_only_within_their_tolerance() -> None:
    waiting = [prompt(1, 1000), prompt(3, 500), prompt(4, 400)]
    order = PrefillOrder()
    assert order.next_to_admit(waiting, []) is waiting[2]
    assert order.next_to_admit(waiting, [prompt(0, 9000)]) is waiting[2]
    assert order.next_to_admit(waiting, [prompt(2, 700)]) is waiting[0], "it tolerates 300 more"
    assert order.next_to_admit(waiting, [prompt(5, 200)]) is waiting[1], "it tolerates 300 more"
    assert order.next_to_admit([], []) is None


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_short_prompt_does_not_wait_for_a_long_prompt(num_stages: int) -> None:
    pipeline = Pipeline(num_stages)
    pipeline.add(make_sequence(0, 3000, 1))
    for _ in range(20):
        pipeline.tick()
    num_before = pipeline.num_ticks
    pipeline.add(make_sequence(1, 400, 1))
    while not pipeline.output(1):
        pipeline.tick()
    # Its 50 chunks and its last token pass all stages, behind the chunks that were under way.
    assert pipeline.num_ticks - num_before <= 51 + 3 * num_stages
    pipeline.run()
    fed = sum(row.num_tokens for step in pipeline.steps for row in step.rows if row.sequence == 0)
    assert fed == 3000, "the long prompt keeps what was read of it"
    check_all_ended(pipeline)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_only_tokens_after_its_prefix_count_in_the_order_of_a_prompt(is_waiting: bool) -> None:
    pipeline = Pipeline(2, max_num_sequences=1 if is_waiting else 8)
    pipeline.scheduler.reuse = "any"
    pipeline.add(make_sequence(0, [5] * 1000, 1))
    pipeline.run()
    num_before = len(pipeline.steps)
    pipeline.add(make_sequence(1, [6] * 300, 1))
    pipeline.tick()
    pipeline.add(make_sequence(2, [7] * 200, 1))
    pipeline.add(make_sequence(3, [5] * 1000 + [8] * 50, 1))
    pipeline.run()
    assert begun_in_order(pipeline, num_before) == [1, 3, 2]
    check_all_ended(pipeline)


def test_short_prompts_overtake_a_long_prompt_that_lacks_memory_within_its_tolerance() -> None:
    """The first sequence leaves room for short prompts, but not for the long one."""
    pipeline = Pipeline(2)
    pipeline.scheduler.budget.max_tokens = 910
    pipeline.add(make_sequence(0, 300, 200))
    for _ in range(100):
        pipeline.tick()
    pipeline.add(make_sequence(1, 601, 1))
    for id in range(2, 12):
        pipeline.add(make_sequence(id, 101, 1))
    pipeline.run()
    begun = begun_in_order(pipeline)
    assert begun[:7] == [0, 2, 3, 4, 5, 6, 7]
    assert begun.index(1) <= 8, "one more may begin when the long one is admitted"
    assert pipeline.max_held <= 910
    fed = sum(row.num_tokens for step in pipeline.steps for row in step.rows if not step.sample)
    assert fed == 299 + 600 + 10 * 100, "a prompt was read twice"
    check_all_ended(pipeline)


def work_of(row: Row) -> float:
    return work(row.position, row.position + row.num_tokens)


ARRIVALS = st.tuples(
    st.integers(1, 4),  # stages
    st.integers(1, 20),  # tokens in a chunk
    st.integers(1, 6),  # sequences at once
    st.sampled_from([None, 250]),  # room
    st.integers(1, 8),  # ticks between two arrivals, at most
    st.integers(0, 2**32),  # seed
)


def check_overtaking(
    num_stages: int,
    chunk: int,
    max_num_sequences: int,
    room: int | None,
    max_ticks: int,
    seed: int,
) -> None:
    """Whatever comes, the work for younger prompts before a prompt's end is at most its own, and
    that of one step. Nothing is read twice, and all come to an end."""
    pipeline = Pipeline(num_stages, max_num_sequences, chunk)
    pipeline.scheduler.budget.max_tokens = room
    chance = random.Random(seed)
    lengths = [chance.choice([5, 20, 20, 30, 200]) for _ in range(25)]
    num_steps: list[int] = []
    for id, length in enumerate(lengths):
        for _ in range(chance.randint(0, max_ticks)):
            pipeline.tick()
        num_steps.append(len(pipeline.steps))
        pipeline.add(make_sequence(id, length + 1, 1))
    pipeline.run()
    reads = [() if step.sample else step.rows for step in pipeline.steps]
    largest = max((sum(map(work_of, rows)) for rows in reads), default=0)
    for id, length in enumerate(lengths):
        own = [n for n, rows in enumerate(reads) for row in rows if row.sequence == id]
        before = [row for rows in reads[num_steps[id] : own[-1]] for row in rows]
        of_younger = sum(work_of(row) for row in before if row.sequence > id)
        assert of_younger <= work(0, length) + largest
        assert sum(r.num_tokens for rows in reads for r in rows if r.sequence == id) == length
        assert pipeline.output(id) == expected(id, length + 1, 1)
    assert room is None or pipeline.max_held <= room
    check_all_ended(pipeline)


@pytest.mark.parametrize("num_examples", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_no_prompt_is_delayed_by_more_than_its_own_length(num_examples: int) -> None:
    check_examples(check_overtaking, ARRIVALS, num_examples)
