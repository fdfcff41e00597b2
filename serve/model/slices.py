"""The parts of an axis on the shards of a stage. The parts are equal, or differ by one unit."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

Ranges = tuple[tuple[int, int], ...]


def size_of(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


@dataclass(frozen=True, slots=True)
class Slices:
    """The ranges of each shard on an axis of size num_whole."""

    num_whole: int
    ranges: tuple[Ranges, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(size_of, self.ranges))

    @property
    def are_equal(self) -> bool:
        return len(set(self.sizes)) == 1

    @property
    def is_partition(self) -> bool:
        """Whether each number of the axis belongs to exactly one shard."""
        last_end = 0
        for start, end in sorted(itertools.chain(*self.ranges)):
            if start != last_end:
                return False
            last_end = end
        return last_end == self.num_whole

    def part_of(self, array: mx.array, shard: int, axis: int = -1) -> mx.array:
        """Returns the shard's part of an array, whose axis has the size num_whole."""
        return select(array, axis, self.ranges[shard])

    def possible_numbers(self, whole: int) -> list[tuple[int, ...]]:
        """Returns the values that an attribute may have on shards, the likeliest first."""
        num_shards = len(self.ranges)
        if whole <= 0:
            return []
        if not self.are_equal:
            in_proportion = self._in_proportion(whole)
            return [in_proportion] if in_proportion else []
        found: list[tuple[int, ...]] = []
        for divisor in range(num_shards, 1, -1):
            # Several shards may hold copies of the same head.
            is_possible = num_shards % divisor == 0
            part, rest = divmod(whole, divisor)
            if is_possible and not rest:
                found.append((part,) * num_shards)
        return found

    def _in_proportion(self, whole: int) -> tuple[int, ...] | None:
        """Divides a number in proportion to this axis; None if the parts are not whole numbers."""
        parts: list[int] = []
        for size in self.sizes:
            part, rest = divmod(whole * size, self.num_whole)
            if rest:
                return None
            parts.append(part)
        return tuple(parts)


Segments = int | Sequence[int | float] | Slices
"""The division of an axis, as an argument of MLX's `shard_linear`: a number of equal segments, or
the positions at which the axis is cut, as indices or as fractions of its size. Every shard gets an
equal part of each segment. Slices, which MLX does not know, are the parts of all shards."""


def cut_units(size: int, num_units: int, num_shards: int) -> Slices:
    """Cuts an axis between equal units. The first shards may get one unit more than the others."""
    size_of_unit = size // num_units
    num_each, num_larger = divmod(num_units, num_shards)
    ranges: list[Ranges] = []
    start = 0
    for shard in range(num_shards):
        num_own = num_each + (shard < num_larger)
        end = start + num_own * size_of_unit
        own = (start, end)
        ranges.append((own,))
        start = end
    return Slices(size, tuple(ranges))


def own_ranges(size: int, segments: Segments, shard: int, num_shards: int) -> Ranges:
    """Returns a shard's ranges of an axis. Raises ValueError if they are not whole or not equal."""
    if isinstance(segments, Slices):
        return scaled(segments.ranges[shard], size, segments.num_whole)
    ranges: list[tuple[int, int]] = []
    start = 0
    for end in _segment_ends(size, segments):
        length = end - start
        part, rest = divmod(length, num_shards)
        if rest:
            raise ValueError(f"{length} does not divide into {num_shards} parts")
        first = start + shard * part
        last = first + part
        ranges.append((first, last))
        start = end
    return tuple(ranges)


def scaled(ranges: Ranges, size: int, num_whole: int) -> Ranges:
    """Scales ranges of an axis from num_whole to size. Raises ValueError for a fractional bound."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        first, rest_of_first = divmod(start * size, num_whole)
        last, rest_of_last = divmod(end * size, num_whole)
        if rest_of_first or rest_of_last:
            raise ValueError(f"{num_whole} numbers in {size} do not divide at {start} and {end}")
        found.append((first, last))
    return tuple(found)


def select(array: mx.array, axis: int, ranges: Ranges) -> mx.array:
    """Concatenates, lazily, these ranges of an array's axis."""
    before = [slice(None)] * (axis % array.ndim)
    parts = [array[(*before, slice(start, end))] for start, end in ranges]
    return mx.concatenate(parts, axis=axis)


def _segment_ends(size: int, segments: int | Sequence[int | float]) -> list[int]:
    ends: list[int] = []
    if isinstance(segments, int):
        length, rest = divmod(size, segments)
        if rest:
            raise ValueError(f"{size} does not divide into {segments} segments")
        for number in range(segments):
            ends.append(length * (number + 1))
        return ends
    for cut in segments:
        if isinstance(cut, int):
            ends.append(cut)
        else:
            place = int(cut * size)
            ends.append(place)
    ends.append(size)
    return ends


def slices_of(supports: Sequence[mx.array], axis: int, parts: Slices) -> Slices | None:
    """Returns the ranges of axis on which each shard's part of another axis (parts) depends: where
    the shard's support is not zero. Returns None if a shard's ranges are the whole axis or empty,
    or if their sizes are not in proportion to parts."""
    num_whole = supports[0].shape[axis]
    ranges: list[Ranges] = []
    for support in supports:
        depends = support != 0
        moved = depends.swapaxes(axis, 0)
        flat = moved.reshape(num_whole, -1)
        is_used: list[bool] = flat.any(axis=1).tolist()  # type: ignore[assignment]
        runs = tuple(_runs(is_used))
        ranges.append(runs)
    found = Slices(num_whole, tuple(ranges))
    is_whole = num_whole in found.sizes
    is_unused = 0 in found.sizes
    if is_whole or is_unused or not _are_proportional(found.sizes, parts.sizes):
        return None
    return found


def _are_proportional(sizes: Sequence[int], others: Sequence[int]) -> bool:
    total = sum(sizes)
    total_of_others = sum(others)
    for size, other in zip(sizes, others, strict=True):
        if size * total_of_others != other * total:
            return False
    return True


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    start = 0
    for flag, group in itertools.groupby(flags):
        length = len(list(group))
        end = start + length
        if flag:
            yield start, end
        start = end
