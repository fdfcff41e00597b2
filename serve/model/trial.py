"""Trial runs of a whole model on lazy arrays: where it can be cut, and which arrays cross each cut.

No weight is read, even if the model's code evaluates.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import PlanError
from serve.model import trace

Layers = list[nn.Module]
Crossing = tuple[int, str]
"""(i, place): the array at this place in the values that layer i passes to others."""

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
"""Errors that a model's code may raise when it is run in an unexpected way."""

_NUM_TOKENS = 4
# Some layers pass on more arrays once they have seen a whole block of tokens.
_NUM_TOKENS_OF_MANY_BLOCKS = 256


class Trial:
    """A run of the whole model, with caches or without: the values that each layer passes to others
    (output, and written arguments), and the users of each cache. Raises PlanError."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        cached: bool,
    ) -> None:
        self.model = model
        self.layers = layers
        self.cached = cached
        self.tokens = mx.zeros((1, _NUM_TOKENS), dtype=mx.int32)
        self._run()
        if any(written for _, written in self.given.values()):
            self.tokens = mx.zeros((1, _NUM_TOKENS_OF_MANY_BLOCKS), dtype=mx.int32)
            self._run()

    def new_caches(self) -> list[Any] | None:
        if self.cached:
            return make_prompt_cache(self.model)
        return None

    def crossing(self, cut: int) -> tuple[Crossing, ...]:
        """Returns the arrays that cross a cut. Raises PlanError for an impossible cut."""
        if cut in (0, len(self.layers)):
            return ()
        for users in self.users.values():
            if min(users) < cut <= max(users):
                raise PlanError(f"No cut before layer {cut}: layers {sorted(users)} share a cache.")
        known: list[Crossing] = []
        for i in range(cut):
            places = trace.places_in(self.given[i])
            known += [(i, place) for place in places]
        used = self._graph.used(set(known))
        if used:
            keys = tuple(key for key in known if key in used)
        else:
            # Code that evaluates hides its graph. Then the last layer's values are assumed.
            last_layer = cut - 1
            keys = tuple((i, place) for i, place in known if i == last_layer)
        self._check_rest(cut, keys)
        return keys

    @functools.cached_property
    def _graph(self) -> trace.Graph[Crossing]:
        arrays: dict[Crossing, mx.array] = {}
        for i, value in self.given.items():
            for place, array in trace.places_in(value).items():
                arrays[i, place] = array
        return trace.Graph(self._outputs, arrays)

    def _run(self) -> None:
        self.given: dict[int, Any] = {}
        self.users: dict[int, set[int]] = defaultdict(set)
        self.caches = self.new_caches() or []
        caches = list(self.caches) if self.cached else None

        try:
            with trace.uncompiled(), trace.seams(self.layers, self._record):
                output = self.model(self.tokens, cache=caches)
        except FAILURES as error:
            raise PlanError(
                f"This model cannot be split: a forward pass in mlx-lm fails ({error}).",
                code="unsplittable",
            ) from error
        if list(self.given) != list(range(len(self.layers))):
            raise PlanError(
                "This model cannot be split: its code does not call every layer.",
                code="unsplittable",
            )
        self._outputs = trace.arrays_in(output)

    def _record(self, i: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
        if i in self.given:
            raise PlanError(
                "This model cannot be split: it runs its layers more than once.",
                code="unsplittable",
            )
        arguments = (*args, *kwargs.values())
        for j, cache in enumerate(self.caches):
            if any(cache is argument for argument in arguments):
                self.users[j].add(i)
        targets = writable(args, kwargs, self.caches)
        value = (call(*args, **kwargs), targets)
        # A layer may return an array of an earlier layer unchanged. A new graph node for the array
        # shows whether later layers use the value of this layer or of the earlier one.
        nodes: trace.Arrays = {}
        for place, array in trace.places_in(value).items():
            nodes[place] = mx.stop_gradient(array)
        output, written = trace.with_arrays(value, nodes)
        trace.write_back(targets, written)
        self.given[i] = trace.snapshot((output, written))
        return output

    def _check_rest(self, cut: int, keys: tuple[Crossing, ...]) -> None:
        """Raises PlanError if the layers from `cut` on need more than the arrays that cross it."""
        blanks: dict[Crossing, mx.array] = {}
        for i, place in keys:
            array = trace.places_in(self.given[i])[place]
            blanks[i, place] = blank(array)
        given: dict[int, Any] = {}
        for i in range(cut):
            given_in_trial = self.given[i]
            given[i] = refill(i, given_in_trial, blanks)
        caches = self.new_caches()

        def replay(i: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
            if i >= cut:
                return call(*args, **kwargs)
            output, written = given[i]
            targets = writable(args, kwargs, caches or ())
            trace.write_back(targets, written)
            return output

        try:
            with trace.seams(self.layers, replay):
                self.model(self.tokens, cache=caches)
        except FAILURES as error:
            raise PlanError(
                f"No cut before layer {cut}: the layers after it also read earlier layers."
            ) from error


def crossings(trials: Sequence[Trial], cut: int) -> dict[bool, tuple[Crossing, ...]]:
    """Returns the arrays that cross a cut before layer `cut`, with caches (True) and without
    (False). Raises PlanError, which names the nearest possible cuts."""
    try:
        return {trial.cached: trial.crossing(cut) for trial in trials}
    except PlanError as error:
        num_layers = len(trials[0].layers)
        below = _first_cut(trials, range(cut - 1, 0, -1))
        above = _first_cut(trials, range(cut + 1, num_layers))
        near = [f"before layer {cut}" for cut in (below, above) if cut is not None]
        if near:
            hint = f"The nearest possible cuts are {' and '.join(near)}."
        else:
            hint = "It has no possible cut."
        raise PlanError(f"{error} {hint}", code="no_cut") from error


def _first_cut(trials: Sequence[Trial], candidates: Iterable[int]) -> int | None:
    for cut in candidates:
        try:
            for trial in trials:
                trial.crossing(cut)
        except PlanError:
            continue
        return cut
    return None


def writable(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caches: Sequence[Any],
) -> list[Any]:
    """Returns a layer's arguments that it may write to, other than caches."""
    cache_types = {type(cache) for cache in caches}
    excluded = (mx.array, nn.Module, tuple, *cache_types)
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        is_mutable = isinstance(value, (dict, list)) or hasattr(value, "__dict__")
        if is_mutable and not isinstance(value, excluded):
            found.append(value)
    return found


def refill(i: int, value: Any, arrays: dict[Crossing, Any]) -> Any:
    """Returns a copy of the values that layer i passed on in the trial, with other arrays."""
    own: dict[str, Any] = {}
    for (layer, place), array in arrays.items():
        if layer == i:
            own[place] = array
    return trace.with_arrays(value, own)


# --- weights that are not read


def blank(array: mx.array) -> mx.array:
    """Returns an array of this shape and dtype that takes no memory. All its values are NaN."""
    nan = mx.array(float("nan")).astype(array.dtype)
    return mx.broadcast_to(nan, array.shape)


def stand_in_for_weights(model: nn.Module) -> trace.Arrays:
    """Replaces all arrays of a model by blanks, and returns the arrays by name. A trial then sees
    where a weight is used, but not how it is made, which may take 50,000 nodes."""
    arrays = dict(named_arrays(model))
    # By identity, so that tied weights stay tied.
    blanks: dict[int, mx.array] = {}
    blanks_by_name: trace.Arrays = {}
    for name, array in arrays.items():
        if id(array) not in blanks:
            blanks[id(array)] = blank(array)
        blanks_by_name[name] = blanks[id(array)]
    set_arrays(model, blanks_by_name)
    return arrays


@contextmanager
def without_weights(model: nn.Module) -> Iterator[None]:
    """Blanks all weights inside a `with` block, then removes what modules computed from them."""
    before: list[tuple[nn.Module, set[str], dict[str, Any]]] = []
    for module in model.modules():
        keys = set(module)
        attributes = dict(vars(module))
        before.append((module, keys, attributes))
    weights = stand_in_for_weights(model)
    try:
        yield
    finally:
        for module, keys, attributes in before:
            for key in set(module) - keys:
                del module[key]
                if key in attributes:
                    vars(module)[key] = attributes[key]
        set_arrays(model, weights)


def modules_outside(model: nn.Module, layers: Layers) -> list[nn.Module]:
    """Returns a model's modules outside of its layers, each module once."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside: dict[int, nn.Module] = {}
    for module in model.modules():
        if id(module) not in inside:
            outside[id(module)] = module
    return list(outside.values())


def named_arrays(tree: Any) -> Iterator[tuple[str, mx.array]]:
    """Yields each array below a module, parameters and constants, with its dotted name."""
    for key, value in entries(tree):
        if isinstance(value, mx.array):
            yield str(key), value
        elif isinstance(value, (dict, list, tuple)):
            for name, array in named_arrays(value):
                yield f"{key}.{name}", array


def entries(tree: Any) -> list[tuple[Any, Any]]:
    """Returns the (key, value) or (index, value) pairs of one level of a module tree."""
    if isinstance(tree, dict):
        return list(tree.items())
    return list(enumerate(tree))


def set_arrays(tree: Any, arrays: trace.Arrays, path: str = "") -> None:
    """Replaces the arrays below a module that have one of these dotted names, except in tuples."""
    for key, value in entries(tree):
        if isinstance(value, mx.array):
            if not isinstance(tree, tuple):
                tree[key] = arrays.get(f"{path}{key}", value)
        elif isinstance(value, (dict, list, tuple)):
            set_arrays(value, arrays, f"{path}{key}.")
