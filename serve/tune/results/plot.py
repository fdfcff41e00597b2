"""Draws a run: its curves, and its measured schedule. matplotlib is an optional extra, so it is
imported late."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.tune.forecast import OpSpan

_COLOURS = {"F": "#7aa6d9", "B": "#e5a15b", "W": "#8fbf7f"}
_WORDS = {
    "F": "forward",
    "B": "gradient of the input",
    "W": "gradients of the parameters",
}
_MIN_SHARE = 0.01  # share of the width; a narrower op has no room for its number


def draw_curves(path: Path, metrics: Sequence[dict[str, Any]]) -> None:
    """Draws the losses of training and validation, the gradient norm and the learning rate, over
    batches. A constant learning rate is written above the loss instead of drawn."""
    from matplotlib.figure import Figure

    reports = [each for each in metrics if "gradient_norm" in each]
    validations = [each for each in metrics if each.get("name") == "valid"]
    batches = _column(reports, "iteration")
    rates = _column(reports, "learning_rate")
    is_constant = len(set(rates)) <= 1
    num_axes = 2 if is_constant else 3
    figure = Figure(figsize=(5 * num_axes, 4.5), layout="constrained")
    loss, norm, *rest = figure.subplots(1, num_axes)
    loss.plot(batches, _column(reports, "loss"), label="training")
    if validations:
        loss.plot(
            _column(validations, "iteration"),
            _column(validations, "loss"),
            marker="o",
            label="validation",
        )
    loss.legend()
    norm.plot(batches, _column(reports, "gradient_norm"))
    title_of_loss = "loss"
    if is_constant and rates:
        title_of_loss = f"loss, at learning rate {rates[0]:.3g}"
    titles = {loss: title_of_loss, norm: "norm of the gradient"}
    for axes in rest:
        axes.plot(batches, rates)
        titles[axes] = "learning rate"
    for axes, title in titles.items():
        axes.set(xlabel="batches", title=title)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _column(metrics: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [each[name] for each in metrics]


def draw_schedule(path: Path, title: str, spans: Sequence[OpSpan]) -> None:
    """Draws one row for each stage, the first layers at the top: the ops over time, with the
    numbers of their micro-batches."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_stages = 1 + max(span.stage for span in spans)
    end = max(span.end for span in spans)
    figure = Figure(figsize=(15, 1.5 + 0.6 * num_stages), layout="constrained")
    axes = figure.subplots()
    for kind, micro_batch, stage, start, until in spans:
        width = until - start
        axes.barh(stage, width, left=start, color=_COLOURS[kind], edgecolor="white")
        if width > _MIN_SHARE * end:
            middle = start + width / 2
            axes.text(
                middle,
                stage,
                str(micro_batch + 1),
                ha="center",
                va="center",
                fontsize=8,
            )
    axes.set(xlabel="seconds", title=title, xlim=(0, end))
    stages = range(num_stages)
    axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
    axes.invert_yaxis()
    seen = {span.kind for span in spans}
    handles = []
    for kind, colour in _COLOURS.items():
        if kind in seen:
            handles.append(Patch(color=colour, label=_WORDS[kind]))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)
