"""Compares the layouts of stages and shards that `brigade plan` could choose."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from serve.core.errors import PlanError
from serve.core.layouts import Forecast, Link, Speeds, best, forecast
from serve.core.plan import PlanRequest, format_bytes
from serve.model.planning import make_plan
from serve.rank.memory import memory_speed


@dataclass(frozen=True, slots=True)
class Comparison:
    """The forecasts of all possible layouts by name, such as "2 x 1", for one client and for many.
    refused has the reasons why other layouts are not possible."""

    one_client: dict[str, Forecast]
    many_clients: dict[str, Forecast]
    refused: dict[str, str]
    speeds: Speeds

    @property
    def fastest(self) -> Forecast:
        """The layout that is fastest with many clients."""
        return best(list(self.many_clients.values()))

    def to_json(self) -> dict[str, Any]:
        layouts: list[dict[str, Any]] = []
        for forecasts in (self.one_client, self.many_clients):
            layouts += [asdict(each) for each in forecasts.values()]
        return {"layouts": layouts, "refused_layouts": self.refused}

    def table(self) -> Table:
        clients = self.fastest.num_clients
        columns: dict[str, Callable[[Forecast, Forecast], str]] = {
            "stages x\nshards": lambda one, _: one.layout,
            "weights on\na rank": lambda one, _: format_bytes(one.weight_bytes),
            "1 client:\nms/token": lambda one, _: f"{one.step_seconds * 1e3:.1f}",
            "of these\nin sums": lambda one, _: f"{one.sum_seconds * 1e3:.1f}",
            f"{clients} clients:\ntok/s": lambda _, many: f"{many.tokens_per_second:.0f}",
        }
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for layout, one in self.one_client.items():
            many = self.many_clients[layout]
            cells = [cell(one, many) for cell in columns.values()]
            table.add_row(*cells)
        return table

    def notes(self) -> Iterator[str]:
        """Yields the lines below the table: refused layouts with their reasons, and the fastest."""
        for layout, reason in self.refused.items():
            yield f"{layout} is not possible: {reason}"
        speed = format_bytes(self.speeds.memory_bytes_per_second)
        quickest = best(list(self.one_client.values()))
        fastest = self.fastest
        yield (
            f"Forecast from bytes, with memory that is read at {speed}/s: one client gets its "
            f"tokens soonest with {quickest.layout}, {fastest.num_clients} clients with "
            f"{fastest.layout} (stages x shards)."
        )


def compare(
    folder: Path,
    request: PlanRequest,
    link: Link,
    memory_bytes_per_second: float | None,
) -> Comparison:
    """Forecasts every layout of the ranks of the request. Without memory_bytes_per_second, the
    memory of this machine is measured. Raises PlanError if no layout is possible."""
    speeds = Speeds(memory_bytes_per_second or memory_speed(), link)
    found = Comparison({}, {}, {}, speeds)
    for num_shards in range(1, request.num_ranks + 1):
        if request.num_ranks % num_shards:
            continue
        layout = f"{request.num_ranks // num_shards} x {num_shards}"
        try:
            plan = make_plan(folder, replace(request, num_shards=num_shards))
        except PlanError as error:
            found.refused[layout] = str(error)
            continue
        hop_bytes = plan.hop_bytes_per_token
        found.one_client[layout] = forecast(plan.stages, hop_bytes, 1, speeds)
        clients = max(2, request.concurrency)
        found.many_clients[layout] = forecast(plan.stages, hop_bytes, clients, speeds)
    if not found.one_client:
        raise PlanError("; ".join(found.refused.values()))
    return found
