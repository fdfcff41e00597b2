"""Stop strings: the same cut as on the whole text, however it arrives."""

import random

import pytest

from serve.front.output.stop_strings import StopMatcher


def slow_cut(text: str, stops: list[str]) -> str:
    """The obvious way: the stop string that is complete first, the longest of those."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


def cut_in_pieces(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(piece) for piece in pieces) + matcher.flush()
    return text, matcher.matched is not None


def pieces_of(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.randint(0, 4)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def test_any_cut_into_pieces_gives_the_cut_of_the_whole() -> None:
    rng = random.Random(1)
    num_matched = 0
    for _ in range(20_000):
        text = "".join(rng.choices("ab ", k=rng.randint(0, 24)))
        stops = ["".join(rng.choices("ab ", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4))]
        got, matched = cut_in_pieces(pieces_of(text, rng), stops)
        assert (got, matched) == (slow_cut(text, stops), any(stop in text for stop in stops))
        num_matched += matched
    assert 2_000 < num_matched < 19_000


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("go on ST") == "go on "
    assert matcher.feed("ART") == "START"
    assert matcher.feed("S") == ""
    assert matcher.flush() == "S"


def test_after_a_match_nothing_comes() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("1a") == "1"
    assert matcher.feed("b2") == ""
    assert matcher.matched == "ab"
    assert matcher.feed("more") == matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "which"), [(["cd", "bcd"], "bcd"), (["d", "b"], "b"), (["x", "cd"], "cd")]
)
def test_the_stop_string_that_ended_the_text_is_known(stops: list[str], which: str) -> None:
    matcher = StopMatcher(stops)
    for piece in ("ab", "c", "d"):
        matcher.feed(piece)
    assert matcher.matched == which


def test_a_stop_string_inside_the_beginning_of_a_longer_one() -> None:
    assert cut_in_pieces(["xabc", "dX"], ["abcde", "cd"]) == ("xab", True)


def test_an_empty_stop_string_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
