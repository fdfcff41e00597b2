"""Prefixes on disk: the time they save after a restart, and what writing them costs streams."""

import asyncio
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx2

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Row, Settings, in_turn
from scripts.measure.sums import p50, steady_tokens_per_second
from serve.bench.client import Server, connected
from serve.bench.prompts import random_words
from serve.bench.records import Record

NUM_WORDS = 7400  # about 8,000 tokens of the bench model, which has room for 8,192
NUM_TOKENS = 16
NUM_STREAMS = 4
STREAM_TOKENS = 160
MAX_WRITE_SECONDS = 300.0


def disk(settings: Settings) -> Row:
    """Measures the time to the first token of a long prompt, computed and then read after a
    restart, and the speed of streams while such a prompt is written."""
    computed: list[float] = []
    read: list[float] = []
    speeds: dict[str, list[float]] = {"without": [], "writing": []}

    def restarted(_: str, round_: int) -> None:
        with TemporaryDirectory() as folder:
            flags = ("--prefix-cache-dir", folder)
            words = random_words(Random(round_), NUM_WORDS)
            computed.append(asyncio.run(_first(settings.model, flags, words)))
            read.append(asyncio.run(_first(settings.model, flags, words)))

    def streams(name: str, round_: int) -> None:
        with TemporaryDirectory() as folder:
            flags = ("--prefix-cache-dir", folder) if name == "writing" else ()
            speeds[name].append(asyncio.run(_speed(settings.model, flags, round_)))

    in_turn(settings, ["restarted"], restarted)
    in_turn(settings, list(speeds), streams)
    by_read = p50(read) / p50(computed)
    by_writing = p50(speeds["writing"]) / p50(speeds["without"])
    data = {"computed": computed, "read": read, "tokens_per_second": speeds}
    seconds = [f"{p50(computed):.2f}", f"{p50(read):.2f}", f"{by_read:.3f}"]
    rates = [f"{p50(speeds['without']):.1f}", f"{p50(speeds['writing']):.1f}", f"{by_writing:.3f}"]
    return Row(
        {"disk": data},
        {
            "time to first token of a long prompt after a restart, s": (
                ["computed", "from disk", "ratio"],
                [seconds],
            ),
            "tokens/s of streams while a long prompt is written": (
                ["without", "writing", "ratio"],
                [rates],
            ),
        },
    )


async def _first(model: Path, flags: tuple[str, ...], words: str) -> float:
    """Returns the seconds until the first token on a new server, which then writes the prompt to
    disk before it ends."""
    start = servers.running(servers.BRIGADE_2, model, *flags, until=servers.until_ready)
    with start as url:
        async with connected(url, model.name, None, TIMEOUT) as server:
            record = await _asked(server, words, NUM_TOKENS)
        await _until_written(url)
    return record.times[0] - record.start


async def _speed(model: Path, flags: tuple[str, ...], seed: int) -> float:
    """Returns the tokens per second of streams that begin after the answer to a long prompt."""
    start = servers.running(servers.BRIGADE_2, model, *flags, until=servers.until_ready)
    chance = Random(seed)
    with start as url:
        async with connected(url, model.name, None, TIMEOUT) as server:
            await _asked(server, random_words(chance, NUM_WORDS), NUM_TOKENS)
            asked = [
                _asked(server, random_words(chance, 20), STREAM_TOKENS) for _ in range(NUM_STREAMS)
            ]
            records = await asyncio.gather(*asked)
    return steady_tokens_per_second(records)


async def _asked(server: Server, words: str, num_tokens: int) -> Record:
    record = await server.ask([{"role": "user", "content": words}], num_tokens)
    if record.error or not record.times:
        raise servers.StartError(f"no answer: {record}")
    return record


async def _until_written(url: str) -> None:
    """Waits until all files are written: their number stays the same for three seconds."""
    deadline = time.monotonic() + MAX_WRITE_SECONDS
    before = -1
    while time.monotonic() < deadline:
        state = httpx2.get(f"{url}/admin/pipeline", timeout=30).json()
        num_files = state["prefix_cache"]["disk"]["num_files"]
        if num_files == before:
            return
        before = num_files
        await asyncio.sleep(3)
    raise servers.StartError("the files were not written in time")
