"""Trial runs of a whole model on lazy arrays: where it can be cut, and what crosses.
No weight is read, even if a forward evaluates.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import PlanError
from serve.model import trace

Crossing = tuple[int, str]
"""(i, place): the array at a place in what layer i gives to others."""

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the code of a model raises when it is run in a way that it was not made for."""

_NUM_TOKENS = 4
# Some layers give more once they have seen a whole block of tokens.
_NUM_TOKENS_OF_MANY_BLOCKS = 256


class Trial:
    """A run of the whole model: what each layer gives to others, which caches it gets."""

    def __init__(self, model: nn.Module, layers: list[nn.Module], cached: bool) -> None:
        self.model, self.layers, self.cached = model, layers, cached
        self.tokens = mx.zeros((1, _NUM_TOKENS), dtype=mx.int32)
        self._run()
        if any(written for _, written in self.given.values()):
            self.tokens = mx.zeros((1, _NUM_TOKENS_OF_MANY_BLOCKS), dtype=mx.int32)
            self._run()

    def new_caches(self) -> list[Any] | None:
        return make_prompt_cache(self.model) if self.cached else None

    def crossing(self, at: int) -> tuple[Crossing, ...]:
        """What layers before `at` give and the rest of the model uses."""
        if at in (0, len(self.layers)):
            return ()
        for users in self.users.values():
            if min(users) < at <= max(users):
                raise PlanError(f"No cut before layer {at}: layers {sorted(users)} share a cache.")
        known = [(i, place) for i in range(at) for place in trace.places_in(self.given[i])]
        used = self._graph.used(set(known))
        # A forward that evaluates hides its graph: then a plain one is assumed.
        keys = tuple(key for key in known if key in used or (not used and key[0] == at - 1))
        self._check_rest(at, keys)
        return keys

    @functools.cached_property
    def _graph(self) -> trace.Graph[Crossing]:
        given = {i: trace.places_in(value) for i, value in self.given.items()}
        arrays = {(i, place): array for i in given for place, array in given[i].items()}
        return trace.Graph(self._outputs, arrays)

    def _run(self) -> None:
        self.given: dict[int, Any] = {}
        self.users: dict[int, set[int]] = defaultdict(set)
        self.caches = self.new_caches() or []
        try:
            seams = trace.seams(self.layers, lambda i: functools.partial(self._record, i))
            with trace.uncompiled(), seams:
                output = self.model(self.tokens, cache=list(self.caches) if self.cached else None)
        except FAILURES as error:
            raise PlanError(
                f"This model cannot be split: mlx-lm's own forward fails ({error})."
            ) from error
        if list(self.given) != list(range(len(self.layers))):
            raise PlanError("This model cannot be split: its forward does not call each layer.")
        self._outputs = trace.arrays_in(output)

    def _record(self, i: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if i in self.given:
            raise PlanError("This model cannot be split: it runs its layers more than once.")
        for j, cache in enumerate(self.caches):
            if any(cache is argument for argument in (*args, *kwargs.values())):
                self.users[j].add(i)
        targets = writable(args, kwargs, self.caches)
        value = (call(*args, **kwargs), targets)
        # What a layer only hands on gets a node of its own: it may be that others use this
        # one, and not the same array as an earlier layer gave it.
        nodes = {place: mx.stop_gradient(a) for place, a in trace.places_in(value).items()}
        output, written = trace.with_arrays(value, nodes)
        trace.write_back(targets, written)
        self.given[i] = trace.snapshot((output, written))
        return output

    def _check_rest(self, at: int, keys: tuple[Crossing, ...]) -> None:
        """Raises PlanError if layers from `at` on do not run on what crosses the cut alone."""
        blanks = {(i, place): blank(trace.places_in(self.given[i])[place]) for i, place in keys}
        made = {i: refill(i, self.given[i], blanks) for i in range(at)}
        caches = self.new_caches()

        def seam(i: int) -> trace.Seam:
            def run(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
                if i >= at:
                    return call(*args, **kwargs)
                output, written = made[i]
                trace.write_back(writable(args, kwargs, caches or ()), written)
                return output

            return run

        try:
            with trace.seams(self.layers, seam):
                self.model(self.tokens, cache=caches)
        except FAILURES as error:
            raise PlanError(
                f"No cut before layer {at}: the rest does not run ({error})."
            ) from error


def crossings(trials: Sequence[Trial], at: int) -> dict[bool, tuple[Crossing, ...]]:
    """What crosses a cut before layer `at`, with caches and without. Raises PlanError
    that names the nearest cuts which are possible."""
    try:
        return {trial.cached: trial.crossing(at) for trial in trials}
    except PlanError as error:
        below = next((n for n in range(at - 1, 0, -1) if _can_cut(trials, n)), None)
        above = next((n for n in range(at + 1, _num_layers(trials)) if _can_cut(trials, n)), None)
        near = " and ".join(f"before layer {n}" for n in (below, above) if n is not None)
        hint = f"The nearest possible cuts are {near}." if near else "It has no possible cut."
        raise PlanError(f"{error} {hint}") from error


def _can_cut(trials: Sequence[Trial], at: int) -> bool:
    try:
        return bool([trial.crossing(at) for trial in trials])
    except PlanError:
        return False


def _num_layers(trials: Sequence[Trial]) -> int:
    return len(trials[0].layers)


def writable(args: tuple[Any, ...], kwargs: dict[str, Any], caches: Sequence[Any]) -> list[Any]:
    """The objects among a layer's arguments that it may leave something in."""
    others = (mx.array, nn.Module, tuple, *{type(cache) for cache in caches})
    values = (*args, *kwargs.values())
    return [
        v
        for v in values
        if (isinstance(v, (dict, list)) or hasattr(v, "__dict__")) and not isinstance(v, others)
    ]


def refill(i: int, value: Any, arrays: dict[Crossing, Any]) -> Any:
    """What layer i gave in the trial, with other arrays."""
    return trace.with_arrays(
        value, {place: array for (n, place), array in arrays.items() if n == i}
    )


# --- weights that are not read


def blank(array: mx.array) -> mx.array:
    """An array without memory. It must not reach a result, so it is NaN."""
    return mx.broadcast_to(mx.array(float("nan")).astype(array.dtype), array.shape)


def stand_in_for_weights(model: nn.Module) -> dict[str, mx.array]:
    """Puts blanks in the place of all arrays, and returns these by name. So a trial
    sees where a weight is used and not how it is made, which may take 50,000 nodes, and
    reads none even if the forward evaluates."""
    arrays = dict(named_arrays(model))
    blanks = {id(array): blank(array) for array in arrays.values()}  # tied ones stay tied
    _set_arrays(model, {name: blanks[id(array)] for name, array in arrays.items()})
    return arrays


@contextmanager
def without_weights(model: nn.Module) -> Iterator[None]:
    """Blanks in place of all weights for a while. Arrays that modules make out of weights
    in a forward and keep are forgotten at the end."""
    before = [(module, set(module), dict(vars(module))) for module in model.modules()]
    weights = stand_in_for_weights(model)
    try:
        yield
    finally:
        for module, keys, attributes in before:
            for key in set(module) - keys:
                del module[key]
                vars(module).update({key: attributes[key]} if key in attributes else {})
        _set_arrays(model, weights)


def named_arrays(tree: Any) -> Iterator[tuple[str, mx.array]]:
    """Each array below a module by its dotted name, parameters and constants."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, mx.array):
            yield str(key), value
        elif isinstance(value, (dict, list, tuple)):
            yield from ((f"{key}.{name}", array) for name, array in named_arrays(value))


def _set_arrays(tree: Any, arrays: dict[str, mx.array], path: str = "") -> None:
    for key, value in list(tree.items()) if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, mx.array):
            if not isinstance(tree, tuple):
                tree[key] = arrays.get(f"{path}{key}", value)
        elif isinstance(value, (dict, list, tuple)):
            _set_arrays(value, arrays, f"{path}{key}.")
