"""How long a message takes from stage to stage while its receiver has nothing else to do."""

from collections import defaultdict
from typing import Any

from scripts.measure import servers
from scripts.measure.limits import timeline
from scripts.measure.settings import Asked, Row, Settings, ask_server, in_turn
from scripts.measure.sums import p50

PROMPT_TOKENS = 66
STREAM_TOKENS = 200


def hops(settings: Settings) -> Row:
    """One client: from the end of a step on a stage to its beginning on the next one, and from
    its token on rank 0 to the next step on rank 1."""
    seconds: dict[str, list[float]] = {"rank 1 to rank 0": [], "rank 0 to rank 1": []}

    async def ask(asked: Asked, url: str) -> None:
        for prompt in asked.prompts("hops", PROMPT_TOKENS, 2):
            await asked(prompt, STREAM_TOKENS)
        forth, back = hop_seconds(await timeline(url))
        seconds["rank 1 to rank 0"] += forth
        seconds["rank 0 to rank 1"] += back

    in_turn(settings, [servers.BRIGADE_2], lambda name, _: ask_server(name, settings, ask))
    rows = [[name, f"{p50(each) * 1000:.2f}"] for name, each in seconds.items()]
    return Row({"hops": seconds}, {"a hop, p50": (["", "ms"], rows)})


def hop_seconds(events: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
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
