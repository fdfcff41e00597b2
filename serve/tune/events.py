"""The events of a run for its user, on rank 0. This module does not need MLX."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serve.core.plan import LayerRange
from serve.tune.forecast import TrainingForecast
from serve.tune.layout import Layout
from serve.tune.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Started:
    """Training begins. Each replica runs schedule. layers are the ranges of the stages, in the
    order of the model. size says how many examples there are, and in how many rows."""

    schedule: Schedule
    layout: Layout
    layers: list[LayerRange]
    num_trained: int
    forecast: TrainingForecast
    size: str
    num_cut: int
    num_dropped: int
    iteration: int
    num_iterations: int


@dataclass(frozen=True, slots=True)
class NothingLeft:
    """A resumed run has no batch left to train on. is_early says that --early-stop ended it."""

    iteration: int
    is_early: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """A report on the updates since the last report. loss is the mean over their learned tokens."""

    iteration: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    iterations_per_second: float
    utilisation: float
    peak_bytes: list[int]
    num_skipped: int


@dataclass(frozen=True, slots=True)
class Validated:
    iteration: int
    name: str
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    iteration: int
    path: Path


@dataclass(frozen=True, slots=True)
class Finished:
    """Training has ended: the forecast from its start, and the measurements. expected_utilisation
    is the schedule's utilisation with the measured costs. `best` is the batch with the lowest
    validation loss, and the loss."""

    iteration: int
    is_early: bool
    forecast: TrainingForecast
    utilisation: float
    expected_utilisation: float
    peak_bytes: list[int]
    best: tuple[int, float] | None


@dataclass(frozen=True, slots=True)
class Written:
    """The run has written files for its user. `without` says which files are left out, and why."""

    paths: list[Path]
    without: str | None


Event = Started | NothingLeft | Reported | Validated | Saved | Finished | Written
Show = Callable[[Event], None]
