"""Which rows get how many drafts."""

import random
from pathlib import Path

import pytest

from serve.core.types import Group, Sampling, Sequence
from serve.front.parts.drafts.acceptance import Acceptance, HitShares
from serve.front.parts.drafts.counts import DraftCounts
from serve.front.parts.drafts.draft import MAX_DRAFTS
from serve.front.parts.drafts.guesses import TextGuesses
from serve.front.parts.drafts.model_guesses import ModelCosts, best_number
from serve.front.parts.drafts.speculation import Speculation
from tests.configs import serve_config

LOOP = [11, 12, 13, 14, 15, 16, 17, 18]


def make_speculation(token_cost: float = 0.02) -> Speculation:
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    speculation.token_cost = token_cost
    return speculation


def make_sequence(id: int = 0, prompt: list[int] | None = None) -> Sequence:
    sequence = Sequence(id, prompt or LOOP * 3, 1000, Sampling(), frozenset())
    sequence.num_computed = len(sequence.prompt) - 1
    return sequence


def generate(speculation: Speculation, sequence: Sequence, tokens: list[int]) -> DraftCounts:
    """Runs steps that sample these tokens. Returns the counts of their drafts."""
    counts = DraftCounts()
    while tokens:
        ((drafts, drafter),) = speculation.propose([sequence])
        accepted = 0
        while accepted < min(len(drafts), len(tokens) - 1) and drafts[accepted] == tokens[accepted]:
            accepted += 1
        sequence.output += tokens[: accepted + 1]
        sequence.num_computed += accepted + 1
        tokens = tokens[accepted + 1 :]
        counts.verified(drafter, len(drafts), accepted)
        speculation.took(sequence, sequence.output[-accepted - 1 :])
    return counts


def test_drafts_repeat_what_came_after_an_earlier_occurrence_of_the_same_text() -> None:
    speculation = make_speculation()
    ((drafts, drafter),) = speculation.propose([make_sequence()])
    assert drafter == "suffixes"
    assert drafts == (LOOP * 2)[: len(drafts)]
    assert 4 <= len(drafts) <= MAX_DRAFTS
    counts = generate(speculation, make_sequence(1), LOOP * 10)
    assert counts.drafted["suffixes"] >= counts.accepted["suffixes"] >= 68


def test_drafts_follow_a_prediction_from_its_start_and_after_a_deviation() -> None:
    speculation = make_speculation()
    prediction = list(range(100, 160))
    sequence = make_sequence(prompt=[1, 2, 3])
    speculation.state_of(sequence).prediction = tuple(prediction)
    answer = [*prediction[:25], 900, 901, *prediction[30:]]
    counts = generate(speculation, sequence, answer)
    assert counts.accepted["prediction"] > 40
    assert counts.drafted["suffixes"] == 0


def test_rows_that_cannot_have_drafts_get_no_drafts() -> None:
    speculation = make_speculation()
    pending, new, ending = (make_sequence(id) for id in range(3))
    pending.num_pending = 1
    new.num_computed = 0
    ending.max_tokens = 1
    assert not any(draft.tokens for draft in speculation.propose([pending, new, ending]))
    almost = make_sequence(3)
    almost.max_tokens = 3
    assert speculation.propose([almost]) == [(LOOP[:2], "suffixes")]


def test_random_text_gets_no_drafts_but_possible_drafts_are_counted() -> None:
    speculation = make_speculation(token_cost=0.1)
    chance = random.Random(0)
    sequence = make_sequence(prompt=[chance.randrange(20) for _ in range(300)])
    generate(speculation, sequence, [chance.randrange(20) for _ in range(300)])
    assert not speculation.is_worth_waiting([sequence])
    counts = generate(speculation, sequence, [chance.randrange(20) for _ in range(300)])
    assert counts.drafted["suffixes"] < 100
    generate(speculation, sequence, LOOP * 12)
    assert speculation.is_worth_waiting([sequence])


def test_no_draft_is_made_if_it_is_impossible_or_too_expensive() -> None:
    impossible = make_speculation()
    impossible.is_possible = False
    expensive = make_speculation(token_cost=0.9)
    many = [make_sequence(id) for id in range(64)]
    for speculation, sequences in (
        (impossible, many[:1]),
        (expensive, many[:2]),
        (make_speculation(), many),
    ):
        assert not any(draft.tokens for draft in speculation.propose(sequences))
        assert not speculation.is_worth_waiting(sequences)
        assert not speculation.drafted


def test_an_ended_sequence_is_forgotten() -> None:
    speculation = make_with_model()
    speculation.propose([make_sequence()])
    speculation.plan_guesses([make_sequence()], 1)
    assert speculation.drafted[0].text
    assert speculation.drafted[0].model
    speculation.ended(make_sequence(0))
    speculation.ended(make_sequence(1))
    assert not speculation.drafted


@pytest.mark.parametrize(
    ("gains", "token_cost", "expected"),
    [
        ([], 0.1, 0),
        ([[]], 0.1, 0),
        ([[0.04]], 0.1, 0),
        ([[0.9, 0.8, 0.7]], 0.05, 3),
        ([[0.9, 0.01, 0.001]], 0.05, 1),
        ([[0.9, 0.8], []], 0.05, 2),
        ([[0.9, 0.8], [], [], [], [], [], [], []], 0.3, 0),
    ],
)
def test_the_best_number_of_drafts_weighs_gains_against_costs(
    gains: list[list[float]], token_cost: float, expected: int
) -> None:
    number, _ = best_number(gains, lambda n: 1 + (n - 1) * token_cost, min_gain=1.05)
    assert number == expected


def test_a_long_prompt_is_indexed_in_several_calls() -> None:
    speculation = make_speculation()
    sequence = make_sequence(prompt=list(range(1000, 40_000)) + LOOP * 2)
    num_calls = 0
    while not speculation.propose([sequence])[0].tokens:
        num_calls += 1
        assert num_calls < 20
    assert num_calls > 1


def test_a_long_answer_is_indexed_in_several_calls() -> None:
    """An answer is learned late if there were too many rows for drafts before."""
    sequence = make_sequence(prompt=[1, 2, 3])
    sequence.output = list(range(1000, 11_000)) + LOOP * 2
    guesses = TextGuesses(sequence, (), Acceptance(), HitShares())
    assert not guesses.catch_up(sequence)
    assert not guesses.draft(4).tokens
    assert not guesses.catch_up(sequence)
    assert guesses.catch_up(sequence)
    assert guesses.draft(4).tokens == LOOP[:4]


def test_acceptance_follows_the_share_of_drafts_that_were_right() -> None:
    every = Acceptance()
    own = Acceptance(every)
    for _ in range(50):
        own.count(4, is_right=False)
    assert own.share(4) < 0.1
    assert own.share(40) > 0.8
    assert Acceptance(every).share(4) < 0.2
    assert own.gains(40, 3) == sorted(own.gains(40, 3), reverse=True)


def test_hit_shares_of_a_new_sequence_start_at_those_of_all_sequences() -> None:
    every = HitShares()
    before = every.gain(False, 0.3)
    own = HitShares(every)
    for _ in range(400):
        own.count(False, True, False)
    assert own.gain(False, 0.3) == pytest.approx(-0.3, abs=0.01)
    assert HitShares(every).gain(False, 0.3) < before - 0.1
    assert every.gain(True, 0.3) == HitShares().gain(True, 0.3)


# --- the draft model


def make_with_model(guess: float = 0.1, reading: float = 0.01) -> Speculation:
    speculation = make_speculation(token_cost=0.05)
    speculation.model_costs = ModelCosts(guess, reading)
    return speculation


def new_text(id: int = 0, num_tokens: int = 20) -> Sequence:
    """Nothing in this text repeats."""
    return make_sequence(id, list(range(1000 * id, 1000 * id + num_tokens)))


def generate_with_model(
    speculation: Speculation, sequence: Sequence, num_tokens: int, right: float
) -> int:
    """Runs steps whose tokens the draft model guesses with this chance each. Returns for how many
    steps it was asked."""
    chance = random.Random(0)
    num_asked = 0
    for n in range(num_tokens):
        (number,) = speculation.plan_guesses([sequence], 1)
        num_asked += number > 0
        sequence.output.append(10**6 + n)
        sequence.num_computed += 1
        speculation.took(sequence, sequence.output[-1:])
        following = [10**6 + n + 1 + i for i in range(number)]
        guesses = tuple(t if chance.random() < right else -9 for t in following)
        speculation.state_of(sequence).guesses = guesses
    return num_asked


def test_more_drafts_are_planned_if_they_are_cheaper() -> None:
    (cheap,), (dear,), (too_dear,) = (
        make_with_model(guess).plan_guesses([new_text()], 1) for guess in (0.01, 0.15, 0.9)
    )
    assert cheap > dear > too_dear == 0


def test_no_drafts_are_planned_for_the_last_token_or_without_a_draft_model_or_memory() -> None:
    assert make_speculation().plan_guesses([new_text()], 1) == [0]
    nine = [new_text(id) for id in range(9)]
    speculation = make_with_model(guess=0.001, reading=0.0)
    speculation.token_cost = 0.01
    assert all(speculation.plan_guesses(nine[:4], 2))
    assert not any(speculation.plan_guesses(nine, 1))
    assert not any(speculation.plan_guesses(nine[:4], 3))
    ending = new_text()
    ending.max_tokens = 1
    assert speculation.plan_guesses([ending], 1) == [0]
    cannot = new_text()
    speculation.verified(cannot, 2, None)
    assert speculation.plan_guesses([cannot], 1) == [0]


def test_drafts_are_made_for_four_rows_if_they_make_a_step_shorter() -> None:
    """A draft costs less than nothing, which must not make a step's time 0."""
    speculation = make_with_model(guess=0.0)
    speculation.row_costs = [1.0, 1.0, 1.0, 2.0, *[1.0] * 13]
    rows = [make_sequence(id) for id in range(4)]
    assert all(len(draft.tokens) >= 2 for draft in speculation.propose(rows))
    assert speculation.is_worth_waiting(rows)
    assert all(speculation.plan_guesses([new_text(id) for id in range(4, 8)], 1))


def test_a_group_does_not_wait_after_all_its_rows_have_left() -> None:
    assert not make_speculation().must_wait(Group(0, num_in_flight=1), is_prefilling=False)


def test_planning_drafts_weighs_the_time_that_other_groups_lose() -> None:
    speculation = make_with_model(guess=0.15, reading=0.0)
    assert speculation.plan_guesses([new_text()], 1)[0] > 0
    assert speculation.plan_guesses([new_text()], 4) == [0]


def test_a_long_text_is_not_read_by_the_draft_model_for_a_short_answer() -> None:
    speculation = make_with_model(guess=0.1, reading=0.02)
    long, short = new_text(0, 400), new_text(1, 400)
    short.max_tokens = 8
    (number_of_long, number_of_short) = speculation.plan_guesses([long, short], 1)
    assert number_of_long > 0 == number_of_short


def test_the_draft_model_is_not_used_for_text_that_repeats_itself() -> None:
    speculation = make_with_model()
    sequence = make_sequence()
    generate(speculation, sequence, LOOP * 3)
    assert speculation.plan_guesses([sequence], 1) == [0]


def test_a_draft_model_that_is_often_wrong_is_tried_again_only_later() -> None:
    speculation = make_with_model()
    assert generate_with_model(speculation, new_text(), 200, right=0.9) > 190
    wrong = make_with_model()
    first = generate_with_model(wrong, new_text(), 60, right=0.05)
    assert 0 < first < 30
    assert wrong.plan_guesses([new_text(1)], 1)[0] > 0, "another text may be easier"
    later = generate_with_model(wrong, new_text(2), 1000, right=0.05)
    assert first < later < 150


def test_the_drafter_that_is_expected_to_gain_more_is_used() -> None:
    speculation = make_with_model()
    sequence = new_text()
    speculation.state_of(sequence).guesses = (7, 8, 9)
    assert speculation.propose([sequence]) == [((7, 8, 9), "model")]
    repeating = make_sequence(1)
    generate(speculation, repeating, LOOP * 3)
    speculation.state_of(repeating).guesses = (7, 8)
    ((drafts, drafter),) = speculation.propose([repeating])
    assert drafter == "suffixes"
    assert len(drafts) > 4


def test_the_draft_model_must_read_the_text_again_after_a_reset() -> None:
    speculation = make_with_model(guess=0.1, reading=0.02)
    sequence = new_text(0, 400)
    assert speculation.plan_guesses([sequence], 1)[0] > 0
    generate_with_model(speculation, sequence, 9, right=1.0)
    sequence.max_tokens = len(sequence.output) + 8
    assert speculation.plan_guesses([sequence], 1)[0] > 0
    speculation.reset(sequence)
    assert not speculation.state_of(sequence).guesses
    assert speculation.plan_guesses([sequence], 1) == [0]
