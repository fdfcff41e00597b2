"""Throughput and latency of all servers against the number of clients."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Row, Settings, Table, in_turn
from serve.bench.client import connected
from serve.bench.config import BenchConfig, Level
from serve.bench.load import Target
from serve.bench.records import Record, Summary, summarise

Runs = dict[tuple[str, int], list[list[Record]]]
"""The records of each round, by the server and the number of clients."""
Summaries = dict[tuple[str, int], Summary]


def curve(settings: Settings) -> Row:
    runs: Runs = {}

    def run(name: str, round_: int) -> None:
        with servers.running(name, settings.model) as url:
            asyncio.run(put_load(settings, runs, name, round_, url))

    in_turn(settings, servers.SERVERS, run)
    summaries = summaries_of(settings, runs, servers.SERVERS)
    return Row(
        data={"curve": data_of(summaries)},
        tables=tables_of(settings, summaries, servers.BRIGADE_2, servers.SERVERS),
    )


async def put_load(settings: Settings, runs: Runs, name: str, round_: int, url: str) -> None:
    """Puts the load of each level on a running server, and notes the records."""
    model = servers.model_name(name, settings.model)
    for clients in settings.levels:
        config = BenchConfig(
            url=(url,),
            model=model,
            concurrency=str(clients),
            requests=settings.requests_per_client * clients,
            seed=settings.seed,
        )
        async with connected(url, model, None, TIMEOUT) as server:
            target = await Target.calibrated(config, server)
            records: list[Record] = []
            await target.run(Level(clients, False), round_, records.append)
        runs.setdefault((name, clients), []).append(records)


def summaries_of(settings: Settings, runs: Runs, names: Sequence[str]) -> Summaries:
    keys = [(name, clients) for name in names for clients in settings.levels]
    return {key: summarise(runs.get(key, [])) for key in keys}


def data_of(summaries: Summaries) -> list[dict[str, Any]]:
    return [
        {"server": name, "clients": clients, **asdict(summary)}
        for (name, clients), summary in summaries.items()
    ]


def tables_of(
    settings: Settings,
    summaries: Summaries,
    ours: str,
    names: Sequence[str],
) -> dict[str, Table]:
    def gain(name: str, n: int) -> str:
        rate = summaries[name, n].tokens_per_second
        return f"{summaries[ours, n].tokens_per_second / rate:.2f}" if rate else "-"

    cells: dict[str, Callable[[str, int], str]] = {
        "tokens/s": lambda name, n: f"{summaries[name, n].tokens_per_second:.1f}",
        f"tokens/s of {ours} ÷ this one's": gain,
        "time to first token, p50, ms": lambda name, n: _ms(summaries[name, n].ttft_p50_seconds),
        "between tokens, p50 / p99, ms": lambda name, n: (
            f"{_ms(summaries[name, n].itl_p50_seconds)} / {_ms(summaries[name, n].itl_p99_seconds)}"
        ),
        "whole answers and their tokens, errors, second connects": lambda name, n: _counts(
            summaries[name, n]
        ),
    }
    columns = ["server, by clients", *map(str, settings.levels)]
    return {
        title: (columns, [[s, *(cell(s, n) for n in settings.levels)] for s in names])
        for title, cell in cells.items()
    }


def _counts(summary: Summary) -> str:
    whole = summary.num_requests - sum(summary.errors.values())
    errors = "; ".join(f"{count} x {reason}" for reason, count in summary.errors.items())
    each = f"{summary.tokens / whole:g}" if whole else "-"
    return f"{whole} x {each}, {errors or 0}, {summary.num_reconnected}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"
