"""What every row shares: its settings, what it gives, and a server that answers in full."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from scripts.measure import servers
from serve.bench.client import Server, connected
from serve.bench.prompts import PROBE_WORDS, Prompts, random_words, words_for
from serve.bench.records import Record

TIMEOUT = 600.0
Table = tuple[Sequence[str], Sequence[Sequence[object]]]
"""Names of the columns, and the rows."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What scripts/bench was asked."""

    model: Path
    levels: tuple[int, ...]
    rounds: int
    requests_per_client: int
    pass_seconds: float
    seed: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.name}


@dataclass(frozen=True, slots=True)
class Row:
    """data is for the JSON file; tables, by title, are for people."""

    data: dict[str, Any]
    tables: dict[str, Table]


def in_turn(settings: Settings, names: Sequence[str], run: Callable[[str, int], None]) -> None:
    """A B A B: a machine that changes its speed meanwhile changes it for all."""
    for round_ in range(settings.rounds):
        for name in names:
            print(f"round {round_ + 1}: {name}", file=sys.stderr, flush=True)
            try:
                run(name, round_)
            except servers.StartError as error:
                print(error, file=sys.stderr, flush=True)


class Asked:
    """A running server, and prompts of exact lengths for it."""

    def __init__(self, server: Server, probes: Sequence[int | None], seed: int) -> None:
        self._server, self._probes, self._seed = server, probes, seed

    def with_server(self, server: Server) -> "Asked":
        """Returns the same for another server, whose model has the same tokenizer."""
        return Asked(server, self._probes, self._seed)

    async def __call__(self, prompt: str, max_tokens: int) -> Record:
        return await self.chat([{"role": "user", "content": prompt}], max_tokens)

    async def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Record:
        record = await self._server.ask(messages, max_tokens)
        if record.error or record.tokens != max_tokens or not record.times:
            raise SystemExit(f"scripts/bench: wanted {max_tokens} tokens, got {record}")
        return record

    def prompts(self, name: str, num_tokens: int, count: int) -> list[str]:
        prompts = Prompts(self._seed, words_for(num_tokens, self._probes))
        return prompts.take(f"{name}/{num_tokens}", count)


@asynccontextmanager
async def asked_of(url: str, model: str, seed: int) -> AsyncIterator[Asked]:
    """A running server, after some probes of how many words make a prompt."""
    async with connected(url, model, None, TIMEOUT) as server:
        probes = []
        for count in PROBE_WORDS:
            words = random_words(Random(count), count)
            record = await server.ask([{"role": "user", "content": words}], 1)
            probes.append(record.prompt_tokens)
        yield Asked(server, probes, seed)


def ask_server(
    name: str,
    settings: Settings,
    questions: Callable[[Asked, str], Awaitable[None]],
    *more: str,
) -> None:
    """Starts a server, with more flags, and runs questions with it and its URL."""

    async def run(url: str) -> None:
        model = servers.model_name(name, settings.model)
        async with asked_of(url, model, settings.seed) as asked:
            await questions(asked, url)

    with servers.running(name, settings.model, *more) as url:
        asyncio.run(run(url))
