"""The output of a training run, on rank 0: tables, a line for each report, and on a terminal a
progress bar below them."""

import time
from collections.abc import Callable
from datetime import datetime

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from serve.cli.output import Output
from serve.core.plan import format_bytes
from serve.tune.events import (
    Event,
    Finished,
    NothingLeft,
    Reported,
    Saved,
    Started,
    Validated,
    Written,
)

_OUT = Output(highlight=False)


class TrainingView:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        self._first = 0
        self._total = 0
        columns = MofNCompleteColumn(), TextColumn("batches,"), TimeRemainingColumn()
        self._bar = Progress(BarColumn(), *columns, TextColumn("left"), console=_OUT)
        self._task = self._bar.add_task("")

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                _show_start(event)
                self._began = self._clock()
                self._first = event.iteration
                self._total = event.num_iterations
                self._bar.update(self._task, total=event.num_iterations)
                self._move(event.iteration)
            case Reported():
                _show_report(event, self._progress(event.iteration))
                self._move(event.iteration)
            case NothingLeft():
                _show_nothing_left(event)
            case Validated():
                loss = {f"{event.name}_loss": f"{event.loss:.4f}"}
                _say(iteration=event.iteration, **loss, seconds=f"{event.seconds:.1f}")
            case Saved():
                _say(iteration=event.iteration, saved=event.path)
            case Finished():
                self.close()
                _show_end(event)
            case Written():
                _say(wrote=" ".join(map(str, event.paths)))
                if event.without:
                    _say(without=event.without)

    def _progress(self, iteration: int) -> dict[str, str]:
        """Describes which part is done, and how long the rest takes at the pace so far, with
        validations and checkpoints."""
        if not self._total:
            return {}
        done = f"{iteration / self._total:.0%}"
        seconds = self._clock() - self._began
        left = (self._total - iteration) * seconds / max(1, iteration - self._first)
        return {"done": done, "left": format_seconds(left)}

    def _move(self, iteration: int) -> None:
        """Moves the progress bar, which exists only on a terminal."""
        self._bar.update(self._task, completed=iteration)
        if _OUT.is_terminal:
            self._bar.start()

    def close(self) -> None:
        if _OUT.is_terminal:
            self._bar.stop()


def format_seconds(seconds: float) -> str:
    """Formats a duration as 45s, 3m20s or 2h05m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{rest:02}s"
    return f"{rest}s"


def _show_report(event: Reported, progress: dict[str, str]) -> None:
    _say(
        iteration=event.iteration,
        **progress,
        loss=f"{event.loss:.4f}",
        learning_rate=f"{event.learning_rate:.3e}",
        gradient_norm=f"{event.gradient_norm:.3f}",
        tokens_per_second=f"{event.tokens_per_second:.0f}",
        iterations_per_second=f"{event.iterations_per_second:.2f}",
        busy=f"{event.utilisation:.0%}",
        memory=format_bytes(max(event.peak_bytes)).replace(" ", ""),
        **({"skipped": event.num_skipped} if event.num_skipped else {}),
    )


def _say(**fields: object) -> None:
    """Prints a log line that begins with the time, as the lines of `brigade serve` do."""
    now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    pairs = (f"{name}={value}" for name, value in fields.items())
    _OUT.print(now, *pairs, soft_wrap=True, markup=False)


def _tell(sentence: str) -> None:
    _OUT.print(sentence, soft_wrap=True, markup=False)


def _show_start(event: Started) -> None:
    _tell(f"{event.size}, {event.num_trained:,} trained parameters")
    if event.num_cut or event.num_dropped:
        _tell(
            f"{event.num_cut} examples are cut at --max-seq-length, {event.num_dropped} "
            "are left out: they are too long or have nothing to learn"
        )
    if event.iteration:
        _tell(f"Continues after {event.iteration} batches.")
    schedule = event.schedule
    shape = event.schedule.shape
    layout = event.layout
    num_parts = shape.num_micro_batches * layout.num_replicas
    parts = f"{num_parts} micro-batch{'es' * (num_parts > 1)}"
    table = Table("rank")
    table.title = f"Schedule {schedule.kind}: {parts} an update"
    if layout.num_ranks > layout.pipeline_size:
        table.add_column("replica")
        table.add_column("shard")
        table.title += f", on {layout}"
    for header in ("layers", "micro-batches in memory", "peak memory (forecast)"):
        table.add_column(header)
    for rank, peak in enumerate(event.forecast.peak_bytes):
        ranges = [event.layers[n] for n in shape.stages(layout.place(rank))]
        layers = " ".join(f"{start}-{end - 1}" for start, end in ranges)
        cells = [layers, str(event.forecast.in_flight[rank]), format_bytes(peak)]
        if layout.num_ranks > layout.pipeline_size:
            cells = [str(layout.replica(rank)), str(layout.shard(rank)), *cells]
        table.add_row(str(rank), *cells)
    _OUT.print(table)
    if shape.num_ranks > 1:
        waiting = f"{1 - event.forecast.utilisation:.0%}"
        _tell(
            f"Ranks will wait for each other {waiting} of the time (the bubble of the schedule, by "
            "forecast)."
        )


def _show_nothing_left(event: NothingLeft) -> None:
    if event.is_early:
        _tell(
            f"--early-stop has ended this run after {event.iteration} batches; give a higher "
            "--early-stop, or none, to continue."
        )
    else:
        _tell(f"All {event.iteration} batches are done; give more --iters to continue.")


def _show_end(event: Finished) -> None:
    table = Table("", "forecast", "measured", title="Forecast and measurement")
    peaks = zip(event.forecast.peak_bytes, event.peak_bytes, strict=True)
    for rank, (before, measured) in enumerate(peaks):
        table.add_row(f"peak memory, rank {rank}", format_bytes(before), format_bytes(measured))
    shares = event.forecast.utilisation, event.utilisation, event.expected_utilisation
    forecast, waited, schedule = (f"{1 - each:.0%}" for each in shares)
    if len(event.peak_bytes) > 1:
        table.add_row("time that ranks waited", forecast, waited)
    _OUT.print(table)
    if len(event.peak_bytes) > 1:
        _tell(
            f"The bubble of the schedule is {schedule} of the time, at the measured speed "
            "of each rank; the rest of the waiting was for messages between ranks."
        )
    if event.is_early:
        _say(iteration=event.iteration, stopped="early", reason="--early-stop")
    if event.best:
        _say(iteration=event.best[0], best_valid_loss=f"{event.best[1]:.4f}")
