"""Steps with drafts, by simulation: right, wrong, cut and lost ones change no answer."""

import random
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import strategies as st
from msgspec.structs import replace

from serve.core.messages import Result
from serve.core.ops import Guess
from serve.core.outputs import Guesses
from serve.core.types import OVERFLOWED_TOKEN, Row, Sequence, Step, tokens_of_rows
from serve.front.parts.drafts.draft import Draft
from serve.front.parts.drafts.drafting import Drafting
from serve.front.pipeline.scheduler import Reuse
from tests.configs import serve_config
from tests.front.pipeline.simulation import (
    Pipeline,
    check_examples,
    check_outputs,
    expected,
    live,
    make_sequence,
)
from tests.front.pipeline.stage_model import VOCABULARY, next_token, result_of
from tests.front.pipeline.test_scheduler import check_all_ended, make_prompt

WRONG = VOCABULARY  # a token that never comes


class RandomDrafting(Drafting):
    """Guesses some tokens of some rows, and some of them right."""

    def __init__(self, chance: random.Random, right: float = 0.7, max_drafts: int = 4) -> None:
        super().__init__(serve_config(model=Path("model")))
        self.chance = chance
        self.right = right
        self.max_drafts = max_drafts

    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        return [Draft(self.guess(sequence)) for sequence in sequences]

    def guess(self, sequence: Sequence) -> list[int]:
        if sequence.num_pending or not sequence.num_computed:
            return []
        guesses = self.state_of(sequence).guesses
        for i, token in enumerate(guesses):
            assert token in (WRONG, next_token(sequence.id, sequence.num_tokens + i)), "of old text"
        if guesses:
            return list(guesses[: sequence.num_left - 1])
        first = sequence.num_tokens
        num_drafts = min(self.chance.randint(0, self.max_drafts), sequence.num_left - 1)
        drafts = [next_token(sequence.id, first + i) for i in range(num_drafts)]
        return [
            token if self.chance.random() < self.right else self.chance.randrange(VOCABULARY)
            for token in drafts
        ]

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        return self.chance.random() < 0.8

    def plan_guesses(self, sequences: ReadableList[Sequence], num_busy_groups: int) -> list[int]:
        assert num_busy_groups > 0
        if self.chance.random() < 0.5:
            return [0 for _ in sequences]
        return [self.chance.randint(0, 3) if sequence.num_left > 1 else 0 for sequence in sequences]


def with_guesses(step: Step, result: Result, chance: random.Random) -> Result:
    """Adds what a draft model guesses for the rows for which the step asks: often right, often
    less than asked for, as where its numbers overflow."""
    asked = step.ops(Guess)
    if not asked:
        return result
    guesses: list[tuple[int, ...]] = []
    sampled = tokens_of_rows(result.tokens, result.num_accepted)
    for row, tokens, num_guesses in zip(step.rows, sampled, asked[0].num_tokens, strict=True):
        first = row.position + 1 + len(tokens)
        num_made = chance.randint(0, num_guesses)
        right = [next_token(row.sequence, first + i) for i in range(num_made)]
        guesses.append(tuple(token if chance.random() < 0.7 else WRONG for token in right))
    return replace(result, outputs=(Guesses(tuple(guesses)),))


class CertainDrafting(RandomDrafting):
    """Guesses as many tokens as it may, all right."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), right=1.0)

    def guess(self, sequence: Sequence) -> list[int]:
        if sequence.num_pending or not sequence.num_computed:
            return []
        first = sequence.num_tokens
        num_drafts = min(self.max_drafts, sequence.num_left - 1)
        return [next_token(sequence.id, first + i) for i in range(num_drafts)]

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        return True

    def plan_guesses(self, sequences: ReadableList[Sequence], num_busy_groups: int) -> list[int]:
        return [0 for _ in sequences]


def usage(sequence: Sequence) -> tuple[int, int]:
    """The numbers of accepted and rejected drafts."""
    return (
        sequence.usage["accepted_prediction_tokens"],
        sequence.usage["rejected_prediction_tokens"],
    )


def check_counts(pipeline: Pipeline) -> None:
    """Every draft is counted, also those of an answer's last step. In some random lives no row can
    have drafts, and both counts are 0."""
    (drafting,) = pipeline.parts
    assert isinstance(drafting, Drafting)
    of_sequences = [usage(sequence) for sequence in pipeline.added.values()]
    assert drafting.counts.drafted["suffixes"] == sum(map(sum, of_sequences))
    assert drafting.counts.accepted["suffixes"] == sum(accepted for accepted, _ in of_sequences)


def test_all_right_drafts_of_a_row_are_accepted_in_one_step() -> None:
    pipeline = Pipeline(2, parts=(CertainDrafting(),))
    pipeline.add(make_sequence(0, 10, 21))
    pipeline.run()
    assert pipeline.output(0) == expected(0, 10, 21)
    assert [len(step.tokens) for step in pipeline.steps if step.sample] == [5, 5, 5, 5, 1]
    assert usage(pipeline.added[0]) == (16, 0)
    check_counts(pipeline)
    check_all_ended(pipeline)


def test_an_answer_can_end_within_its_drafts() -> None:
    """What comes behind an end token is right as a draft, and is no part of the answer."""
    pipeline = Pipeline(2, parts=(CertainDrafting(),))
    pipeline.scheduler.reuse = "any"
    pipeline.add(make_sequence(0, 10, 100, frozenset({next_token(0, 12)})))
    pipeline.run()
    assert pipeline.output(0) == expected(0, 10, 3)
    assert pipeline.scheduler.budget.kept.num_tokens == 12
    assert usage(pipeline.added[0]) == (3, 1)
    check_counts(pipeline)
    check_all_ended(pipeline)


@dataclass
class RoughPipeline(Pipeline):
    """Treats drafts as engines may do: removes some, like those that a grammar forbids, and lets
    others overflow."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    cut_share: float = 0.0
    overflow_share: float = 0.0

    def _send(self, step: Step) -> None:
        rows: list[Row] = []
        tokens: list[int] = []
        start = 0
        for row in step.rows:
            own = step.tokens[start : start + row.num_tokens]
            start += row.num_tokens
            if step.sample and self.chance.random() < self.cut_share:
                own = own[: self.chance.randint(1, 2)]
            rows.append(replace(row, num_tokens=len(own)))
            tokens += own
        super()._send(replace(step, rows=tuple(rows), tokens=tuple(tokens)))

    def _result(self, step: Step) -> Result:
        with_drafts = {row.sequence for row in step.rows if row.num_tokens > 1}

        def draw(sequence: int, position: int) -> int:
            if sequence in with_drafts and self.chance.random() < self.overflow_share:
                return OVERFLOWED_TOKEN
            return self._draw(sequence, position)

        return with_guesses(step, result_of(step, draw), self.chance)


def test_drafts_that_were_not_fed_are_not_counted() -> None:
    pipeline = RoughPipeline(2, parts=(CertainDrafting(),), cut_share=1.0)
    pipeline.add(make_sequence(0, 10, 100))
    pipeline.run()
    assert pipeline.output(0) == expected(0, 10, 100)
    accepted, rejected = usage(pipeline.added[0])
    assert accepted > 0 == rejected
    check_counts(pipeline)


def test_a_row_can_fail_within_its_drafts() -> None:
    pipeline = Pipeline(2, parts=(CertainDrafting(),))
    pipeline.failing = {(0, 13)}
    pipeline.add(make_sequence(0, 10, 100))
    pipeline.run()
    assert pipeline.output(0) == expected(0, 10, 3)
    assert pipeline.events[-1].finish_reason not in (None, "stop", "length")
    check_all_ended(pipeline)


def test_steps_are_sent_ahead_if_waiting_for_drafts_is_not_worth_it() -> None:
    class Hopeless(RandomDrafting):
        def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
            return False

        def plan_guesses(
            self, sequences: ReadableList[Sequence], num_busy_groups: int
        ) -> list[int]:
            return [0 for _ in sequences]

    with_drafts = Pipeline(2, parts=(Hopeless(random.Random(0), max_drafts=0),))
    without = Pipeline(2)
    for pipeline in (with_drafts, without):
        for id in range(5):
            pipeline.add(make_sequence(id, 10, 20))
        pipeline.run()
    assert with_drafts.steps == without.steps


def test_a_row_whose_drafts_overflow_is_repeated_without_them() -> None:
    pipeline = RoughPipeline(2, parts=(CertainDrafting(),), overflow_share=1.0)
    pipeline.add(make_sequence(0, 10, 5))
    pipeline.run()
    assert pipeline.output(0) == expected(0, 10, 5)
    feeds = [(step.rows[0].position, len(step.tokens)) for step in pipeline.steps if step.sample]
    assert feeds == [(9, 5), (9, 1), (10, 1), (11, 1), (12, 1), (13, 1)]
    check_all_ended(pipeline)


def test_no_memory_is_reserved_for_drafts() -> None:
    pipeline = Pipeline(2, parts=(CertainDrafting(),))
    pipeline.scheduler.budget.max_tokens = 60
    for id in range(2):
        pipeline.add(make_sequence(id, 12, 16))
    pipeline.run()
    for id in range(2):
        assert pipeline.output(id) == expected(id, 12, 16)
    assert pipeline.max_held <= 60
    check_all_ended(pipeline)


def check_random_lives(
    num_stages: int,
    max_num_sequences: int,
    chunk: int,
    held: int | None,
    reuse: Reuse,
    num_groups: int | None,
    kill_share: float,
    seed: int,
) -> None:
    chance = random.Random(seed)
    drafting = RandomDrafting(chance)
    pipeline = RoughPipeline(
        num_stages,
        max_num_sequences=max_num_sequences,
        prefill_chunk=chunk,
        num_groups=num_groups,
        parts=(drafting,),
        chance=chance,
        cut_share=0.1,
        overflow_share=0.1,
    )
    pipeline.scheduler.budget.max_tokens, pipeline.scheduler.reuse = held, reuse

    def next_sequence(id: int) -> Sequence:
        sequence = make_sequence(id, make_prompt(chance, pipeline)[:100], chance.randint(1, 16))
        if chance.random() < 0.1:
            pipeline.failing.add((id, len(sequence.prompt) + chance.randrange(16)))
        return sequence

    dropped = live(pipeline, chance, next_sequence, kill_share=kill_share)
    pipeline.run()
    check_outputs(pipeline, dropped)
    check_counts(pipeline)
    assert not drafting.drafted, "an ended sequence is not forgotten"
    check_all_ended(pipeline)


LIVES = st.tuples(
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 20),
    st.sampled_from([None, 130, 200, 500]),
    st.sampled_from(["any", "none"]),  # Caches that need checkpoints cannot go back.
    st.sampled_from([None, 1, 3]),
    st.sampled_from([0.0, 0.04, 0.12]),
    st.integers(0, 2**32),
)


@pytest.mark.parametrize("num_examples", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_random_requests_with_drafts_get_the_right_answers(num_examples: int) -> None:
    check_examples(check_random_lives, LIVES, num_examples)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_requests_with_drafts_get_the_right_answers(part: int) -> None:
    """In parts with different random lives, because all of them together take many minutes."""
    check_examples(check_random_lives, LIVES, 1_000, seed=part)
