"""The samples behind the page's charts: one a second, for the last ten minutes."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

STEP_SECONDS = 1.0
MAX_SAMPLES = 600
_SIGNIFICANT = 4  # the digits of a number; the charts show three

_logger = logging.getLogger(__name__)


class Sample(NamedTuple):
    """The server's state at a time, with the rates and means since the previous sample. A mean is
    None if nothing happened."""

    time: float
    tokens_per_second: float
    first_token_seconds: float | None
    next_token_seconds: float | None
    num_running: int
    num_waiting: int
    kv_share: float | None
    cached_share: float | None


class SampleHistory:
    """The latest samples, the oldest first. pipeline returns the state, totals the counters."""

    def __init__(
        self, pipeline: Callable[[], dict[str, Any]], totals: Callable[[], dict[str, float]]
    ) -> None:
        self._pipeline, self._totals = pipeline, totals
        self._last = totals()
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def latest(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def samples(self) -> list[Sample]:
        return list(self._samples)

    async def run(self) -> None:
        """Takes a sample every second until it is cancelled."""
        while True:
            begin = time.monotonic()
            await asyncio.sleep(STEP_SECONDS)
            try:
                self.add_sample(time.time(), time.monotonic() - begin)
            except Exception:  # The top of the task: otherwise the error would be lost.
                _logger.exception("event=bug")
                return

    def add_sample(self, now: float, seconds: float) -> None:
        """Adds the sample of the seconds up to now."""
        if self._samples and now < self._samples[-1].time:
            self._samples.clear()  # The clock was set back.
        before, self._last = self._last, self._totals()
        change = {name: value - before[name] for name, value in self._last.items()}
        state = self._pipeline()
        self._samples.append(
            Sample(
                round(now, 3),
                _rounded(change["brigade_generation_tokens_total"] / seconds),
                _mean(change, "brigade_time_to_first_token_seconds"),
                _mean(change, "brigade_inter_token_latency_seconds"),
                state["num_running"],
                state["num_waiting"],
                _ratio(state["kv_tokens"], state["max_kv_tokens"]),
                _ratio(
                    change["brigade_prefix_cache_hits_total"],
                    change["brigade_prefix_cache_queries_total"],
                ),
            )
        )


def _mean(change: dict[str, float], name: str) -> float | None:
    return _ratio(change[f"{name}_sum"], change[f"{name}_count"])


def _ratio(part: float, whole: float | None) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT}g}")
