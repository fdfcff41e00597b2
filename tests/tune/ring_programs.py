"""What the ranks of a real ring do in test_transport: python -m … NAME."""

import math
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil

from serve.core.config import read_cluster
from serve.core.errors import BrigadeError, ClusterError, PlanError
from serve.core.messages import AnyNote, LossSum, NotFinite, NumTrained, Reached
from serve.tune import mesh, run, transport
from serve.tune.config import FineTuneConfig
from serve.tune.layout import Layout
from serve.tune.schedule import SCHEDULES
from serve.tune.transport import Links, exchange, gather, share, sum_arrays
from tests.tune.ranks import (
    KINDS,
    MICRO_BATCHES,
    batches_of,
    config_of,
    error_of,
    trainer,
    tuned,
    unsplit_gradients,
    update_of,
)

RANK = int(os.environ["MLX_RANK"])
NUM_RANKS = int(os.environ["NUM_RANKS"])
LEFT, RIGHT = (RANK - 1) % NUM_RANKS, (RANK + 1) % NUM_RANKS


def join(stall_seconds: float = 60.0) -> Links:
    cluster = read_cluster(os.environ)
    return mesh.join(cluster, Layout(NUM_RANKS), stall_seconds, 60.0).everybody


def tensors(rank: int, number: int) -> list[mx.array]:
    """Equal sizes, so that swapped ones would be read without an error."""
    mx.random.seed(100 * rank + number)
    return [
        mx.random.normal((2, 3, 4)),
        mx.random.normal((2, 3, 4)).astype(mx.bfloat16),
        mx.array([[number]]),
        mx.zeros((0,)),
    ]


def note(rank: int) -> tuple[AnyNote, ...]:
    return LossSum(0.1 * rank), NotFinite(None)


def both_ways() -> None:
    """All ranks send 40 MB to both neighbours before they take anything, then take messages
    in another order than they came."""
    links, large = join(), mx.full((10 << 20,), float(RANK))
    mx.eval(large)
    for side, peer in (("left", LEFT), ("right", RIGHT)):
        links.send(peer, f"large {side}", (), [large])
        for number in range(8):
            arrays = tensors(RANK, number)
            mx.eval(arrays)
            links.send(peer, f"{number} {side}", note(RANK), arrays)
    for number in reversed(range(8)):
        for side, peer in (("left", RIGHT), ("right", LEFT)):
            notes, arrays = links.receive(f"{number} {side}")
            assert notes == note(peer)
            expected = tensors(peer, number)
            assert all(mx.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))
    for side, peer in (("left", RIGHT), ("right", LEFT)):
        _, (arrived,) = links.receive(f"large {side}")
        assert arrived.shape == large.shape
        assert (arrived.min().item(), arrived.max().item()) == (peer, peer)
    assert exchange(links, NumTrained(RANK)) == [NumTrained(rank) for rank in range(NUM_RANKS)]
    (total,) = sum_arrays(links, [mx.array([1.0, RANK])])
    assert total.tolist() == [NUM_RANKS, sum(range(NUM_RANKS))]
    gathered = gather(links, {f"of {RANK}": mx.array([RANK])})
    if RANK == 0:
        assert {name: a.item() for name, a in gathered.items()} == {
            f"of {rank}": rank for rank in range(NUM_RANKS)
        }
    exchange(links, Reached("the end"))
    links.close()
    print("fine", flush=True)
    os._exit(0)


def in_parts() -> None:
    """What ranks gather and share is sent and read in parts of 16 bytes."""
    transport._PART_BYTES = 16
    links = join()

    def of(rank: int) -> dict[str, mx.array]:
        whole = dict(enumerate(tensors(rank, 3)))
        whole |= {4: mx.arange(37).astype(mx.int8), 5: mx.array([True] * 5), 6: mx.array(rank)}
        mx.eval(whole)
        return {f"{n} of {rank}": array for n, array in whole.items()}

    everything = {name: array for rank in range(NUM_RANKS) for name, array in of(rank).items()}
    gathered = gather(links, of(RANK))
    for found in (share(links, gathered), gathered if RANK == 0 else everything):
        assert found.keys() == everything.keys()
        for name, array in everything.items():
            assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
            assert mx.array_equal(found[name], array)
    exchange(links, Reached("all have it"))
    links.close()
    print("fine", flush=True)
    os._exit(0)


def sender_fails() -> None:
    """Rank 0 has something to send that no message can hold."""
    links = join()
    if RANK == 0:
        links.send(LEFT, "never", (object(),), [])
    try:
        links.receive("never")
    except ClusterError as error:
        print(error, flush=True)
    os._exit(0)


class Patience:
    """Takes the place of `select` where a rank waits for its peers. Its seconds pass quickly, but
    the one after which a silent peer is given up passes only for `given_up`. So a peer that is late
    on a busy machine is not given up, and one that gives no sign of life is waited for forever."""

    def __init__(self, stall_seconds: float) -> None:
        self.given_up: socket.socket | None = None
        self._stall_seconds = stall_seconds
        self._silent: dict[socket.socket, int] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a time in which peers send nothing but signs of life."""
        self.seconds = 0  # in which a peer was silent
        self.has_come_in_time = False  # whether a sign has come soon after the one before
        self._heard_at: dict[socket.socket, float] = {}

    def select(self, peers: list[socket.socket], *_: object) -> tuple[list[socket.socket], ...]:
        (peer,) = peers
        silent = self._silent.pop(peer, 0)
        while not select.select(peers, [], [], 0.05)[0]:
            if silent + 1 < self._stall_seconds or peer is self.given_up:
                self._silent[peer] = silent + 1
                self.seconds += 1
                return [], [], []
        if silent:  # Otherwise this is the rest of a sign.
            now = time.monotonic()
            seconds = now - self._heard_at.get(peer, -math.inf)
            self.has_come_in_time |= seconds < self._stall_seconds
            self._heard_at[peer] = now
        return peers, [], []


def wait_for_files(pattern: str, num_files: int) -> None:
    folder = Path(os.environ["MLX_HOSTFILE"]).parent
    while len(list(folder.glob(pattern))) < num_files:
        time.sleep(0.05)


def touch(name: str) -> None:
    Path(os.environ["MLX_HOSTFILE"]).with_name(f"{name}-{RANK}").touch()


def silent() -> None:
    """The last rank computes for longer than a silent one is waited for, and is then stopped."""
    stall_seconds = 2.0
    patience = Patience(stall_seconds)
    transport.select = patience  # type: ignore[assignment]
    links = join(stall_seconds)
    pids = exchange(links, NumTrained(os.getpid()))
    touch("met")
    wait_for_files("met-*", NUM_RANKS)
    patience.begin()
    if RANK < NUM_RANKS - 1:
        while patience.seconds < 3 * stall_seconds or not patience.has_come_in_time:
            time.sleep(0.05)
        touch("waited")
    wait_for_files("waited-*", NUM_RANKS - 1)
    exchange(links, Reached("still there"))
    # The last rank must not stop before its message has reached all others.
    touch("reached")
    if RANK == NUM_RANKS - 1:
        wait_for_files("reached-*", NUM_RANKS)
        os.kill(os.getpid(), signal.SIGSTOP)
    last = psutil.Process(pids[-1].count)
    while last.status() != psutil.STATUS_STOPPED:
        time.sleep(0.05)
    assert isinstance(links, transport.TcpLinks)
    patience.given_up = links._connections.get(NUM_RANKS - 1)
    try:
        links.receive("never")
    except ClusterError as error:
        print(error, flush=True)
    touch("said")  # A rank that ends sooner would be the one that others name.
    wait_for_files("said-*", NUM_RANKS - 1)
    if RANK == 0:
        last.kill()
    os._exit(0)


def peer_ends() -> None:
    """The last rank ends while the others wait for it; those beside it say so."""
    links = join()
    if RANK < NUM_RANKS - 1:
        try:
            links.receive("never")
        except ClusterError as error:
            print(error, flush=True)
    os._exit(0)


def error_ends_all() -> None:
    """Rank 1 ends by its own error while the others wait for each other, and send it much."""

    def part(_: FineTuneConfig, groups: mesh.Groups, *__: object, **___: object) -> None:
        if RANK == 1:
            raise PlanError("Its disk is full.", code="no_memory")
        large = mx.zeros((10 << 20,))
        mx.eval(large)
        for number in range(8 if RANK in (0, 2) else 0):
            groups.everybody.send(1, f"{number}", (), [large])
        groups.everybody.receive("never")

    run.run_rank = part  # type: ignore[assignment]
    config = FineTuneConfig(model=Path("m"), data=Path("d"))
    try:
        run.run(config, read_cluster(os.environ), lambda _: None)
    except BrigadeError as error:
        print(error.exit_code, error.code, error, flush=True)
    os._exit(0)


def gradients() -> None:
    """A diagonal through the table of test_gradients: every schedule and every kind."""
    links, worst = join(), 0.0
    for number, (schedule, kind) in enumerate(zip(SCHEDULES, KINDS, strict=True)):
        fine_tune_type, *model = KINDS[kind]
        changes = {"schedule": schedule, "grad_checkpoint": number % 2 == 0}
        config = config_of(fine_tune_type=fine_tune_type, **changes)
        batches = batches_of(MICRO_BATCHES)
        found = update_of(trainer(config, links, *model), batches)
        if RANK == 0:
            expected = unsplit_gradients(tuned(config, *model[:1], make=model[1]), batches)
            worst = float(np.max([worst, error_of(found, expected)]))
    exchange(links, Reached("the end"))
    links.close()
    print(worst, flush=True)
    os._exit(0)


if __name__ == "__main__":
    programs = (both_ways, error_ends_all, gradients, in_parts, peer_ends, sender_fails, silent)
    {program.__name__: program for program in programs}[sys.argv[1]]()
