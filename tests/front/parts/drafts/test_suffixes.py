"""Matches against the slow, obvious search."""

import random

import pytest

from serve.front.parts.drafts.suffixes import Match, Suffixes


def suffixes_of(tokens: list[int]) -> Suffixes:
    suffixes = Suffixes()
    for token in tokens:
        suffixes.add(token)
    return suffixes


def longest_match(tokens: list[int]) -> int:
    """Tries every earlier place."""
    best = 0
    for place in range(2, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, min(length, 32))
    return best if best >= 2 else 0


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4], [1, 1], [5, 6, 5]])
def test_a_match_has_at_least_two_earlier_tokens(text: list[int]) -> None:
    assert suffixes_of(text).match() is None


def test_the_longest_match_is_found_and_the_latest_of_equally_long_matches() -> None:
    assert suffixes_of([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]).match() == Match(3, 3)
    assert suffixes_of([7, 2, 3, 9, 6, 2, 3, 8, 5, 2, 3]).match() == Match(2, 7)


@pytest.mark.parametrize("num_kinds", [2, 3, 8])
def test_matches_in_random_texts_equal_those_of_a_slow_search(num_kinds: int) -> None:
    chance = random.Random(num_kinds)
    for _ in range(300):
        text = [chance.randrange(num_kinds) for _ in range(chance.randint(0, 20))]
        match = suffixes_of(text).match()
        expected = longest_match(text)
        if match is None:
            assert expected == 0
            continue
        assert match.length == expected or num_kinds == 2, text
        assert text[match.place - match.length : match.place] == text[-match.length :]


def test_a_match_is_found_quickly_in_a_long_text_of_one_token() -> None:
    suffixes = suffixes_of([1] * 100_000)
    assert suffixes.match() == Match(32, 99_999)


def test_a_draft_is_the_text_after_the_match() -> None:
    suffixes = suffixes_of([1, 2, 3, 4, 5, 6, 7, 1, 2])
    match = suffixes.match()
    assert match == Match(2, 2)
    assert suffixes.draft(match, 16) == [3, 4, 5, 6]
    assert suffixes.draft(match, 3) == [3, 4, 5]


def test_a_draft_can_repeat_a_loop_of_tokens() -> None:
    suffixes = suffixes_of([9, 1, 2, 1, 2, 1, 2])
    match = suffixes.match()
    assert match is not None
    assert suffixes.draft(match, 5) == [1, 2, 1, 2, 1]
