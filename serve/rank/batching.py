"""Whether rows of different lengths can share a forward of a model, found by a trial run."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.core.types import Row, Step
from serve.model import trace, trial
from serve.rank.cache import GroupCaches

# Rows that are fed together in each step, by their numbers of tokens. Rows join, leave
# and go alone. No broadcast can make 2, 3 and 5 rows out of the same number of heads.
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
    """Whether rows of different lengths can run in one forward of this whole model: its
    caches can hold them together, and it understands their positions and masks. Reads no
    weights."""
    with trial.without_weights(model):
        return _runs_together(model)


def _runs_together(model: nn.Module) -> bool:
    caches = GroupCaches(lambda: make_prompt_cache(model))
    positions: dict[int, int] = defaultdict(int)
    try:
        for number, feeds in enumerate(_TRIAL_STEPS):
            rows = tuple(Row(sequence, positions[sequence], n) for sequence, n in feeds.items())
            step = Step(number, 0, rows, (0,) * sum(feeds.values()), sample=True)
            for part in caches.apply(step):
                tokens = part.tokens(step)
                ragged = len({rows[n].position for n in part.rows if n is not None}) > 1
                with _numbers_as_positions_refused() if ragged else nullcontext():
                    (output,) = trace.arrays_in(model(tokens, cache=part.caches))
                if output.shape[:2] != tokens.shape:
                    return False
            for row in rows:
                positions[row.sequence] += row.num_tokens
    except trial.FAILURES:
        return False
    return True


@contextmanager
def _numbers_as_positions_refused() -> Iterator[None]:
    """Where rows are at different positions, one number for all rows is wrong: it comes
    from the shape of keys that are padded, and not from the cache."""
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
