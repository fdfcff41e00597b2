"""Throughput and latency against the number of clients: of all servers, and of two shards."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import httpx2

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Asked, Row, Settings, Table, ask_server, in_turn
from scripts.measure.sums import p50, ratio
from serve.bench.client import connected
from serve.bench.config import BenchConfig, Level
from serve.bench.load import Target
from serve.bench.records import Record, Summary, summarise

LONG_TOKENS = 2048
Runs = dict[tuple[str, int], list[list[Record]]]
"""The records of each round, by the server and the number of clients."""
Summaries = dict[tuple[str, int], Summary]


def curve(settings: Settings) -> Row:
    runs: Runs = {}

    def run(name: str, round_: int) -> None:
        with servers.running(name, settings.model) as url:
            asyncio.run(_levels(settings, runs, name, round_, url))

    in_turn(settings, servers.SERVERS, run)
    summaries = _summaries(settings, runs, servers.SERVERS)
    return Row(
        data={"curve": _data(summaries)},
        tables=_tables(settings, summaries, servers.BRIGADE_2, servers.SERVERS),
    )


def shards(settings: Settings) -> Row:
    """Two shards beside one rank and mlx_lm.server: the curve, and a long prompt alone."""
    names = (servers.SHARDS_2, servers.BRIGADE_1, servers.MLX_LM_1)
    runs: Runs = {}
    first_tokens: dict[str, list[float]] = {name: [] for name in names}
    sums: list[dict[str, Any]] = []

    def run(name: str, round_: int) -> None:
        async def ask(asked: Asked, url: str) -> None:
            await _levels(settings, runs, name, round_, url)
            warm_up, *prompts = asked.prompts(f"shards/{round_}", LONG_TOKENS, 4)
            await asked(warm_up, 2)
            for prompt in prompts:
                record = await asked(prompt, 2)
                first_tokens[name].append(record.times[0] - record.start)
            if name == servers.SHARDS_2:
                sums.append(httpx2.get(f"{url}/admin/pipeline").json()["stages"][0]["all_reduce"])

        ask_server(name, settings, ask)

    in_turn(settings, names, run)
    summaries = _summaries(settings, runs, names)
    data = {"curve": _data(summaries), "first_tokens": first_tokens, "all_reduce": sums}
    tables = _tables(settings, summaries, servers.SHARDS_2, names)
    ours = first_tokens[servers.SHARDS_2]
    rows: list[list[object]] = []
    for name, seconds in first_tokens.items():
        rows.append([name, f"{p50(seconds):.2f}", f"{ratio(ours, seconds):.2f}"])
    columns = ["server", "seconds", "two shards ÷ this one's"]
    tables[f"time to first token of {LONG_TOKENS} tokens"] = (columns, rows)
    shares: list[list[object]] = []
    for each in sums:
        share = each["seconds"] / each["step_seconds"] if each["step_seconds"] else float("nan")
        shares.append([f"{share:.0%}", each["num_sums"], f"{each['num_bytes'] / 1e6:.1f}"])
    columns = ["share of measured steps", "sums", "MB sent"]
    tables["sums between two shards, for each round"] = (columns, shares)
    return Row({"shards": data}, tables)


async def _levels(settings: Settings, runs: Runs, name: str, round_: int, url: str) -> None:
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


def _summaries(settings: Settings, runs: Runs, names: Sequence[str]) -> Summaries:
    keys = [(name, clients) for name in names for clients in settings.levels]
    return {key: summarise(runs.get(key, [])) for key in keys}


def _data(summaries: Summaries) -> list[dict[str, Any]]:
    return [
        {"server": name, "clients": clients, **asdict(summary)}
        for (name, clients), summary in summaries.items()
    ]


def _tables(
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
