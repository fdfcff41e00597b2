"""Figures computed from records and timelines, by pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from serve.bench.records import RequestRecord, quantile

Window = tuple[float, float]


def p50(values: Sequence[float]) -> float:
    return quantile(values, 0.5) or float("nan")


def p99(values: Sequence[float]) -> float:
    return quantile(values, 0.99) or float("nan")


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Of the medians."""
    return p50(values) / p50(others)


def steady_window(run: Sequence[RequestRecord]) -> Window:
    """While all requests of the run decode: from the latest first chunk to the earliest last
    one."""
    return max(record.times[0] for record in run), min(record.times[-1] for record in run)


def steady_tokens_per_second(run: Sequence[RequestRecord]) -> float:
    """For answers whose tokens come as one chunk each."""
    begin, end = steady_window(run)
    tokens = sum(begin < time <= end for record in run for time in record.times)
    return tokens / (end - begin) if end > begin else float("nan")


def gaps_in(run: Sequence[RequestRecord], window: Window) -> list[float]:
    """Gaps between chunks of which any part lies in the window."""
    begin, end = window
    return [
        later - sooner
        for record in run
        for sooner, later in zip(record.times, record.times[1:], strict=False)
        if later > begin and sooner < end
    ]


def busy_shares(events: Sequence[Mapping[str, Any]], window: Window) -> dict[int, float]:
    """Of each stage in a Chrome trace: the share of the window (seconds) that steps fill."""
    begin, end = window
    filled: dict[int, float] = {}
    for event in events:
        if event["ph"] == "X":
            start = event["ts"] / 1e6
            inside = min(end, start + event["dur"] / 1e6) - max(begin, start)
            filled[event["pid"]] = filled.get(event["pid"], 0.0) + max(0.0, inside)
    return {rank: seconds / (end - begin) for rank, seconds in filled.items()}
