"""Packs several examples into one row, in which none attends to another.

An unmodified model asks its caches for the mask, so caches that hold nothing give it one
that ends where an example begins. Positions go on along the row: that changes nothing
where only their differences count, as with RoPE. Whether a model is such is tried."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from serve.core.errors import PlanError
from serve.model import trial
from serve.model.stage import Stage
from serve.tune.data.examples import Example, MicroBatch, Split, pad

_PLAIN_CACHES = (KVCache, RotatingKVCache)
_MIN_TOKENS_BEFORE = 8


# --- rows


def pack(split: Split, length: int) -> Split:
    """A split whose examples are rows of at most so many tokens. The longest examples come
    first, each into the fullest row with room for it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of each row, and its number
    for n in np.argsort(-split.lengths, kind="stable").tolist():
        size = len(split.examples[n].tokens)
        at = bisect_left(room, (size, 0))
        if at == len(room):
            rows.append([])
            room.append((length, len(rows) - 1))
        free, row = room.pop(at)
        rows[row].append(n)
        insort(room, (free - size, row))
    joined = []
    for numbers in rows:
        members = [split.examples[n] for n in numbers]
        joined.append(join(members))
    return replace(split, examples=joined, is_packed=True)


def join(examples: Sequence[Example]) -> Example:
    """One row. The first token of each example is learned by nobody, as when it is alone."""
    tokens: list[int] = []
    labels: list[tuple[int, int]] = []
    starts: list[int] = []
    for example in examples:
        start = len(tokens)
        starts.append(start)
        tokens += example.tokens
        for first, end in example.labels:
            if end > 1:
                labels.append((start + max(first, 1), start + end))
    return Example(tuple(tokens), tuple(labels), tuple(starts))


# --- masks


class Packed:
    """A stand-in for a model's cache that holds nothing and gives the mask of a packed row.
    segments (B, L) are the numbers of the examples."""

    offset = 0

    def __init__(self, segments: mx.array) -> None:
        self._segments = segments

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(
        self,
        num_tokens: int,
        return_array: bool = True,  # noqa: ARG002 (what models ask of a cache)
        window_size: int | None = None,
    ) -> mx.array:
        """(B, 1, L, L), true where a token may look."""
        queries = self._segments[:, None, :, None]
        keys = self._segments[:, None, None, :]
        causal: mx.array = create_causal_mask(num_tokens, window_size=window_size)
        return causal & (queries == keys)


def caches(stage: Stage, segments: mx.array) -> list[Packed]:
    return [Packed(segments)] * len(stage.make_cache())


# --- whether it is exact


def check_stage(stage: Stage, name: str) -> None:
    """Raises PlanError if the model has a state that goes from token to token, or does not
    take a mask from its caches. Evaluates nothing."""
    kinds = {type(cache) for cache in stage.make_cache()}
    others = [kind.__name__ for kind in kinds.difference(_PLAIN_CACHES)]
    if others:
        raise PlanError(f"--packing: {name} keeps more than keys and values ({min(others)}).")
    cut = stage.cuts[True]
    segments = mx.zeros(cut.tokens.shape, mx.int32)
    try:
        stage(cut.tokens, caches(stage, segments), cut.example())
    except trial.FAILURES as error:
        raise PlanError(
            f"--packing: {name} does not accept the mask that separates examples ({error})."
        ) from error


def check_exact(
    split: Split, length: int, name: str, loss_of: Callable[[list[MicroBatch]], float], most: float
) -> None:
    """Raises PlanError if what stands before an example in its row, or its place there,
    changes its loss by more than rounding makes of another place: a share of most. loss_of
    runs the whole model."""
    by_length = sorted(split.examples, key=lambda example: len(example.tokens))
    # Long, and with as much again before it: there both show most.
    short = [each for each in by_length if len(each.tokens) <= length // 2]
    if short:
        example = short[-1]
    else:
        example = by_length[0]
    example = replace(example, labels=((0, len(example.tokens)),))
    num_before = max(_MIN_TOKENS_BEFORE, length - len(example.tokens))
    highest = 0
    for each in split.examples:
        highest = max(highest, *each.tokens)
    random = np.random.default_rng(0)
    rows = [example]
    for _ in range(2):
        tokens = random.integers(0, highest + 1, num_before).tolist()
        before = Example(tuple(tokens), ())
        rows.append(join([before, example]))
    batches = [pad([row]) for row in rows]
    alone, one, other = (loss_of([batch]) for batch in batches)
    # At the same place rounding makes next to nothing.
    most_at_the_same_place = most / 10 * abs(alone)
    if not abs(one - other) <= most_at_the_same_place:
        raise PlanError(
            f"--packing: in {name} an example attends to the one before it in its row "
            f"(its loss is {one:.6f} or {other:.6f}): leave out --packing."
        )
    if not abs(one - alone) <= most * abs(alone):
        raise PlanError(
            f"--packing: in {name} the loss of an example depends on its place in the row "
            f"({alone:.6f} at the start, {one:.6f} after {num_before} tokens): leave out "
            "--packing."
        )
