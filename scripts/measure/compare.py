"""Compares this checkout with another one on two ranks, or on one: tokens per second at each number
of clients, and a hop's time. Both servers run all the time and are asked in turn.

    .venv/bin/python -m scripts.measure.compare OTHER_CHECKOUT
"""

import argparse
import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

from scripts.measure.clients import asked_of, timeline
from scripts.measure.hops import DIRECTIONS, hop_seconds
from scripts.measure.model import FOLDER, make_model
from scripts.measure.rounds import Settings, Table, in_turn, levels_of, markdown
from scripts.measure.servers import BRIGADE_1, BRIGADE_2, ROOT, NotMeasuredError, running
from scripts.measure.sums import p50
from serve.bench.records import tokens_per_second

MAX_TOKENS = 32  # of an answer
BEFORE, AFTER = "before", "after"
Figures = dict[str, dict[int, dict[str, float]]]
"""By BEFORE or AFTER, by round, and by what was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("other", type=Path, help="a checkout of the state before")
    parser.add_argument("--model", type=Path, help="its folder (150 M random weights)")
    parser.add_argument("--levels", type=levels_of, default="1,8,32", help="clients (1,8,32)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each checkout (3)")
    parser.add_argument("--one-rank", action="store_true", help="one rank, which has no hops")
    flags = parser.parse_args()
    model = flags.model.resolve() if flags.model else make_model(FOLDER)
    settings = Settings(model, flags.levels, flags.rounds, requests_per_client=1, seed=0)
    try:
        server = BRIGADE_1 if flags.one_rank else BRIGADE_2
        print(markdown(table_of(compare(settings, flags.other.resolve(), server))))
    except NotMeasuredError as error:
        raise SystemExit(f"compare: {error}") from error


def compare(settings: Settings, other: Path, kind: str = BRIGADE_2) -> Figures:
    """Measures both checkouts in each round."""
    figures: Figures = {BEFORE: {}, AFTER: {}}
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for name, checkout in ((BEFORE, other), (AFTER, ROOT)):
            server = running(kind, settings.model, checkout=checkout)
            urls[name] = stack.enter_context(server)

        def run(name: str, round_: int) -> None:
            measured = _measure(settings, urls[name], round_, has_hops=kind != BRIGADE_1)
            figures[name][round_] = asyncio.run(measured)

        in_turn(settings.rounds, list(urls), run)
    return figures


async def _measure(
    settings: Settings, url: str, round_: int, *, has_hops: bool
) -> dict[str, float]:
    """The figures of one round. Hops are those of a single client, whose stages wait for them."""
    found: dict[str, float] = {}
    async with asked_of(url, settings.model.name, settings.seed) as asked:
        if not round_:
            await asked.at_once("warm-up", max(settings.levels), 4)
        for n in settings.levels:
            start = time.time()
            rates: list[float] = []
            for turn in range(2 if n == 1 else 1):
                run = await asked.at_once(f"{round_}/{turn}", n, MAX_TOKENS)
                rates.append(tokens_per_second(run))
            found[f"tokens/s, clients: {n}"] = p50(rates)
            if n == 1 and has_hops:
                seconds = hop_seconds(await timeline(url, start))
                for direction, each in zip(DIRECTIONS, seconds, strict=True):
                    found[f"hop {direction}, p50, ms"] = 1000 * p50(each)
    return found


def table_of(figures: Figures) -> Table:
    """Medians over the rounds in which both were measured, and of the quotients of each round.
    Raises NotMeasuredError without such a round."""
    rounds = sorted(figures[BEFORE].keys() & figures[AFTER].keys())
    if not rounds:
        raise NotMeasuredError("no round has figures of both; the lines above say why")
    rows: list[list[str]] = []
    for figure in figures[BEFORE][rounds[0]]:
        before, after = ([figures[name][n][figure] for n in rounds] for name in (BEFORE, AFTER))
        quotients = [b / a for a, b in zip(before, after, strict=True)]
        medians = [f"{p50(before):.4g}", f"{p50(after):.4g}", f"{p50(quotients):.3f}"]
        each = " ".join(f"{quotient:.3f}" for quotient in quotients)
        rows.append([figure, *medians, each])
    return ["", BEFORE, AFTER, "after ÷ before", "of each round"], rows


if __name__ == "__main__":
    main()
