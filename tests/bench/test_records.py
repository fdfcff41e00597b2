"""Statistics of records, against numbers worked out by hand."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.bench.records import RequestRecord, quantile, summarise

WHOLE = RequestRecord(start=0.0, end=2.0, times=(0.5, 1.0, 2.0), tokens=3, prompt_tokens=10)
FAILED = RequestRecord(start=0.0, end=9.0, times=(1.0,), error="HTTP 429: full")


def test_a_summary_combines_all_records() -> None:
    later = RequestRecord(start=1.0, end=4.0, times=(2.0, 4.0), tokens=2, prompt_tokens=12)
    summary = summarise([[WHOLE, later]])
    assert summary.tokens == summary.chunks == 5
    assert summary.tokens_per_second == pytest.approx(5 / 4)
    assert summary.prompt_tokens == 11
    assert summary.ttft_p50_seconds == pytest.approx(0.75)
    assert summary.ttft_p99_seconds == pytest.approx(0.995)
    assert summary.itl_p50_seconds == pytest.approx(1.0)  # of 0.5, 1 and 2
    assert summary.itl_mean_seconds == pytest.approx(3.5 / 3)


def test_a_failed_request_is_counted_with_its_reason_but_not_in_latencies() -> None:
    summary = summarise([[WHOLE, FAILED, FAILED]])
    assert (summary.num_requests, summary.errors) == (3, {"HTTP 429: full": 2})
    assert summary.tokens == 3
    assert summary.tokens_per_second == pytest.approx(1.5)
    assert summary.ttft_p99_seconds == pytest.approx(0.5)


def test_tokens_are_counted_from_usage_if_chunks_hold_several_tokens() -> None:
    record = RequestRecord(start=0.0, end=3.0, times=(1.0, 3.0), tokens=9)
    summary = summarise([[record]])
    assert (summary.tokens, summary.chunks) == (9, 2)
    assert summary.tokens_per_second == pytest.approx(3.0)
    assert summary.itl_mean_seconds == pytest.approx(2 / 8)


def test_each_chunk_counts_as_one_token_if_there_is_no_usage() -> None:
    assert summarise([[RequestRecord(start=0.0, end=1.0, times=(0.5, 1.0))]]).tokens == 2


def test_the_rate_of_several_rounds_is_their_median() -> None:
    """A round in which the machine was busy with something else must not count for all."""
    rounds = [
        [RequestRecord(start=0.0, end=end, times=(end,), tokens=12)] for end in (1.0, 2.0, 12.0)
    ]
    summary = summarise(rounds)
    assert summary.tokens_per_second == pytest.approx(6.0)
    assert summary.tokens == 36


@pytest.mark.parametrize("runs", [[], [[]], [[FAILED]]])
def test_latencies_are_none_if_nothing_was_measured(runs: list[list[RequestRecord]]) -> None:
    summary = summarise(runs)
    assert summary.tokens_per_second == 0
    assert summary.ttft_p50_seconds is summary.itl_p99_seconds is summary.itl_mean_seconds is None


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_equal_those_of_numpy(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found is not None
    assert math.isclose(found, float(np.quantile(values, share)), rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(quantile(values, 0.5) or 0.0, statistics.median(values), abs_tol=1e-9)
