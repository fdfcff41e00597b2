"""Two ranks whose link delays every message: the speed of both layouts, and what auto chooses."""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from launcher.process import free_ports
from scripts.measure import servers
from scripts.measure.limits import PROMPT_TOKENS
from scripts.measure.relay import HERE, THERE, NoLinkError, delayed_link, in_space
from scripts.measure.settings import Asked, Row, Settings, asked_of, in_turn
from scripts.measure.sums import p50, steady_tokens_per_second
from serve.bench.load import closed_loop
from serve.bench.records import Record

DELAY_SECONDS = 0.001
TOKENS = 64
LEVELS = (1, 8)
LAYOUTS = {"2 stages": "1", "2 shards": "2", "auto": "auto"}
"""The value of --tensor-parallel for each layout."""


def delayed(settings: Settings) -> Row:
    """Decoding with two stages, with two shards and as auto chooses. One rank is in another network
    namespace, and packets take a millisecond longer on their way there and back."""
    rates: dict[tuple[str, int], list[float]] = {}
    chosen: list[str] = []

    def run(name: str, round_: int) -> None:
        async def measure(url: str) -> None:
            async with asked_of(url, settings.model.name, settings.seed) as asked:
                for clients in LEVELS:
                    rate = await _decode(asked, f"delayed/{round_}", clients)
                    rates.setdefault((name, clients), []).append(rate)

        with two_hosts(settings.model, LAYOUTS[name], "--no-speculation") as (url, _):
            asyncio.run(measure(url))
            if name == "auto":
                num_shards = httpx2.get(f"{url}/admin/pipeline").json()["tensor_parallel"]
                chosen.append("2 shards" if num_shards == 2 else "2 stages")

    try:
        in_turn(settings, list(LAYOUTS), run)
    except NoLinkError as error:
        print(f"delayed: skipped, {error}", file=sys.stderr)
        return Row({}, {})
    rows: list[list[object]] = []
    data: list[dict[str, Any]] = []
    for name in LAYOUTS:
        cells = [f"{p50(rates.get((name, clients), [])):.1f}" for clients in LEVELS]
        rows.append([name, *cells, ", ".join(chosen) if name == "auto" else name])
        for clients in LEVELS:
            data.append({"layout": name, "clients": clients, "rates": rates.get((name, clients))})
    columns = ["--tensor-parallel", *(f"{n} clients, tok/s" for n in LEVELS), "layout"]
    title = f"decoding over a link that delays messages by {DELAY_SECONDS * 1000:g} ms"
    return Row({"delayed": {"rates": data, "chosen": chosen}}, {title: (columns, rows)})


async def _decode(asked: Asked, name: str, clients: int) -> float:
    """Tokens per second while all clients decode."""
    run: list[Record] = []
    prompts = asked.prompts(f"{name}/{clients}", PROMPT_TOKENS, clients)
    await closed_loop(lambda text: asked(text, TOKENS), prompts, clients, run.append)
    return steady_tokens_per_second(run)


@contextmanager
def two_hosts(model: Path, tensor_parallel: str, *flags: str) -> Iterator[tuple[str, Path]]:
    """Two ranks, the second of which is behind a link with a delay. Yields the URL of the server
    when it answers, and the file with its log. Raises NoLinkError."""
    first, second, control, port = free_ports(4)
    with delayed_link(DELAY_SECONDS) as space, tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder) / "hosts.json"
        hostfile.write_text(json.dumps([[f"{HERE}:{first}"], [f"{THERE}:{second}"]]))
        variables = [f"MLX_HOSTFILE={hostfile}", f"BRIGADE_CONTROL={HERE}:{control}"]
        words = [sys.executable, "-m", "launcher.cli", "serve", "--model", str(model)]
        words += ["--port", str(port), "--tensor-parallel", tensor_parallel, *flags]
        log = Path(folder) / "log"
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("w") as output:
                for rank in (1, 0):
                    environment = ["env", *variables, "BRIGADE_SECRET=s", f"MLX_RANK={rank}"]
                    command = [*environment, *words]
                    if rank:
                        command = [*in_space(space), *command]
                    started = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                    processes.append(started)
            url = f"http://127.0.0.1:{port}"
            servers.until_it_answers(url, model.name, processes, log)
            yield url, log
        finally:
            servers.end(processes)
