"""`brigade bench`: put load on an OpenAI-compatible server, or on two in turn, and report speed and
latency."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve.bench.client import connected
from serve.bench.config import BenchConfig, Level
from serve.bench.load import Target
from serve.bench.plot import check_plot, draw
from serve.bench.records import Record, Summary, summarise
from serve.cli.flags import parse
from serve.core.errors import ClusterError, UsageError

# Of each level and server, the records of each round. A server is `A: URL` or `B: URL`, as
# one URL may be given twice, to see how much equal servers differ.
Runs = dict[tuple[Level, str], list[list[Record]]]


def run(argv: Sequence[str]) -> int:
    config = parse(BenchConfig, argv, "brigade bench", __doc__)
    if config.plot:
        check_plot(config.plot)
    for path in filter(None, (config.output, config.plot)):
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is not a folder: {path} cannot be written there.")
    runs: Runs = {}
    try:
        asyncio.run(measure(config, runs))
    except KeyboardInterrupt:
        return 130
    summaries = {key: summarise(rounds) for key, rounds in runs.items()}
    try:
        write(config, summaries)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}.") from error
    for (level, name), summary in summaries.items():
        if not summary.chunks:
            raise ClusterError(f"{name} gave no complete answer at {level}: see the table.")
    return 0


async def measure(config: BenchConfig, runs: Runs) -> None:
    """Fills runs, and shows them meanwhile. Raises BrigadeError if a server is not there."""
    async with AsyncExitStack() as stack:
        targets: dict[str, Target] = {}
        for url in config.url:
            link = connected(url, config.model, os.environ.get("OPENAI_API_KEY"), config.timeout)
            target = await Target.calibrated(config, await stack.enter_async_context(link))
            targets[f"{'AB'[len(targets)]}: {url}"] = target
        console = Console()
        if console.is_terminal:
            # Seldom: it sorts all that came so far, in the process that takes the times.
            with Live(
                get_renderable=lambda: table(runs),
                console=console,
                refresh_per_second=0.5,
            ):
                await run_levels(config, targets, runs, lambda _: None)
            return
        try:
            await run_levels(config, targets, runs, tell)
        finally:
            with console.capture() as shown:
                console.print(table(runs))
            print("\n".join(line.rstrip() for line in shown.get().splitlines()))


async def run_levels(
    config: BenchConfig,
    targets: Mapping[str, Target],
    runs: Runs,
    begin: Callable[[str], None],
) -> None:
    """Sends the load of each level to each server in turn. Before each of these runs, begin is
    called with a line about it."""
    for level in config.levels:
        for round_ in range(config.rounds):
            for name, target in targets.items():
                begin(f"{level}, round {round_ + 1} of {config.rounds}, {name}")
                records: list[Record] = []
                runs.setdefault((level, name), []).append(records)
                await target.run(level, round_, records.append)


def tell(text: str) -> None:
    """Writes a line to stderr. On stdout there is only the table, at the end."""
    print(f"brigade bench: {text}", file=sys.stderr, flush=True)


def table(runs: Runs) -> Table:
    """Returns one row for each load and server, seconds as milliseconds; below it, each error's
    reason."""
    # As narrow as its numbers are: it has to fit into 80 columns.
    shown = Table(
        box=None,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    shown.title = Text("\n".join(dict.fromkeys(name for _, name in runs)))
    shown.add_column("load", no_wrap=True)
    columns = ("answers", "errors", "prompt", "tok/s", "TTFT ms p50", "p99", "ITL ms p50", "p99")
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    reasons = []
    for (level, name), rounds in runs.items():
        each = summarise(rounds)
        num_errors = sum(each.errors.values())
        ttft = (each.ttft_p50_seconds, each.ttft_p99_seconds)
        itl = (each.itl_p50_seconds, each.itl_p99_seconds)
        shown.add_row(
            f"{level} {name[0]}",
            str(each.num_requests - num_errors),
            str(num_errors),
            "" if each.prompt_tokens is None else f"{each.prompt_tokens:g}",
            f"{each.tokens_per_second:.1f}",
            *(
                "" if value is None else f"{value * 1000:.{int(value < 10)}f}"
                for value in ttft + itl
            ),
        )
        reasons += [f"{level}, {name[0]}: {n} x {reason}" for reason, n in each.errors.items()]
        if each.num_reconnected:
            reasons.append(
                f"{level}, {name[0]}: {each.num_reconnected} x connected on the second try"
            )
    shown.caption = Text("\n".join(reasons))
    return shown


def write(config: BenchConfig, summaries: Mapping[tuple[Level, str], Summary]) -> None:
    if config.output:
        results = [
            {"server": name, "load": str(level), **asdict(each)}
            for (level, name), each in summaries.items()
        ]
        text = json.dumps({"flags": asdict(config), "results": results}, indent=2, default=str)
        config.output.write_text(text + "\n", "utf-8")
    if config.plot:
        curves: dict[str, list[tuple[float, Summary]]] = {}
        for (level, name), each in summaries.items():
            curves.setdefault(name, []).append((level.value, each))
        draw(config.plot, "requests per second" if config.rate else "clients", curves)
