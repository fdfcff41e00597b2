"""Two shards beside the other layouts of two ranks, one rank and mlx_lm.server."""

import asyncio
from contextlib import suppress
from typing import Any

import httpx2
import psutil

from scripts.measure import servers
from scripts.measure.curve import Runs, Summaries, data_of, put_load, summaries_of, tables_of
from scripts.measure.limits import NUM_LAYERS, Part, run_passes
from scripts.measure.settings import Asked, Row, Settings, Table, ask_server, in_turn
from scripts.measure.sums import p50, ratio

# Two ranks have two layouts, so the layout that --tensor-parallel auto chooses is measured beside
# every one that a person could choose.
SERVERS = (
    servers.SHARDS_2,
    servers.BRIGADE_2,
    servers.AUTO_2,
    servers.BRIGADE_1,
    servers.MLX_LM_1,
)
UNCOUPLED = "two uncoupled shards"
LONG_TOKENS = 2048
PAUSE_SECONDS = 2.0  # after the last request, before a server counts as idle
IDLE_SECONDS = 10.0


class Measured:
    """What the rounds have measured so far."""

    def __init__(self) -> None:
        self.runs: Runs = {}
        self.first_tokens: dict[str, list[float]] = {name: [] for name in SERVERS}
        self.sums: list[dict[str, Any]] = []
        self.layouts: list[int] = []  # the number of shards that auto has chosen
        self.uncoupled_seconds: list[float] = []  # of one token, in the slower of two processes
        self.idle_shares: list[list[float]] = []  # of each process of two shards


def shards(settings: Settings) -> Row:
    """The curve, a long prompt alone, the bound of one client's speed, and the idle CPU."""
    measured = Measured()

    def run(name: str, round_: int) -> None:
        if name == UNCOUPLED:
            parts = [Part(0, NUM_LAYERS, num_shards=2, shard=number) for number in range(2)]
            passes = run_passes(settings, parts, batch=1)
            slower = max(p50(seconds) for seconds in passes)
            measured.uncoupled_seconds.append(slower)
            return

        async def ask(asked: Asked, url: str) -> None:
            await put_load(settings, measured.runs, name, round_, url)
            await _read_long_prompts(asked, measured.first_tokens[name], round_)
            if name == servers.AUTO_2:
                measured.layouts.append(_pipeline(url)["tensor_parallel"])
            if name == servers.SHARDS_2:
                measured.sums.append(_pipeline(url)["stages"][0]["all_reduce"])
                measured.idle_shares.append(await _idle_shares())

        ask_server(name, settings, ask)

    in_turn(settings, [*SERVERS, UNCOUPLED], run)
    summaries = summaries_of(settings, measured.runs, SERVERS)
    tables = tables_of(settings, summaries, servers.SHARDS_2, SERVERS)
    tables |= _first_token_table(measured)
    tables |= _sums_table(measured)
    tables |= _bound_table(measured, summaries)
    tables |= _idle_table(measured)
    data = {
        "curve": data_of(summaries),
        "first_tokens": measured.first_tokens,
        "all_reduce": measured.sums,
        "shards_chosen_by_auto": measured.layouts,
        "uncoupled_seconds": measured.uncoupled_seconds,
        "idle_shares": measured.idle_shares,
    }
    return Row({"shards": data}, tables)


def _pipeline(url: str) -> dict[str, Any]:
    """What Brigade says of its stages. mlx_lm.server has no such page."""
    pipeline: dict[str, Any] = httpx2.get(f"{url}/admin/pipeline").json()
    return pipeline


async def _read_long_prompts(asked: Asked, seconds: list[float], round_: int) -> None:
    """Notes the times to the first token of some long prompts, which come one after the other."""
    warm_up, *prompts = asked.prompts(f"shards/{round_}", LONG_TOKENS, 4)
    await asked(warm_up, 2)
    for prompt in prompts:
        record = await asked(prompt, 2)
        seconds.append(record.times[0] - record.start)


async def _idle_shares() -> list[float]:
    """The share of a core that each process of the server uses while nobody asks anything, the
    largest first."""
    await asyncio.sleep(PAUSE_SECONDS)
    before = _cpu_seconds()
    await asyncio.sleep(IDLE_SECONDS)
    after = _cpu_seconds()
    shares: list[float] = []
    for process in before.keys() & after.keys():
        used = after[process] - before[process]
        shares.append(used / IDLE_SECONDS)
    return sorted(shares, reverse=True)


def _cpu_seconds() -> dict[psutil.Process, float]:
    """The processor time of each process of the server."""
    seconds: dict[psutil.Process, float] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[process] = times.user + times.system
    return seconds


def _first_token_table(measured: Measured) -> dict[str, Table]:
    ours = measured.first_tokens[servers.SHARDS_2]
    rows: list[list[object]] = []
    for name, seconds in measured.first_tokens.items():
        rows.append([name, f"{p50(seconds):.2f}", f"{ratio(ours, seconds):.2f}"])
    columns = ["server", "seconds", "two shards ÷ this one's"]
    return {f"time to first token of {LONG_TOKENS} tokens": (columns, rows)}


def _sums_table(measured: Measured) -> dict[str, Table]:
    rows: list[list[object]] = []
    for each in measured.sums:
        share = each["seconds"] / each["step_seconds"] if each["step_seconds"] else float("nan")
        rows.append([f"{share:.0%}", each["num_sums"], f"{each['num_bytes'] / 1e6:.1f}"])
    columns = ["share of measured steps", "sums", "MB sent"]
    return {"sums between two shards, for each round": (columns, rows)}


def _bound_table(measured: Measured, summaries: Summaries) -> dict[str, Table]:
    """One client's speed on two shards against two processes that have a shard each and compute no
    sums. That is the best that two shards can reach on this machine, with its one memory bus."""
    summary = summaries.get((servers.SHARDS_2, 1))
    coupled = summary.itl_p50_seconds if summary else None
    if coupled is None or not measured.uncoupled_seconds:
        return {}
    bound = p50(measured.uncoupled_seconds)
    cells = [f"{1 / coupled:.1f}", f"{1 / bound:.1f}", f"{bound / coupled:.2f}"]
    columns = ["tok/s of two shards", "bound tok/s", "share of the bound"]
    return {"one client against two uncoupled shards": (columns, [cells])}


def _idle_table(measured: Measured) -> dict[str, Table]:
    rows: list[list[object]] = []
    for shares in measured.idle_shares:
        rows.append([len(shares), f"{max(shares):.1%}", f"{sum(shares):.1%}"])
    columns = ["processes", "largest share of a core", "sum"]
    return {"CPU of two shards that are idle, for each round": (columns, rows)}
