"""How long people wait: for a long prompt, for a second turn, and while others' prompts come in."""

import asyncio
import sys

from scripts.measure import servers
from scripts.measure.clients import Asked, ask_in_turn, first_token_seconds
from scripts.measure.rounds import Row, Samples, Settings
from scripts.measure.sums import gaps_in, p50, p99

LONG_TOKENS = 2048
SECOND_TURN_TOKENS = 2000
INTERRUPTING_TOKENS = 4000
STREAM_TOKENS = 500
NUM_STREAMS = 8
QUIET_SECONDS = 8.0
BEHIND_TOKENS = 400
AHEAD_TOKENS = 3000
BEHIND_SECONDS = 0.5


def long_prompt(settings: Settings) -> Row:
    """Time to the first token of a long prompt, alone on the server."""
    names = servers.BRIGADE_2, servers.BRIGADE_1
    seconds = Samples(*names)

    async def ask(asked: Asked, name: str, round_: int) -> None:
        seconds.add(name, *await long_prompt_seconds(asked, round_))

    ask_in_turn(settings, names, ask)
    return seconds.row("long_prompt", f"time to first token of {LONG_TOKENS} tokens, s", names)


async def long_prompt_seconds(asked: Asked, round_: int) -> list[float]:
    """The times to the first token of some long prompts that come one after the other."""
    warm_up, *prompts = asked.prompts(f"long/{round_}", LONG_TOKENS, 4)
    await asked(warm_up, 2)
    return [first_token_seconds(await asked(prompt, 2)) for prompt in prompts]


def second_turn(settings: Settings) -> Row:
    """A chat's second turn repeats the first one, which the prefix cache holds."""
    seconds = Samples("first turn", "second turn")

    async def ask(asked: Asked, _: str, round_: int) -> None:
        warm_up, *prompts = asked.prompts(f"turn/{round_}", SECOND_TURN_TOKENS, 3)
        await asked(warm_up, 16)
        for prompt in prompts:
            chat = [{"role": "user", "content": prompt}]
            one = await asked.chat(chat, 16)
            chat.append({"role": "assistant", "content": one.text})
            chat.append({"role": "user", "content": "and the time"})
            two = await asked.chat(chat, 16)
            seconds.add("first turn", first_token_seconds(one))
            seconds.add("second turn", first_token_seconds(two))

    ask_in_turn(settings, [servers.BRIGADE_2], ask)
    title = f"time to first token in a chat of {SECOND_TURN_TOKENS} tokens, s"
    return seconds.row("second_turn", title, ("second turn", "first turn"))


def interrupted(settings: Settings) -> Row:
    """Eight running streams, and one long prompt that comes in."""
    before, during, first = "p50 before, ms", "p99 during, ms", "the prompt's first token, s"
    samples = Samples(before, during, first)

    async def ask(asked: Asked, _: str, round_: int) -> None:
        name = f"interrupted/{round_}"
        await asked.at_once(f"{name}/warm-up", NUM_STREAMS, 8)
        running = asyncio.create_task(asked.at_once(name, NUM_STREAMS, STREAM_TOKENS))
        await asyncio.sleep(QUIET_SECONDS)
        long = await asked(asked.prompts(name, INTERRUPTING_TOKENS, 1)[0], 2)
        streams = await running
        begin = max(record.times[0] for record in streams)
        end = min(record.times[-1] for record in streams)
        if end < long.times[0]:
            print("the streams ended before the long prompt was read", file=sys.stderr)
        samples.add(before, 1000 * p50(gaps_in(streams, (begin, long.start))))
        disturbed = gaps_in(streams, (long.start, min(long.times[0], end)))
        samples.add(during, 1000 * p99(disturbed))
        samples.add(first, first_token_seconds(long))

    ask_in_turn(settings, [servers.BRIGADE_2], ask)
    title = f"between tokens of {NUM_STREAMS} streams while {INTERRUPTING_TOKENS} tokens come in"
    return samples.row("interrupted", title, (during, before))


def behind(settings: Settings) -> Row:
    """A short prompt that comes just behind a long one, on two ranks."""
    names = [f"{n} {how}" for n in (BEHIND_TOKENS, AHEAD_TOKENS) for how in ("together", "alone")]
    short, short_alone, long, long_alone = names
    seconds = Samples(*names)

    async def ask(asked: Asked, _: str, round_: int) -> None:
        warm_up, *shorts = asked.prompts(f"behind/{round_}", BEHIND_TOKENS, 3)
        longs = asked.prompts(f"behind/{round_}", AHEAD_TOKENS, 2)
        await asked(warm_up, 8)
        seconds.add(short_alone, first_token_seconds(await asked(shorts[0], 2)))
        seconds.add(long_alone, first_token_seconds(await asked(longs[0], 2)))
        ahead = asyncio.create_task(asked(longs[1], 2))
        await asyncio.sleep(BEHIND_SECONDS)
        seconds.add(short, first_token_seconds(await asked(shorts[1], 2)))
        seconds.add(long, first_token_seconds(await ahead))

    ask_in_turn(settings, [servers.BRIGADE_2], ask)
    title = f"time to first token, s; the short prompt {BEHIND_SECONDS} s behind the long one"
    return seconds.row("behind", title, (short, short_alone), (long, long_alone))
