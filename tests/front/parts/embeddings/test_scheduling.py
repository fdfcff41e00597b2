"""Prompts that are embedded: prefill steps only, one end each, and nothing kept of them."""

import random

import pytest

from serve.core.ops import Copy
from serve.core.types import Sequence
from serve.front.pipeline.scheduler import Reuse
from tests.front.pipeline.simulation import Pipeline, make_sequence


def embedded(id: int, prompt: int | list[int]) -> Sequence:
    return make_sequence(id, prompt, 0)


def ends(pipeline: Pipeline, id: int) -> list[tuple[int | None, str | None]]:
    return [(each.token, each.finish_reason) for each in pipeline.events if each.sequence == id]


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 30])
def test_every_token_of_an_embedded_prompt_is_fed_in_prefill_steps(num_tokens: int) -> None:
    pipeline = Pipeline(2)
    pipeline.add(embedded(1, num_tokens))
    pipeline.run()
    rows = [row for step in pipeline.steps for row in step.rows]
    assert not any(step.sample for step in pipeline.steps)
    assert sum(row.num_tokens for row in rows) == num_tokens
    assert ends(pipeline, 1) == [(None, "stop")]
    assert pipeline.scheduler.num_held_tokens == 0
    assert all(not stage.held for stage in pipeline.stages)


def test_short_embedded_prompts_share_a_step() -> None:
    pipeline = Pipeline(2, prefill_chunk=64)
    for id in range(6):
        pipeline.add(embedded(id, 8))
    pipeline.run()
    assert max(len(step.rows) for step in pipeline.steps) > 1


@pytest.mark.parametrize("reuse", ["any", "checkpoints"])
def test_embedded_prompts_neither_use_nor_leave_a_prefix(reuse: Reuse) -> None:
    pipeline = Pipeline(2)
    pipeline.scheduler.reuse = reuse
    for number, sequence in enumerate(
        [make_sequence(1, 40, 3), embedded(2, 44), make_sequence(3, 44, 3), embedded(4, 44)]
    ):
        pipeline.add(sequence)
        pipeline.run()
        copies = [copy for step in pipeline.steps for copy in step.ops(Copy)]
        assert all(copy.source != 2 and copy.sequence not in (2, 4) for copy in copies)
        assert len(ends(pipeline, sequence.id)) == (3 if number % 2 == 0 else 1)


def test_a_prompt_to_embed_may_fill_all_of_the_memory() -> None:
    assert embedded(1, 32).fit(32)
    assert not embedded(1, 33).fit(32)
    assert not make_sequence(1, 32, 5).fit(32)


@pytest.mark.parametrize("seed", range(60))
def test_each_sequence_ends_once_among_random_chats_and_embeddings(seed: int) -> None:
    """Chats and embeddings arrive at random, with little room, drops and lost engines."""
    chance = random.Random(seed)
    pipeline = Pipeline(chance.choice([1, 2, 3]), max_num_sequences=chance.choice([2, 5, 32]))
    pipeline.scheduler.reuse = chance.choice(["any", "checkpoints", "none"])
    pipeline.scheduler.budget.max_tokens = chance.choice([None, 60, 90])
    added: dict[int, Sequence] = {}
    dropped: set[int] = set()
    for id in range(30):
        make = embedded if chance.random() < 0.6 else lambda id, n: make_sequence(id, n, 6)
        added[id] = make(id, chance.randint(1, 40))
        pipeline.add(added[id])
        for _ in range(chance.randint(0, 6)):
            pipeline.tick()
        if chance.random() < 0.15:
            gone = chance.randrange(id + 1)
            dropped.add(gone)
            pipeline.scheduler.drop(gone)
        if chance.random() < 0.1:
            pipeline.kill()
    pipeline.run()
    for id, sequence in added.items():
        finished = [reason for _, reason in ends(pipeline, id) if reason]
        assert len(finished) <= 1
        assert finished or id in dropped
        if not sequence.has_answer:
            assert all(token is None for token, _ in ends(pipeline, id))
            assert id not in list(pipeline.scheduler.budget.kept)
    while step := pipeline.scheduler.schedule():
        pipeline.outbox.put(step)
    for _ in range(20):
        pipeline.tick()
    held = set(pipeline.stages[-1].held)
    assert held == set(pipeline.scheduler.budget.kept)
