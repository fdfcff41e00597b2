"""The prefix cache on disk: the time that it saves after a restart, and after a killed engine."""

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from random import Random
from tempfile import TemporaryDirectory

import httpx2
import psutil

from scripts.measure.clients import TIMEOUT, first_token_seconds, pipeline
from scripts.measure.rounds import Row, Samples, Settings, in_turn
from scripts.measure.servers import BRIGADE_2, NotMeasuredError, running
from serve.bench.client import ChatClient, connected
from serve.bench.prompts import random_words
from serve.bench.records import RequestRecord

NUM_WORDS = 7300  # about 7,900 tokens of the bench model, which has room for 8,192
NUM_TOKENS = 120
COMPUTED, READ = "computed", "read from disk"
# A spare engine is ready when it has imported MLX, which takes it beyond this size.
IMPORTED_BYTES = 50 << 20
IN_FLIGHT_SECONDS = 0.1  # Tokens that were under way at the moment of the kill still come.
MAX_WAIT_SECONDS = 300.0


def disk(settings: Settings) -> Row:
    """The time to the first token of a long prompt. Each server reads the prompt that the one
    before has computed, then computes a new one."""
    seconds = Samples(READ, COMPUTED)

    async def ask(url: str, life: int) -> None:
        async with connected(url, settings.model.name, None, TIMEOUT) as server:
            for number, how in ((life - 1, READ), (life, COMPUTED)):
                if number >= 0:
                    record = await _asked(server, settings, number)
                    seconds.add(how, first_token_seconds(record))
        await _until(lambda: _is_written(url))

    with TemporaryDirectory() as folder:
        for life in range(settings.rounds + 1):
            with running(BRIGADE_2, settings.model, "--prefix-cache-dir", folder) as url:
                asyncio.run(ask(url, life))
    title = f"time to first token of {NUM_WORDS} words after a restart, s"
    return seconds.row("disk", title, (READ, COMPUTED))


MANY_RESTARTS = "--quick-start=warms_up=true,keeps_spare_engine=true,max_restarts=1000"


def kill(settings: Settings) -> Row:
    """From the kill of rank 1's engine to the next token of the only stream, with a spare engine on
    each rank, without and with a prefix cache on disk."""
    seconds = Samples(READ, COMPUTED)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        urls: dict[str, str] = {}
        for how, flags in ((COMPUTED, ()), (READ, ("--prefix-cache-dir", folder))):
            server = running(BRIGADE_2, settings.model, MANY_RESTARTS, *flags)
            urls[how] = stack.enter_context(server)

        def run(how: str, round_: int) -> None:
            seconds.add(how, asyncio.run(_kill_seconds(urls[how], settings, round_)))

        in_turn(settings.rounds, list(urls), run)
    title = f"from a kill to the next token after a prompt of {NUM_WORDS} words, s"
    return seconds.row("kill", title, (READ, COMPUTED))


async def _kill_seconds(url: str, settings: Settings, number: int) -> float:
    await _until(lambda: _has_spares(url))
    num_begun = _num_first_tokens(url)
    async with connected(url, settings.model.name, None, TIMEOUT) as server:
        asking = asyncio.create_task(_asked(server, settings, number))
        await _until(lambda: asking.done() or _num_first_tokens(url) > num_begun)
        # The prompt is written as soon as the answer has begun.
        await asyncio.sleep(1)
        await _until(lambda: _is_written(url))
        engine, *_ = _engines(pipeline(url)["stages"][1]["pid"])
        killed = time.perf_counter()
        engine.kill()
        record = await asking
    later = [each for each in record.times if each > killed + IN_FLIGHT_SECONDS]
    if not later:
        raise NotMeasuredError(f"no token came after the kill: {record}")
    return later[0] - killed


async def _asked(server: ChatClient, settings: Settings, number: int) -> RequestRecord:
    words = random_words(Random(f"{settings.seed}/{number}"), NUM_WORDS)
    record = await server.chat([{"role": "user", "content": words}], NUM_TOKENS)
    if record.error or not record.times:
        raise NotMeasuredError(f"no answer: {record}")
    return record


async def _until(is_so: Callable[[], bool]) -> None:
    """Waits for a condition. Each check runs in a thread, because it sends a request to the
    server."""
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while not await asyncio.to_thread(is_so):
        if time.monotonic() > deadline:
            raise NotMeasuredError(f"waited {MAX_WAIT_SECONDS:g} s in vain")
        await asyncio.sleep(0.2)


def _is_written(url: str) -> bool:
    return not pipeline(url)["prefix_cache"]["disk"]["num_unwritten_files"]


def _has_spares(url: str) -> bool:
    for stage in pipeline(url)["stages"]:
        engines = _engines(stage["pid"])
        if len(engines) < 2 or engines[-1].memory_info().rss < IMPORTED_BYTES:
            return False
    return True


def _engines(parent: int) -> list[psutil.Process]:
    """The engine processes of a rank, the working one first: the spare one is younger."""
    engines: list[psutil.Process] = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):  # It was killed, and its parent has not noticed yet.
            if "serve.rank.worker" in child.cmdline():
                engines.append(child)
    return sorted(engines, key=psutil.Process.create_time)


def _num_first_tokens(url: str) -> float:
    metrics = httpx2.get(f"{url}/metrics", timeout=TIMEOUT).text
    found = re.search(r"^brigade_time_to_first_token_seconds_count (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0
