"""Measures sums over all ranks of a launch. Each rank runs this; rank 0 prints the result.

Between two sums is a product, as in the layers of shards, so a GPU and the CPU wait for each other.
"""

import json
import time

import mlx.core as mx

from serve.core.config import Cluster
from serve.ring.check import grid_of_all, run_on_rank
from serve.ring.peers import meet
from serve.ring.transport import form_group

_SIZES = (8 << 10, 16 << 10, 64 << 10, 1 << 20, 8 << 20)  # the bytes of a sum
_NUM_SUMS = 4
_WIDTH = 256


def milliseconds(group: mx.distributed.Group, num_bytes: int) -> float:
    """Measures a sum of num_bytes bytes within a chain of products and sums. Returns its time."""
    scale = mx.eye(_WIDTH, dtype=mx.float16) * (1 / group.size())

    def chain(num_sums: int) -> None:
        x = mx.ones((num_bytes // (2 * _WIDTH), _WIDTH), dtype=mx.float16)
        for _ in range(num_sums):
            x = mx.distributed.all_sum(x @ scale, group=group, stream=mx.cpu)
        mx.eval(x)

    chain(1)
    started = time.perf_counter()
    chain(_NUM_SUMS)
    return (time.perf_counter() - started) / _NUM_SUMS * 1e3


def of_all_sizes(group: mx.distributed.Group) -> dict[str, float]:
    """Returns the milliseconds of a sum by its size."""
    return {f"{size >> 10} KB": milliseconds(group, size) for size in _SIZES}


def measure(cluster: Cluster) -> str | None:
    """Returns the times of all sizes as JSON on rank 0, None on the others."""
    grid = grid_of_all(cluster)
    neighbours = meet(grid)
    series = of_all_sizes(form_group(grid, mx.new_stream(mx.cpu)))
    neighbours.close()
    return None if cluster.rank else json.dumps(series)


if __name__ == "__main__":
    run_on_rank(measure)
