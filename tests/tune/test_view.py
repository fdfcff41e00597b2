"""What a run says, on a terminal and elsewhere."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from serve.cli import training
from serve.tune.events import Finished, Reported, Saved, Started, Validated, Written
from serve.tune.forecast import Forecast
from serve.tune.schedule import Shape, make_schedule

FORECAST = Forecast(0.75, [1, 2], [10**6, 2 * 10**6])
EVENTS = [
    Started(
        schedule=make_schedule("1f1b", Shape(2, 4)),
        layers=[(0, 3), (3, 8)],
        num_trained=1234,
        forecast=FORECAST,
        size="40 examples in 9 rows",
        num_cut=2,
        num_dropped=1,
        iteration=4,
        num_iterations=20,
    ),
    Reported(10, 1.5, 1e-4, 2.5, 1000.0, 4.0, 0.7, [10**6, 3 * 10**6], 1),
    Validated(10, "valid", 1.25, 0.5),
    Saved(10, Path("out/adapters.safetensors")),
    Finished(12, True, FORECAST, 0.7, 0.72, [10**6, 3 * 10**6], (10, 1.25)),
    Written([Path("out/README.md")], "charts: pip install matplotlib"),
]


def said(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=120, highlight=False)
    monkeypatch.setattr(training, "_OUT", console)
    view = training.TrainingView()
    for event in EVENTS:
        view(event)
    view.close()
    return text.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_every_event_is_told(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    text = said(monkeypatch, is_terminal=is_terminal)
    for part in (
        "40 examples in 9 rows, 1,234 trained parameters",
        "goes on after 4 batches",
        "skipped=1",
        "valid_loss=1.2500",
        "saved=out/adapters.safetensors",
        "stopped=early",
        "best_valid_loss=1.2500",
        "pip install matplotlib",
    ):
        assert part in text, part
    assert ("10/20" in text) == is_terminal, "a bar is for a terminal only"
