"""The output of a training run on rank 0: tables, and a line for each report."""

import time
from collections.abc import Callable
from datetime import datetime

from rich.table import Table

from serve.cli.output import StandardOutput
from serve.core.amounts import format_bytes
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

_OUT = StandardOutput(highlight=False)


class TrainingView:
    """Shows the events of a run, one after the other. clock returns seconds; tests replace it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        self._first = 0
        self._total = 0

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                _show_start(event)
                self._began = self._clock()
                self._first = event.iteration
                self._total = event.num_iterations
            case Reported():
                _show_report(event, self._progress(event.iteration))
            case NothingLeft():
                _show_nothing_left(event)
            case Validated():
                _show_validation(event)
            case Saved():
                _log(iteration=event.iteration, saved=event.path)
            case Finished():
                _show_end(event)
            case Written():
                _log(wrote=" ".join(map(str, event.paths)))
                if event.without:
                    _log(without=event.without)

    def _progress(self, iteration: int) -> dict[str, str]:
        """Describes how much of the run is done, and how long the rest takes at the pace so far."""
        if not self._total:
            return {}
        share = iteration / self._total
        num_done = iteration - self._first
        num_left = self._total - iteration
        seconds = self._clock() - self._began
        seconds_each = seconds / max(1, num_done)
        left = format_seconds(num_left * seconds_each)
        return {"done": f"{share:.0%}", "left": left}


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
    memory = format_bytes(max(event.peak_bytes))
    skipped = {"skipped": event.num_skipped} if event.num_skipped else {}
    _log(
        iteration=event.iteration,
        **progress,
        loss=f"{event.loss:.4f}",
        learning_rate=f"{event.learning_rate:.3e}",
        gradient_norm=f"{event.gradient_norm:.3f}",
        tokens_per_second=f"{event.tokens_per_second:.0f}",
        iterations_per_second=f"{event.iterations_per_second:.2f}",
        busy=f"{event.utilisation:.0%}",
        memory=memory.replace(" ", ""),
        **skipped,
    )


def _show_validation(event: Validated) -> None:
    loss = {f"{event.name}_loss": f"{event.loss:.4f}"}
    _log(iteration=event.iteration, **loss, seconds=f"{event.seconds:.1f}")


def _log(**fields: object) -> None:
    """Prints a log line that begins with the time, as the lines of `brigade serve` do."""
    now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    pairs = [f"{name}={value}" for name, value in fields.items()]
    _OUT.print(now, *pairs, soft_wrap=True, markup=False)


def _print(sentence: str) -> None:
    _OUT.print(sentence, soft_wrap=True, markup=False)


def _show_start(event: Started) -> None:
    _print(f"{event.size}, {event.num_trained:,} trained parameters")
    if event.num_cut or event.num_dropped:
        _print(
            f"{event.num_cut} examples are cut at --max-seq-length, {event.num_dropped} "
            "are left out: they are too long or contain no tokens to learn"
        )
    if event.iteration:
        _print(f"Continues after {event.iteration} batches.")
    _OUT.print(_schedule_table(event))
    if event.schedule.shape.num_ranks > 1:
        waiting = _share(1 - event.forecast.utilisation)
        _print(
            f"Ranks will wait for each other {waiting} of the time (the bubble of the schedule, by "
            "forecast)."
        )


def _schedule_table(event: Started) -> Table:
    """Describes the part of the work that each rank does, and the memory that it will take."""
    schedule = event.schedule
    layout = event.layout
    forecast = event.forecast
    num_parts = schedule.shape.num_micro_batches * layout.num_replicas
    unit = "micro-batch" if num_parts == 1 else "micro-batches"
    is_divided = layout.num_ranks > layout.pipeline_size
    table = Table("rank")
    table.title = f"Schedule {schedule.kind}: {num_parts} {unit} an update"
    if is_divided:
        table.title += f", on {layout}"
        table.add_column("replica")
        table.add_column("shard")
    table.add_column("layers")
    table.add_column("micro-batches in memory")
    table.add_column("peak memory (forecast)")
    for rank, peak_bytes in enumerate(forecast.peak_bytes):
        cells = [str(rank)]
        if is_divided:
            cells += [str(layout.replica(rank)), str(layout.shard(rank))]
        cells.append(_layers_of_rank(event, rank))
        cells.append(str(forecast.in_flight[rank]))
        cells.append(format_bytes(peak_bytes))
        table.add_row(*cells)
    return table


def _layers_of_rank(event: Started, rank: int) -> str:
    """Names the layers of a rank: several ranges in an interleaved schedule."""
    place = event.layout.place(rank)
    words = []
    for stage in event.schedule.shape.stages(place):
        start, end = event.layers[stage]
        words.append(f"{start}-{end - 1}")
    return " ".join(words)


def _show_nothing_left(event: NothingLeft) -> None:
    if event.is_early:
        _print(
            f"--early-stop has ended this run after {event.iteration} batches; give a higher "
            "--early-stop, or none, to continue."
        )
    else:
        _print(f"All {event.iteration} batches are done; give more --iters to continue.")


def _show_end(event: Finished) -> None:
    has_several_ranks = len(event.peak_bytes) > 1
    table = _comparison(event)
    if has_several_ranks:
        forecast = _share(1 - event.forecast.utilisation)
        measured = _share(1 - event.utilisation)
        table.add_row("time that ranks waited", forecast, measured)
    _OUT.print(table)
    if has_several_ranks:
        bubble = _share(1 - event.expected_utilisation)
        _print(
            f"The bubble of the schedule is {bubble} of the time, at the measured speed "
            "of each rank; the rest of the waiting was for messages between ranks."
        )
    if event.is_early:
        _log(iteration=event.iteration, stopped="early", reason="--early-stop")
    if event.best:
        iteration, loss = event.best
        _log(iteration=iteration, best_valid_loss=f"{loss:.4f}")


def _comparison(event: Finished) -> Table:
    """Compares the peak memory of each rank with its forecast."""
    table = Table("", "forecast", "measured", title="Forecast and measurement")
    peaks = zip(event.forecast.peak_bytes, event.peak_bytes, strict=True)
    for rank, (forecast_bytes, measured_bytes) in enumerate(peaks):
        forecast = format_bytes(forecast_bytes)
        measured = format_bytes(measured_bytes)
        table.add_row(f"peak memory, rank {rank}", forecast, measured)
    return table


def _share(number: float) -> str:
    return f"{number:.0%}"
