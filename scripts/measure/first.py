"""How much longer the first answer takes than later ones, when a server has just become ready."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from scripts.measure import servers
from scripts.measure.model import TOKENIZER
from scripts.measure.settings import TIMEOUT, Row, Settings, in_turn
from scripts.measure.sums import p50
from serve.bench.client import connected
from serve.bench.prompts import random_words

NUM_LATER = 8
NUM_WORDS = 60
NUM_TOKENS = 4
COLD = "--no-warm-up"


def first(settings: Settings) -> Row:
    """Time to the first token of the first chat after /ready, and of later ones."""
    models = {"embedded": TOKENIZER, "150 M": settings.model}
    runs = {f"{name}, {how}": (model, how) for name, model in models.items() for how in HOWS}
    firsts: dict[str, list[float]] = {name: [] for name in runs}
    later: dict[str, list[float]] = {name: [] for name in runs}

    def run(name: str, _: int) -> None:
        model, how = runs[name]
        seconds = asyncio.run(_ask(model, HOWS[how]))
        firsts[name].append(seconds[0])
        later[name] += seconds[1:]

    in_turn(settings, list(runs), run)
    data, rows = {}, []
    for name in runs:
        one, other = p50(firsts[name]), p50(later[name])
        data[name] = {"first": firsts[name], "later": later[name], "ratio": one / other}
        rows.append([name, f"{one * 1000:.1f}", f"{other * 1000:.1f}", f"{one / other:.2f}"])
    title = "time to first token after /ready on two ranks, ms"
    return Row({"first": data}, {title: (["model", "first", "later", "first ÷ later"], rows)})


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """On a CPU, MLX keeps the code that it compiles in the temporary folder."""
    former = os.environ.get("TMPDIR")
    with TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            if former is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = former


HOWS: dict[str, tuple[str, ...]] = {"warm": (), "cold": (COLD,)}


async def _ask(model: Path, flags: tuple[str, ...]) -> list[float]:
    """Of chats one after the other, on a server of their own."""
    start = servers.running(servers.BRIGADE_2, model, *flags, until=servers.until_ready)
    with nothing_compiled(), start as url:
        async with connected(url, model.name, None, TIMEOUT) as server:
            seconds = []
            for number in range(1 + NUM_LATER):
                words = random_words(Random(number), NUM_WORDS)
                record = await server.ask([{"role": "user", "content": words}], NUM_TOKENS)
                if record.error or not record.times:
                    raise servers.StartError(f"no answer: {record}")
                seconds.append(record.times[0] - record.start)
            return seconds
