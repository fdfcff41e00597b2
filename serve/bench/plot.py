"""Draws the results of a load run. matplotlib is an optional extra, so it is imported late."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve.bench.records import Summary
from serve.core.errors import UsageError

Points = Sequence[tuple[float, Summary]]
_SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises UsageError if the plot cannot be drawn. Call it before measuring."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {' or '.join(_SUFFIXES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib.", code="missing_package")


def draw(
    path: Path,
    load: str,
    curves: Mapping[str, Points],
) -> None:
    """Draws the speed and latencies of each server against its load. `load` labels the x axis."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    rate, first, between = figure.subplots(1, 3)
    rate.set_title("tokens per second")
    first.set_title("time to first token, p50, ms")
    between.set_title("time between chunks, ms")
    for name, points in curves.items():
        loads = [value for value, _ in points]
        summaries = [summary for _, summary in points]
        rates = [summary.tokens_per_second for summary in summaries]
        rate.plot(loads, rates, marker="o", label=name)
        ttfts = [_milliseconds(summary.ttft_p50_seconds) for summary in summaries]
        first.plot(loads, ttfts, marker="o", label=name)
        p50 = [_milliseconds(summary.itl_p50_seconds) for summary in summaries]
        (line,) = between.plot(loads, p50, marker="o", label=f"{name}, p50")
        p99 = [_milliseconds(summary.itl_p99_seconds) for summary in summaries]
        between.plot(
            loads,
            p99,
            color=line.get_color(),
            linestyle=":",
            label=f"{name}, p99",
        )
    for axes in (rate, first, between):
        axes.set_xlabel(load)
        axes.set_ylim(bottom=0)
        if all(x == int(x) for points in curves.values() for x, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def _milliseconds(seconds: float | None) -> float:
    return float("nan") if seconds is None else seconds * 1000
