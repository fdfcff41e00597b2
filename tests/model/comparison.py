"""A pipeline of stages beside the whole model: the same steps, so the same numbers."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import PlanError
from serve.core.ops import Drop
from serve.core.types import Row, Step
from serve.model import trial
from serve.model.stage import Stage
from serve.model.trial import Crossing, Trial
from serve.rank.cache import GroupCaches

Feeds = dict[int, list[int]]
Ragged = tuple[tuple[int, Feeds, tuple[int, ...]], ...]
OVERFLOWS = 50  # a token that is not in RAGGED
Place = tuple[Callable[..., list[mx.array]], Callable[[], list[Any]]]
"""What runs, and what makes its caches: a stage, or the whole model."""

# Prompts and tokens of a batch whose rows are of the same length.
EVEN = ([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], [[6, 3, 1], [7, 2, 2]], [[8], [9]], [[1], [1]])

# (group, what each sequence feeds, who is dropped before). Rows join a group from their
# prefill, at position 0 beside longer ones, two new ones together, from another group,
# and after being parked; rows grow past the window of sliding attention.
RAGGED: Ragged = (
    (10, {0: [1, 2, 3]}, ()),
    (0, {0: [4]}, ()),
    (11, {1: [5, 6, 7, 8, 9, 10, 11]}, ()),
    (11, {1: [12, 13]}, ()),
    (0, {0: [14], 1: [15]}, ()),
    (0, {0: [16], 2: [17], 1: [18]}, ()),
    (1, {3: [5, 6], 4: [7, 8]}, ()),
    (0, {0: [19], 1: [20], 2: [21], 3: [22]}, ()),
    (0, {2: [23], 0: [24]}, (1,)),
    (0, {2: [25], 3: [26], 4: [27]}, (0,)),
    (0, {2: [28], 3: [29], 4: [30]}, ()),
    (0, {3: [31], 5: [32]}, (2,)),
    (0, {3: [33], 5: [34]}, ()),
    (2, {6: [1], 7: [2]}, ()),
    (0, {5: [35], 6: [36], 7: [31]}, (3,)),
)


def possible_cuts(model: nn.Module) -> tuple[dict[int, tuple[Crossing, ...]], str]:
    """What crosses each possible cut, and why other cuts are not possible."""
    crossing: dict[int, tuple[Crossing, ...]] = {}
    refusal = ""
    layers = list(model.layers)
    try:
        with trial.without_weights(model):
            trials = [Trial(model, layers, cached) for cached in (True, False)]
            for cut in range(1, len(layers)):
                try:
                    crossing[cut] = trial.crossings(trials, cut)[True]
                except PlanError as error:
                    refusal = refusal or str(error)
    except PlanError as error:
        refusal = str(error)
    return crossing, refusal


def split(model: nn.Module, cuts: Sequence[int]) -> list[Stage]:
    """Stages out of copies of a model."""
    ends = [0, *cuts, len(model.layers)]
    return [
        Stage(copy.deepcopy(model), start, end) for start, end in zip(ends, ends[1:], strict=False)
    ]


def forward(
    stages: Sequence[Stage], tokens: mx.array, caches: Sequence[list[Any] | None]
) -> mx.array:
    passed: list[mx.array] = []
    for stage, cache in zip(stages, caches, strict=True):
        passed = stage(tokens, cache, passed)
    (logits,) = passed
    return logits


def even(model: nn.Module, stages: Sequence[Stage]) -> Iterator[tuple[mx.array, mx.array]]:
    """Logits of the whole model and of the stages, step by step."""
    whole, caches = make_prompt_cache(model), [stage.make_cache() for stage in stages]
    for fed in EVEN:
        tokens = mx.array(fed)
        yield model(tokens, cache=whole), forward(stages, tokens, caches)


def overflowing(model: nn.Module) -> tuple[Ragged, list[int]]:
    """Makes a token of the model one whose hidden state is not a number. Returns steps in which
    some sequences feed it, and those sequences."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight[OVERFLOWS] = mx.nan
    bad = [1, 4, 6]
    return tuple(
        (group, {s: [OVERFLOWS] * len(fed) if s in bad else fed for s, fed in feeds.items()}, drop)
        for group, feeds, drop in RAGGED
    ), bad


def steps(ragged: Ragged = RAGGED) -> Iterator[Step]:
    positions: dict[int, int] = {}
    for number, (group, feeds, drop) in enumerate(ragged):
        rows = tuple(Row(s, positions.get(s, 0), len(fed)) for s, fed in feeds.items())
        positions |= {row.sequence: row.position + row.num_tokens for row in rows}
        tokens = tuple(token for fed in feeds.values() for token in fed)
        yield Step(number, group, rows, tokens, True, tuple(map(Drop, drop)))


def ragged(places: Sequence[Place], can_batch: bool, feeds: Ragged = RAGGED) -> Iterator[mx.array]:
    """Logits (B, L, vocabulary) of each step, through the caches of a worker."""
    caches = [GroupCaches(make_cache, can_batch) for _, make_cache in places]
    for step in steps(feeds):
        logits: dict[int, mx.array] = {}
        for own in caches:
            for op in step.ops(Drop):
                own.drop(op.sequence)
        for parts in zip(*(own.arrange(step) for own in caches), strict=True):
            passed: list[mx.array] = []
            for (run, _), part in zip(places, parts, strict=True):
                passed = run(part.tokens(step), part.caches, passed)
            logits |= dict(zip(parts[0].rows, passed[0], strict=True))
        output = mx.stack([logits[n] for n in range(len(step.rows))])
        mx.eval(output, [own.states(step) for own in caches])
        yield output


def whole(model: nn.Module) -> Place:
    return (
        lambda tokens, cache, _: [model(tokens, cache=cache)],
        lambda: make_prompt_cache(model),
    )


def alone(model: nn.Module) -> Iterator[mx.array]:
    """Logits of each step when each row is run by itself."""
    caches: dict[int, list[Any]] = {}
    for _, feeds, _ in RAGGED:
        outputs = [
            model(mx.array([fed]), cache=caches.setdefault(s, make_prompt_cache(model)))
            for s, fed in feeds.items()
        ]
        mx.eval(outputs)
        yield mx.concatenate(outputs)


def relative_difference(a: mx.array, b: mx.array) -> float:
    """Some models write -inf to the logits of tokens that do not exist."""
    finite = mx.isfinite(b)
    a, b = mx.where(finite, a, 0), mx.where(finite, b, 0)
    return float((mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-30)).item())


# --- gradients

TOKENS = ((3, 1, 4, 1, 5),)


def whole_gradients(model: nn.Module, dy: mx.array) -> dict[str, mx.array]:
    """Of each parameter, for dy (1, 5, vocabulary) at the logits."""
    names, values = _floating(model)

    def run(*values: mx.array) -> list[mx.array]:
        model.update(tree_unflatten(list(zip(names, values, strict=True))))
        return [model(mx.array(TOKENS))]

    _, gradients = mx.vjp(run, values, [dy])
    mx.eval(gradients)
    model.update(tree_unflatten(list(zip(names, values, strict=True))))
    return dict(zip(names, gradients, strict=True))


def pipeline_gradients(stages: Sequence[Stage], dy: mx.array) -> dict[str, mx.array]:
    """The same through the stages: forwards in order, backwards in reverse."""
    inputs: list[list[mx.array]] = []
    passed: list[mx.array] = []
    for stage in stages:
        inputs.append(passed)
        passed = stage(mx.array(TOKENS), None, passed)
        mx.eval(passed)
    total: dict[str, mx.array] = {}
    flow = [dy]
    for stage, received in zip(reversed(stages), reversed(inputs), strict=True):
        own, flow = _stage_gradients(stage, received, flow)
        for name, gradient in own.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def _stage_gradients(
    stage: Stage, received: list[mx.array], dy: list[mx.array]
) -> tuple[dict[str, mx.array], list[mx.array]]:
    names, values = _floating(stage.model)
    moving = [n for n, array in enumerate(received) if mx.issubdtype(array.dtype, mx.floating)]

    def run(*arguments: mx.array) -> list[mx.array]:
        stage.model.update(tree_unflatten(list(zip(names, arguments, strict=False))))
        given = dict(enumerate(received)) | dict(zip(moving, arguments[len(names) :], strict=True))
        outputs = stage(mx.array(TOKENS), None, [given[n] for n in range(len(received))])
        return [array for array in outputs if mx.issubdtype(array.dtype, mx.floating)]

    _, gradients = mx.vjp(run, [*values, *(received[n] for n in moving)], dy)
    mx.eval(gradients)
    stage.model.update(tree_unflatten(list(zip(names, values, strict=True))))
    own = dict(zip(names, gradients, strict=False))
    return own, gradients[len(names) :]


def _floating(model: nn.Module) -> tuple[list[str], list[mx.array]]:
    named = [
        (name, array)
        for name, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    ]
    return [name for name, _ in named], [array for _, array in named]
