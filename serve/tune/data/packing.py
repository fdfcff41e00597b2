"""Packs several examples into one row, in which no example attends to another.

A model asks its caches for the attention mask. So the caches of this module store nothing and
return a mask that ends where an example begins. Positions continue along the row, which changes
nothing if only their differences count, as with RoPE. A trial shows whether they do."""

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
    """Returns a split whose examples are packed rows of at most `length` tokens. The longest
    examples are placed first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, number) of each row, sorted
    longest_first = np.argsort(-split.lengths, kind="stable")
    for n in longest_first.tolist():
        size = len(split.examples[n].tokens)
        fullest = bisect_left(room, (size, 0))
        if fullest == len(room):
            room.append((length, len(rows)))
            rows.append([])
        num_free, row = room.pop(fullest)
        rows[row].append(n)
        insort(room, (num_free - size, row))
    joined = []
    for numbers in rows:
        members = [split.examples[n] for n in numbers]
        joined.append(join(members))
    return replace(split, examples=joined, is_packed=True)


def join(examples: Sequence[Example]) -> Example:
    """Joins examples into one row. The first token of each is not learned."""
    tokens: list[int] = []
    labels: list[tuple[int, int]] = []
    starts: list[int] = []
    for example in examples:
        start = len(tokens)
        starts.append(start)
        tokens += example.tokens
        for first, end in example.labels:
            first_learned = max(first, 1)
            if end > 1:
                labels.append((start + first_learned, start + end))
    return Example(tuple(tokens), tuple(labels), tuple(starts))


# --- masks


class Packed:
    """A stand-in for a model's cache that stores nothing and returns the mask of a packed row.
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
        """Returns the mask (B, 1, L, L), which is true where a token may attend."""
        queries = self._segments[:, None, :, None]
        keys = self._segments[:, None, None, :]
        causal: mx.array = create_causal_mask(num_tokens, window_size=window_size)
        return causal & (queries == keys)


def caches(stage: Stage, segments: mx.array) -> list[Packed]:
    return [Packed(segments)] * len(stage.make_cache())


# --- whether it is exact


def check_stage(stage: Stage, name: str) -> None:
    """Raises PlanError if the model has a recurrent state, or does not use its caches' mask."""
    kinds = {type(cache) for cache in stage.make_cache()}
    others = [kind.__name__ for kind in kinds.difference(_PLAIN_CACHES)]
    if others:
        raise PlanError(
            f"--packing: {name} keeps more than keys and values ({min(others)}).",
            code="not_packable",
        )
    cut = stage.cuts[True]
    segments = mx.zeros(cut.tokens.shape, mx.int32)
    packed = caches(stage, segments)
    try:
        stage(cut.tokens, packed, cut.example())
    except trial.FAILURES as error:
        raise PlanError(
            f"--packing: {name} does not accept the mask that separates examples ({error})."
        ) from error


def check_exact(
    split: Split,
    length: int,
    name: str,
    loss_of: Callable[[list[MicroBatch]], float],
    rounding: float,
) -> None:
    """Raises PlanError if the tokens before an example in its row, or its position there, change
    its loss. Rounding may change the loss at another position, by at most the fraction `rounding`
    of it. loss_of runs the whole model."""
    example = _half_a_row(split, length)
    num_before = max(_MIN_TOKENS_BEFORE, length - len(example.tokens))
    highest_ids = [max(each.tokens) for each in split.examples]
    num_ids = max(highest_ids) + 1
    random = np.random.default_rng(0)
    rows = [example]
    for _ in range(2):
        tokens = random.integers(0, num_ids, num_before).tolist()
        before = Example(tuple(tokens), ())
        rows.append(join([before, example]))
    losses = []
    for row in rows:
        batch = pad([row])
        losses.append(loss_of([batch]))
    alone, one, other = losses
    max_difference = rounding * abs(alone)
    # At the same position, rounding changes nearly nothing.
    if not abs(one - other) <= max_difference / 10:
        raise PlanError(
            f"--packing: in {name} an example attends to the one before it in its row "
            f"(its loss is {one:.6f} or {other:.6f}): leave out --packing.",
            code="not_packable",
        )
    if not abs(one - alone) <= max_difference:
        raise PlanError(
            f"--packing: in {name} the loss of an example depends on its place in the row "
            f"({alone:.6f} at the start, {one:.6f} after {num_before} tokens): leave out "
            "--packing.",
            code="not_packable",
        )


def _half_a_row(split: Split, length: int) -> Example:
    """Returns the longest example of at most half a row, all of it learned. A second such example
    fits before it in the row, where both effects are largest."""
    by_length = sorted(split.examples, key=lambda example: len(example.tokens))
    chosen = by_length[0]
    for example in by_length:
        if len(example.tokens) <= length // 2:
            chosen = example
    everything = 0, len(chosen.tokens)
    return replace(chosen, labels=(everything,))
