"""Load on a server: closed loop (clients that ask one after the other) or open loop (arrivals)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from serve.bench.client import Server
from serve.bench.prompts import PROBE_WORDS, Prompts, random_words, read_questions, words_for
from serve.bench.records import Record
from serve.core.config import BenchConfig, Level
from serve.core.errors import ClusterError

Ask = Callable[[str], Awaitable[Record]]
Seen = Callable[[Record], None]

RAMP_SECONDS = 0.02  # between two clients' first requests: short listening queues overflow
_WARM_UP_TOKENS = 8
_OPEN_WARM_UP = 2
_OPEN_REQUESTS = 32
_REQUESTS_PER_CLIENT = 4


async def closed_loop(ask: Ask, prompts: Sequence[str], num_clients: int, seen: Seen) -> None:
    """num_clients at any time, until no prompt is left."""
    waiting = iter(prompts)

    async def client(number: int) -> None:
        await asyncio.sleep(number * RAMP_SECONDS)
        for prompt in waiting:
            seen(await ask(prompt))

    await asyncio.gather(*map(client, range(num_clients)))


async def open_loop(ask: Ask, prompts: Sequence[str], times: Sequence[float], seen: Seen) -> None:
    """Each prompt at its time in seconds, whatever is still unanswered."""

    async def arrival(prompt: str, time: float) -> None:
        await asyncio.sleep(time)
        seen(await ask(prompt))

    await asyncio.gather(*map(arrival, prompts, times))


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Times of a Poisson process with `rate` arrivals a second; the first is at 0."""
    random = Random(seed)
    gaps = (random.expovariate(rate) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


def num_requests(config: BenchConfig, level: Level) -> int:
    if config.requests:
        return config.requests
    return _OPEN_REQUESTS if level.is_open else _REQUESTS_PER_CLIENT * int(level.value)


class Target:
    """One server under one config: its prompts, and its levels of load."""

    def __init__(self, config: BenchConfig, server: Server, prompts: Prompts) -> None:
        self._config, self._server, self._prompts = config, server, prompts

    @classmethod
    async def calibrated(cls, config: BenchConfig, server: Server) -> "Target":
        """Asks the server how many tokens words are. Raises ClusterError if it cannot answer."""
        if config.prompts:
            return cls(config, server, Prompts(config.seed, 0, read_questions(config.prompts)))
        probes = []
        for num_words in PROBE_WORDS:
            text = random_words(Random(num_words), num_words)
            record = await server.ask([{"role": "user", "content": text}], 1)
            if record.error:
                raise ClusterError(f"the first request failed: {record.error}")
            probes.append(record.prompt_tokens)
        num_words = words_for(config.prompt_tokens, probes)
        return cls(config, server, Prompts(config.seed, num_words))

    async def run(self, level: Level, round_: int, seen: Seen) -> None:
        """One warm-up and one measured run; only what fails is seen of the warm-up."""
        name = f"{level}/{round_}"
        warm_up = _OPEN_WARM_UP if level.is_open else int(level.value)
        prompts = self._prompts.take(f"{name}/warm-up", warm_up)

        def failed(record: Record) -> None:
            if record.error:
                seen(replace(record, error=f"warm-up: {record.error}"))

        await closed_loop(self._ask(_WARM_UP_TOKENS), prompts, warm_up, failed)
        ask = self._ask(self._config.max_tokens)
        prompts = self._prompts.take(name, num_requests(self._config, level))
        if level.is_open:
            seed = self._config.seed + round_
            times = poisson_arrivals(level.value, len(prompts), seed)
            await open_loop(ask, prompts, times, seen)
        else:
            await closed_loop(ask, prompts, int(level.value), seen)

    def _ask(self, max_tokens: int) -> Ask:
        async def ask(prompt: str) -> Record:
            messages = [{"role": "user", "content": prompt}]
            return await self._server.ask(messages, max_tokens, self._config.temperature)

        return ask
