"""The output while a cluster starts: the plan, progress, and the server's address."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from serve.cli.output import StandardOutput
from serve.cli.plan import plan_table, print_table
from serve.core.amounts import format_bytes
from serve.core.plan import StagePlan
from serve.front.pipeline.status import StageStatus

READY_STYLE = "bold green"
_LINE_SECONDS = 5.0
_LINE_COLUMNS = 100
_WARM_UP = "warming up: one step of each kind"


class TerminalView:
    """Prints the plan and, when the server is ready, its address on stdout. On stderr it shows the
    progress of fetching, loading and the warm-up: live bars on a terminal, otherwise an occasional
    line."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._sampling = ""
        console = Console(stderr=True, highlight=False)
        if not console.is_terminal:
            console = Console(stderr=True, highlight=False, width=_LINE_COLUMNS)
        self._bars = _progress(
            console,
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._warm_up = _progress(console, TaskProgressColumn())
        self._tasks: dict[int, tuple[str, TaskID]] = {}
        self._shown_at = time.monotonic()

    def planned(self, stages: Sequence[StagePlan]) -> None:
        print_table(plan_table(stages))

    def loaded(self, stages: Sequence[StageStatus], room: int) -> None:
        owned = format_bytes(sum(stage.loaded.bytes_owned for stage in stages))
        fetched = sum(stage.loaded.bytes_fetched for stage in stages)
        from_neighbours = sum(stage.loaded.bytes_from_neighbours for stage in stages)
        more = ""
        if fetched:
            more = f", {format_bytes(fetched)} of them fetched"
        if from_neighbours:
            more += f" ({format_bytes(from_neighbours)} from other machines)"
        line = f"Loaded {owned}{more}. There is room for keys and values of {room:,} tokens."
        StandardOutput(highlight=False, soft_wrap=True).print(line)

    def sampling(self, defaults: Mapping[str, float | int]) -> None:
        """Stores the model's own sampling parameters, to print them when the server is ready."""
        self._sampling = ", ".join(f"{name} {value:g}" for name, value in defaults.items())

    def ready(self) -> None:
        if self._sampling:
            StandardOutput(highlight=False, soft_wrap=True).print(
                f"Sampling by default: {self._sampling} (generation_config.json)",
                markup=False,
            )
        StandardOutput(highlight=False, soft_wrap=True).print(
            f"Ready on {self._url}, model {self._model}",
            markup=False,
            style=READY_STYLE,
        )

    def progressed(self, stage: StageStatus) -> None:
        if not stage.latest.total:
            self._hide(stage.rank)
        else:
            self._bars.update(
                self._task(stage), completed=stage.latest.done, total=stage.latest.total
            )
        self._show(self._bars)

    def warming_up(self, done: int, total: int) -> None:
        """Shows that done of total warm-up steps are done. total is 0 at the end."""
        if not total:
            for task in self._warm_up.task_ids:
                self._warm_up.remove_task(task)
        elif not self._warm_up.tasks:
            self._shown_at = time.monotonic()
            self._warm_up.add_task(_WARM_UP, completed=done, total=total)
        else:
            self._warm_up.update(self._warm_up.task_ids[0], completed=done, total=total)
        self._show(self._warm_up)

    def _show(self, bars: Progress) -> None:
        if bars.console.is_terminal:
            # A live bar occupies the cursor, so it exists only while there is progress to show.
            if bars.tasks:
                bars.start()
                bars.refresh()
            else:
                bars.stop()
        elif bars.tasks and time.monotonic() - self._shown_at > _LINE_SECONDS:
            self._shown_at = time.monotonic()
            bars.console.print(bars.get_renderable())

    def close(self) -> None:
        if self._bars.console.is_terminal:
            self._bars.stop()
            self._warm_up.stop()

    def _task(self, stage: StageStatus) -> TaskID:
        state, task = self._tasks.get(stage.rank, ("", TaskID(-1)))
        if not self._tasks:
            self._shown_at = time.monotonic()  # A quick task gets no line.
        if state != stage.state:
            self._hide(stage.rank)
            task = self._bars.add_task(f"rank {stage.rank} {stage.state}")
            self._tasks[stage.rank] = stage.state, task
        return task

    def _hide(self, rank: int) -> None:
        if rank in self._tasks:
            self._bars.remove_task(self._tasks.pop(rank)[1])


def _progress(console: Console, *columns: ProgressColumn) -> Progress:
    bar = [BarColumn(bar_width=24)] if console.is_terminal else []
    return Progress(
        TextColumn("{task.description}"),
        *bar,
        *columns,
        console=console,
        get_time=time.monotonic,
        auto_refresh=False,
        transient=True,
    )
