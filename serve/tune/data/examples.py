"""Reads examples from jsonl files, marks the tokens to train on, and forms the batches of a run.

Formats and tokens are those of mlx_lm.tuner.datasets; labels, order and padding are not: every
turn of the assistant can be learned, padding never is, and the order follows from the seed and
the number of the batch alone, so a run can be resumed at any batch."""

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

# What templates raise at a line that is not as they expect.
_FAILURES = (jinja2.TemplateError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Example:
    """labels are the ranges of tokens that are learned. Of a row of several examples starts
    tells where each begins."""

    tokens: tuple[int, ...]
    labels: tuple[tuple[int, int], ...]
    starts: tuple[int, ...] = (0,)

    def cut(self, length: int) -> "Example":
        """The first tokens of this example."""
        labels = []
        for start, end in self.labels:
            if start < length:
                labels.append((start, min(end, length)))
        return Example(self.tokens[:length], tuple(labels))

    @property
    def num_labels(self) -> int:
        """How many tokens are learned. The first one of a row never is: nothing predicts it."""
        count = 0
        for start, end in self.labels:
            first = max(start, 1)
            count += max(0, end - first)
        return count


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """inputs, targets and mask are (B, L); mask is 1 where a target is learned. So are the
    segments of rows with several examples: numbers of the example that an input is of."""

    inputs: mx.array
    targets: mx.array
    mask: mx.array
    num_labels: int
    num_tokens: int
    segments: mx.array | None = None

    @property
    def size(self) -> int:
        """Positions that are computed, padding among them."""
        return int(self.inputs.size)

    @property
    def learned(self) -> mx.array:
        """(N,): the positions, numbered along all rows, whose target is learned."""
        mask = np.array(self.mask)
        positions = np.flatnonzero(mask)
        return mx.array(positions.astype(np.int32))


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of one file, or rows of several. num_cut and num_dropped are those longer
    than the window or without a label; digest tells whether two ranks have read the same."""

    examples: list[Example]
    num_cut: int
    num_dropped: int
    digest: str
    is_packed: bool = False

    @property
    def size(self) -> str:
        """How many examples there are, and in how many rows, for people."""
        count = sum(len(example.starts) for example in self.examples)
        if self.is_packed:
            return f"{count} examples in {len(self.examples)} rows"
        return f"{count} examples"

    @cached_property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(N,): the number of tokens in each row."""
        lengths = [len(example.tokens) for example in self.examples]
        return np.array(lengths, dtype=np.int64)


def read_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer with mlx_lm. Raises ModelError."""
    # It warns of a text longer than the model's window, which is cut here.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return load_tokenizer(folder, {"config": config_for_tokenizer(folder)})
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"The tokenizer in {folder} cannot be read ({reason}): are its files there?"
        ) from error


def read_split(path: Path, tokenizer: Any, config: FineTuneConfig) -> Split:
    """Raises UsageError that names the file and the line of what is wrong."""
    lines = read_lines(path, config)
    try:
        items = [item for _, item in lines]
        dataset = create_dataset(items, tokenizer, config)
    except ValueError as error:  # --mask-prompt, which texts have not
        raise UsageError(f"{path}:{lines[0][0]}: {error}") from error
    examples = []
    num_cut = 0
    num_dropped = 0
    shortest = sys.maxsize
    digest = hashlib.sha256()
    for number, item in lines:
        try:
            example = _example(dataset, item, config.mask_prompt)
        except _FAILURES as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UsageError(
                f"{path}:{number}: the model's chat template rejects this chat ({reason})."
            ) from error
        shortest = min(shortest, len(example.tokens))
        if len(example.tokens) > config.max_seq_length:
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
            f"{path}: no example has anything to learn within --max-seq-length "
            f"{config.max_seq_length}: the shortest has {shortest} tokens."
        )
    return Split(examples, num_cut, num_dropped, digest.hexdigest()[:16])


# --- what is learned


def _example(dataset: Any, item: dict[str, Any], mask_prompt: bool) -> Example:
    if isinstance(dataset, TextDataset):
        tokens = tuple(dataset.process(item)[0])
        everything = 0, len(tokens)
        return Example(tokens, (everything,))
    if isinstance(dataset, ChatDataset):
        messages = item[dataset.chat_key]
    else:
        user = {"role": "user", "content": item[dataset.prompt_key]}
        assistant = {"role": "assistant", "content": item[dataset.completion_key]}
        messages = [user, assistant]

    def render(num_messages: int, prompt: bool) -> tuple[int, ...]:
        tokens = dataset.tokenizer.apply_chat_template(
            messages[:num_messages],
            tools=item.get("tools"),
            add_generation_prompt=prompt,
            return_dict=False,
        )
        return tuple(tokens)

    tokens = render(len(messages), False)
    if mask_prompt:
        return Example(tokens, _turns(messages, render))
    everything = 0, len(tokens)
    return Example(tokens, (everything,))


def _turns(
    messages: Sequence[dict[str, Any]], render: Callable[[int, bool], tuple[int, ...]]
) -> tuple[tuple[int, int], ...]:
    """The tokens of each turn of the assistant. Some templates show earlier turns in another way
    than the last: then only the last is learned, if it is the assistant's."""
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
        is_shown_alike = _begins_with(tokens, after) and _begins_with(after, before)
        if not is_shown_alike:
            return _last_turn(messages, render)
        labels.append((len(before), len(after)))
    return tuple(labels)


def _begins_with(tokens: tuple[int, ...], start: tuple[int, ...]) -> bool:
    return tokens[: len(start)] == start


def _last_turn(
    messages: Sequence[dict[str, Any]], render: Callable[[int, bool], tuple[int, ...]]
) -> tuple[tuple[int, int], ...]:
    """The tokens of the last message, if it is the assistant's."""
    if messages[-1]["role"] != "assistant":
        return ()
    count = len(messages)
    before = render(count - 1, True)
    after = render(count, False)
    turn = len(before), len(after)
    return (turn,)


def _opening(turn: tuple[int, ...], prompted: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens before the assistant's words in a chat that it opens. Templates may
    refuse to render no messages, but the prompt for a second turn also stands before the first."""
    prompt = prompted[len(turn) :]
    for start in range(len(turn)):
        end = start + len(prompt)
        if turn[start:end] == prompt:
            return turn[:end]
    return turn


# --- batches


def batch_at(split: Split, number: int, batch_size: int, seed: int) -> list[int]:
    """The examples of a batch, counted from 0 over all epochs, shortest first.

    An epoch has examples of similar length in each batch and the batches in random order;
    what does not fill a batch, other examples in each epoch, is left out.
    """
    count = len(split.examples)
    if count < batch_size:
        found = f"{count} {'packed rows' if split.is_packed else 'examples'}"
        raise UsageError(
            f"train.jsonl has {found} to learn from, fewer than --batch-size "
            f"{batch_size}: use {count} or less."
        )
    epoch, at = divmod(number, count // batch_size)
    batches = _epoch(split, epoch, batch_size, seed)
    return [int(n) for n in batches[at]]


@lru_cache(maxsize=1)
def _epoch(split: Split, epoch: int, batch_size: int, seed: int) -> Any:
    """(N, B): all batches of an epoch in their order."""
    random = np.random.default_rng([seed, epoch])
    count = len(split.examples)
    kept = random.permutation(count)[: count - count % batch_size]
    by_length = np.argsort(split.lengths[kept], kind="stable")
    order = kept[by_length].reshape(-1, batch_size)
    return order[random.permutation(len(order))]


def some_examples(split: Split, most: int | None, seed: int) -> list[int]:
    """The same examples at each call, shortest first; all of them if most is None."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(split.examples))[:most]
    by_length = np.argsort(split.lengths[order], kind="stable")
    return [int(n) for n in order[by_length]]


def micro_batches(split: Split, chosen: Sequence[int], num_rows: int) -> list[MicroBatch]:
    """Parts of so many rows, each padded to its own longest."""
    batches = []
    for start in range(0, len(chosen), num_rows):
        numbers = chosen[start : start + num_rows]
        rows = [split.examples[number] for number in numbers]
        batches.append(pad(rows))
    return batches


def largest(split: Split, num_rows: int) -> MicroBatch:
    """A micro-batch of the longest examples, which needs most memory."""
    order = np.argsort(split.lengths, kind="stable")[-num_rows:]
    return micro_batches(split, order.tolist(), num_rows)[0]


def pad(examples: Sequence[Example]) -> MicroBatch:
    """Rows of different lengths as one micro-batch, padded on the right."""
    length = max(len(example.tokens) for example in examples)
    tokens = np.zeros((len(examples), length), np.int32)
    learned = np.zeros((len(examples), length), np.float32)
    segments = np.zeros((len(examples), length - 1), np.int32)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        for start, end in example.labels:
            learned[row, start:end] = 1
        positions = np.arange(length - 1)
        segments[row] = np.searchsorted(example.starts, positions, side="right")
    inputs = mx.array(tokens[:, :-1])
    targets = mx.array(tokens[:, 1:])
    mask = mx.array(learned[:, 1:])
    num_labels = 0
    num_tokens = 0
    for example in examples:
        num_labels += example.num_labels
        num_tokens += len(example.tokens) - len(example.starts)
    has_several = segments.max(initial=0) > 1
    return MicroBatch(
        inputs=inputs,
        targets=targets,
        mask=mask,
        num_labels=num_labels,
        num_tokens=num_tokens,
        segments=mx.array(segments) if has_several else None,
    )
