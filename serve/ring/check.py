"""The last check of `brigade doctor`, as each rank runs it: a sum that travels around the ring."""

import os
import sys
import time
import zlib
from collections.abc import Callable
from typing import NoReturn

import mlx.core as mx

from serve.core.config import Cluster, read_cluster
from serve.core.errors import BrigadeError, ClusterError
from serve.core.types import Step
from serve.ring.peers import Grid, grid_of, meet
from serve.ring.regroup import objection
from serve.ring.transport import RingTransport, Streams

_NUM_VALUES = 1 << 20
_JOIN_SECONDS = 30.0


def go_round(cluster: Cluster, streams: Streams) -> str | None:
    """Runs this rank's part of the check, and leaves the ring. Returns a report on the last rank,
    None on the others. Each rank adds its rank plus one, and rank 0 sends the sum to the last rank,
    so that every hop is used. Raises ClusterError."""
    grid = grid_of_all(cluster)
    transport = RingTransport(grid, meet(grid), streams)
    is_last = cluster.rank == cluster.num_ranks - 1
    started = time.perf_counter()
    total = mx.zeros(_NUM_VALUES) if is_last else received(transport)
    step = Step(1, 0, (), (), sample=False)
    transport.send(step, [total + cluster.rank + 1])
    if not is_last:
        # The last rank closes first and each neighbour sees that, so no message is left unread.
        transport.receive()
        _leave(transport)
        return None
    total = received(transport)
    seconds = time.perf_counter() - started
    _leave(transport)
    expected = sum(range(1, cluster.num_ranks + 1))
    if not bool(mx.all(total == expected)):
        raise ClusterError("The sum over the ring is wrong: values were lost on the way.")
    return (
        f"the sum over {cluster.num_ranks} ranks is correct: {total.nbytes / 1e6:.1f} MB "
        f"went around the ring in {seconds * 1000:.0f} ms"
    )


def _leave(transport: RingTransport) -> None:
    """Leaves the ring so that this process can form another one, if MLX supports this."""
    if objection():
        transport.close()
    else:
        transport.leave()


def received(transport: RingTransport) -> mx.array:
    """Returns the tensor of the next message. Raises ClusterError."""
    message = transport.receive()
    if message is None:
        raise ClusterError("A neighbour is gone: look at its output.")
    return message[1][0]


def go_round_twice(cluster: Cluster) -> str | None:
    """Returns a report on the last rank, None on the others. Raises ClusterError."""
    streams = Streams()
    report = go_round(cluster, streams)
    if reason := objection():
        outcome = f"engines cannot outlive a fault: {reason}"
    else:
        go_round(cluster, streams)
        outcome = "ring can be re-formed: engines survive a fault"
    return f"{report}; {outcome}" if report else None


# --- programs that run on all ranks of a launch


def grid_of_all(cluster: Cluster) -> Grid:
    """Returns this rank's place in a ring of all ranks of the launch."""
    nonce = zlib.crc32(cluster.secret.encode()) >> 1
    ring = range(cluster.num_ranks)
    return grid_of(ring, cluster.addresses, cluster.num_ranks, nonce, _JOIN_SECONDS)


def run_on_rank(measure: Callable[[Cluster], str | None]) -> NoReturn:
    """Runs this rank's part of a measurement, prints its result, if there is one, and ends."""
    code = 0
    try:
        text = measure(read_cluster(os.environ))
    except BrigadeError as error:
        text, code = str(error), error.exit_code
    if text is not None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    os._exit(code)  # A normal exit would wait forever in MLX when the ring has lost a peer.


if __name__ == "__main__":
    run_on_rank(go_round_twice)
