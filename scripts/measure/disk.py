"""Prefixes on disk: the time they save after a restart, and what writing them costs streams."""

import asyncio
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Row, Settings, in_turn
from scripts.measure.sums import p50, ratio, steady_tokens_per_second
from serve.bench.client import Server, connected
from serve.bench.prompts import random_words
from serve.bench.records import Record

NUM_WORDS = 7400  # about 8,000 tokens of the bench model, which has room for 8,192
NUM_TOKENS = 16
WRITING, WITHOUT = "writing", "without"
NUM_STREAMS = 4
STREAM_TOKENS = 100
FED_WORDS = 450  # of each prompt that is written while streams run
MAX_WRITE_SECONDS = 300.0


def disk(settings: Settings) -> Row:
    """Measures the time to the first token of a long prompt, computed and then read after a
    restart; and the speed of streams beside prompts that are written to disk."""
    times, prompt_tokens = _after_restarts(settings)
    speeds, num_files = _beside_writes(settings)
    by_read = ratio(times["from disk"], times["computed"])
    by_writing = ratio(speeds[WRITING], speeds[WITHOUT])
    data = {
        "prompt_tokens": prompt_tokens,
        "first_token": {**times, "ratio": by_read},
        "tokens_per_second": {**speeds, "ratio": by_writing},
        "files_written": num_files,
    }
    seconds = [*(f"{p50(each):.2f}" for each in times.values()), f"{by_read:.3f}"]
    rates = [*(f"{p50(each):.1f}" for each in speeds.values()), f"{by_writing:.3f}"]
    title = f"time to first token of a prompt of {prompt_tokens} tokens after a restart, s"
    return Row(
        {"disk": data},
        {
            title: ([*times, "ratio"], [seconds]),
            f"tokens/s of {NUM_STREAMS} streams beside prompts that are written to disk": (
                [*speeds, "ratio"],
                [rates],
            ),
        },
    )


# --- after a restart


def _after_restarts(settings: Settings) -> tuple[dict[str, list[float]], int]:
    """Returns the seconds until the first token, read and computed, and the number of tokens of the
    prompts. Each server reads the prompt that the one before has computed, then computes a new
    one."""
    times: dict[str, list[float]] = {"computed": [], "from disk": []}
    lengths: list[int] = []
    with TemporaryDirectory() as folder:

        async def ask(url: str, life: int) -> None:
            async with connected(url, settings.model.name, None, TIMEOUT) as server:
                if life:
                    record = await _asked(server, _prompt(settings, life - 1), NUM_TOKENS)
                    times["from disk"].append(record.times[0] - record.start)
                if life < settings.rounds:
                    record = await _asked(server, _prompt(settings, life), NUM_TOKENS)
                    times["computed"].append(record.times[0] - record.start)
                    lengths.append(record.prompt_tokens or 0)
            await _until_written(url)

        for life in range(settings.rounds + 1):
            with _server(settings.model, "--prefix-cache-dir", folder) as url:
                asyncio.run(ask(url, life))
    return times, max(lengths)


def _prompt(settings: Settings, number: int) -> str:
    return random_words(Random(f"{settings.seed}/{number}"), NUM_WORDS)


# --- beside writes


def _beside_writes(settings: Settings) -> tuple[dict[str, list[float]], int]:
    """Returns the tokens per second of streams while prompts come in that are written to disk, and
    while the same prompts come in without a disk; and the number of files written. Both clusters
    run all the time. An idle one takes no CPU time."""
    speeds: dict[str, list[float]] = {WITHOUT: [], WRITING: []}
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        flags = {WITHOUT: [], WRITING: ["--prefix-cache-dir", folder]}
        urls: dict[str, str] = {}
        for name, own in flags.items():
            urls[name] = stack.enter_context(_server(settings.model, *own))

        def run(name: str, round_: int) -> None:
            chance = Random(f"{settings.seed}/{round_}")
            speeds[name].append(asyncio.run(_speed(urls[name], settings.model, chance)))

        in_turn(settings, list(speeds), run)
        return speeds, _disk(urls[WRITING])["num_written_files"]


async def _speed(url: str, model: Path, chance: Random) -> float:
    """Returns the tokens per second of streams while another client sends prompts one after the
    other."""
    async with connected(url, model.name, None, TIMEOUT) as server:
        feeding = asyncio.create_task(_feed(server, chance))
        texts = [random_words(chance, 20) for _ in range(NUM_STREAMS)]
        records = await asyncio.gather(*(_asked(server, text, STREAM_TOKENS) for text in texts))
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding
    await _until_written(url)
    return steady_tokens_per_second(records)


async def _feed(server: Server, chance: Random) -> None:
    while True:
        await _asked(server, random_words(chance, FED_WORDS), 1)


# --- servers


def _server(model: Path, *flags: str) -> Any:
    return servers.running(servers.BRIGADE_2, model, *flags, until=servers.until_ready)


async def _asked(server: Server, words: str, num_tokens: int) -> Record:
    record = await server.ask([{"role": "user", "content": words}], num_tokens)
    if record.error or not record.times:
        raise servers.StartError(f"no answer: {record}")
    return record


async def _until_written(url: str) -> None:
    """Waits until nothing is left to write."""
    deadline = time.monotonic() + MAX_WRITE_SECONDS
    while time.monotonic() < deadline:
        if not _disk(url)["num_unwritten_files"]:
            return
        await asyncio.sleep(0.2)
    raise servers.StartError("the files were not written in time")


def _disk(url: str) -> dict[str, Any]:
    state: dict[str, Any] = httpx2.get(f"{url}/admin/pipeline", timeout=30).json()
    return dict(state["prefix_cache"]["disk"])
