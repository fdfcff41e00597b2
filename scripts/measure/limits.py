"""Decoding against what this machine can do: passes of MLX alone, and two uncoupled half-models."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Asked, Row, Settings, ask_server, in_turn
from scripts.measure.sums import (
    Window,
    busy_shares,
    p50,
    ratio,
    steady_tokens_per_second,
    steady_window,
)
from serve.bench.load import closed_loop
from serve.bench.records import Record
from serve.core.blas import with_openblas

NUM_LAYERS = 16
NUM_RANKS = 2
PROMPT_TOKENS = 66
DECODE_TOKENS = 128
DECODE_LEVELS = (8, 16, 32)


def passes(settings: Settings) -> Row:
    """t(b): one pass of b rows through the whole model, in one process."""
    batches = sorted({max(1, n // p) for n in settings.levels for p in (1, NUM_RANKS)})
    seconds: dict[int, list[float]] = {batch: [] for batch in batches}
    for _ in range(settings.rounds):
        for batch in batches:
            times = run_passes(settings, [Part(0, NUM_LAYERS)], batch)[0]
            seconds[batch].append(p50(times))
    t = {batch: p50(times) for batch, times in seconds.items()}
    rows = [
        [
            n,
            *(f"{t[batch] * 1000:.1f}" for batch in (n, n // 2)),
            f"{t[n] / t[n // 2]:.2f}",
            *(f"{n / t[batch]:.1f}" for batch in (n, n // 2)),
        ]
        for n in settings.levels
        if n > 1
    ]
    columns = ["N", "t(N) ms", "t(N/2) ms", "bound of the gain", "N/t(N) tok/s", "N/t(N/2) tok/s"]
    return Row({"pass_seconds": t}, {"one decode pass of the whole model": (columns, rows)})


@dataclass(frozen=True, slots=True)
class Part:
    """Layers [start, end) of the model, or one shard of them."""

    start: int
    end: int
    num_shards: int = 1
    shard: int = 0

    @property
    def flags(self) -> list[str]:
        words: list[str] = []
        for name, value in asdict(self).items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return words


def run_passes(settings: Settings, parts: Sequence[Part], batch: int) -> list[list[float]]:
    """Seconds of each pass of each part; the parts run at the same time, uncoupled."""
    words = [sys.executable, "-m", "scripts.measure.passes", "--model", str(settings.model)]
    words += ["--batch", str(batch), "--seconds", str(settings.pass_seconds)]
    processes = [
        subprocess.Popen(
            [*words, *part.flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=with_openblas(os.environ),
        )
        for part in parts
    ]
    try:
        for process in processes:
            assert process.stdout
            if process.stdout.readline() != "ready\n":
                raise SystemExit("scripts/bench: a process of passes ended early")
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(process.communicate(timeout=TIMEOUT)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def decode(settings: Settings) -> Row:
    """Pure decode of two ranks against two uncoupled half-models, and how busy the stages were."""
    levels = [n for n in settings.levels if n in DECODE_LEVELS] or [8]
    rates: dict[int, list[float]] = {n: [] for n in levels}
    bounds: dict[int, list[float]] = {n: [] for n in levels}
    shares: dict[int, list[dict[int, float]]] = {n: [] for n in levels}

    async def ask(asked: Asked, url: str) -> None:
        for n in levels:
            run: list[Record] = []
            prompts = asked.prompts(f"decode/{n}/{len(rates[n])}", PROMPT_TOKENS, n)
            await closed_loop(lambda text: asked(text, DECODE_TOKENS), prompts, n, run.append)
            rates[n].append(steady_tokens_per_second(run))
            shares[n].append(busy_shares(await timeline(url), _wall(steady_window(run))))

    def run(name: str, _: int) -> None:
        if name == servers.BRIGADE_2:
            ask_server(name, settings, ask)
            return
        for n in levels:
            halves = [Part(0, NUM_LAYERS // 2), Part(NUM_LAYERS // 2, NUM_LAYERS)]
            slower = max(p50(times) for times in run_passes(settings, halves, n // 2))
            bounds[n].append(n // 2 / slower)

    in_turn(settings, [servers.BRIGADE_2, "two uncoupled halves"], run)
    rows = [
        [
            n,
            f"{p50(rates[n]):.1f}",
            f"{p50(bounds[n]):.1f}",
            f"{ratio(rates[n], bounds[n]):.2f}",
            *(f"{p50([each[rank] for each in shares[n]]):.0%}" for rank in range(NUM_RANKS)),
        ]
        for n in levels
    ]
    columns = ["N", "tok/s", "bound tok/s", "share of the bound", "rank 0 busy", "rank 1 busy"]
    data = {"decode": {"tokens_per_second": rates, "bound": bounds, "busy_shares": shares}}
    return Row(data, {"pure decode against two uncoupled half-models": (columns, rows)})


async def timeline(url: str) -> list[dict[str, Any]]:
    await asyncio.sleep(0.6)  # the stages report four times a second
    async with httpx2.AsyncClient(timeout=30) as http:
        answer = await http.get(f"{url}/admin/trace", params={"seconds": 300})
        return list(answer.raise_for_status().json()["traceEvents"])


def _wall(window: Window) -> Window:
    """Records have the clock that only goes forward, timelines have the wall's."""
    offset = time.time() - time.perf_counter()
    return window[0] + offset, window[1] + offset
