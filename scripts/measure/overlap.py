"""What overlap gains while all sequences decode: two groups that take turns on two stages, against
one group in lockstep and against one rank."""

import time

from scripts.measure.clients import Asked, ask_in_turn, timeline
from scripts.measure.rounds import Row, Samples, Settings
from scripts.measure.servers import BRIGADE_1, BRIGADE_2, LOCKSTEP
from scripts.measure.sums import busy_shares, steady_tokens_per_second, steady_window

DECODE_TOKENS = 128
LEVELS = (8, 16, 32)


def decode(settings: Settings) -> Row:
    """Pure decode, without prompts, and how busy the stages were.

    A pass of b rows takes t(b) on one rank. Two groups of N/2 rows on two stages generate at most
    N tokens in t(N/2), which is twice what one rank reaches with N/2 clients.
    """
    levels = [n for n in settings.levels if n in LEVELS] or [8]
    rate = {(name, n): f"{name}, {n} clients" for n in levels for name in (BRIGADE_2, LOCKSTEP)}
    rate |= {(BRIGADE_1, n // 2): f"{BRIGADE_1}, {n // 2} clients" for n in levels}
    busy = {n: f"busy share of the busier stage, {n} clients" for n in levels}
    samples = Samples(*rate.values(), *busy.values())

    async def ask(asked: Asked, name: str, round_: int) -> None:
        for n in (n for server, n in rate if server == name):
            start = time.time()
            run = await asked.at_once(f"decode/{n}/{round_}", n, DECODE_TOKENS)
            samples.add(rate[name, n], steady_tokens_per_second(run))
            if name == BRIGADE_2:
                # Records have the clock that only goes forward, timelines have the wall's.
                offset = time.time() - time.perf_counter()
                begin, end = steady_window(run)
                events = await timeline(asked.url, start)
                shares = busy_shares(events, (begin + offset, end + offset))
                samples.add(busy[n], max(shares.values()))

    ask_in_turn(settings, (BRIGADE_2, LOCKSTEP, BRIGADE_1), ask)
    ratios = [(rate[BRIGADE_2, n], rate[LOCKSTEP, n]) for n in levels]
    ratios += [(rate[BRIGADE_2, n], rate[BRIGADE_1, n // 2]) for n in levels]
    return samples.row("decode", "pure decode, tokens/s", *ratios)
