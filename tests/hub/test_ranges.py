"""Requests cover what is missing, fetch nothing twice, and keep to the spare bytes."""

from hypothesis import given
from hypothesis import strategies as st

from serve.hub.ranges import requests, subtract, total, union

RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=12).map(
    lambda pairs: [(start, start + length) for start, length in pairs]
)


def members(ranges: list[tuple[int, int]]) -> set[int]:
    return {byte for start, end in ranges for byte in range(start, end)}


@given(RANGES)
def test_union_is_the_same_bytes_in_order(ranges: list[tuple[int, int]]) -> None:
    merged = union(ranges)
    assert members(merged) == members(ranges)
    assert all(left[1] < right[0] for left, right in zip(merged, merged[1:], strict=False))


@given(RANGES, RANGES)
def test_subtract_is_the_difference_of_sets(
    wanted: list[tuple[int, int]], present: list[tuple[int, int]]
) -> None:
    left = subtract(wanted, present)
    assert members(left) == members(wanted) - members(present)
    assert total(left) == len(members(left))


@given(RANGES, RANGES, st.integers(0, 20), st.integers(0, 40), st.integers(1, 50))
def test_requests(
    wanted: list[tuple[int, int]],
    present: list[tuple[int, int]],
    gap: int,
    spare: int,
    max_bytes: int,
) -> None:
    asked = requests(wanted, present, gap_bytes=gap, spare_bytes=spare, max_bytes=max_bytes)
    missing = members(wanted) - members(present)
    assert missing <= members(asked)
    assert not members(asked) & members(present)
    assert total(asked) <= len(missing) + spare
    assert all(0 < end - start <= max_bytes for start, end in asked)
    assert total(asked) == len(members(asked))


def test_small_gaps_are_bridged_and_large_ones_are_not() -> None:
    wanted = [(0, 100), (110, 200), (500, 600)]
    asked = requests(wanted, [], gap_bytes=50, spare_bytes=50, max_bytes=1000)
    assert asked == [(0, 200), (500, 600)]
    assert len(requests(wanted, [], gap_bytes=50, spare_bytes=9, max_bytes=1000)) == 3
