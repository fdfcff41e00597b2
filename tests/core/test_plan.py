"""Reverse assignment: rank 0 has the last layers, sizes differ by one at most."""

import pytest

from serve.core.errors import PlanError
from serve.core.plan import even_split


@pytest.mark.parametrize("num_layers", range(1, 41))
def test_every_split_covers_each_layer_once(num_layers: int) -> None:
    for num_ranks in range(1, min(num_layers, 9)):
        ranges = even_split(num_layers, num_ranks)
        assert ranges[0][1] == num_layers
        assert ranges[-1][0] == 0
        assert all(a[0] == b[1] for a, b in zip(ranges, ranges[1:], strict=False))
        sizes = [end - start for start, end in ranges]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes), "rank 0 also has the head: its share is not the larger one"


def test_more_ranks_than_layers_are_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match="9 ranks are more than the model's 8 layers"):
        even_split(8, 9)
