"""What people see while a cluster starts: the plan, progress, and what was read and fetched."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from serve.cli.output import Output
from serve.cli.plan import plan_table
from serve.core.plan import StagePlan, format_bytes
from serve.front.pipeline.stages import StageStatus

_LINE_SECONDS = 5.0
_LINE_COLUMNS = 100


class StartView:
    """Tables on stdout, and on stderr a bar for each rank that fetches or loads: live on a
    terminal, else as lines now and then, which a launcher can pass on."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        if not console.is_terminal:
            console = Console(stderr=True, highlight=False, width=_LINE_COLUMNS)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            get_time=time.monotonic,
            auto_refresh=False,
            transient=True,
        )
        self._tasks: dict[int, tuple[str, TaskID]] = {}
        self._shown_at = time.monotonic()

    def planned(self, stages: Sequence[StagePlan]) -> None:
        Output(highlight=False).print(plan_table(stages))

    def ready(self, stages: Sequence[StageStatus]) -> None:
        table = Table("rank", "host", "layers", "owned", "read", "fetched")
        for stage in stages:
            start, end = stage.plan.layers if stage.plan else (0, 0)
            table.add_row(
                str(stage.rank),
                stage.host,
                f"[{start}, {end})",
                format_bytes(stage.bytes_owned),
                "" if stage.bytes_read is None else format_bytes(stage.bytes_read),
                format_bytes(stage.bytes_fetched),
            )
        Output(highlight=False).print(table)

    def progressed(self, stage: StageStatus) -> None:
        if not stage.total:
            self._hide(stage.rank)
        else:
            self._bars.update(self._task(stage), completed=stage.done, total=stage.total)
        if self._bars.console.is_terminal:
            # A live bar holds the cursor: only as long as there is something to show.
            if self._tasks:
                self._bars.start()
                self._bars.refresh()
            else:
                self.close()
        elif self._tasks and time.monotonic() - self._shown_at > _LINE_SECONDS:
            self._shown_at = time.monotonic()
            self._bars.console.print(self._bars.get_renderable())

    def close(self) -> None:
        if self._bars.console.is_terminal:
            self._bars.stop()

    def _task(self, stage: StageStatus) -> TaskID:
        state, task = self._tasks.get(stage.rank, ("", TaskID(-1)))
        if state != stage.state:
            self._hide(stage.rank)
            task = self._bars.add_task(f"rank {stage.rank} {stage.state}")
            self._tasks[stage.rank] = stage.state, task
        return task

    def _hide(self, rank: int) -> None:
        if rank in self._tasks:
            self._bars.remove_task(self._tasks.pop(rank)[1])
