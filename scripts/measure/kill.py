"""A lost engine under a long context: the time to the next token, when the context is replayed and
when it is read from disk."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import psutil

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Row, Settings, in_turn
from scripts.measure.sums import p50, ratio
from serve.bench.client import connected
from serve.bench.prompts import random_words

NUM_WORDS = 7300  # about 7,900 tokens of the bench model, which has room for 8,192
NUM_TOKENS = 120
REPLAYED, READ = "replayed", "from disk"
# A spare engine is ready when it has imported MLX, which takes it beyond this size.
IMPORTED_BYTES = 50 << 20
IN_FLIGHT_SECONDS = 0.1  # Tokens that were under way at the moment of the kill still come.
MAX_WAIT_SECONDS = 300.0


def kill(settings: Settings) -> Row:
    """Measures the time from the kill of rank 1's engine to the next token of the only stream, with
    a spare engine on each rank, without and with a prefix cache on disk."""
    times: dict[str, list[float]] = {REPLAYED: [], READ: []}
    read_tokens: dict[str, int] = {}
    prompt_tokens: list[int] = []
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        urls = {
            REPLAYED: stack.enter_context(_server(settings)),
            READ: stack.enter_context(_server(settings, "--prefix-cache-dir", folder)),
        }

        def run(name: str, round_: int) -> None:
            words = random_words(Random(f"{settings.seed}/{round_}"), NUM_WORDS)
            seconds, num_tokens = asyncio.run(_seconds_to_next_token(urls[name], settings, words))
            times[name].append(seconds)
            prompt_tokens.append(num_tokens)
            read_tokens[name] = _pipeline(urls[name])["prefix_cache"]["disk"]["num_read_tokens"]

        in_turn(settings, list(times), run)
    return _row(times, prompt_tokens, read_tokens)


def _row(
    times: Mapping[str, Sequence[float]],
    prompt_tokens: Sequence[int],
    read_tokens: Mapping[str, int],
) -> Row:
    """Sums up all rounds. Raises StartError if no round of a kind was measured."""
    for name, seconds_of_kind in times.items():
        if not seconds_of_kind:
            raise servers.StartError(
                f"no round '{name}' was measured: the lines above say what each of them failed with"
            )
    by_disk = ratio(times[READ], times[REPLAYED])
    data = {
        "prompt_tokens": max(prompt_tokens),
        "seconds": times,
        "ratio": by_disk,
        "tokens_read_from_disk": read_tokens,
    }
    seconds = [*(f"{p50(each):.2f}" for each in times.values()), f"{by_disk:.3f}"]
    title = f"from a kill to the next token after a prompt of {max(prompt_tokens)} tokens, s"
    return Row({"kill": data}, {title: ([*times, "ratio"], [seconds])})


def _server(settings: Settings, *flags: str) -> Any:
    return servers.running(
        servers.BRIGADE_2,
        settings.model,
        "--max-restarts",
        "1000",
        *flags,
        until=servers.until_ready,
    )


async def _seconds_to_next_token(url: str, settings: Settings, words: str) -> tuple[float, int]:
    """Returns the seconds from the kill to the next token, and the number of tokens of the
    prompt."""
    await _until(lambda: _has_spares(url))
    num_begun = _num_first_tokens(url)
    async with connected(url, settings.model.name, None, TIMEOUT) as server:
        chat = [{"role": "user", "content": words}]
        asking = asyncio.create_task(server.ask(chat, NUM_TOKENS))
        await _until(lambda: asking.done() or _num_first_tokens(url) > num_begun)
        # The prompt is written as soon as the answer has begun.
        await asyncio.sleep(1)
        await _until(lambda: not _pipeline(url)["prefix_cache"]["disk"]["num_unwritten_files"])
        engine, *_ = _engines(_pipeline(url)["stages"][1]["pid"])
        killed = time.perf_counter()
        engine.kill()
        record = await asking
    later = [each for each in record.times if each > killed + IN_FLIGHT_SECONDS]
    if record.error or not later:
        raise servers.StartError(f"no token came after the kill: {record}")
    return later[0] - killed, record.prompt_tokens or 0


async def _until(is_so: Callable[[], bool]) -> None:
    """Waits for a condition. Each check runs in a thread, because it sends a request to the
    server. Raises StartError after some minutes."""
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while not await asyncio.to_thread(is_so):
        if time.monotonic() > deadline:
            raise servers.StartError(f"waited {MAX_WAIT_SECONDS:g} s in vain")
        await asyncio.sleep(0.2)


def _has_spares(url: str) -> bool:
    for stage in _pipeline(url)["stages"]:
        engines = _engines(stage["pid"])
        if len(engines) < 2:
            return False
        *_, spare = engines
        if spare.memory_info().rss < IMPORTED_BYTES:
            return False
    return True


def _engines(parent: int) -> list[psutil.Process]:
    """Returns the engine processes of a rank, the working one first: the spare one is younger."""
    engines: list[psutil.Process] = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):  # It was killed, and its parent has not noticed yet.
            if "serve.rank.worker" in child.cmdline():
                engines.append(child)
    return sorted(engines, key=psutil.Process.create_time)


def _num_first_tokens(url: str) -> float:
    metrics = httpx2.get(f"{url}/metrics", timeout=30).text
    found = re.search(r"^brigade_time_to_first_token_seconds_count (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _pipeline(url: str) -> dict[str, Any]:
    return dict(httpx2.get(f"{url}/admin/pipeline", timeout=30).json())
