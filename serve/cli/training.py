"""What people see of a run, on rank 0: tables, a line for each report, and on a terminal a bar
below them."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from serve.cli.output import Output
from serve.core.plan import format_bytes
from serve.tune.events import Event, Finished, Reported, Saved, Started, Validated, Written

_OUT = Output(highlight=False)  # What is shown is not what a run is for.


class TrainingView:
    def __init__(self) -> None:
        columns = MofNCompleteColumn(), TextColumn("batches,"), TimeRemainingColumn()
        self._bar = Progress(BarColumn(), *columns, TextColumn("left"), console=_OUT)
        self._task = self._bar.add_task("")

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                _show_start(event)
                self._bar.update(self._task, total=event.num_iterations)
                self._move(event.iteration)
            case Reported():
                _show_report(event)
                self._move(event.iteration)
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

    def _move(self, iteration: int) -> None:
        """Where nobody looks at a terminal, the lines say it all."""
        self._bar.update(self._task, completed=iteration)
        if _OUT.is_terminal:
            self._bar.start()

    def close(self) -> None:
        if _OUT.is_terminal:
            self._bar.stop()


def _show_report(event: Reported) -> None:
    _say(
        iteration=event.iteration,
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
    _OUT.print(*(f"{k}={value}" for k, value in fields.items()), soft_wrap=True, markup=False)


def _show_start(event: Started) -> None:
    _OUT.print(f"{event.size}, {event.num_trained:,} trained parameters")
    if event.num_cut or event.num_dropped:
        _OUT.print(
            f"{event.num_cut} examples are cut at --max-seq-length, {event.num_dropped} left out: "
            "too long, or without anything to learn"
        )
    if event.iteration:
        _OUT.print(f"goes on after {event.iteration} batches")
    schedule, shape = event.schedule, event.schedule.shape
    table = Table("rank", "layers", "micro-batches held", "peak memory, forecast")
    for rank, peak in enumerate(event.forecast.peak_bytes):
        layers = " ".join("[{}, {})".format(*event.layers[n]) for n in shape.stages(rank))
        table.add_row(str(rank), layers, str(event.forecast.in_flight[rank]), format_bytes(peak))
    table.title = f"{schedule.kind}, {shape.num_micro_batches} micro-batches an update"
    table.caption = f"bubble, forecast: {1 - event.forecast.utilisation:.0%}"
    _OUT.print(table)


def _show_end(event: Finished) -> None:
    table = Table("", "forecast", "measured")
    peaks = zip(event.forecast.peak_bytes, event.peak_bytes, strict=True)
    for rank, (before, measured) in enumerate(peaks):
        table.add_row(f"peak memory, rank {rank}", format_bytes(before), format_bytes(measured))
    bubbles = event.forecast.utilisation, event.utilisation, event.expected_utilisation
    shown = [f"{1 - each:.0%}" for each in bubbles]
    table.add_row("bubble", *shown[:2])
    table.add_row("bubble, by the costs of the run", shown[2], shown[1])
    _OUT.print(table)
    if event.is_early:
        _say(iteration=event.iteration, stopped="early", reason="--early-stop")
    if event.best:
        _say(iteration=event.best[0], best_valid_loss=f"{event.best[1]:.4f}")
