"""Requests to a running server: prompts of exact lengths, whole answers, and its own pages."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import httpx2

from scripts.measure import servers
from scripts.measure.rounds import Settings, in_turn
from serve.bench.client import ChatClient, connected
from serve.bench.load import closed_loop
from serve.bench.prompts import PROBE_WORDS, Prompts, random_words, words_for
from serve.bench.records import RequestRecord

TIMEOUT = 600.0
PROMPT_TOKENS = 66
REPORT_SECONDS = 0.6  # the stages report their steps four times a second


class Asked:
    """A running server, and prompts of exact lengths for it."""

    def __init__(
        self, url: str, server: ChatClient, probes: Sequence[int | None], seed: int
    ) -> None:
        self.url = url
        self._server, self._probes, self._seed = server, probes, seed

    async def __call__(self, prompt: str, max_tokens: int) -> RequestRecord:
        return await self.chat([{"role": "user", "content": prompt}], max_tokens)

    async def chat(self, messages: list[dict[str, str]], max_tokens: int) -> RequestRecord:
        """Raises NotMeasuredError unless the answer has max_tokens tokens."""
        record = await self._server.chat(messages, max_tokens)
        if record.error or record.tokens != max_tokens or not record.times:
            raise servers.NotMeasuredError(f"wanted {max_tokens} tokens, got {record}")
        return record

    def prompts(self, name: str, num_tokens: int, count: int) -> list[str]:
        prompts = Prompts(self._seed, words_for(num_tokens, self._probes))
        return prompts.for_run(f"{name}/{num_tokens}", count)

    async def at_once(self, name: str, num_clients: int, max_tokens: int) -> list[RequestRecord]:
        """The answers of num_clients clients to a short prompt each."""
        records: list[RequestRecord] = []
        prompts = self.prompts(name, PROMPT_TOKENS, num_clients)
        await closed_loop(lambda text: self(text, max_tokens), prompts, num_clients, records.append)
        return records

    @asynccontextmanager
    async def with_adapter(self, name: str) -> AsyncIterator["Asked"]:
        """The same server, with answers of an adapter."""
        async with connected(self.url, name, None, TIMEOUT) as server:
            yield Asked(self.url, server, self._probes, self._seed)


@asynccontextmanager
async def asked_of(url: str, model: str, seed: int) -> AsyncIterator[Asked]:
    """A running server, after some probes of how many words make a prompt."""
    async with connected(url, model, None, TIMEOUT) as server:
        probes = []
        for count in PROBE_WORDS:
            words = random_words(Random(count), count)
            record = await server.chat([{"role": "user", "content": words}], 1)
            probes.append(record.prompt_tokens)
        yield Asked(url, server, probes, seed)


Questions = Callable[[Asked, str, int], Awaitable[None]]
"""Gets a running server, its name in SERVERS, and the number of the round."""


def ask_in_turn(
    settings: Settings,
    names: Sequence[str],
    questions: Questions,
    *more: str,
) -> None:
    """Starts each server in each round, with more flags, and runs questions with it."""

    def run(name: str, round_: int) -> None:
        async def ask(url: str) -> None:
            model = servers.model_name(name, settings.model)
            async with asked_of(url, model, settings.seed) as asked:
                await questions(asked, name, round_)

        with servers.running(name, settings.model, *more) as url:
            asyncio.run(ask(url))

    in_turn(settings.rounds, names, run)


def first_token_seconds(record: RequestRecord) -> float:
    return record.times[0] - record.start


def pipeline(url: str) -> dict[str, Any]:
    """What Brigade says of its stages and of its prefix cache."""
    answer = httpx2.get(f"{url}/admin/pipeline", timeout=TIMEOUT)
    return dict(answer.raise_for_status().json())


async def timeline(url: str, since: float) -> list[dict[str, Any]]:
    """The events that began after a moment of the wall's clock, as a Chrome trace."""
    await asyncio.sleep(REPORT_SECONDS)
    seconds = int(time.time() - since) + 1
    async with httpx2.AsyncClient(timeout=TIMEOUT) as http:
        answer = await http.get(f"{url}/admin/trace", params={"seconds": seconds})
    events = answer.raise_for_status().json()["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["ts"] >= since * 1e6]
