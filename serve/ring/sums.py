"""Counts the sums that the shards of a stage compute together, and measures the time of some.
Gathering an array, such as the logits, counts as a sum too."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from serve.core.types import FIRST_WARM_UP_STEP, Step, SumCounts

_MEASURED_EVERY = 32  # steps. A measured step is slower, because it waits for each sum.

Collective = Callable[..., mx.array]
Evaluate = Callable[[Sequence[mx.array]], None]


class Sums:
    """Counts and measures the sums of one shard while it computes steps. Sums are parts of lazy
    graphs, so in a measured step all shards evaluate each sum separately. counts is None for a
    stage of one shard, latest_seconds is None if the latest step was not measured."""

    def __init__(self) -> None:
        self.counts: SumCounts | None = None
        self.latest_seconds: float | None = None
        self._is_counting = False
        self._is_measuring = False

    def install(self, num_shards: int, evaluate: Evaluate) -> None:
        """Routes every later sum of this process through this object."""
        self.counts = SumCounts()
        self._evaluate = evaluate
        # For a sum, each shard sends T - 1 parts of partial sums, then T - 1 parts of the result.
        num_others = num_shards - 1
        self._intercept("all_sum", 2 * num_others / num_shards)
        self._intercept("all_gather", num_others)

    def _intercept(self, name: str, num_sent: float) -> None:
        """Routes the calls of a function of MLX through this object. In each call a shard sends
        num_sent times the bytes of its array."""
        original = getattr(mx.distributed, name)
        vars(mx.distributed)[name] = functools.partial(self._counted, original, num_sent)

    @contextmanager
    def of_step(self, step: Step) -> Iterator[None]:
        self.latest_seconds = None
        before = self.counts
        if before is None or step.number >= FIRST_WARM_UP_STEP:
            yield
            return
        started = time.perf_counter()
        self._is_counting = True
        self._is_measuring = step.number % _MEASURED_EVERY == 0
        try:
            yield
        finally:
            is_measured = self._is_measuring
            self._is_counting = False
            self._is_measuring = False
        after = self.counts
        if is_measured and after and after.num_sums > before.num_sums:
            step_seconds = time.perf_counter() - started
            self.latest_seconds = after.seconds - before.seconds
            self.counts = after.with_step(step_seconds)

    def _counted(
        self,
        original: Collective,
        num_sent: float,
        x: mx.array,
        *,
        group: Any = None,
        stream: Any = None,
    ) -> mx.array:
        result = original(x, group=group, stream=stream)
        if not self._is_counting or self.counts is None:
            return result
        seconds = 0.0
        if self._is_measuring:
            self._evaluate([x])
            started = time.perf_counter()
            self._evaluate([result])
            seconds = time.perf_counter() - started
        num_bytes = int(num_sent * x.nbytes)
        self.counts = self.counts.with_sum(num_bytes, seconds)
        return result
