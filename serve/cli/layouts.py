"""Shows the layouts of stages and shards that `brigade plan` compares."""

from collections.abc import Callable, Iterator

from rich import box
from rich.table import Table

from serve.core.amounts import format_bytes
from serve.core.layouts import Forecast, best
from serve.model.layouts import Comparison


def layout_table(compared: Comparison) -> Table:
    """Returns a table with one row for each layout."""
    clients = compared.fastest.num_clients
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
    for layout, one in compared.one_client.items():
        many = compared.many_clients[layout]
        cells = [cell(one, many) for cell in columns.values()]
        table.add_row(*cells)
    return table


def layout_notes(compared: Comparison) -> Iterator[str]:
    """Yields the sentences below the table."""
    for layout, plan in compared.plans.items():
        if plan.warning:
            yield f"{layout}: {plan.warning}"
    for layout, reason in compared.refused.items():
        yield f"{layout} is not possible: {reason}"
    speed = format_bytes(compared.speeds.memory_bytes_per_second)
    quickest = best(list(compared.one_client.values()))
    fastest = compared.fastest
    yield (
        f"Forecast from bytes, for memory that is read at {speed}/s: one client gets its "
        f"tokens soonest with {quickest.layout} (--tensor-parallel-size {quickest.num_shards}), "
        f"{fastest.num_clients} clients with {fastest.layout} "
        f"(--tensor-parallel-size {fastest.num_shards})."
    )
