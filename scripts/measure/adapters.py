"""What adapters cost: in decoding, while one is swapped, and until a new one first answers."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from safetensors.numpy import save_file

from scripts.measure import servers
from scripts.measure.clients import PROMPT_TOKENS, TIMEOUT, Asked, ask_in_turn, first_token_seconds
from scripts.measure.model import HIDDEN, INNER, KEYS, NUM_LAYERS, SPREAD
from scripts.measure.rounds import Row, Samples, Settings
from scripts.measure.sums import gaps_in, steady_tokens_per_second

NUM_ROWS = 8
RANK, BIG_RANK = 8, 10  # on all modules: 8.5 and 10.6 MB
DECODE_TOKENS = 128
SHORT_TOKENS = 16
STREAM_TOKENS = 600
SETTLE_SECONDS, WINDOW_SECONDS = 0.5, 1.0
NUM_LOADS = 6
NAMES = [f"rank-8-{n}" for n in range(NUM_ROWS)]
BASE, LOADED, EACH, SAME = "base", "base, 8 adapters loaded", "an adapter each", "all on one"
KINDS = ("nothing", "a request", "a swap", "a swap and a request by it")
LOAD, FIRST = "it is loaded", "its first token"


def adapters(settings: Settings) -> Row:
    root = make_adapters(settings.model)
    rates = Samples(BASE, LOADED, EACH, SAME)
    gaps = Samples(*KINDS)
    seconds = Samples(LOAD, FIRST)

    async def ask(asked: Asked, _: str, round_: int) -> None:
        await _decode(asked, rates, round_)
        await _load(asked, seconds, round_)
        await _swap(asked, gaps, round_)

    ask_in_turn(settings, [servers.BRIGADE_2], ask, "--adapter-root", str(root))
    ratios = [(name, BASE) for name in (LOADED, EACH, SAME)]
    rows = [
        rates.row("rates", f"pure decode of {NUM_ROWS} rows, tokens/s", *ratios),
        gaps.row("gaps", f"longest gap of {NUM_ROWS} streams while there comes, s"),
        seconds.row("seconds", "from the call that loads a new adapter until, s"),
    ]
    data = {key: value for row in rows for key, value in row.data.items()}
    tables = {title: table for row in rows for title, table in row.tables.items()}
    return Row({"adapters": data}, tables)


async def _post(asked: Asked, what: str, name: str, path: str | None = None) -> None:
    """Loads an adapter, also under a name that is in use, or unloads it."""
    body: dict[str, Any] = {"lora_name": name}
    if path:
        body |= {"lora_path": path, "load_inplace": True}
    async with httpx2.AsyncClient(base_url=asked.url, timeout=TIMEOUT) as http:
        (await http.post(f"/v1/{what}_lora_adapter", json=body)).raise_for_status()


async def _decode(asked: Asked, rates: Samples, round_: int) -> None:
    """Decodes rows without an adapter, before and after any is loaded, with one each, and with the
    same one."""

    async def run(name: str, askers: Sequence[Asked]) -> None:
        prompts = asked.prompts(f"{name}/{round_}", PROMPT_TOKENS, NUM_ROWS)
        asks = [ask(text, DECODE_TOKENS) for ask, text in zip(askers, prompts, strict=True)]
        rates.add(name, steady_tokens_per_second(await asyncio.gather(*asks)))

    base = [asked] * NUM_ROWS
    await asked.at_once(f"warm-up/{round_}", NUM_ROWS, 8)
    await run(BASE, base)
    for name in NAMES:
        await _post(asked, "load", name, name)
    async with AsyncExitStack() as stack:
        each = [await stack.enter_async_context(asked.with_adapter(name)) for name in NAMES]
        await run(EACH, each)
        await run(LOADED, base)
        await run(SAME, each[:1] * NUM_ROWS)
    for name in NAMES:
        await _post(asked, "unload", name)


async def _load(asked: Asked, seconds: Samples, round_: int) -> None:
    """A new adapter of 10 MB on an idle server, until it has answered a short question."""
    async with asked.with_adapter("big") as adapted:
        for prompt in asked.prompts(f"load/{round_}", SHORT_TOKENS, NUM_LOADS):
            start = time.perf_counter()
            await _post(asked, "load", "big", "big")
            loaded = time.perf_counter() - start
            record = await adapted(prompt, 2)
            seconds.add(LOAD, loaded)
            seconds.add(FIRST, loaded + first_token_seconds(record))
    await _post(asked, "unload", "big")


async def _swap(asked: Asked, gaps: Samples, round_: int) -> None:
    """Streams that go on with the version that they began with."""
    first, second, *others = NAMES
    for name in (first, second):
        await _post(asked, "load", name, name)
    windows: list[tuple[str, float, float]] = []
    short = asked.prompts(f"short/{round_}", SHORT_TOKENS, 100)
    async with asked.with_adapter(first) as one, asked.with_adapter(second) as other:
        await other(short.pop(), 2)
        streaming = one.at_once(f"swaps/{round_}", NUM_ROWS, STREAM_TOKENS)
        running = asyncio.create_task(streaming)
        await asyncio.sleep(6.0)  # until all prompts are read
        for n in range(NUM_LOADS):
            for kind in KINDS:
                # The streams have to recover from the load before.
                await asyncio.sleep(SETTLE_SECONDS)
                start = time.perf_counter()
                if "swap" in kind:
                    await _post(asked, "load", first, others[n % 2])
                if "request" in kind:
                    await (one if "swap" in kind else other)(short.pop(), 2)
                await asyncio.sleep(max(0.0, start + WINDOW_SECONDS - time.perf_counter()))
                windows.append((kind, start, time.perf_counter()))
        if running.done():
            raise servers.NotMeasuredError("the streams ended before the swaps")
        streams = await running
    for kind, start, end in windows:
        gaps.add(kind, max(gaps_in(streams, (start, end))))
    for name in (first, second):
        await _post(asked, "unload", name)


def make_adapters(model: Path) -> Path:
    """A folder of random adapters beside the model; made once."""
    root = model.with_name(f"{model.name}-adapters")
    for seed, name in enumerate([*NAMES, "big"]):
        if not (root / name / "adapter_config.json").exists():
            write(root / name, seed, BIG_RANK if name == "big" else RANK)
    return root


def write(folder: Path, seed: int, rank: int) -> None:
    random = np.random.default_rng(seed)
    shapes = {f"self_attn.{x}_proj": (HIDDEN, HIDDEN) for x in "qo"}
    shapes |= {f"self_attn.{x}_proj": (HIDDEN, KEYS) for x in "kv"}
    shapes |= {"mlp.gate_proj": (HIDDEN, INNER), "mlp.up_proj": (HIDDEN, INNER)}
    shapes["mlp.down_proj"] = (INNER, HIDDEN)
    tensors = {}
    for layer in range(NUM_LAYERS):
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
