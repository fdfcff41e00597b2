"""Several clients at a time: tokens per second with ÷ without speculation, and the time between
tokens ÷ that of mlx_lm.server."""

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

import httpx2

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Settings, Table
from scripts.measure.tasks import Task, tasks
from serve.bench.records import quantile

NUM_TOKENS = 48
KINDS = ("chat", "code", "json", "repetition")  # those with short prompts
COMPARED_LEVELS = (8, 16, 32)  # the numbers of clients of which mlx_lm.server's times are wanted
WITH, WITHOUT, OTHER = "with", "without", "mlx_lm.server"


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. Times are those of its events, in seconds after its request."""

    num_tokens: int
    times: list[float]


@dataclass(frozen=True, slots=True)
class Load:
    """The figures of one number of clients: tokens per second, and the median time to the first
    token and 99th percentile of the times between events, in seconds."""

    clients: int
    tokens_per_second: float
    first_seconds: float
    p99_seconds: float


def crowd(
    with_: str,
    without: str,
    other: str,
    settings: Settings,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Table]]:
    """Asks three servers, given by their URLs, in turn at each number of clients. Returns the loads
    of each server, and tables."""
    urls = {WITH: with_, WITHOUT: without, OTHER: other}
    names = {name: servers.model_name(servers.BRIGADE_2, settings.model) for name in urls}
    names[OTHER] = servers.model_name(servers.MLX_LM_1, settings.model)
    loads: dict[str, dict[int, list[Load]]] = {name: {} for name in urls}
    for round_ in range(settings.rounds):
        for clients in settings.levels:
            for name, url in urls.items():
                if name == OTHER and clients not in COMPARED_LEVELS:
                    continue
                load = _load(url, names[name], clients, round_)
                loads[name].setdefault(clients, []).append(load)
                print(json.dumps({"server": name, **asdict(load)}), flush=True)
    medians = {
        name: {clients: _median(each) for clients, each in of_levels.items()}
        for name, of_levels in loads.items()
    }
    data = {name: [asdict(load) for load in each.values()] for name, each in medians.items()}
    return data, _tables(medians, settings.levels)


def _load(url: str, model: str, clients: int, round_: int) -> Load:
    """Every client sends one request. A model like this one keeps the prefixes of prompts, so the
    prompts differ from round to round and from level to level."""
    every = [task for task in tasks(4) if task.kind in KINDS]
    chosen = list(islice(cycle(every), clients))
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        asked = [
            threads.submit(_ask, url, model, task, f"{round_}.{clients}.{n}")
            for n, task in enumerate(chosen)
        ]
        answers = [future.result() for future in asked]
    seconds = time.perf_counter() - started
    gaps: list[float] = []
    for answer in answers:
        gaps += [b - a for a, b in zip(answer.times, answer.times[1:], strict=False)]
    return Load(
        clients,
        sum(answer.num_tokens for answer in answers) / seconds,
        median(answer.times[0] for answer in answers if answer.times),
        quantile(gaps, 0.99) or 0.0,
    )


def _ask(url: str, model: str, task: Task, mark: str) -> Answered:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"({mark}) {task.question}"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    num_tokens = 0
    started = time.perf_counter()
    for chunk in streamed_chat(url, body):
        if usage := chunk.get("usage"):
            num_tokens = usage["completion_tokens"]
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            times.append(time.perf_counter() - started)
    return Answered(num_tokens, times)


def streamed_chat(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Posts a chat with `stream` and yields its chunks as they arrive."""
    endpoint = f"{url}/v1/chat/completions"
    with httpx2.stream("POST", endpoint, json=body, timeout=TIMEOUT) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _median(loads: list[Load]) -> Load:
    return Load(
        loads[0].clients,
        median(load.tokens_per_second for load in loads),
        median(load.first_seconds for load in loads),
        median(load.p99_seconds for load in loads),
    )


def _tables(loads: Mapping[str, Mapping[int, Load]], levels: tuple[int, ...]) -> dict[str, Table]:
    speed: list[list[object]] = []
    for clients in levels:
        own = loads[WITH][clients].tokens_per_second
        plain = loads[WITHOUT][clients].tokens_per_second
        speed.append([clients, f"{own:.1f}", f"{plain:.1f}", f"{own / plain:.2f}"])
    smooth: list[list[object]] = []
    for clients, other in loads[OTHER].items():
        mine = loads[WITH][clients]
        p99_ratio = mine.p99_seconds / other.p99_seconds if other.p99_seconds else float("nan")
        smooth.append(
            [
                clients,
                f"{mine.p99_seconds * 1000:.0f} / {other.p99_seconds * 1000:.0f}",
                f"{p99_ratio:.2f}",
                f"{mine.first_seconds:.2f} / {other.first_seconds:.2f}",
            ]
        )
    return {
        "tokens/s of several clients": (["clients", "with", "without", "ratio"], speed),
        "two ranks against mlx_lm.server on one": (
            ["clients", "between tokens, p99, ms", "ratio", "first token, p50, s"],
            smooth,
        ),
    }
