"""The samples behind the page's charts."""

import asyncio
import logging
from typing import Any

import pytest

from serve.front.routes import history
from serve.front.routes.history import MAX_SAMPLES, Sample, SampleHistory

COUNTERS = (
    "brigade_generation_tokens_total",
    "brigade_prefix_cache_queries_total",
    "brigade_prefix_cache_hits_total",
    "brigade_time_to_first_token_seconds_sum",
    "brigade_time_to_first_token_seconds_count",
    "brigade_inter_token_latency_seconds_sum",
    "brigade_inter_token_latency_seconds_count",
)


class Counted:
    """A pipeline and counters that a test changes."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(COUNTERS, 7.0)
        self.state: dict[str, Any] = {
            "num_running": 2,
            "num_waiting": 1,
            "kv_tokens": 3,
            "max_kv_tokens": 4,
        }
        self.history = SampleHistory(lambda: self.state, lambda: dict(self.totals))

    def add(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.totals[f"brigade_{name}"] += number


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_a_sample_contains_the_activity_since_the_previous_sample(counted: Counted) -> None:
    counted.add(generation_tokens_total=30, prefix_cache_queries_total=8)
    counted.add(prefix_cache_hits_total=2)
    counted.add(time_to_first_token_seconds_sum=3, time_to_first_token_seconds_count=2)
    counted.add(inter_token_latency_seconds_sum=1, inter_token_latency_seconds_count=28)
    counted.history.add_sample(100.0, 2.0)
    assert counted.history.latest() == Sample(100.0, 15.0, 1.5, 0.03571, 2, 1, 0.75, 0.25)


def test_a_sample_without_activity_contains_no_means(counted: Counted) -> None:
    counted.state["max_kv_tokens"] = None
    counted.history.add_sample(100.0, 1.0)
    assert counted.history.latest() == Sample(100.0, 0.0, None, None, 2, 1, None, None)


def test_samples_of_ten_minutes_are_kept(counted: Counted) -> None:
    for second in range(MAX_SAMPLES + 5):
        counted.history.add_sample(float(second), 1.0)
    kept = counted.history.samples()
    assert (len(kept), kept[0].time) == (MAX_SAMPLES, 5.0)


def test_samples_are_deleted_when_the_clock_is_set_back(counted: Counted) -> None:
    for time in (100.0, 101.0, 50.0, 51.0):
        counted.history.add_sample(time, 1.0)
    assert [sample.time for sample in counted.history.samples()] == [50.0, 51.0]


def test_samples_are_taken_until_the_task_is_cancelled(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "STEP_SECONDS", 0.001)

    async def run() -> None:
        sampling = asyncio.ensure_future(counted.history.run())
        async with asyncio.timeout(60):
            while len(counted.history.samples()) < 3:
                await asyncio.sleep(0.001)
        sampling.cancel()

    asyncio.run(run())


def test_an_error_while_a_sample_is_taken_is_logged(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history, "STEP_SECONDS", 0.001)
    counted.state = {}
    with caplog.at_level(logging.ERROR):
        asyncio.run(counted.history.run())
    assert "event=bug" in caplog.text
