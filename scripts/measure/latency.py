"""How long people wait: for a long prompt, for a second turn, and while others' prompts come in."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scripts.measure import servers
from scripts.measure.model import make_state_model, make_window_model
from scripts.measure.settings import Asked, Row, Settings, ask_server, in_turn
from scripts.measure.sums import gaps_in, p50, ratio
from serve.bench.load import closed_loop
from serve.bench.records import Record, quantile

LONG_TOKENS = 2048
SECOND_TURN_TOKENS = 2000
INTERRUPTING_TOKENS = 4000
STREAM_PROMPT_TOKENS = 66
STREAM_TOKENS = 500
NUM_STREAMS = 8
QUIET_SECONDS = 8.0
BEHIND_TOKENS = 400
AHEAD_TOKENS = 3000
BEHIND_SECONDS = 0.5


def long_prompt(settings: Settings) -> Row:
    """Time to the first token of a long prompt, alone on the server."""
    seconds: dict[str, list[float]] = {servers.BRIGADE_2: [], servers.BRIGADE_1: []}

    def run(name: str, round_: int) -> None:
        async def ask(asked: Asked, _: str) -> None:
            warm_up, *prompts = asked.prompts(f"long/{round_}", LONG_TOKENS, 4)
            await asked(warm_up, 2)
            for prompt in prompts:
                seconds[name].append(_ttft(await asked(prompt, 2)))

        ask_server(name, settings, ask)

    in_turn(settings, list(seconds), run)
    quotient = ratio(seconds[servers.BRIGADE_2], seconds[servers.BRIGADE_1])
    rows: list[Sequence[Any]] = [[name, f"{p50(each):.2f}"] for name, each in seconds.items()]
    rows.append(["two ranks ÷ one", f"{quotient:.2f}"])
    title = f"time to first token of {LONG_TOKENS} tokens, s"
    return Row({"long_prompt": {**seconds, "ratio": quotient}}, {title: (["", ""], rows)})


def second_turn(settings: Settings) -> Row:
    """A chat's second turn repeats the first one, which the server has already seen. Windows and
    states need checkpoints for that, plain attention does not."""
    folder = settings.model.parent
    models = {
        "plain": settings.model,
        "windows": make_window_model(folder),
        "states": make_state_model(folder),
    }
    first: dict[str, list[float]] = {name: [] for name in models}
    second: dict[str, list[float]] = {name: [] for name in models}

    def run(name: str, _: int) -> None:
        async def ask(asked: Asked, _: str) -> None:
            await _two_turns(asked, f"turn/{len(first[name])}", first[name], second[name])

        ask_server(servers.BRIGADE_2, replace(settings, model=models[name]), ask)

    in_turn(settings, list(models), run)
    rows: list[list[str]] = []
    data: dict[str, dict[str, Any]] = {}
    for name in models:
        quotient = ratio(second[name], first[name])
        data[name] = {"first": first[name], "second": second[name], "ratio": quotient}
        times = f"{p50(first[name]):.2f}", f"{p50(second[name]):.3f}"
        rows.append([name, *times, f"{quotient:.3f}"])
    title = f"time to first token of a {SECOND_TURN_TOKENS}-token chat's turns, s"
    return Row({"second_turn": data}, {title: (["model", "first", "second", "ratio"], rows)})


async def _two_turns(asked: Asked, name: str, first: list[float], second: list[float]) -> None:
    """Asks three chats with two turns each, and notes the times of the last two."""
    prompts = asked.prompts(name, SECOND_TURN_TOKENS, 3)
    for i, prompt in enumerate(prompts):
        chat = [{"role": "user", "content": prompt}]
        one = await asked.chat(chat, 16)
        chat.append({"role": "assistant", "content": one.text})
        chat.append({"role": "user", "content": "and the time"})
        two = await asked.chat(chat, 16)
        if i:  # the first chat warms up
            first.append(_ttft(one))
            second.append(_ttft(two))


def interrupted(settings: Settings) -> Row:
    """Eight running streams, and one long prompt that comes in."""
    quiet: list[float] = []
    disturbed: list[float] = []
    arrivals: list[float] = []

    async def ask(asked: Asked, _: str) -> None:
        name = f"interrupted/{len(quiet)}"
        streams: list[Record] = []

        async def run(name: str, num_tokens: int) -> None:
            prompts = asked.prompts(name, STREAM_PROMPT_TOKENS, NUM_STREAMS)
            ask = lambda text: asked(text, num_tokens)  # noqa: E731
            await closed_loop(ask, prompts, NUM_STREAMS, streams.append)

        await run(f"{name}/warm-up", 8)
        streams.clear()
        running = asyncio.create_task(run(name, STREAM_TOKENS))
        await asyncio.sleep(QUIET_SECONDS)
        long = await asked(asked.prompts(name, INTERRUPTING_TOKENS, 1)[0], 2)
        await running
        steady = max(record.times[0] for record in streams), long.start
        during = long.start, min(long.times[0], min(record.times[-1] for record in streams))
        if during[1] < long.times[0]:
            print("the streams ended before the long prompt was read", file=sys.stderr)
        quiet.append(p50(gaps_in(streams, steady)))
        disturbed.extend(gaps_in(streams, during))
        arrivals.append(_ttft(long))

    in_turn(settings, [servers.BRIGADE_2], lambda name, _: ask_server(name, settings, ask))
    worst = quantile(disturbed, 0.99) or float("nan")
    rows = [
        ["p50 before, ms", f"{p50(quiet) * 1000:.0f}"],
        ["p99 during, ms", f"{worst * 1000:.0f}"],
        ["p99 ÷ p50", f"{worst / p50(quiet):.2f}"],
        ["the long prompt's first token, s", f"{p50(arrivals):.1f}"],
    ]
    title = f"between tokens of {NUM_STREAMS} streams while {INTERRUPTING_TOKENS} tokens come in"
    data = {"p50": quiet, "p99": worst, "ratio": worst / p50(quiet), "ttft": arrivals}
    return Row({"interrupted": data}, {title: (["", ""], rows)})


def behind(settings: Settings) -> Row:
    """A short prompt that comes just behind a long one, on two ranks."""
    short: dict[str, list[float]] = {"alone": [], "together": []}
    long: dict[str, list[float]] = {"alone": [], "together": []}

    async def ask(asked: Asked, _: str) -> None:
        name = f"behind/{len(short['alone'])}"
        shorts = asked.prompts(name, BEHIND_TOKENS, 3)
        longs = asked.prompts(name, AHEAD_TOKENS, 2)
        await asked(shorts[2], 8)
        short["alone"].append(_ttft(await asked(shorts[0], 2)))
        long["alone"].append(_ttft(await asked(longs[0], 2)))
        ahead = asyncio.create_task(asked(longs[1], 2))
        await asyncio.sleep(BEHIND_SECONDS)
        short["together"].append(_ttft(await asked(shorts[1], 2)))
        long["together"].append(_ttft(await ahead))

    in_turn(settings, [servers.BRIGADE_2], lambda name, _: ask_server(name, settings, ask))
    rows: list[list[str]] = []
    data: dict[str, dict[str, Any]] = {}
    for name, seconds in {f"{BEHIND_TOKENS}": short, f"{AHEAD_TOKENS}": long}.items():
        quotient = ratio(seconds["together"], seconds["alone"])
        data[name] = {**seconds, "ratio": quotient}
        times = f"{p50(seconds['alone']):.2f}", f"{p50(seconds['together']):.2f}"
        rows.append([name, *times, f"{quotient:.2f}"])
    title = f"time to first token, s; the short prompt {BEHIND_SECONDS} s behind the long one"
    columns = ["tokens", "alone", "together", "ratio"]
    return Row({"behind": data}, {title: (columns, rows)})


def _ttft(record: Record) -> float:
    return record.times[0] - record.start
