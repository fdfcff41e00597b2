"""Arithmetic on byte ranges: it decides what to request, given wanted and present ranges.

The functions are pure.
"""

from collections.abc import Iterable

Range = tuple[int, int]
"""Bytes [start, end)."""


def total(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Returns the same bytes as sorted ranges that are not empty and neither overlap nor touch."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if not merged or start > merged[-1][1]:
            merged.append((start, end))
            continue
        last_start, last_end = merged[-1]
        merged[-1] = (last_start, max(end, last_end))
    return merged


def subtract(wanted: Iterable[Range], present: Iterable[Range]) -> list[Range]:
    left: list[Range] = []
    cuts = union(present)
    first = 0
    for start, end in union(wanted):
        while first < len(cuts) and cuts[first][1] <= start:
            first += 1
        for cut_start, cut_end in cuts[first:]:
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
    max_bytes: int,
) -> list[Range]:
    """Returns the ranges to request, in order. They end at multiples of max_bytes, so that other
    machines, which keep the digests of pieces, need not read more than they send."""
    chosen: list[Range] = []
    for start, end in subtract(wanted, present):
        while start < end:
            part_end = min((start // max_bytes + 1) * max_bytes, end)
            chosen.append((start, part_end))
            start = part_end
    return chosen
