"""What the ranks of a real ring do in test_transport: python -m … NAME [ARGUMENT]."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import psutil

from serve.core.addresses import Addresses
from serve.core.errors import ClusterError
from serve.core.messages import Order
from serve.core.types import Row, Step
from serve.rank.joining import join as meet_and_join
from serve.ring.peers import RingLostError, grid_of, meet
from serve.ring.transport import Received, RingTransport, Streams

RANK = int(os.environ["MLX_RANK"])
NUM_RANKS = int(os.environ["NUM_RANKS"])
HOSTFILE = Path(os.environ["MLX_HOSTFILE"])
ADDRESSES = Addresses.known_to_all(RANK, json.loads(HOSTFILE.read_text()))


def join(nonce: int = 1, streams: Streams | None = None, late_seconds: float = 0) -> RingTransport:
    """Joins a ring. Rank 0 begins to listen late_seconds after the ranks have met."""
    grid = grid_of(range(NUM_RANKS), ADDRESSES, NUM_RANKS, 1, 60.0)
    neighbours = meet(grid)
    if RANK == 0:
        time.sleep(late_seconds)
    return RingTransport(replace(grid, nonce=nonce), neighbours, streams)


def rejoin(nonce: int, streams: Streams) -> RingTransport:
    """Joins a ring as engines do after faults: the ranks meet first, so that MLX finds them all."""
    order = Order(
        rank=RANK,
        ring=tuple(range(NUM_RANKS)),
        hosts=("127.0.0.1",) * NUM_RANKS,
        addresses=ADDRESSES,
        nonce=nonce,
        model="",
        commit=None,
        cache_dir=None,
        copies=str(HOSTFILE.with_name(f"copies-{RANK}")),
        layers=(0, 1),
        kv_bits=None,
        join_timeout=60.0,
    )
    transport = meet_and_join(order, streams)
    assert isinstance(transport, RingTransport)
    return transport


def step(number: int) -> Step:
    return Step(number, 0, (Row(1, 0, 2),), (number, 2), True)


def tensors(number: int) -> list[mx.array]:
    """Equal sizes, so that swapped ones would be read without an error."""
    mx.random.seed(number)
    return [
        mx.random.normal((2, 3, 4)),
        mx.random.normal((2, 3, 4)).astype(mx.bfloat16),
        mx.array([[number]]),
        mx.random.normal((1 << 18,)),
    ]


def around() -> None:
    """Rank 0 starts steps; each other rank passes on; rank 0 checks what comes."""
    transport = join()
    num_steps = 40
    if RANK == 0:
        for number in range(num_steps):
            transport.send(step(number), [])
    for number in range(num_steps):
        message = transport.receive()
        assert message is not None
        got, arrays = message
        assert got == step(number)
        if RANK == NUM_RANKS - 1:
            arrays = tensors(number)
        same = [mx.array_equal(a, b).item() for a, b in zip(arrays, tensors(number), strict=True)]
        assert all(same), (number, same)
        if RANK:
            transport.send(got, arrays)
    print("fine", flush=True)
    if RANK:
        assert transport.receive() is None, "rank 0 ends first, then one after another"


def one_ahead() -> None:
    """Rank 0 leaves the first message lying until rank 1 has received the second one, and prints
    whether it did."""
    transport, large = join(), [mx.zeros((8 << 20,))]  # more than the system has room for
    mx.eval(large)
    received = Path(os.environ["MLX_HOSTFILE"]).with_name("received")
    if RANK == 0:
        deadline = time.monotonic() + 60
        while not received.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        print(received.exists(), flush=True)
    for number in range(2):
        if RANK < 2:
            assert transport.receive() is not None
        if RANK == 1 and number == 1:
            received.touch()
        if RANK:
            transport.send(step(number), large)
    if RANK:
        assert transport.receive() is None


def other_nonce() -> None:
    try:
        join(nonce=RANK)
    except ClusterError as error:
        print(error, flush=True)


def peer_dies() -> None:
    """The last rank announces a large tensor and is killed while it is on its way."""
    transport = join()
    if RANK == NUM_RANKS - 1:
        transport.send(step(1), [mx.zeros((64 << 20,))])
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 0:
        try:
            transport.receive()
            print("received", flush=True)
        except ClusterError as error:
            print(error, flush=True)
        os._exit(0)  # MLX would wait forever on a group that has lost a peer.


def again() -> None:
    """Forms rings one after the other in the same processes. Rank 0 leaves each one while a large
    message is on its way to it. Prints threads and megabytes after the first tenth and at the end,
    and the descriptors at the end."""
    num_rings = int(sys.argv[2])
    streams = Streams()
    kept, sizes = tensors(7), []
    mx.eval(kept)
    for number in range(1, num_rings + 1):
        transport = rejoin(number, streams)
        pass_around(transport, number)
        transport.leave()
        if number in (max(1, num_rings // 10), num_rings):
            sizes += own_sizes(*sizes[:1])
    assert all(mx.array_equal(a, b).item() for a, b in zip(kept, tensors(7), strict=True))
    print(*sizes, psutil.Process().num_fds(), flush=True)
    os._exit(0)


def received(transport: RingTransport, number: int) -> Received:
    """Starts a message on rank 0, and returns the one that arrives here."""
    if RANK == 0:
        transport.send(step(number), [])
    message = transport.receive()
    assert message is not None
    got, arrays = message
    assert got == step(number), "a message of another ring"
    return got, arrays


def pass_around(transport: RingTransport, number: int) -> None:
    """Takes a message around the ring, and then loses the ring."""
    got, arrays = received(transport, number)
    if RANK == 0:
        same = [mx.array_equal(a, b).item() for a, b in zip(arrays, tensors(number), strict=True)]
        assert all(same), (number, same)
        return
    transport.send(got, tensors(number) if RANK == NUM_RANKS - 1 else arrays)
    transport.send(step(number + 1), [mx.zeros((4 << 20,))])
    with suppress(RingLostError):
        while transport.receive() is not None:
            continue


def many() -> None:
    """Forms rings one after the other, and sends a message around each. Prints threads, megabytes
    and descriptors after the first tenth and at the end."""
    num_rings = int(sys.argv[2])
    streams = Streams()
    sizes: list[int] = []
    for number in range(1, num_rings + 1):
        transport = rejoin(number, streams)
        got, arrays = received(transport, number)
        if RANK:
            transport.send(got, [mx.array([number])] if RANK == NUM_RANKS - 1 else arrays)
            with suppress(RingLostError):
                assert transport.receive() is None
        else:
            assert arrays[0].item() == number
        transport.leave()
        if number in (num_rings // 10, num_rings):
            sizes += [*own_sizes(*sizes[:1]), psutil.Process().num_fds()]
    print(*sizes, flush=True)
    os._exit(0)


def late() -> None:
    """Forms three rings. Rank 0 is late for all but the first one, and the last rank, which
    connects first, finds that it does not listen. Prints the descriptors after each ring."""
    streams = Streams()
    counts: list[int] = []
    for number in range(1, 4):
        join(number, streams, late_seconds=0.5 if number > 1 else 0).leave()
        counts.append(psutil.Process().num_fds())
    print(*counts, flush=True)
    os._exit(0)


def own_sizes(num_threads: int | None = None) -> list[int]:
    """Returns the number of threads, and megabytes. The system counts a thread until shortly after
    it was joined, so this waits until there are only num_threads, if that comes."""
    process = psutil.Process()
    deadline = time.monotonic() + 30
    while num_threads and process.num_threads() > num_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    return [process.num_threads(), process.memory_info().rss >> 20]


def idle() -> None:
    """Prints the CPU seconds that a second of waiting costs."""
    transport = join()
    if RANK == 0:
        time.sleep(1.5)
        os._exit(0)
    before = time.process_time()
    transport.receive()
    print(time.process_time() - before, flush=True)
    os._exit(0)


if __name__ == "__main__":
    {
        **{"around": around, "one_ahead": one_ahead, "other_nonce": other_nonce},
        **{"peer_dies": peer_dies, "idle": idle, "again": again},
        **{"many": many, "late": late},
    }[sys.argv[1]]()
