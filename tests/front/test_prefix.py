"""Which kept sequence a prompt begins like."""

from hypothesis import given
from hypothesis import strategies as st

from serve.front.pipeline.prefix import LEAST_TOKENS, MOST_KEPT, PrefixIndex, common_length

TOKENS = st.lists(st.integers(0, 2), max_size=60)


@given(TOKENS, TOKENS, TOKENS)
def test_common_length_is_what_counting_gives(start: list[int], a: list[int], b: list[int]) -> None:
    one, other = start + a, start + b
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert common_length(one, other) == expected


def test_the_longest_common_beginning_wins() -> None:
    index = PrefixIndex()
    index.keep(1, [*range(20), 77, 77])
    index.keep(2, [*range(30), 88])
    index.keep(3, [5] * 40)
    assert index.longest([*range(40)], whole=False) == (2, 30)
    assert index.longest([*range(22)], whole=False) == (2, 22)
    assert index.longest([*range(LEAST_TOKENS - 1)], whole=False) is None
    assert index.longest([*range(40)], whole=True) is None
    assert index.longest([*range(30), 88, 1], whole=True) == (2, 31)
    assert index.num_tokens == 22 + 31 + 40


def test_what_was_used_stays_longest() -> None:
    index = PrefixIndex()
    for id in range(3):
        index.keep(id, [id] * 20)
    assert index.longest([0] * 30, whole=False) == (0, 20)
    assert index.oldest() == 1
    index.forget(1)
    assert index.oldest() == 2
    assert index.num_tokens == 40


def test_a_longer_one_takes_the_place_of_its_beginnings() -> None:
    index = PrefixIndex()
    assert index.keep(1, [1] * 20) == []
    assert index.keep(2, [2] * 20) == []
    assert index.keep(3, [1] * 25 + [2] * 9) == [1]
    assert sorted(index) == [2, 3]


def test_so_many_are_kept_and_no_more() -> None:
    index = PrefixIndex()
    for id in range(MOST_KEPT):
        assert index.keep(id, [id] * 20) == []
    assert index.longest([0] * 20, whole=False) == (0, 20)
    assert index.keep(MOST_KEPT, [MOST_KEPT] * 20) == [1]
    assert index.keep(MOST_KEPT + 1, [MOST_KEPT] * 21) == [MOST_KEPT]
    assert index.keep(MOST_KEPT + 2, [7, 7, 7]) == [2]
    assert len(list(index)) == MOST_KEPT
    assert index.num_tokens == 20 * (MOST_KEPT - 2) + 21 + 3
