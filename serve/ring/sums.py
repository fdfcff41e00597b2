"""Counts the sums that the shards of a stage compute together, and measures the time of some."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from serve.core.messages import SumCounts
from serve.core.types import FIRST_WARM_UP_STEP, Step

_MEASURED_EVERY = 32  # steps. A measured step waits before and after each sum.


class Sums:
    """The sums of one shard, while it computes steps.

    Sums are parts of lazy graphs, so their time shows only where they are evaluated one by one. All
    shards do this in the same steps, because they match their sums by the order of evaluation.
    """

    def __init__(self, num_shards: int, evaluate: Callable[[Sequence[mx.array]], None]) -> None:
        self._num_shards = num_shards
        self._evaluate = evaluate
        self._sum_up = mx.distributed.all_sum
        self._is_counting = False
        self._is_measuring = False
        self._counts = SumCounts()

    @property
    def counts(self) -> SumCounts:
        return self._counts

    def install(self) -> None:
        """Makes every sum of this process go through this object, for good."""
        vars(mx.distributed)["all_sum"] = self._counted

    @contextmanager
    def of_step(self, step: Step) -> Iterator[None]:
        """Counts the sums inside a with block, and measures them in some of the steps."""
        if step.number >= FIRST_WARM_UP_STEP or not step.rows:
            yield
            return
        before = self._counts
        started = time.perf_counter()
        self._is_counting = True
        self._is_measuring = step.number % _MEASURED_EVERY == 0
        try:
            yield
        finally:
            if self._is_measuring and self._counts.num_sums > before.num_sums:
                self._counts = self._counts.with_step(time.perf_counter() - started)
            self._is_counting = self._is_measuring = False

    def _counted(self, x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
        if not self._is_counting:
            return self._sum_up(x, group=group, stream=stream)
        # Around a ring, each shard sends its part of the sum T - 1 times, and then of the result.
        sent_bytes = 2 * (self._num_shards - 1) * x.nbytes // self._num_shards
        seconds = 0.0
        if self._is_measuring:
            self._evaluate([x])
            started = time.perf_counter()
            total = self._sum_up(x, group=group, stream=stream)
            self._evaluate([total])
            seconds = time.perf_counter() - started
        else:
            total = self._sum_up(x, group=group, stream=stream)
        self._counts = self._counts.with_sum(sent_bytes, seconds)
        return total
