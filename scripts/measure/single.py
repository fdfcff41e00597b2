"""One client on two ranks, with speculation and without, beside mlx_lm.server; then several
clients."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from scripts.measure import servers
from scripts.measure.crowd import crowd, streamed_chat
from scripts.measure.python_share import python_share
from scripts.measure.settings import Row, Settings, Table
from scripts.measure.tasks import Task, tasks

WITH, WITHOUT, OTHER = "with", "without", servers.MLX_LM_1
SERVERS = {WITH: servers.BRIGADE_2, WITHOUT: servers.BRIGADE_2, OTHER: OTHER}
NUM_TOKENS = 48
TEMPERATURES = (0.0, 0.7)
Pair = dict[str, Any]
Measured = dict[tuple[str, float], list[Pair]]


@dataclass(frozen=True, slots=True)
class Answered:
    """seconds are those of a token, or None if the answer came in one piece. Several tokens may
    come with the first event, so the time from there to the last event is divided among the steps.
    """

    text: str
    seconds: float | None
    num_tokens: int
    num_accepted: int
    num_rejected: int


def single(settings: Settings) -> Row:
    """All servers run all the time. An idle one takes almost no CPU time."""
    measured: Measured = defaultdict(list)
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(
                servers.running(server, settings.model, speculates=name == WITH)
            )
            for name, server in SERVERS.items()
        }
        for round_ in range(settings.rounds):
            for task in tasks(settings.requests_per_client):
                for temperature in TEMPERATURES:
                    pair = _in_turn(urls, settings, task, temperature, round_)
                    measured[task.kind, temperature].append(pair)
                    line = {"kind": task.kind, "temperature": temperature, **pair}
                    print(json.dumps(line), flush=True)
        many, many_tables = crowd(urls[WITH], urls[WITHOUT], urls[OTHER], settings)
    share = python_share(settings.model)
    return Row(
        {
            "single": [
                {"kind": kind, "temperature": temperature, "pairs": pairs}
                for (kind, temperature), pairs in measured.items()
            ],
            "crowd": many,
            "python_share": share,
        },
        {
            "one client, two ranks, with ÷ without speculation": _table(measured),
            "figures": _figures(measured, share),
            **many_tables,
        },
    )


def _in_turn(
    urls: dict[str, str],
    settings: Settings,
    task: Task,
    temperature: float,
    round_: int,
) -> Pair:
    """Asks one server after the other; the first one changes from task to task. mlx_lm.server is
    asked at temperature 0 only, because it has random numbers of its own."""
    names = [WITH, WITHOUT]
    if temperature == 0:
        names.append(OTHER)
    first = (round_ + len(task.question)) % len(names)
    answers = {}
    for name in [*names[first:], *names[:first]]:
        answers[name] = _ask(urls[name], name, settings, task, temperature)
    with_, without = answers[WITH], answers[WITHOUT]
    other = answers.get(OTHER)
    return {
        "seconds": [with_.seconds, without.seconds, other.seconds if other else None],
        "tokens": with_.num_tokens,
        "accepted": with_.num_accepted,
        "rejected": with_.num_rejected,
        "same": with_.text == without.text,
    }


def _ask(url: str, name: str, settings: Settings, task: Task, temperature: float) -> Answered:
    server = OTHER if name == OTHER else servers.BRIGADE_2
    body: dict[str, Any] = {
        "model": servers.model_name(server, settings.model),
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
    for chunk in streamed_chat(url, body):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                text += choice["delta"]["content"]
                times.append(time.perf_counter())
    details = usage.get("completion_tokens_details") or {}
    num_tokens = usage["completion_tokens"]
    num_accepted = details.get("accepted_prediction_tokens", 0)
    seconds = None
    num_steps = num_tokens - num_accepted
    if num_steps > 1 and len(times) > 1:
        step_seconds = (times[-1] - times[0]) / (num_steps - 1)
        seconds = step_seconds * num_steps / num_tokens
    num_rejected = details.get("rejected_prediction_tokens", 0)
    return Answered(text, seconds, num_tokens, num_accepted, num_rejected)


def _ratios(pairs: Sequence[Pair], over: int) -> list[float]:
    """How much faster answers came with speculation than from the server with this index."""
    both = [(pair["seconds"][0], pair["seconds"][over]) for pair in pairs]
    return [other / own for own, other in both if own and other]


def _table(measured: Measured) -> Table:
    columns = ["tasks", "temperature", "ms a token with / without / mlx_lm"]
    columns += ["ratio", "worst", "÷ mlx_lm", "right guesses", "same text"]
    rows: list[list[object]] = []
    for (kind, temperature), pairs in measured.items():
        rows.append([kind, temperature, *_cells(pairs)])
    for temperature in TEMPERATURES:
        rows.append(["all", temperature, *_cells(_all(measured, temperature))])
    return columns, rows


def _all(measured: Measured, temperature: float) -> list[Pair]:
    return [pair for (_, t), pairs in measured.items() if t == temperature for pair in pairs]


def _cells(pairs: Sequence[Pair]) -> list[object]:
    """The cells of several pairs. Times are medians, ratios geometric means of the pairs'."""
    times = []
    for server in range(3):
        known = [pair["seconds"][server] for pair in pairs if pair["seconds"][server]]
        times.append(f"{median(known) * 1000:.0f}" if known else "-")
    ratios = _ratios(pairs, 1)
    accepted = sum(pair["accepted"] for pair in pairs)
    drafted = accepted + sum(pair["rejected"] for pair in pairs)
    return [
        " / ".join(times),
        _mean(ratios),
        f"{min(ratios):.2f}" if ratios else "-",
        _mean(_ratios(pairs, 2)),
        f"{accepted} of {drafted}",
        f"{sum(pair['same'] for pair in pairs)} of {len(pairs)}",
    ]


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f}" if ratios else "-"


def _figures(measured: Measured, share: float) -> Table:
    """The figures that have targets."""

    def of_kinds(temperature: float, has: Callable[[str], bool], over: int = 1) -> str:
        chosen: list[Pair] = []
        for (kind, t), pairs in measured.items():
            if t == temperature and has(kind):
                chosen += pairs
        return _mean(_ratios(chosen, over))

    def is_any(_: str) -> bool:
        return True

    rows: list[list[object]] = [
        ["all tasks, temperature 0, with ÷ without", of_kinds(0.0, is_any), "1.6"],
        ["edits", of_kinds(0.0, lambda kind: kind.startswith("edits")), "2.8"],
        ["chat", of_kinds(0.0, lambda kind: kind == "chat"), "1.0"],
        ["all tasks, temperature 0.7, with ÷ without", of_kinds(0.7, is_any), "1.3"],
        ["two ranks ÷ mlx_lm.server on one, temperature 0", of_kinds(0.0, is_any, 2), "1.5"],
        ["time of a decode step spent in Python, one rank", f"{share:.3f}", "0.04"],
    ]
    return ["one client", "measured", "target"], rows
