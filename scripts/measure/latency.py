"""How long people wait: for a long prompt, for a second turn, and while others' prompts come in."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from scripts.measure import servers
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
    """A chat's second turn repeats the first one, which the server has already seen."""
    first: list[float] = []
    second: list[float] = []

    async def ask(asked: Asked, _: str) -> None:
        prompts = asked.prompts(f"turn/{len(first)}", SECOND_TURN_TOKENS, 3)
        for i, prompt in enumerate(prompts):
            chat = [{"role": "user", "content": prompt}]
            one = await asked.chat(chat, 16)
            chat.append({"role": "assistant", "content": one.text})
            chat.append({"role": "user", "content": "and the time"})
            two = await asked.chat(chat, 16)
            if i:  # the first chat warms up
                first.append(_ttft(one))
                second.append(_ttft(two))

    in_turn(settings, [servers.BRIGADE_2], lambda name, _: ask_server(name, settings, ask))
    rows = [
        ["first", f"{p50(first):.2f}"],
        ["second", f"{p50(second):.2f}"],
        ["second ÷ first", f"{ratio(second, first):.3f}"],
    ]
    title = f"time to first token of a {SECOND_TURN_TOKENS}-token chat's turns, s"
    data = {"second_turn": {"first": first, "second": second, "ratio": ratio(second, first)}}
    return Row(data, {title: (["turn", "s"], rows)})


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


def _ttft(record: Record) -> float:
    return record.times[0] - record.start
