"""Measures sums over all ranks of a launch. Each rank runs this; rank 0 prints the result.

Between two sums is a product, as in the layers of shards, so a GPU and the CPU wait for each other.
"""

import json
import os
import sys
import time
import zlib

import mlx.core as mx

from serve.core.config import read_cluster
from serve.core.errors import BrigadeError
from serve.ring.peers import grid_of, meet
from serve.ring.transport import form_group

_SIZES = (8 << 10, 64 << 10, 1 << 20, 8 << 20)  # the bytes of a sum
_NUM_SUMS = 4
_WIDTH = 256
_JOIN_SECONDS = 30.0


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


def main() -> int:
    try:
        cluster = read_cluster(os.environ)
        nonce = zlib.crc32(cluster.secret.encode()) >> 1
        ring = range(cluster.num_ranks)
        grid = grid_of(ring, cluster.addresses, cluster.num_ranks, nonce, _JOIN_SECONDS)
        neighbours = meet(grid)
        group = form_group(grid, mx.new_stream(mx.cpu))
        series = {f"{size >> 10} KB": milliseconds(group, size) for size in _SIZES}
        neighbours.close()
    except BrigadeError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_code
    if cluster.rank == 0:
        sys.stdout.write(f"sums {json.dumps(series)}\n")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # A normal exit would wait forever in MLX when the ring has lost a peer.
