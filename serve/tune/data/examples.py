"""Reads examples from jsonl files, marks the tokens to train on, and forms the batches of a run.

Formats and tokens are those of mlx_lm.tuner.datasets. Labels, order and padding differ: every
turn of the assistant can be learned, padding never is, and the order depends only on the seed and
the number of the batch, so a run can be resumed at any batch."""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tuner.datasets import ChatDataset, TextDataset, create_dataset

from serve.core.errors import ModelError, UsageError
from serve.hub.model_config import config_for_tokenizer
from serve.tune.config import FineTuneConfig
from serve.tune.data.lines import read_lines

# Errors that templates raise for a line in an unexpected form.
_FAILURES = (
    jinja2.TemplateError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


Tokens = tuple[int, ...]
Range = tuple[int, int]
"""A range of positions: the first one, and the one after the last one."""
Render = Callable[[int, bool], Tokens]
"""Renders the first messages of a chat, with or without the prompt for the assistant's turn."""


@dataclass(frozen=True, slots=True)
class Example:
    """An example, or a row of several examples that begin at `starts`. labels are the ranges of
    tokens that are learned, as (start, end)."""

    tokens: Tokens
    labels: tuple[Range, ...]
    starts: tuple[int, ...] = (0,)

    def cut(self, length: int) -> "Example":
        """Returns the first `length` tokens of this example."""
        tokens = self.tokens[:length]
        labels = []
        for start, end in self.labels:
            if start < length:
                labels.append((start, min(end, length)))
        return Example(tokens, tuple(labels))

    @property
    def num_labels(self) -> int:
        """The number of learned tokens, without a row's first token, which nothing predicts."""
        count = 0
        for start, end in self.labels:
            first = max(start, 1)
            count += max(0, end - first)
        return count


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that are trained together. inputs, targets, mask and segments are (B, L). mask is 1
    where a target is learned. segments numbers the examples in rows that contain several."""

    inputs: mx.array
    targets: mx.array
    mask: mx.array
    num_labels: int
    num_tokens: int
    segments: mx.array | None = None

    @property
    def size(self) -> int:
        """The number of computed positions, including padding."""
        return int(self.inputs.size)

    @property
    def learned(self) -> mx.array:
        """The positions with a learned target, numbered along all rows: (N,)."""
        mask = np.array(self.mask)
        positions = np.flatnonzero(mask)
        return mx.array(positions.astype(np.int32))


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of one file, or packed rows of them. num_cut counts examples that were cut to
    --max-seq-length, num_dropped examples that were left out: too long, or nothing to learn. Ranks
    compare their digests to find out whether they have read the same examples."""

    examples: list[Example]
    num_cut: int
    num_dropped: int
    digest: str
    is_packed: bool = False

    @property
    def size(self) -> str:
        """The number of examples, and of rows if they are packed, as text."""
        counts = [len(example.starts) for example in self.examples]
        count = sum(counts)
        if self.is_packed:
            return f"{count} examples in {len(self.examples)} rows"
        return f"{count} examples"

    @cached_property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of tokens in each row: (N,)."""
        lengths = [len(example.tokens) for example in self.examples]
        return np.array(lengths, dtype=np.int64)


def read_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer with mlx_lm. Raises ModelError."""
    # transformers warns of texts longer than the model's context, but such texts are cut here.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = config_for_tokenizer(folder)
        return load_tokenizer(folder, {"config": config})
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        reason, _, _ = str(error).strip().partition("\n")
        raise ModelError(
            f"The tokenizer in {folder} cannot be read ({reason}): are its files there?",
            code="unreadable",
        ) from error


def read_split(path: Path, tokenizer: Any, config: FineTuneConfig) -> Split:
    """Reads the examples of a file. Raises UsageError that names the file and the wrong line."""
    lines = read_lines(path, config)
    try:
        items = [item for _, item in lines]
        dataset = create_dataset(items, tokenizer, config)
    except ValueError as error:  # raised for --mask-prompt, which does not work with texts
        first_line, _ = lines[0]
        raise UsageError(f"{path}:{first_line}: {error}") from error
    examples = []
    num_cut = 0
    num_dropped = 0
    shortest = sys.maxsize
    digest = hashlib.sha256()
    for number, item in lines:
        try:
            example = _example(dataset, item, config.mask_prompt)
        except _FAILURES as error:
            lines_of_error = str(error).splitlines()
            reason = lines_of_error[0] if lines_of_error else type(error).__name__
            raise UsageError(
                f"{path}:{number}: the model's chat template rejects this chat ({reason}).",
                code="template_refusal",
            ) from error
        length = len(example.tokens)
        shortest = min(shortest, length)
        if length > config.max_seq_length:
            if config.long_examples == "cut":
                example = example.cut(config.max_seq_length)
                num_cut += 1
            else:
                example = Example((), ())
        described = json.dumps([example.tokens, example.labels])
        digest.update(described.encode())
        if example.num_labels:
            examples.append(example)
        else:
            num_dropped += 1
    if not examples:
        raise UsageError(
            f"{path}: no example contains tokens to learn within --max-seq-length "
            f"{config.max_seq_length}: the shortest has {shortest} tokens.",
            code="no_examples",
        )
    short_digest = digest.hexdigest()[:16]
    return Split(examples, num_cut, num_dropped, short_digest)


# --- what is learned


def _example(dataset: Any, item: dict[str, Any], mask_prompt: bool) -> Example:
    if isinstance(dataset, TextDataset):
        text_tokens, _ = dataset.process(item)
        everything = 0, len(text_tokens)
        return Example(tuple(text_tokens), (everything,))
    if isinstance(dataset, ChatDataset):
        messages = item[dataset.chat_key]
    else:
        prompt = item[dataset.prompt_key]
        completion = item[dataset.completion_key]
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]

    def render(num_messages: int, is_prompt: bool) -> Tokens:
        rendered = dataset.tokenizer.apply_chat_template(
            messages[:num_messages],
            tools=item.get("tools"),
            add_generation_prompt=is_prompt,
            return_dict=False,
        )
        return tuple(rendered)

    tokens = render(len(messages), False)
    if mask_prompt:
        return Example(tokens, _turns(messages, render))
    everything = 0, len(tokens)
    return Example(tokens, (everything,))


def _turns(messages: Sequence[dict[str, Any]], render: Render) -> tuple[Range, ...]:
    """Returns the tokens of each turn of the assistant. Some templates render earlier turns
    differently from the last one. Then only the last turn is learned, if it is the assistant's."""
    tokens = render(len(messages), False)
    labels = []
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        after = render(n + 1, False)
        if n:
            before = render(n, True)
        else:
            first_prompt = render(1, True)
            before = _opening(after, first_prompt)
        is_same_everywhere = _begins_with(tokens, after) and _begins_with(after, before)
        if not is_same_everywhere:
            return _last_turn(messages, render)
        labels.append((len(before), len(after)))
    return tuple(labels)


def _begins_with(tokens: Tokens, start: Tokens) -> bool:
    return tokens[: len(start)] == start


def _last_turn(messages: Sequence[dict[str, Any]], render: Render) -> tuple[Range, ...]:
    """Returns the tokens of the last message, if it is the assistant's."""
    if messages[-1]["role"] != "assistant":
        return ()
    count = len(messages)
    before = render(count - 1, True)
    after = render(count, False)
    turn = len(before), len(after)
    return (turn,)


def _opening(turn: Tokens, prompted: Tokens) -> Tokens:
    """Returns the tokens before the assistant's words in a chat that the assistant begins.

    A template may refuse to render an empty chat. But the same prompt precedes every turn, and
    `prompted` is the first turn with the prompt for a second turn."""
    prompt = prompted[len(turn) :]
    for start in range(len(turn)):
        end = start + len(prompt)
        if turn[start:end] == prompt:
            return turn[:end]
    return turn


# --- batches


def batch_at(split: Split, number: int, batch_size: int, seed: int) -> list[int]:
    """Returns the examples of a batch, shortest first. Batches are counted from 0 over all epochs.

    Each batch has examples of similar length, and an epoch has its batches in random order. Each
    epoch leaves out other examples, which do not fill a batch.
    """
    count = len(split.examples)
    if count < batch_size:
        unit = "packed rows" if split.is_packed else "examples"
        raise UsageError(
            f"train.jsonl has {count} {unit} to learn from, fewer than --batch-size "
            f"{batch_size}: use {count} or less.",
            code="too_few_examples",
        )
    num_batches = count // batch_size
    epoch, in_epoch = divmod(number, num_batches)
    batches = _epoch(split, epoch, batch_size, seed)
    return [int(n) for n in batches[in_epoch]]


@lru_cache(maxsize=1)
def _epoch(split: Split, epoch: int, batch_size: int, seed: int) -> Any:
    """Returns all batches of an epoch, in their order: (N, B)."""
    random = np.random.default_rng([seed, epoch])
    count = len(split.examples)
    num_kept = count - count % batch_size
    kept = random.permutation(count)[:num_kept]
    by_length = np.argsort(split.lengths[kept], kind="stable")
    batches = kept[by_length].reshape(-1, batch_size)
    order = random.permutation(len(batches))
    return batches[order]


def some_examples(split: Split, count: int | None, seed: int) -> list[int]:
    """Returns `count` examples (None: all), shortest first. The seed decides which."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(split.examples))
    chosen = order[:count]
    by_length = np.argsort(split.lengths[chosen], kind="stable")
    return [int(n) for n in chosen[by_length]]


def micro_batches(split: Split, chosen: Sequence[int], num_rows: int) -> list[MicroBatch]:
    """Divides examples into micro-batches of num_rows rows, each padded to its longest row."""
    batches = []
    for start in range(0, len(chosen), num_rows):
        numbers = chosen[start : start + num_rows]
        rows = [split.examples[number] for number in numbers]
        batches.append(pad(rows))
    return batches


def largest(split: Split, num_rows: int) -> MicroBatch:
    """Returns a micro-batch with the longest examples, which needs the most memory."""
    by_length = np.argsort(split.lengths, kind="stable")
    longest = by_length[-num_rows:]
    batches = micro_batches(split, longest.tolist(), num_rows)
    return batches[0]


def pad(examples: Sequence[Example]) -> MicroBatch:
    """Makes one micro-batch of rows of different lengths, padded on the right."""
    num_rows = len(examples)
    lengths = [len(example.tokens) for example in examples]
    length = max(lengths)
    tokens = np.zeros((num_rows, length), np.int32)
    learned = np.zeros((num_rows, length), np.float32)
    segments = np.zeros((num_rows, length - 1), np.int32)
    positions = np.arange(length - 1)
    num_labels = 0
    num_tokens = 0
    for row, example in enumerate(examples):
        tokens[row, : lengths[row]] = example.tokens
        for start, end in example.labels:
            learned[row, start:end] = 1
        segments[row] = np.searchsorted(example.starts, positions, side="right")
        num_labels += example.num_labels
        num_tokens += lengths[row] - len(example.starts)
    inputs = mx.array(tokens[:, :-1])
    targets = mx.array(tokens[:, 1:])
    mask = mx.array(learned[:, 1:])
    has_several = segments.max(initial=0) > 1
    return MicroBatch(
        inputs=inputs,
        targets=targets,
        mask=mask,
        num_labels=num_labels,
        num_tokens=num_tokens,
        segments=mx.array(segments) if has_several else None,
    )
