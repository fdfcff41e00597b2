"""Shards of a model as threads of one process. They add up their results like a group of MLX."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from serve.model.sharding import without_sums

Built = TypeVar("Built")
Result = TypeVar("Result")


class Seat:
    """One shard's view of a group whose shards are threads."""

    def __init__(self, group: "ThreadGroup", rank: int) -> None:
        self.group = group
        self.is_building = False
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.group.parts)


class ThreadGroup:
    """Stands in for a group of MLX within one process. It evaluates at once, while MLX is lazy."""

    def __init__(self, num_shards: int) -> None:
        self.parts: list[NDArray[np.uint8] | None] = [None] * num_shards
        self.barrier = threading.Barrier(num_shards, timeout=60)
        self.seats = [Seat(self, rank) for rank in range(num_shards)]

    def gather(self, seat: Seat, x: mx.array) -> list[mx.array]:
        if seat.is_building:  # Trial runs need only the shapes.
            return [x] * len(self.parts)
        # As bytes, because threads must not share arrays of MLX.
        self.parts[seat.rank()] = np.array(x.reshape(-1).view(mx.uint8))
        self.barrier.wait()
        parts = [
            mx.array(part).view(x.dtype).reshape(x.shape) for part in self.parts if part is not None
        ]
        self.barrier.wait()
        return parts


@contextmanager
def sums_between_threads() -> Iterator[None]:
    def all_sum(x: mx.array, *, group: Seat, **_: Any) -> mx.array:
        parts = group.group.gather(group, x)
        parts[group.rank()] = x  # of which the sum has a gradient
        first, *others = parts
        return sum(others, first)

    def all_gather(x: mx.array, *, group: Seat, **_: Any) -> mx.array:
        return mx.concatenate(group.group.gather(group, x), axis=0)

    with without_sums():
        vars(mx.distributed).update({"all_sum": all_sum, "all_gather": all_gather})
        yield


def on_shards(
    num_shards: int,
    build: Callable[[Seat], Built],
    run: Callable[[Built], Result],
) -> list[Result]:
    """Returns the results of run on each shard. Shards are built one after the other, because
    seeds and seams are global."""
    group = ThreadGroup(num_shards)
    building = threading.Lock()
    found: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run_one(seat: Seat) -> None:
        try:
            with building:
                seat.is_building = True
                built = build(seat)
                seat.is_building = False
            found[seat.rank()] = run(built)
        except BaseException as error:
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run_one, args=(seat,)) for seat in group.seats]
    with sums_between_threads():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    return [found[shard] for shard in range(num_shards)]
