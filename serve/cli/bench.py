"""`brigade bench`: put load on an OpenAI-compatible server, or on two in turn, and report speed and
latency."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve.bench.client import connected
from serve.bench.config import BenchConfig, Level
from serve.bench.load import LoadGenerator, num_requests
from serve.bench.plot import check_plot, draw
from serve.bench.records import RequestRecord, Summary, summarise
from serve.cli.flags import parse
from serve.core.errors import ClusterError, UsageError

Runs = dict[tuple[Level, str], list[list[RequestRecord]]]
"""The records of each round, by level and server. A server is `A: URL` or `B: URL`, because one URL
may be given twice, to see how much equal servers differ."""
_PROGRESS_SECONDS = 10.0
_COLUMNS = ("answers", "errors", "prompt", "tok/s", "TTFT ms p50", "p99", "ITL ms p50", "p99")


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
    """Measures servers, fills runs and shows them. Raises BrigadeError if a server is silent."""
    async with AsyncExitStack() as stack:
        generators: dict[str, LoadGenerator] = {}
        for url in config.url:
            link = connected(url, config.model, os.environ.get("OPENAI_API_KEY"), config.timeout)
            server = await stack.enter_async_context(link)
            letter = "AB"[len(generators)]
            generators[f"{letter}: {url}"] = await LoadGenerator.calibrated(config, server)
        console = Console()
        if console.is_terminal:
            # The table is drawn rarely, because drawing it sorts all records so far, in the
            # process that takes the times.
            with Live(
                get_renderable=lambda: table(runs),
                console=console,
                refresh_per_second=0.5,
            ):
                await run_levels(config, generators, runs, ProgressReporter(lambda _: None))
            return
        try:
            await run_levels(config, generators, runs, ProgressReporter(tell))
        finally:
            with console.capture() as shown:
                console.print(table(runs))
            print("\n".join(line.rstrip() for line in shown.get().splitlines()))


class ProgressReporter:
    """Reports when a run begins, and from time to time how many of its requests have ended."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._what = ""
        self._told_at = 0.0

    def begin_run(self, what: str) -> None:
        self._what = what
        self._say(what)

    def ended(self, num_ended: int, num_requests: int) -> None:
        if time.monotonic() - self._told_at >= _PROGRESS_SECONDS:
            self._say(f"{self._what}: {num_ended} of {num_requests} requests have ended")

    def _say(self, text: str) -> None:
        self._told_at = time.monotonic()
        self._tell(text)


async def run_levels(
    config: BenchConfig,
    generators: Mapping[str, LoadGenerator],
    runs: Runs,
    progress: ProgressReporter,
) -> None:
    """Sends the load of each level to each server in turn."""
    for level in config.levels:
        for round_ in range(config.rounds):
            for name, generator in generators.items():
                progress.begin_run(f"{level}, round {round_ + 1} of {config.rounds}, {name}")
                records: list[RequestRecord] = []
                runs.setdefault((level, name), []).append(records)
                on_record = _recorder(records, progress, num_requests(config, level))
                await generator.run(level, round_, on_record)


def _recorder(
    records: list[RequestRecord], progress: ProgressReporter, num_requests: int
) -> Callable[[RequestRecord], None]:
    def on_record(record: RequestRecord) -> None:
        records.append(record)
        progress.ended(len(records), num_requests)

    return on_record


def tell(text: str) -> None:
    """Writes a line to stderr. On stdout there is only the table, at the end."""
    print(f"brigade bench: {text}", file=sys.stderr, flush=True)


def table(runs: Runs) -> Table:
    """Returns a table with a row for each load and server. Its caption gives reasons of errors."""
    # The table has to fit into 80 columns, so it is as narrow as its numbers.
    shown = Table(
        box=None,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    shown.title = Text("\n".join(dict.fromkeys(name for _, name in runs)))
    shown.add_column("load", no_wrap=True)
    for column in _COLUMNS:
        shown.add_column(column, justify="right", no_wrap=True)
    reasons: list[str] = []
    for (level, name), rounds in runs.items():
        letter = name[0]
        summary = summarise(rounds)
        shown.add_row(f"{level} {letter}", *_cells(summary))
        reasons += [f"{level}, {letter}: {reason}" for reason in _reasons(summary)]
    shown.caption = Text("\n".join(reasons))
    return shown


def _cells(summary: Summary) -> list[str]:
    """Returns the cells of a table row, one for each of _COLUMNS."""
    num_errors = sum(summary.errors.values())
    prompt_tokens = summary.prompt_tokens
    return [
        str(summary.num_requests - num_errors),
        str(num_errors),
        "" if prompt_tokens is None else f"{prompt_tokens:g}",
        f"{summary.tokens_per_second:.1f}",
        _milliseconds(summary.ttft_p50_seconds),
        _milliseconds(summary.ttft_p99_seconds),
        _milliseconds(summary.itl_p50_seconds),
        _milliseconds(summary.itl_p99_seconds),
    ]


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    num_digits = 1 if seconds < 10 else 0
    return f"{seconds * 1000:.{num_digits}f}"


def _reasons(summary: Summary) -> list[str]:
    reasons = [f"{count} x {reason}" for reason, count in summary.errors.items()]
    if summary.num_reconnected:
        reasons.append(f"{summary.num_reconnected} x connected on the second try")
    return reasons


def write(config: BenchConfig, summaries: Mapping[tuple[Level, str], Summary]) -> None:
    """Writes the summaries as --output and --plot ask for. Raises OSError."""
    if config.output:
        results: list[dict[str, Any]] = []
        for (level, name), summary in summaries.items():
            result = {"server": name, "load": str(level), **asdict(summary)}
            results.append(result)
        written = {"flags": asdict(config), "results": results}
        text = json.dumps(written, indent=2, default=str)
        config.output.write_text(text + "\n", "utf-8")
    if config.plot:
        curves: dict[str, list[tuple[float, Summary]]] = {}
        for (level, name), summary in summaries.items():
            point = level.value, summary
            curves.setdefault(name, []).append(point)
        axis = "requests per second" if config.rate else "clients"
        draw(config.plot, axis, curves)
