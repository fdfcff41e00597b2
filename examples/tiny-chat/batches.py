"""Dialogues as token arrays: rendered by the chat template, packed by length, targets masked."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
from dialogues import Dialogue
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from vocabulary import END, ROLES

# Inputs (B, L); where in the flattened inputs the assistant speaks (N,); the tokens it says (N,).
Batch = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
Row = tuple[list[int], list[bool]]


def render(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> str:
    """Render a whole dialogue with the chat template."""
    template: Any = tokenizer.apply_chat_template
    text: str = template(dialogue.messages, tools=dialogue.tools, tokenize=False)
    return text


def target_mask(ids: list[int], start: int, end: int) -> list[bool]:
    """Mark what the assistant says, its end token included, given the tokens around it."""
    mask, inside = [], False
    for token in ids:
        mask.append(inside)
        if token == start:
            inside = True
        elif token == end:
            inside = False
    return mask


def pack(rows: list[Row], length: int, pad: int) -> Batch:
    """Make one batch of rows that are no longer than length + 1."""
    ids = np.full((len(rows), length + 1), pad, dtype=np.int32)
    mask = np.zeros((len(rows), length + 1), dtype=bool)
    for i, (row, marks) in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = marks
    positions = np.flatnonzero(mask[:, 1:]).astype(np.int32)
    return ids[:, :-1], positions, ids[:, 1:].reshape(-1)[positions]


def cut(rows: list[Row], tokens: int, pad: int) -> list[Batch]:
    """Cut rows, sorted by length, into batches of at most `tokens` positions."""
    batches: list[Batch] = []
    first, length = 0, 0
    for last, (row, _) in enumerate(rows):
        if last > first and (len(row) - 1) * (last + 1 - first) > tokens:
            batches.append(pack(rows[first:last], length, pad))
            first = last
        length = len(row) - 1
    return [*batches, pack(rows[first:], length, pad)]


def draw_batches(
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[], Dialogue],
    tokens: int,
    chunk: int = 4096,
) -> Iterator[Batch]:
    """Draw training batches of about `tokens` positions for ever, each dialogue drawn afresh.

    Rows of one batch are of like length, so little is spent on padding.
    """
    start: Any = tokenizer.convert_tokens_to_ids(ROLES["assistant"])
    end: Any = tokenizer.convert_tokens_to_ids(END)
    order = Random(0)
    while True:
        texts = [render(tokenizer, draw()) for _ in range(chunk)]
        encoded: Any = tokenizer(texts, add_special_tokens=False)["input_ids"]
        rows = [(ids, target_mask(ids, start, end)) for ids in encoded]
        batches = cut(sorted(rows, key=lambda row: len(row[0])), tokens, tokenizer.pad_token_id)
        # Otherwise they would come from the shortest to the longest.
        order.shuffle(batches)
        yield from batches
