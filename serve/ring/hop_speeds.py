"""Measures hops between the ranks of a launch, with a step on each rank, as between stages.

Each rank runs this; the last rank prints the result.
"""

import json
import time

import mlx.core as mx

from serve.core.config import Cluster
from serve.core.types import Step
from serve.ring.check import grid_of_all, received, run_on_rank
from serve.ring.peers import meet
from serve.ring.transport import RingTransport

_NUM_ROUNDS = 20
_SHAPE = (16, 256)  # 8 KB, as the hidden state of one token


def measure(cluster: Cluster) -> str | None:
    """Returns milliseconds as JSON on the last rank, None on the others. Raises ClusterError."""
    grid = grid_of_all(cluster)
    transport = RingTransport(grid, meet(grid))
    weights = mx.eye(_SHAPE[1], dtype=mx.float16)
    first = mx.ones(_SHAPE, dtype=mx.float16)
    mx.eval(weights, first)
    is_last = cluster.rank == cluster.num_ranks - 1
    steps: list[float] = []
    rounds: list[float] = []
    for number in range(1, _NUM_ROUNDS + 1):
        hidden = first if is_last else received(transport)
        started = time.perf_counter()
        # On the default device: a GPU has to hand over to the CPU, which sends.
        hidden = hidden @ weights
        mx.eval(hidden)
        steps.append(time.perf_counter() - started)
        transport.send(Step(number, 0, (), (), sample=False), [hidden])
        if is_last:
            received(transport)
            rounds.append(time.perf_counter() - started)
    if not is_last:
        transport.receive()  # The last rank closes first, so no message is left unread.
    transport.close()
    if not is_last:
        return None
    step = min(steps) * 1e3  # Other programs only slow a run down.
    hop = min(rounds) * 1e3 / cluster.num_ranks - step
    return json.dumps({"step": step, "hop": hop})


if __name__ == "__main__":
    run_on_rank(measure)
