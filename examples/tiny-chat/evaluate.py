"""Score a trained Tiny on held-out dialogues: greedy answers that match exactly, for each task.

Every assistant turn is generated once, with the reference as its history. Exits 1 when fewer than
the wanted share of all answers are right.
"""

import argparse
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from dialogues import Dialogue, Source, draw_dialogue
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from vocabulary import END, ROLES


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: the tokens before it and the tokens it should be, end token included."""

    task: str
    prompt: tuple[int, ...]
    wanted: tuple[int, ...]


def render(tokenizer: Any, dialogue: Dialogue) -> str:
    """Render a whole dialogue with the chat template."""
    text: str = tokenizer.apply_chat_template(
        dialogue.messages, tools=dialogue.tools, tokenize=False
    )
    return text


def turns_of(tokenizer: Any, dialogue: Dialogue) -> list[Turn]:
    """Cut a rendered dialogue at its assistant turns."""
    start, end = tokenizer.convert_tokens_to_ids([ROLES["assistant"], END])
    ids = tokenizer.encode(render(tokenizer, dialogue), add_special_tokens=False)
    begins = [i + 1 for i, token in enumerate(ids) if token == start]
    ends = [ids.index(end, begin) + 1 for begin in begins]
    return [
        Turn(task, tuple(ids[:begin]), tuple(ids[begin:stop]))
        for task, begin, stop in zip(dialogue.tasks, begins, ends, strict=True)
    ]


def answer(model: Any, prompts: list[tuple[int, ...]], end: int, limit: int) -> list[list[int]]:
    """Generate greedily for prompts of equal length; each row stops at its own end token."""
    cache = make_prompt_cache(model)
    rows: list[list[int]] = [[] for _ in prompts]
    inputs = mx.array(prompts)
    for _ in range(limit):
        tokens = mx.argmax(model(inputs, cache=cache)[:, -1], axis=-1)
        said: Any = tokens.tolist()
        for row, token in zip(rows, said, strict=True):
            if not row or row[-1] != end:
                row.append(token)
        if all(row[-1] == end for row in rows):
            break
        inputs = tokens[:, None]
    return rows


def score(
    model: Any, tokenizer: Any, turns: list[Turn], show: int, rows: int = 32
) -> tuple[Counter[str], Counter[str]]:
    """Count turns and right turns for each task; print the first `show` wrong ones."""
    # Rows of equal prompt length need no padding, so a batch computes what a single row would.
    by_length: dict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        by_length[len(turn.prompt)].append(turn)
    groups = [same[i : i + rows] for same in by_length.values() for i in range(0, len(same), rows)]
    asked, right = Counter[str](), Counter[str]()
    for group in groups:
        limit = max(len(turn.wanted) for turn in group)
        said = answer(model, [turn.prompt for turn in group], tokenizer.eos_token_id, limit)
        for turn, tokens in zip(group, said, strict=True):
            asked[turn.task] += 1
            right[turn.task] += tuple(tokens) == turn.wanted
            if tuple(tokens) != turn.wanted and (show := show - 1) >= 0:
                print(tokenizer.decode(turn.prompt), "SAID", tokenizer.decode(tokens))
    return asked, right


def score_folder(
    folder: Path, num_dialogues: int = 1500, seed: int = 1, show: int = 0
) -> tuple[Counter[str], Counter[str]]:
    """Score the model in a folder on held-out dialogues."""
    model, wrapper = load(str(folder))[:2]
    tokenizer = wrapper._tokenizer
    source = Source(Random(f"evaluate {seed}"), "test")
    dialogues = [draw_dialogue(source) for _ in range(num_dialogues)]
    turns = [turn for dialogue in dialogues for turn in turns_of(tokenizer, dialogue)]
    return score(model, tokenizer, turns, show)


def table(asked: Counter[str], right: Counter[str]) -> str:
    """Format the score as a table in Markdown."""
    rows = [(task, right[task], asked[task]) for task in sorted(asked)]
    rows.append(("**all**", right.total(), asked.total()))
    lines = [f"| {name} | {good} of {all_} | {good / all_:.2%} |" for name, good, all_ in rows]
    return "\n".join(["| task | right | share |", "|---|---|---|", *lines])


def main() -> None:
    """Read the command line, score, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent
    parser.add_argument("--model", type=Path, default=default, help="folder of the model")
    parser.add_argument("--dialogues", type=int, default=1500, help="how many to draw")
    parser.add_argument("--seed", type=int, default=1, help="which of them to draw")
    parser.add_argument("--wanted", type=float, default=0.95, help="least share right")
    parser.add_argument("--show", type=int, default=0, help="how many wrong answers to print")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    asked, right = score_folder(
        arguments.model, arguments.dialogues, arguments.seed, arguments.show
    )
    print(table(asked, right))
    if right.total() < arguments.wanted * asked.total():
        sys.exit(f"below {arguments.wanted:.0%}")


if __name__ == "__main__":
    main()
