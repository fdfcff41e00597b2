"""Puts load on a server: in a closed loop of clients, or in an open loop of arrivals.

A client of a closed loop sends its next request when the previous one is answered. In an open
loop requests arrive at given times, whatever is still unanswered.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from serve.bench.client import ChatClient
from serve.bench.config import BenchConfig, Level
from serve.bench.prompts import PROBE_WORDS, Prompts, random_words, read_questions, words_for
from serve.bench.records import RequestRecord
from serve.core.errors import ClusterError

Send = Callable[[str], Awaitable[RequestRecord]]
OnRecord = Callable[[RequestRecord], None]

# Clients start this many seconds apart, because a short listening queue can overflow.
RAMP_SECONDS = 0.02
_WARM_UP_TOKENS = 8
_NUM_OPEN_WARM_UPS = 2
_NUM_OPEN_REQUESTS = 32
_NUM_REQUESTS_PER_CLIENT = 4


async def closed_loop(
    send: Send,
    prompts: Sequence[str],
    num_clients: int,
    on_record: OnRecord,
) -> None:
    """Runs num_clients clients at once until no prompt is left. on_record gets each record."""
    waiting = iter(prompts)

    async def client(number: int) -> None:
        await asyncio.sleep(number * RAMP_SECONDS)
        for prompt in waiting:
            on_record(await send(prompt))

    await asyncio.gather(*map(client, range(num_clients)))


async def open_loop(
    send: Send,
    prompts: Sequence[str],
    times: Sequence[float],
    on_record: OnRecord,
) -> None:
    """Sends each prompt at its time (seconds from the start), whatever is still unanswered."""

    async def arrival(prompt: str, time: float) -> None:
        await asyncio.sleep(time)
        on_record(await send(prompt))

    await asyncio.gather(*map(arrival, prompts, times))


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Returns the seconds of a Poisson process with `rate` arrivals a second, from 0."""
    random = Random(seed)
    gaps = [random.expovariate(rate) for _ in range(count - 1)]
    return list(accumulate(gaps, initial=0.0))


def num_requests(config: BenchConfig, level: Level) -> int:
    if config.requests:
        return config.requests
    if level.is_open:
        return _NUM_OPEN_REQUESTS
    return _NUM_REQUESTS_PER_CLIENT * int(level.value)


class LoadGenerator:
    """One server under load: the prompts for it, and runs at several levels of load."""

    def __init__(self, config: BenchConfig, client: ChatClient, prompts: Prompts) -> None:
        self._config = config
        self._client = client
        self._prompts = prompts

    @classmethod
    async def calibrated(cls, config: BenchConfig, client: ChatClient) -> "LoadGenerator":
        """Measures the tokens in a word, for prompts of the wanted length. Raises ClusterError."""
        if config.prompts:
            questions = read_questions(config.prompts)
            return cls(config, client, Prompts(config.seed, 0, questions))
        probes: list[int | None] = []
        for num_words in PROBE_WORDS:
            text = random_words(Random(num_words), num_words)
            message = {"role": "user", "content": text}
            record = await client.chat([message], max_tokens=1)
            if record.error:
                raise ClusterError(f"the first request failed: {record.error}")
            probes.append(record.prompt_tokens)
        num_words = words_for(config.prompt_tokens, probes)
        return cls(config, client, Prompts(config.seed, num_words))

    async def run(self, level: Level, round_: int, on_record: OnRecord) -> None:
        """Runs a warm-up and one measured run. on_record gets the measured run's records, and the
        warm-up's failures."""
        name = f"{level}/{round_}"
        await self._warm_up(name, level, on_record)
        send = self._sender(self._config.max_tokens)
        prompts = self._prompts.for_run(name, num_requests(self._config, level))
        if level.is_open:
            seed = self._config.seed + round_
            times = poisson_arrivals(level.value, len(prompts), seed)
            await open_loop(send, prompts, times, on_record)
        else:
            await closed_loop(send, prompts, int(level.value), on_record)

    async def _warm_up(self, name: str, level: Level, on_record: OnRecord) -> None:
        num_clients = _NUM_OPEN_WARM_UPS if level.is_open else int(level.value)
        prompts = self._prompts.for_run(f"{name}/warm-up", num_clients)

        def on_warm_up_record(record: RequestRecord) -> None:
            if record.error:
                on_record(replace(record, error=f"warm-up: {record.error}"))

        send = self._sender(_WARM_UP_TOKENS)
        await closed_loop(send, prompts, num_clients, on_warm_up_record)

    def _sender(self, max_tokens: int) -> Send:
        async def send(prompt: str) -> RequestRecord:
            messages = [{"role": "user", "content": prompt}]
            return await self._client.chat(messages, max_tokens, self._config.temperature)

        return send
