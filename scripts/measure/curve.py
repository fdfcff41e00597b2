"""Throughput and latency of servers against the number of clients."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.measure import servers
from scripts.measure.clients import TIMEOUT, Asked, ask_in_turn
from scripts.measure.rounds import Row, Settings, Table
from serve.bench.client import connected
from serve.bench.config import BenchConfig, Level
from serve.bench.load import LoadGenerator
from serve.bench.plot import draw
from serve.bench.records import RequestRecord, Summary, summarise

Runs = dict[tuple[str, int], list[list[RequestRecord]]]
"""The records of each round, by the server and the number of clients."""


def curve(settings: Settings) -> Row:
    """All servers, each under the load of every level."""
    runs: Runs = {}

    async def ask(asked: Asked, name: str, round_: int) -> None:
        for clients in settings.levels:
            run = await put_load(settings, asked.url, name, clients, round_)
            runs.setdefault((name, clients), []).append(run)

    ask_in_turn(settings, servers.SERVERS, ask)
    data, tables = summed_up(settings, runs, servers.BRIGADE_2, servers.SERVERS)
    return Row({"curve": data}, tables)


async def put_load(
    settings: Settings, url: str, name: str, clients: int, round_: int
) -> list[RequestRecord]:
    """The records of one level of load on a running server, after a warm-up."""
    model = servers.model_name(name, settings.model)
    config = BenchConfig(
        url=(url,),
        model=model,
        concurrency=str(clients),
        requests=settings.requests_per_client * clients,
        seed=settings.seed,
    )
    records: list[RequestRecord] = []
    async with connected(url, model, None, TIMEOUT) as server:
        target = await LoadGenerator.calibrated(config, server)
        await target.run(Level(clients, False), round_, records.append)
    return records


def summed_up(
    settings: Settings, runs: Runs, ours: str, names: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, Table]]:
    """The data and tables of all runs; each server is compared with ours."""
    keys = [(name, clients) for name in names for clients in settings.levels]
    summaries = {key: summarise(runs.get(key, [])) for key in keys}

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
        "errors": lambda name, n: str(sum(summaries[name, n].errors.values())),
    }
    columns = ["server, by clients", *map(str, settings.levels)]
    tables: dict[str, Table] = {
        title: (columns, [[name, *(cell(name, n) for n in settings.levels)] for name in names])
        for title, cell in cells.items()
    }
    data = [{"server": name, "clients": n, **asdict(summaries[name, n])} for name, n in keys]
    return data, tables


def picture(path: Path, data: Sequence[dict[str, Any]]) -> None:
    """Draws what summed_up returned as data."""
    curves: dict[str, list[tuple[float, Summary]]] = {}
    for each in data:
        values = {key: each[key] for key in each if key not in ("server", "clients")}
        curves.setdefault(each["server"], []).append((each["clients"], Summary(**values)))
    draw(path, "clients", curves)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"
