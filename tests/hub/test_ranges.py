"""Requests cover exactly what is missing."""

from hypothesis import given
from hypothesis import strategies as st

from serve.hub.ranges import requests, subtract, total, union

RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=12).map(
    lambda pairs: [(start, start + length) for start, length in pairs]
)


def members(ranges: list[tuple[int, int]]) -> set[int]:
    return {byte for start, end in ranges for byte in range(start, end)}


@given(RANGES)
def test_the_union_of_ranges_covers_the_same_bytes_in_order(ranges: list[tuple[int, int]]) -> None:
    merged = union(ranges)
    assert members(merged) == members(ranges)
    assert all(left[1] < right[0] for left, right in zip(merged, merged[1:], strict=False))


@given(RANGES, RANGES)
def test_subtracting_ranges_leaves_the_difference_of_two_sets_of_bytes(
    wanted: list[tuple[int, int]], present: list[tuple[int, int]]
) -> None:
    left = subtract(wanted, present)
    assert members(left) == members(wanted) - members(present)
    assert total(left) == len(members(left))


@given(RANGES, RANGES, st.integers(1, 50))
def test_requests_cover_exactly_the_missing_bytes(
    wanted: list[tuple[int, int]], present: list[tuple[int, int]], max_bytes: int
) -> None:
    asked = requests(wanted, present, max_bytes)
    assert members(asked) == members(wanted) - members(present)
    assert all(0 < end - start <= max_bytes for start, end in asked)
    assert total(asked) == len(members(asked))
