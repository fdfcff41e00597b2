"""Results as a picture. matplotlib is an optional extra, so it is imported late."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve.bench.records import Summary
from serve.core.errors import UsageError

Points = Sequence[tuple[float, Summary]]
_SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises UsageError if that file could not be drawn, before anything is measured."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {' or '.join(_SUFFIXES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib.")


def draw(
    path: Path,
    load: str,
    curves: Mapping[str, Points],
    bounds: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """curves: for each server, summaries by load. bounds: further lines of tokens a second."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    rate, first, between = figure.subplots(1, 3)
    for name, points in curves.items():
        x = [at for at, _ in points]
        rate.plot(x, [each.tokens_per_second for _, each in points], marker="o", label=name)
        first.plot(x, [_ms(each.ttft_p50_seconds) for _, each in points], marker="o", label=name)
        p50 = [_ms(each.itl_p50_seconds) for _, each in points]
        line = between.plot(x, p50, marker="o", label=f"{name}, p50")[0]
        p99 = [_ms(each.itl_p99_seconds) for _, each in points]
        between.plot(x, p99, color=line.get_color(), linestyle=":", label=f"{name}, p99")
    for name, line_points in (bounds or {}).items():
        rate.plot(*zip(*line_points, strict=True), linestyle="--", color="grey", label=name)
    for axes, title in (
        (rate, "tokens a second"),
        (first, "time to first token, p50, ms"),
        (between, "between tokens, ms"),
    ):
        axes.set(xlabel=load, title=title)
        axes.set_ylim(bottom=0)
        if all(x == int(x) for points in curves.values() for x, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def _ms(seconds: float | None) -> float:
    return float("nan") if seconds is None else seconds * 1000
