"""Who holds which layers. Assignment is in reverse: rank 0 has the last ones."""

from serve.core.errors import PlanError

LayerRange = tuple[int, int]


def even_split(num_layers: int, num_ranks: int) -> list[LayerRange]:
    """The layers [start, end) of each rank, rank 0 first.

    Sizes differ by one at most. The ranks with the lower numbers get the smaller
    shares, because rank 0 also has the head and samples.
    """
    if num_ranks > num_layers:
        raise PlanError(
            f"{num_ranks} ranks are more than the model's {num_layers} layers: "
            f"start at most {num_layers} ranks."
        )
    base, rest = divmod(num_layers, num_ranks)
    ranges, end = [], num_layers
    for rank in range(num_ranks):
        start = end - base - (rank >= num_ranks - rest)
        ranges.append((start, end))
        end = start
    return ranges
