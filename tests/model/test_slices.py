"""Parts of an axis: units, supports, and the numbers that fit them."""

import mlx.core as mx
import pytest

from serve.model.slices import Slices, cut_units, scaled, slices_of


@pytest.mark.parametrize(
    ("size", "num_units", "num_shards", "sizes"),
    [
        (48, 2, 2, (24, 24)),
        (48, 3, 2, (32, 16)),
        (64, 8, 3, (24, 24, 16)),
        (14336, 224, 3, (75 * 64, 75 * 64, 74 * 64)),
        (9, 9, 4, (3, 2, 2, 2)),
    ],
)
def test_first_shards_get_one_unit_more_if_units_do_not_divide_evenly(
    size: int, num_units: int, num_shards: int, sizes: tuple[int, ...]
) -> None:
    slices = cut_units(size, num_units, num_shards)
    assert slices.sizes == sizes
    assert slices.is_partition
    array = mx.arange(size)
    parts = [slices.part_of(array, shard) for shard in range(num_shards)]
    assert mx.concatenate(parts).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("ranges", "is_partition"),
    [
        ((((0, 2), (4, 6)), ((2, 4),)), True),
        ((((0, 4),), ((2, 6),)), False),  # a copy
        ((((0, 2),), ((4, 6),)), False),  # a gap
        ((((0, 2),), ((2, 4),)), False),  # no end
    ],
)
def test_slices_are_a_partition_if_each_number_is_on_exactly_one_shard(
    ranges: tuple[tuple[tuple[int, int], ...], ...], is_partition: bool
) -> None:
    assert Slices(6, ranges).is_partition == is_partition


def test_slices_cannot_be_scaled_to_an_axis_that_does_not_divide_at_their_ends() -> None:
    """A part that is rounded down would be a wrong part of an adapter."""
    assert scaled(((0, 2), (4, 6)), 12, 6) == ((0, 4), (8, 12))
    assert scaled(((2, 4),), 3, 6) == ((1, 2),)
    with pytest.raises(ValueError, match="do not divide at 1 and 3"):
        scaled(((1, 3),), 8, 6)


def test_slices_found_in_an_array_keep_the_proportions_of_unequal_parts() -> None:
    parts = cut_units(6, 3, 2)  # Four numbers and two.
    fitting = [mx.array([[1.0, 0, 1, 0, 0, 0]]), mx.array([[0, 0, 0, 0, 1.0, 0]])]
    found = slices_of(fitting, -1, parts)
    assert found
    assert found.ranges == (((0, 1), (2, 3)), ((4, 5),))
    equal = [mx.array([[1.0, 0, 0]]), mx.array([[0, 1.0, 0]])]
    assert slices_of(equal, -1, parts) is None
    assert slices_of(equal, -1, cut_units(6, 2, 2))
    assert slices_of([mx.ones(3), mx.ones(3)], -1, parts) is None
    assert slices_of([mx.zeros(3), mx.zeros(3)], -1, parts) is None


def test_numbers_are_divided_in_proportion_to_the_slices() -> None:
    assert cut_units(48, 3, 2).possible_numbers(9) == [(6, 3)]
    assert cut_units(48, 3, 2).possible_numbers(8) == []
    assert cut_units(48, 3, 2).possible_numbers(0) == []
    # Four shards have a head each, or each head is on two shards.
    assert cut_units(48, 4, 4).possible_numbers(4) == [(1, 1, 1, 1), (2, 2, 2, 2)]
