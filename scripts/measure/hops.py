"""How long a message takes from stage to stage while its receiver has nothing else to do."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from scripts.measure import servers
from scripts.measure.clients import PROMPT_TOKENS, Asked, ask_in_turn, timeline
from scripts.measure.rounds import Row, Samples, Settings

STREAM_TOKENS = 200
DIRECTIONS = ("to rank 0", "to rank 1")


def hops(settings: Settings) -> Row:
    """One client: from the end of a step on a stage to its beginning on the next one, and from
    its token on rank 0 to the next step on rank 1."""
    milliseconds = Samples(*DIRECTIONS)

    async def ask(asked: Asked, _: str, round_: int) -> None:
        start = time.time()
        for prompt in asked.prompts(f"hops/{round_}", PROMPT_TOKENS, 2):
            await asked(prompt, STREAM_TOKENS)
        found = hop_seconds(await timeline(asked.url, start))
        for name, seconds in zip(DIRECTIONS, found, strict=True):
            milliseconds.add(name, *(1000 * each for each in seconds))

    ask_in_turn(settings, [servers.BRIGADE_2], ask)
    return milliseconds.row("hops", "a hop, ms")


def hop_seconds(events: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Of a Chrome trace in which one sequence decodes on two stages: the hops to rank 0, and
    those back to rank 1."""
    steps: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "X" and event["args"]["tokens"] == 1:
            steps[event["args"]["step"]][event["pid"]] = event
    whole = [steps[number] for number in sorted(steps) if len(steps[number]) == 2]
    forth = [(step[0]["ts"] - _end(step[1])) / 1e6 for step in whole]
    back = [
        (later[1]["ts"] - _end(step[0])) / 1e6
        for step, later in zip(whole, whole[1:], strict=False)
        if later[0]["args"]["step"] == step[0]["args"]["step"] + 1
    ]
    return forth, back


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])
