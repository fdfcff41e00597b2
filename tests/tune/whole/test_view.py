"""What a run says, on a terminal and elsewhere."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from serve.cli import training
from serve.tune.events import Finished, NothingLeft, Reported, Saved, Started, Validated, Written
from serve.tune.forecast import TrainingForecast
from serve.tune.layout import Layout
from serve.tune.schedule import Shape, make_schedule

FORECAST = TrainingForecast(0.75, [1, 2], [10**6, 2 * 10**6])
EVENTS = [
    Started(
        schedule=make_schedule("1f1b", Shape(2, 4)),
        layout=Layout(2),
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
    NothingLeft(20, False),
    NothingLeft(12, True),
    Written([Path("out/README.md")], "charts: pip install matplotlib"),
]


def said(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=120, highlight=False)
    monkeypatch.setattr(training, "_OUT", console)
    now = iter([100.0, 130.0])
    view = training.TrainingView(lambda: next(now))
    for event in EVENTS:
        view(event)
    return text.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_every_event_of_a_run_is_shown(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    text = said(monkeypatch, is_terminal=is_terminal)
    for part in (
        "40 examples in 9 rows, 1,234 trained parameters",
        "Continues after 4 batches",
        "done=50% left=50s",  # 6 batches in 30 seconds, 10 to go
        "wait for each other 25% of the time",
        "bubble of the schedule is 28% of the time",
        "All 20 batches are done; give more --iters",
        "--early-stop has ended this run after 12 batches",
        "skipped=1",
        "valid_loss=1.2500",
        "saved=out/adapters.safetensors",
        "stopped=early",
        "best_valid_loss=1.2500",
        "pip install matplotlib",
    ):
        assert part in text, part
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d iteration=10 done=50%", text)
    assert text.index("Forecast and measurement") < text.index("time that ranks waited")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0s"), (45, "45s"), (59.7, "1m00s"), (200, "3m20s"), (7500, "2h05m"), (1e6, "277h46m")],
)
def test_seconds_are_formatted_for_people(seconds: float, shown: str) -> None:
    assert training.format_seconds(seconds) == shown


def test_no_waiting_time_is_shown_for_a_single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, highlight=False)
    monkeypatch.setattr(training, "_OUT", console)
    view = training.TrainingView()
    forecast = TrainingForecast(1.0, [1], [10**6])
    schedule = make_schedule("1f1b", Shape(1, 4))
    view(replace(EVENTS[0], schedule=schedule, layers=[(0, 8)], forecast=forecast))
    view(Finished(12, False, forecast, 1.0, 1.0, [10**6], None))
    assert "wait" not in text.getvalue()
