"""Programs that ranks of a real grid run in test_grid: python -m … NAME. Rows have two ranks."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import msgspec

from serve.core.addresses import Addresses
from serve.core.errors import ClusterError
from serve.core.types import Row, Step
from serve.ring import sums
from serve.ring.grid import GridTransport
from serve.ring.peers import Grid, grid_of, meet
from serve.ring.sums import Sums
from serve.ring.transport import among

RANK = int(os.environ["MLX_RANK"])
LISTED = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
ADDRESSES = Addresses.known_to_all(RANK, LISTED)
NUM_STEPS = 40
NUM_SMALL_SUMS = 10**6


def place(nonce: int = 1) -> Grid:
    return grid_of(range(len(LISTED)), ADDRESSES, 2, nonce, 60.0)


def join() -> GridTransport:
    grid = place()
    neighbours = meet(grid)
    folder = Path(os.environ["MLX_HOSTFILE"]).parent / f"rank{RANK}"
    with among(grid.row, ADDRESSES, folder):
        return GridTransport(grid, neighbours)


def step(number: int) -> Step:
    return Step(number, 0, (Row(1, 0, 2),), (number, 2), True)


def hidden(number: int, stage: int) -> list[mx.array]:
    """Returns what a stage sends. Some steps have no tensors, like those that only drop
    sequences."""
    if number % 5 == 0:
        return []
    return [mx.full((3, number), number + stage), mx.array([stage]).astype(mx.bfloat16)]


def steps() -> None:
    """Rank 0 starts all steps at once. Every rank checks its messages, and what its row sums up and
    gathers."""
    grid, transport = place(), join()
    assert 0 < transport.link.round_trip_seconds < 1
    assert transport.link.bytes_per_second > 0
    if RANK == 0:
        for number in range(1, NUM_STEPS):
            transport.send(step(number), [])
    for number in range(1, NUM_STEPS):
        message = transport.receive()
        assert message is not None
        got, arrays = message
        assert got == step(number)
        expected = hidden(number, grid.stage + 1) if grid.stage < grid.num_stages - 1 else []
        same = [mx.array_equal(a, b).item() for a, b in zip(arrays, expected, strict=True)]
        assert all(same), (number, same)
        own = mx.array([number * (10.0 if grid.shard else 1.0)])
        with transport.sums.of_step(got):
            total = mx.distributed.all_sum(own, group=transport.group)
            gathered = transport.gather(own)
            transport.evaluate([total, gathered])
        assert total.item() == number * 11.0, total
        assert gathered.tolist() == [number, number * 10.0]
        if grid.stage:
            transport.send(got, hidden(number, grid.stage))
    counts = transport.sums.counts
    assert counts is not None
    # Each of two shards sends half of its four bytes twice for the sum, and all of them to gather.
    assert counts.num_sums == 2 * (NUM_STEPS - 1)
    assert counts.num_bytes == 8 * (NUM_STEPS - 1)
    assert counts.num_measured == 1  # Step 32.
    assert 0 < counts.seconds <= counts.step_seconds
    print("fine", flush=True)
    if RANK:  # Rank 0 ends when it has everything. The others end with it, and not before.
        with suppress(ClusterError):
            assert transport.receive() is None
    os._exit(0)


def waits() -> None:
    """As with GPUs. In decode, only the first shard measures that waiting for each sum is cheap."""
    costs = {True: 1.0 if RANK == 0 else 9.0, False: 1.0}
    vars(sums)["has_gpu"] = lambda exchange: True
    Sums._chain_seconds = lambda self, group, waits=False: costs[waits]  # type: ignore[method-assign]
    transport = join()
    evaluated: list[int] = []
    transport.sums._evaluate = lambda arrays: evaluated.append(len(arrays))
    for sample in (False, True):
        with transport.sums.of_step(msgspec.structs.replace(step(1), sample=sample)):
            total = mx.distributed.all_sum(mx.ones(1), group=transport.group)
        transport.evaluate([total])
    counts = transport.sums.counts
    assert counts is not None
    assert counts.separate_in_decode
    print(evaluated, flush=True)
    os._exit(0)


def small_sums() -> None:
    """Both ranks compute sums as large as those of a small model's decode step, one by one."""
    transport = join()
    own = mx.full((576,), RANK + 1.0)
    mx.eval(own)
    started = time.monotonic()
    for _ in range(NUM_SMALL_SUMS):
        total = mx.distributed.all_sum(own, group=transport.group)
        transport.evaluate([total])
    assert total[0].item() == 3.0
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    os._exit(0)


def other_nonce() -> None:
    """Rank 0 belongs to another launch, on the same ports."""
    try:
        meet(place(nonce=1 if RANK else 2))
    except ClusterError as error:
        print(error, flush=True)


def peer_dies() -> None:
    """Rank 1 is killed while rank 0 waits for its part of a sum."""
    transport = join()
    if RANK == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        total = mx.distributed.all_sum(mx.zeros(1 << 20), group=transport.group)
        transport.evaluate([total])
        print("summed up", flush=True)
    except ClusterError as error:
        print(error, flush=True)
    os._exit(0)


def rank_0_ends() -> None:
    """Rank 0 ends while rank 1 waits for a step. Rank 1 prints what receive() returns."""
    transport = join()
    if RANK == 0:
        os._exit(0)
    print(transport.receive(), flush=True)
    os._exit(0)


def idle() -> None:
    """Rank 1 prints the CPU seconds that it uses while it waits until rank 0 ends."""
    transport = join()
    if RANK == 0:
        time.sleep(1.5)
        os._exit(0)
    before = time.process_time()
    transport.receive()
    print(time.process_time() - before, flush=True)
    os._exit(0)


if __name__ == "__main__":
    PROGRAMS = {
        "steps": steps,
        "waits": waits,
        "small_sums": small_sums,
        "other_nonce": other_nonce,
        "peer_dies": peer_dies,
        "rank_0_ends": rank_0_ends,
        "idle": idle,
    }
    PROGRAMS[sys.argv[1]]()
