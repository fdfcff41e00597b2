"""A real chat model on two ranks, with speculation and without, beside mlx_lm.server: tasks of a
single client, then several clients."""

import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from statistics import geometric_mean
from typing import Any

import httpx2

from scripts.measure import servers
from scripts.measure.clients import TIMEOUT
from scripts.measure.rounds import Row, Samples, Settings, Table, in_turn
from scripts.measure.sums import p99
from scripts.measure.tasks import Task, short_tasks, tasks

WITH, WITHOUT, OTHER = "with", "without", servers.MLX_LM_1
SERVERS = {WITH: servers.BRIGADE_2, WITHOUT: servers.BRIGADE_2, OTHER: OTHER}
NUM_TOKENS = 48
TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True, slots=True)
class Answer:
    """times are those of the events with text, in seconds after the request."""

    text: str
    times: list[float]
    num_tokens: int
    num_accepted: int

    @property
    def token_seconds(self) -> float | None:
        """Seconds a token, or None if the answer came in one piece. Several tokens may come with
        the first event, so the time from there to the last one is divided among the steps."""
        num_steps = self.num_tokens - self.num_accepted
        if num_steps < 2 or len(self.times) < 2:
            return None
        step_seconds = (self.times[-1] - self.times[0]) / (num_steps - 1)
        return step_seconds * num_steps / self.num_tokens


def single(settings: Settings) -> Row:
    """All servers run all the time. An idle one takes almost no CPU time."""
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for name, server in SERVERS.items():
            running = servers.running(server, settings.model, speculates=name == WITH)
            urls[name] = stack.enter_context(running)
        alone = _one_client(settings, urls)
        together = _several_clients(settings, urls)
    return Row({**alone.data, **together.data}, {**alone.tables, **together.tables})


def _one_client(settings: Settings, urls: dict[str, str]) -> Row:
    """Asks each task of one server after the other. mlx_lm.server is asked at temperature 0 only,
    because it has random numbers of its own."""
    gains: dict[tuple[str, float, str], list[float]] = defaultdict(list)
    same: list[bool] = []
    for round_ in range(settings.rounds):
        for task in tasks(settings.requests_per_client):
            for temperature in TEMPERATURES:
                names = list(urls)[: 2 if temperature else 3]
                first = (round_ + len(task.question)) % len(names)
                answers: dict[str, Answer] = {}
                for name in [*names[first:], *names[:first]]:
                    answers[name] = _ask(settings, name, urls[name], task, temperature)
                same.append(answers[WITH].text == answers[WITHOUT].text)
                own = answers[WITH].token_seconds
                for name in names[1:]:
                    other = answers[name].token_seconds
                    if own and other:
                        gains[task.kind, temperature, name].append(other / own)
                        gains["all", temperature, name].append(other / own)
    rows = [
        [*key, f"{geometric_mean(each):.2f}", f"{min(each):.2f}"] for key, each in gains.items()
    ]
    columns = ["tasks", "temperature", "speed with speculation ÷", "mean", "worst"]
    title = f"one client, two ranks; {sum(same)} of {len(same)} texts the same without speculation"
    table: Table = columns, rows
    return Row({"single": rows, "same": same}, {title: table})


def _several_clients(settings: Settings, urls: dict[str, str]) -> Row:
    """Every client sends one request."""
    rate = {(name, n): f"{name}, {n} clients: tokens/s" for n in settings.levels for name in urls}
    gap = {key: f"{key[0]}, {key[1]} clients: p99 between events, s" for key in rate}
    samples = Samples(*rate.values(), *gap.values())

    def run(name: str, round_: int) -> None:
        for n in settings.levels:
            # The model keeps the prefixes of prompts, so these differ from run to run.
            chosen = [
                Task(task.kind, f"({round_}.{n}.{number}) {task.question}")
                for number, task in enumerate(islice(cycle(short_tasks()), n))
            ]
            start = time.perf_counter()
            with ThreadPoolExecutor(n) as threads:
                ask = lambda task: _ask(settings, name, urls[name], task, 0.0)  # noqa: E731
                answers = list(threads.map(ask, chosen))
            seconds = time.perf_counter() - start
            samples.add(rate[name, n], sum(each.num_tokens for each in answers) / seconds)
            gaps = [later - sooner for each in answers for sooner, later in pairwise(each.times)]
            samples.add(gap[name, n], p99(gaps))

    in_turn(settings.rounds, list(urls), run)
    ratios = [(rate[WITH, n], rate[WITHOUT, n]) for n in settings.levels]
    ratios += [(gap[WITH, n], gap[OTHER, n]) for n in settings.levels]
    return samples.row("crowd", "several clients", *ratios)


def _ask(settings: Settings, name: str, url: str, task: Task, temperature: float) -> Answer:
    """Streams one answer. `brigade bench`'s client sends no prediction and no seed."""
    body: dict[str, Any] = {
        "model": servers.model_name(SERVERS[name], settings.model),
        "messages": [{"role": "user", "content": task.question}],
        "max_tokens": NUM_TOKENS,
        "temperature": temperature,
        "seed": settings.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if task.prediction and name != OTHER:
        body["prediction"] = {"type": "content", "content": task.prediction}
    text = ""
    times: list[float] = []
    usage: dict[str, Any] = {}
    start = time.perf_counter()
    endpoint = f"{url}/v1/chat/completions"
    with httpx2.stream("POST", endpoint, json=body, timeout=TIMEOUT) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    if content := choice["delta"].get("content"):
                        text += content
                        times.append(time.perf_counter() - start)
    details = usage.get("completion_tokens_details") or {}
    num_accepted = details.get("accepted_prediction_tokens", 0)
    return Answer(text, times, usage["completion_tokens"], num_accepted)
