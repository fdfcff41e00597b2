"""Which bytes to ask for: wanted ones minus present ones, as few requests. Pure."""

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
"""Bytes [start, end)."""


def total(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, not empty, neither overlapping nor touching."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(wanted: Iterable[Range], present: Iterable[Range]) -> list[Range]:
    """The part of wanted that is not in present."""
    left: list[Range] = []
    cuts = union(present)
    at = 0
    for start, end in union(wanted):
        while at < len(cuts) and cuts[at][1] <= start:
            at += 1
        for cut_start, cut_end in cuts[at:]:
            if cut_start >= end:
                break
            if start < cut_start:
                left.append((start, cut_start))
            start = max(start, cut_end)
        if start < end:
            left.append((start, end))
    return left


def requests(
    wanted: Iterable[Range],
    present: Iterable[Range],
    *,
    gap_bytes: int,
    spare_bytes: int,
    most_bytes: int,
) -> list[Range]:
    """The ranges to ask for, in order, each of most_bytes at most.

    Gaps of gap_bytes at most are fetched along, the smallest first, while they are
    spare_bytes together; never one that holds bytes that are there already.
    """
    present = union(present)
    missing = subtract(wanted, present)
    bridged = _bridges(missing, present, gap_bytes, spare_bytes)
    return [
        (at, min(at + most_bytes, end))
        for start, end in union([*missing, *bridged])
        for at in range(start, end, most_bytes)
    ]


def _bridges(
    missing: Sequence[Range], present: list[Range], gap_bytes: int, spare_bytes: int
) -> list[Range]:
    gaps = [(left[1], right[0]) for left, right in zip(missing, missing[1:], strict=False)]
    absent = set(subtract(gaps, present))
    chosen = []
    for start, end in sorted(absent.intersection(gaps), key=lambda gap: (gap[1] - gap[0], gap)):
        spare_bytes -= end - start
        if end - start > gap_bytes or spare_bytes < 0:
            break
        chosen.append((start, end))
    return chosen
