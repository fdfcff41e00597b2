"""Stop strings: the same cut as on the whole text, however it arrives."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.front.output.stop_strings import StopMatcher, borders


def overlap(text: str, mark: str) -> int:
    """The length of the longest beginning of mark, but not all of it, with which text ends."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


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


def test_the_result_does_not_depend_on_how_text_is_cut_into_pieces() -> None:
    rng = random.Random(1)
    num_matched = 0
    for _ in range(20_000):
        text = "".join(rng.choices("ab ", k=rng.randint(0, 24)))
        stops = ["".join(rng.choices("ab ", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4))]
        got, matched = cut_in_pieces(pieces_of(text, rng), stops)
        assert (got, matched) == (slow_cut(text, stops), any(stop in text for stop in stops))
        num_matched += matched
    assert 2_000 < num_matched < 19_000


def test_text_is_held_back_only_if_it_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("go on ST") == "go on "
    assert matcher.feed("ART") == "START"
    assert matcher.feed("S") == ""
    assert matcher.flush() == "S"


def test_no_text_is_returned_after_a_match() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("1a") == "1"
    assert matcher.feed("b2") == ""
    assert matcher.matched == "ab"
    assert matcher.feed("more") == matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "which"), [(["cd", "bcd"], "bcd"), (["d", "b"], "b"), (["x", "cd"], "cd")]
)
def test_the_stop_string_that_matched_is_known(stops: list[str], which: str) -> None:
    matcher = StopMatcher(stops)
    for piece in ("ab", "c", "d"):
        matcher.feed(piece)
    assert matcher.matched == which


def test_a_stop_string_is_found_inside_the_beginning_of_a_longer_stop_string() -> None:
    assert cut_in_pieces(["xabc", "dX"], ["abcde", "cd"]) == ("xab", True)


def test_an_empty_stop_string_raises_value_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


class SlowMatcher:
    """The obvious way, which looks at all that is held and at every length of every stop."""

    def __init__(self, stops: list[str], keep: bool) -> None:
        self.stops, self.keep = stops, keep
        self.held = ""
        self.matched: str | None = None

    def feed(self, delta: str) -> str:
        if self.matched:
            return ""
        text = self.held + delta
        starts = [(text.find(stop), stop) for stop in self.stops if stop in text]
        if starts:
            ends = [(start + len(stop), start, stop) for start, stop in starts]
            end, start, self.matched = min(ends)
            self.held = ""
            return text[: end if self.keep else start]
        split = len(text) - max((overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[split:]
        return text[:split]

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


PIECES = st.lists(st.text("ab", max_size=12), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=12), max_size=4)


@given(PIECES, STOPS, st.booleans())
def test_stop_matcher_gives_the_same_text_as_the_slow_reference(
    pieces: list[str], stops: list[str], keep: bool
) -> None:
    fast, slow = StopMatcher(stops, keep), SlowMatcher(stops, keep)
    for piece in pieces:
        assert fast.feed(piece) == slow.feed(piece)
        assert fast.matched == slow.matched
    assert fast.flush() == slow.flush()


@given(st.text("ab", min_size=1, max_size=30))
def test_borders_equal_those_of_a_brute_force_search(text: str) -> None:
    expected = [overlap(text[:end], text[:end]) for end in range(1, len(text) + 1)]
    assert list(borders(text)) == expected


class Counted(str):
    """A string that counts how often one of its characters is looked at."""

    num_reads = 0

    def __getitem__(self, key: object) -> str:
        Counted.num_reads += 1
        return str.__getitem__(self, key)  # type: ignore[index]


def test_stop_matcher_reads_each_character_a_constant_number_of_times() -> None:
    """The worst case: with each character, nearly a whole stop string is held back."""
    stops = ["a" * 1023 + "b", *("c" + "a" * 1022 + chr(65 + i) for i in range(15))]
    counted = [Counted(stop) for stop in stops]
    matcher = StopMatcher(counted)
    Counted.num_reads = 0
    for _ in range(4000):
        matcher.feed("a")
    assert Counted.num_reads < 4000 * len(stops) * 4
