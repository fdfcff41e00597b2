"""Finds out by trial runs whether rows of different lengths can share a forward pass."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.core.types import Row, Step
from serve.model import trace, trial
from serve.rank.cache import ForwardPass, GroupCaches

# mlx-lm's architectures in which tokens see later tokens in the same forward pass.
_NOT_CAUSAL = {"phi3small"}

# The number of tokens that each row feeds, for each step. Rows join, leave and run alone. There are
# 2, 3 or 5 rows, so that no number of heads can be broadcast to all three.
_TRIAL_STEPS: tuple[dict[int, int], ...] = (
    {0: 3},
    {1: 1},
    {0: 1, 1: 1},
    {2: 2},
    {0: 1, 1: 1, 2: 1},
    {3: 2, 4: 2},
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    {1: 1, 4: 1},
    {4: 1},
)


def can_batch(model: nn.Module) -> bool:
    """Whether rows of different lengths can share a forward pass of this whole model: its caches
    can hold them together, and it handles their positions and masks. No weights are read."""
    with trial.without_weights(model):
        return _runs_together(model)


def is_causal(model: nn.Module) -> bool:
    """Whether tokens fed together give the same logits as one by one, so that guesses can be
    verified. No trial can show this without weights; tests try every architecture."""
    return type(model).__module__.rpartition(".")[2] not in _NOT_CAUSAL


def _runs_together(model: nn.Module) -> bool:
    caches = GroupCaches(lambda: make_prompt_cache(model))
    positions: dict[int, int] = defaultdict(int)
    try:
        for number, feeds in enumerate(_TRIAL_STEPS):
            step = _trial_step(number, feeds, positions)
            for each in caches.arrange(step):
                if not _runs(model, step, each):
                    return False
            for sequence, num_tokens in feeds.items():
                positions[sequence] += num_tokens
    except trial.FAILURES:
        return False
    return True


def _trial_step(number: int, feeds: dict[int, int], positions: dict[int, int]) -> Step:
    rows: list[Row] = []
    for sequence, num_tokens in feeds.items():
        rows.append(Row(sequence, positions[sequence], num_tokens))
    tokens = (0,) * sum(feeds.values())
    return Step(number, 0, tuple(rows), tokens, sample=True)


def _runs(model: nn.Module, step: Step, own: ForwardPass) -> bool:
    """Whether the model gives an output for each token of a forward pass. May raise FAILURES."""
    tokens = own.tokens(step)
    rows = [step.rows[n] for n in own.rows if n is not None]
    is_ragged = len({row.position for row in rows}) > 1
    with _common_position_refused() if is_ragged else nullcontext():
        (output,) = trace.arrays_in(model(tokens, cache=own.caches))
    return output.shape[:2] == tokens.shape


@contextmanager
def _common_position_refused() -> Iterator[None]:
    """Makes rope raise ValueError if all rows get one position. Each row needs its own; a single
    number comes from the shape of padded keys, not from the cache."""
    rope = mx.fast.rope

    def checked(*args: Any, **kwargs: Any) -> mx.array:
        if not isinstance(kwargs.get("offset"), mx.array):
            raise ValueError("The same position for all rows.")
        return rope(*args, **kwargs)

    mx.fast.rope = checked
    try:
        yield
    finally:
        mx.fast.rope = rope
