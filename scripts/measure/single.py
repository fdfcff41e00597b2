"""One client: with speculation and without, on two ranks, in turn on each task."""

import json
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

import httpx2

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Row, Settings
from scripts.measure.tasks import Task, tasks

WITH, WITHOUT = "with", "without"
NUM_TOKENS = 64
TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True, slots=True)
class Answered:
    """seconds are those of a token. Several tokens may come with the first event, so the time from
    there to the last event is divided among the steps."""

    text: str
    seconds: float
    num_tokens: int
    num_accepted: int
    num_rejected: int


def single(settings: Settings) -> Row:
    """Both clusters run all the time. An idle one takes no CPU time."""
    measured: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    with ExitStack() as stack:
        urls = {
            WITH: stack.enter_context(servers.running(servers.BRIGADE_2, settings.model)),
            WITHOUT: stack.enter_context(
                servers.running(servers.BRIGADE_2, settings.model, "--no-speculation")
            ),
        }
        for round_ in range(settings.rounds):
            for task in tasks(settings.requests_per_client):
                for temperature in TEMPERATURES:
                    pair = _in_both(urls, settings, task, temperature, round_)
                    measured[task.kind, temperature].append(pair)
                    line = {"kind": task.kind, "temperature": temperature, **pair}
                    print(json.dumps(line), flush=True)
    return Row(
        {"single": [{"kind": k, "temperature": t, "pairs": p} for (k, t), p in measured.items()]},
        {"one client, two ranks, with ÷ without speculation": _table(measured)},
    )


def _in_both(
    urls: dict[str, str], settings: Settings, task: Task, temperature: float, round_: int
) -> dict[str, Any]:
    """Asks one server and then the other; the first one changes from round to round."""
    names = [WITH, WITHOUT] if round_ % 2 else [WITHOUT, WITH]
    answers = {}
    for name in names:
        answers[name] = _ask(urls[name], settings, task, temperature, settings.seed)
    with_, without = answers[WITH], answers[WITHOUT]
    return {
        "ratio": without.seconds / with_.seconds,
        "seconds": [with_.seconds, without.seconds],
        "tokens": with_.num_tokens,
        "accepted": with_.num_accepted,
        "rejected": with_.num_rejected,
        "same": with_.text == without.text,
    }


def _ask(url: str, settings: Settings, task: Task, temperature: float, seed: int) -> Answered:
    body: dict[str, Any] = {
        "model": servers.model_name(servers.BRIGADE_2, settings.model),
        "messages": [{"role": "user", "content": task.question}],
        "max_tokens": NUM_TOKENS,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if task.prediction:
        body["prediction"] = {"type": "content", "content": task.prediction}
    text = ""
    times: list[float] = []
    usage: dict[str, Any] = {}
    endpoint = f"{url}/v1/chat/completions"
    with httpx2.stream("POST", endpoint, json=body, timeout=TIMEOUT) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    text += choice["delta"]["content"]
                    times.append(time.perf_counter())
    details = usage["completion_tokens_details"]
    num_tokens = usage["completion_tokens"]
    num_accepted = details["accepted_prediction_tokens"]
    num_steps = max(2, num_tokens - num_accepted)
    step_seconds = (times[-1] - times[0]) / (num_steps - 1)
    seconds = step_seconds * num_steps / num_tokens
    num_rejected = details["rejected_prediction_tokens"]
    return Answered(text, seconds, num_tokens, num_accepted, num_rejected)


def _table(
    measured: dict[tuple[str, float], list[dict[str, Any]]],
) -> tuple[list[str], list[list[object]]]:
    columns = ["tasks", "temperature", "ms a token", "ratio", "worst", "right guesses", "same text"]
    rows: list[list[object]] = []
    for (kind, temperature), pairs in measured.items():
        rows.append([kind, temperature, *_cells(pairs)])
    for temperature in TEMPERATURES:
        pairs = [p for (_, t), own in measured.items() if t == temperature for p in own]
        rows.append(["all", temperature, *_cells(pairs)])
    return columns, rows


def _cells(pairs: list[dict[str, Any]]) -> list[object]:
    """The cells of several pairs. The ratio is the geometric mean of the pairs'."""
    with_ = median(pair["seconds"][0] for pair in pairs)
    without = median(pair["seconds"][1] for pair in pairs)
    ratios = [pair["ratio"] for pair in pairs]
    accepted = sum(pair["accepted"] for pair in pairs)
    drafted = accepted + sum(pair["rejected"] for pair in pairs)
    return [
        f"{with_ * 1000:.0f} / {without * 1000:.0f}",
        f"{geometric_mean(ratios):.2f}",
        f"{min(ratios):.2f}",
        f"{accepted} of {drafted}",
        f"{sum(pair['same'] for pair in pairs)} of {len(pairs)}",
    ]
