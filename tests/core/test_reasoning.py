"""The reasoning of an answer is followed by its tokens alone."""

import random

import pytest

from serve.core.reasoning import ReasoningTracker
from serve.core.types import Reasoning, Sampling

START, END = (90,), (91,)
LONG_START, LONG_END = (80, 81), (91, 92, 91, 93)


def generate(
    reasoning: Reasoning, seed: int, num_tokens: int, output: tuple[int, ...] = ()
) -> list[int]:
    """An answer of tokens at random, with the tokens that the budget forces. It goes on after
    output; what comes at a position depends on the seed and the position only."""
    tokens = list(output)
    tracker = ReasoningTracker(reasoning, tokens)
    while len(tokens) < num_tokens:
        drawn = random.Random(seed * 1000 + len(tokens)).choice([1, 2, 80, 81, 90, 91, 92, 93])
        forced = tracker.forced_token
        tokens.append(drawn if forced is None else forced)
        tracker.note(tokens[-1])
    return tokens


def count_slowly(reasoning: Reasoning, tokens: list[int]) -> list[int]:
    """The length of each part of the reasoning, found by searching for the marks."""
    lengths: list[int] = []
    is_open, start = reasoning.is_open, 0
    place = 0
    while place < len(tokens):
        mark = list(reasoning.end if is_open else reasoning.start)
        if place + 1 - start >= len(mark) and tokens[place + 1 - len(mark) : place + 1] == mark:
            if is_open:
                lengths.append(place + 1 - start - len(mark))
            is_open, start = not is_open, place + 1
        place += 1
    if is_open:
        lengths.append(len(tokens) - start)
    return lengths


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(("start", "end"), [(START, END), (LONG_START, LONG_END)])
def test_tracker_counts_the_tokens_between_the_marks(
    start: tuple[int, ...], end: tuple[int, ...], is_open: bool
) -> None:
    reasoning = Reasoning(start, end, is_open)
    for seed in range(200):
        tokens = generate(reasoning, seed, 60)
        expected = sum(count_slowly(reasoning, tokens))
        assert ReasoningTracker(reasoning, tokens).num_tokens == expected


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 17])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(("start", "end"), [(START, END), (LONG_START, LONG_END)])
def test_tracker_never_exceeds_the_budget_and_changes_nothing_within_it(
    start: tuple[int, ...], end: tuple[int, ...], is_open: bool, budget: int
) -> None:
    num_used_up = 0
    for seed in range(200):
        reasoning = Reasoning(start, end, is_open, budget)
        tokens = generate(reasoning, seed, 60)
        free = generate(Reasoning(start, end, is_open), seed, 60)
        parts = count_slowly(reasoning, tokens[: 60 - len(end)])
        assert sum(parts) <= budget + len(end) - 1  # The last part may lack its mark.
        ended = count_slowly(reasoning, tokens)[:-1]
        assert sum(ended) <= budget
        if sum(count_slowly(reasoning, free)) <= budget:
            assert tokens == free, "the budget changed an answer that keeps it"
        else:
            num_used_up += tokens != free
    assert num_used_up > 20


@pytest.mark.parametrize("budget", [0, 3, 8])
def test_tracker_forces_the_same_tokens_if_it_starts_again_at_any_position(budget: int) -> None:
    reasoning = Reasoning(LONG_START, LONG_END, True, budget)
    for seed in range(40):
        whole = generate(reasoning, seed, 40)
        for cut in range(40):
            assert generate(reasoning, seed, 40, tuple(whole[:cut])) == whole


def test_tracker_completes_a_mark_that_has_begun() -> None:
    tracker = ReasoningTracker(Reasoning(LONG_START, LONG_END, True, 3), [5, 91, 92])
    assert tracker.forced_token == 91
    tracker.note(91)
    assert tracker.forced_token == 93
    tracker.note(93)
    assert (tracker.forced_token, tracker.num_tokens) == (None, 1)


def test_tracker_ends_reasoning_at_once_if_no_budget_is_left() -> None:
    tracker = ReasoningTracker(Reasoning(START, END, True, 2), [5, 6, *END, 7, *START])
    assert tracker.forced_token == END[0]


def test_reasoning_makes_sampling_read_tokens_only_if_it_has_a_budget() -> None:
    assert not Sampling(reasoning=Reasoning(START, END)).reads_tokens
    assert Sampling(reasoning=Reasoning(START, END, budget=0)).reads_tokens
