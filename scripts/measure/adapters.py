"""What adapters cost: in decoding, while one is swapped, and until a new one says something."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from safetensors.numpy import save_file

from scripts.measure import servers
from scripts.measure.model import CONFIG
from scripts.measure.settings import TIMEOUT, Asked, Row, Settings, ask_server, in_turn
from scripts.measure.sums import gaps_in, p50, ratio, steady_tokens_per_second
from serve.bench.client import connected
from serve.bench.load import closed_loop
from serve.bench.records import Record

NUM_ROWS = 8
RANK, BIG_RANK = 8, 10  # on all modules: 8.5 and 10.6 MB
PROMPT_TOKENS, DECODE_TOKENS = 66, 128
SHORT_TOKENS = 16
STREAM_TOKENS = 600
SETTLE_SECONDS, WINDOW_SECONDS = 0.5, 1.0
NUM_LOADS = 6
SPREAD = 0.02
KINDS = ("nothing", "a request", "a swap", "a swap and a request by it")
Ask = Callable[[str, int], Awaitable[Record]]


def adapters(settings: Settings) -> Row:
    root = make_adapters(settings.model)
    rates: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    seconds: dict[str, list[float]] = {}

    async def ask(asked: Asked, url: str) -> None:
        async with Adapted.opened(asked, url) as adapted:
            await decoding(adapted, rates)
            await first_tokens(adapted, seconds)
            await swaps(adapted, gaps)

    flags = ("--adapter-root", str(root))
    in_turn(settings, [servers.BRIGADE_2], lambda name, _: ask_server(name, settings, ask, *flags))
    step = p50(gaps["nothing"])
    tables: dict[str, Any] = {
        f"pure decode of {NUM_ROWS} rows": (
            ["rows", "tok/s", "÷ base rows"],
            [
                [name, f"{p50(each):.1f}", f"{ratio(each, rates['base']):.3f}"]
                for name, each in rates.items()
            ],
        ),
        f"between tokens of {NUM_ROWS} streams, while there comes": (
            ["", "p50, ms", "longest, ms"],
            [[kind, _ms(p50(each)), _ms(max(each))] for kind, each in gaps.items()],
        ),
        "seconds until, p50": (["", "ms"], [[name, _ms(p50(s))] for name, s in seconds.items()]),
    }
    data = {"tokens_per_second": rates, "gaps": gaps, "step": step, "seconds": seconds}
    return Row({"adapters": data}, tables)


class Adapted:
    """A running server and questions to its adapters, in their order in the folder."""

    def __init__(self, asked: Asked, http: httpx2.AsyncClient, adapted: dict[str, Asked]) -> None:
        self.base, self._http, self.adapted = asked, http, adapted

    @classmethod
    @asynccontextmanager
    async def opened(cls, asked: Asked, url: str) -> Any:
        """Connects to the server, once for each adapter."""
        async with AsyncExitStack() as stack:
            client = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT)
            http = await stack.enter_async_context(client)
            adapted: dict[str, Asked] = {}
            for name in [*names(), "big"]:
                connection = connected(url, name, None, TIMEOUT)
                server = await stack.enter_async_context(connection)
                adapted[name] = asked.with_server(server)
            yield cls(asked, http, adapted)

    async def load(self, name: str, path: str) -> float:
        """Loads an adapter, also under a name that is in use. Returns the seconds that it takes."""
        start = time.perf_counter()
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        await self._post("load", body)
        return time.perf_counter() - start

    async def unload(self, name: str) -> None:
        await self._post("unload", {"lora_name": name})

    async def _post(self, what: str, body: dict[str, Any]) -> None:
        (await self._http.post(f"/v1/{what}_lora_adapter", json=body)).raise_for_status()


def names() -> list[str]:
    return [f"rank-8-{n}" for n in range(NUM_ROWS)]


async def decoding(adapted: Adapted, rates: dict[str, list[float]]) -> None:
    """Base rows with no adapter there, and beside loaded ones; one adapter each; all the same."""

    async def run(name: str, askers: Iterable[Ask]) -> None:
        prompts = adapted.base.prompts(
            f"{name}/{len(rates.get(name, ()))}", PROMPT_TOKENS, NUM_ROWS
        )
        asks = [ask(text, DECODE_TOKENS) for ask, text in zip(askers, prompts, strict=True)]
        rates.setdefault(name, []).append(steady_tokens_per_second(await asyncio.gather(*asks)))

    base, eight = [adapted.base] * NUM_ROWS, [adapted.adapted[name] for name in names()]
    await closed_loop(lambda text: adapted.base(text, 8), adapted.base.prompts("w", 66, 8), 8, _no)
    await run("base", base)
    for name in names():
        await adapted.load(name, name)
    await run("8 adapters", eight)
    await run("base, 8 adapters loaded", base)
    await run("all on one adapter", eight[:1] * NUM_ROWS)
    await run("half on one, half base", eight[:1] * (NUM_ROWS // 2) + base[: NUM_ROWS // 2])
    for name in names():
        await adapted.unload(name)
    await run("base", base)


async def first_tokens(adapted: Adapted, seconds: dict[str, list[float]]) -> None:
    """A new adapter of 10 MB on an idle server, until it has answered a short question."""
    ask = adapted.adapted["big"]
    prompts = adapted.base.prompts("first", SHORT_TOKENS, 2 * NUM_LOADS)
    for n in range(NUM_LOADS):
        start = time.perf_counter()
        loaded = await adapted.load("big", "big")
        first = (await ask(prompts[2 * n], 2)).times[0]
        again = await ask(prompts[2 * n + 1], 2)
        for name, value in (
            ("it is loaded", loaded),
            ("its first token", first - start),
            (
                f"a first token of {SHORT_TOKENS} tokens once it is loaded",
                again.times[0] - again.start,
            ),
        ):
            seconds.setdefault(name, []).append(value)
    await adapted.unload("big")


async def swaps(adapted: Adapted, gaps: dict[str, list[float]]) -> None:
    """Streams that go on with the version that they began with."""
    first, second, *_ = names()
    for name in (first, second):
        await adapted.load(name, name)
    streams: list[Record] = []
    windows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}

    async def run() -> None:
        prompts = adapted.base.prompts("swaps", PROMPT_TOKENS, NUM_ROWS)
        ask = adapted.adapted[first]
        await closed_loop(lambda text: ask(text, STREAM_TOKENS), prompts, NUM_ROWS, streams.append)

    short = adapted.base.prompts("short", SHORT_TOKENS, 100)
    await adapted.adapted[second](short.pop(), 2)
    running = asyncio.create_task(run())
    await asyncio.sleep(6.0)  # until all prompts are read
    for n in range(NUM_LOADS):
        for kind in KINDS:
            # What the one before has done to the streams is not this one's.
            await asyncio.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            if "swap" in kind:
                await adapted.load(first, names()[2 + n % 2])
            if "request" in kind:
                asked = adapted.adapted[first if "swap" in kind else second]
                await asked(short.pop(), 2)
            await asyncio.sleep(max(0.0, start + WINDOW_SECONDS - time.perf_counter()))
            windows[kind].append((start, time.perf_counter()))
    if running.done():
        raise SystemExit("scripts/bench: the streams ended before the swaps")
    await running
    for kind, each in windows.items():
        for window in each:
            gaps[kind] += gaps_in(streams, window)
    for name in (first, second):
        await adapted.unload(name)


def make_adapters(model: Path) -> Path:
    """A folder of random adapters beside the model; made once."""
    root = model.with_name(f"{model.name}-adapters")
    for seed, name in enumerate([*names(), "big"]):
        if not (root / name / "adapter_config.json").exists():
            write(root / name, seed, BIG_RANK if name == "big" else RANK)
    return root


def write(folder: Path, seed: int, rank: int) -> None:
    random = np.random.default_rng(seed)
    hidden, inner = (int(CONFIG[name]) for name in ("hidden_size", "intermediate_size"))  # type: ignore[call-overload]
    heads = 2 * hidden // 14
    shapes = {f"self_attn.{x}_proj": (hidden, hidden) for x in "qo"}
    shapes |= {f"self_attn.{x}_proj": (hidden, heads) for x in "kv"}
    shapes |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner)}
    shapes["mlp.down_proj"] = (inner, hidden)
    tensors = {}
    for layer in range(int(CONFIG["num_hidden_layers"])):  # type: ignore[call-overload]
        for module, (num_in, num_out) in shapes.items():
            name = f"model.layers.{layer}.{module}"
            for part, shape in (("lora_a", (num_in, rank)), ("lora_b", (rank, num_out))):
                drawn = random.standard_normal(shape, np.float32) * np.float32(SPREAD)
                tensors[f"{name}.{part}"] = drawn
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": rank, "scale": 2.0, "dropout": 0.0, "keys": list(shapes)}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    # Last, because it says that the folder is whole.
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _no(_: Record) -> None:
    """A warm-up is not counted."""


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
