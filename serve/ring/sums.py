"""Counts the sums that the shards of a stage compute together, and measures the time of some.
Gathering an array, such as the logits, counts as a sum too.

Sums are parts of lazy graphs. On a GPU, work after a sum would wait there for the other shards, and
macOS ends work that waits for 5 s. So a shard with a GPU evaluates up to each sum, sums up on the
CPU, and goes on: in prefill always, and in decode unless that costs too much.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from serve.core.types import FIRST_WARM_UP_STEP, Step, SumCounts

_MEASURED_EVERY = 32  # Every 32nd step is measured, and is slower: it waits for each sum.
_MAX_COST_OF_WAITING = 1.2  # as a multiple of the lazy graph's time, in decode
_CHAIN_SIZE = 1024
_CHAIN_LENGTH = 32
_NUM_CHAINS = 8

Collective = Callable[..., mx.array]
Evaluate = Callable[[Sequence[mx.array]], None]
Exchange = Callable[[float], Sequence[float]]
"""Tells a number to all shards of the stage. Returns all their numbers, in their order."""


class Sums:
    """The sums of one shard. In a measured step, all shards evaluate each sum separately. counts is
    None for a stage of one shard, latest_seconds is None if the latest step was not measured."""

    def __init__(self) -> None:
        self.counts: SumCounts | None = None
        self.latest_seconds: float | None = None
        self._waits_in_prefill = False
        self._waits_in_decode = False
        self._is_waiting = False
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

    def choose(self, exchange: Exchange, group: mx.distributed.Group) -> None:
        """Chooses in which steps each sum is evaluated separately. All shards call this together,
        and the first shard's times decide, so that all make their sums in the same order."""
        if not has_gpu(exchange):
            return
        self._waits_in_prefill = True
        waiting, lazy = self._chain_seconds(group, waits=True), self._chain_seconds(group)
        cost, *_ = exchange(waiting / lazy)
        self._waits_in_decode = cost <= _MAX_COST_OF_WAITING
        self.counts = SumCounts(separate_in_decode=self._waits_in_decode)

    def _chain_seconds(self, group: mx.distributed.Group, waits: bool = False) -> float:
        """Measures a chain of products and sums, as in a decode step."""
        matrix = mx.zeros((_CHAIN_SIZE, _CHAIN_SIZE))
        times: list[float] = []
        self._is_waiting = waits
        for _ in range(_NUM_CHAINS):
            started = time.perf_counter()
            row = mx.ones((1, _CHAIN_SIZE))
            for _ in range(_CHAIN_LENGTH):
                row = mx.distributed.all_sum(row @ matrix, group=group)
            self._evaluate([row @ matrix])
            times.append(time.perf_counter() - started)
        self._is_waiting = False
        return min(times)

    @contextmanager
    def of_step(self, step: Step) -> Iterator[None]:
        """Counts, and evaluates separately as chosen, the sums of a step."""
        self._is_waiting = self._waits_in_decode if step.sample else self._waits_in_prefill
        try:
            with self._counting(step):
                yield
        finally:
            self._is_waiting = False

    @contextmanager
    def _counting(self, step: Step) -> Iterator[None]:
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
        seconds = 0.0
        if self._is_waiting or self._is_measuring:
            self._evaluate([x])
            started = time.perf_counter()
            self._evaluate([result])
            seconds = time.perf_counter() - started
        if self._is_counting and self.counts is not None:
            num_bytes = int(num_sent * x.nbytes)
            self.counts = self.counts.with_sum(num_bytes, seconds if self._is_measuring else 0.0)
        return result


def has_gpu(exchange: Exchange) -> bool:
    """Whether a shard of the stage runs its steps on a GPU."""
    return any(exchange(float(mx.default_device() == mx.gpu)))
