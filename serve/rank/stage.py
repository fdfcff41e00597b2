"""A stage: consecutive layers of any mlx-lm model, whose code does not know it.

The whole model is built with lazy weights. The layers before the stage return
what was received instead of running, and the first layer after it ends the
forward. A trial run on lazy arrays tells which values cross a cut and which
weights the stage needs; only those stay. Names keep their original index.
Owns no communication and evaluates nothing.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import PlanError
from serve.rank import trace

Crossing = tuple[int, int]
"""(i, n): the n-th array that layer i gives to others."""

_TRIAL_TOKENS = ((0, 0, 0, 0),)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a stage gets from the one before and gives to the next, and the shape of
    everything that its earlier layers gave in the trial, to put received arrays in."""

    given: dict[int, Any]
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]

    def example(self) -> list[mx.array]:
        """Zeros of the shapes and dtypes received in the trial (1 row, 4 tokens)."""
        arrays = [trace.arrays_in(self.given[i])[n] for i, n in self.receives]
        return [mx.zeros(array.shape, array.dtype) for array in arrays]


class _LeftStage(Exception):
    """Ends the forward where it leaves the stage."""


class Stage:
    """Layers [start, end) of a model, which becomes this stage for good.

    Raises PlanError if the model cannot be cut there.
    """

    def __init__(self, model: nn.Module, start: int, end: int) -> None:
        self.model, self.start, self.end = model, start, end
        self.layers: list[nn.Module] = list(model.layers)
        weights = stand_in_for_weights(model)
        trials = [_Trial(model, self.layers, cached) for cached in (True, False)]
        self.cuts = {t.cached: Cut(t.given, t.crossing(start), t.crossing(end)) for t in trials}
        self._caches: Sequence[Any] = ()
        self._made: dict[int, Any] = {}
        self._open_seams()
        self._caching = _Caching(trials[0], start, end)
        _keep_own_weights(self)
        _put_back(model, weights)

    @property
    def is_last(self) -> bool:
        return self.end == len(self.layers)

    def weights(self) -> dict[str, mx.array]:
        """Every array that the stage owns, by its original name."""
        return dict(named_arrays(self.model))

    def make_cache(self) -> list[Any]:
        """mlx-lm caches of the local layers, and what else their positions need."""
        return self._caching.own_part(make_prompt_cache(self.model))

    def __call__(
        self, tokens: mx.array, cache: list[Any] | None, received: Sequence[mx.array]
    ) -> list[mx.array]:
        """Runs the stage lazily.

        tokens is (B, L), received what the stage before returned ([] for the first).
        Returns the arrays for the next stage, or [logits (B, L, vocabulary)] of the
        last.
        """
        if cache is None:
            return self._run(tokens, None, received)
        outputs = self._run(tokens, self._caching.as_model_expects(cache), received)
        self._caching.advance_ghosts(cache, *tokens.shape)
        return outputs

    def _run(
        self, tokens: mx.array, caches: list[Any] | None, received: Sequence[mx.array]
    ) -> list[mx.array]:
        cut = self.cuts[caches is not None]
        arrays = dict(zip(cut.receives, received, strict=True))
        self._caches = caches or ()
        self._made = {i: _refill(i, cut.given[i], arrays) for i in range(self.start)}
        try:
            return trace.arrays_in(self.model(tokens, cache=caches))
        except _LeftStage:
            made = {i: trace.arrays_in(value) for i, value in self._made.items()}
            return [arrays[i, n] if i < self.start else made[i][n] for i, n in cut.sends]
        finally:
            self._made = {}

    # --- seams

    def _open_seams(self) -> None:
        sources = {i for cut in self.cuts.values() for i, _ in cut.sends}
        for i, layer in enumerate(self.layers):
            if i < self.start:
                trace.open_seam(layer, functools.partial(self._replay, i))
            elif i >= self.end:
                trace.open_seam(layer, self._leave)
            elif i in sources:
                trace.open_seam(layer, functools.partial(self._record, i))

    def _replay(self, i: int, _call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output, written = self._made[i]
        trace.write_back(_writable(args, kwargs, self._caches), written)
        return output

    def _record(self, i: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._made[i] = trace.snapshot((output, _writable(args, kwargs, self._caches)))
        return output

    def _leave(self, _call: Callable[..., Any], _args: Any, _kwargs: Any) -> Any:
        raise _LeftStage


# --- the trial


class _Trial:
    """A run of the whole model: what each layer gives to others, which caches it
    gets. Evaluates nothing."""

    def __init__(self, model: nn.Module, layers: list[nn.Module], cached: bool) -> None:
        self.model, self.layers, self.cached = model, layers, cached
        self.given: dict[int, Any] = {}
        self.users: dict[int, set[int]] = defaultdict(set)
        self.caches = self.new_caches() or []
        with trace.seams(layers, lambda i: functools.partial(self._record, i)):
            model(mx.array(_TRIAL_TOKENS), cache=list(self.caches) if cached else None)
        if list(self.given) != list(range(len(layers))):
            raise PlanError("This model cannot be split: its forward does not call each layer.")

    def new_caches(self) -> list[Any] | None:
        return make_prompt_cache(self.model) if self.cached else None

    def _record(self, i: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if i in self.given:
            raise PlanError("This model cannot be split: it runs its layers more than once.")
        for j, cache in enumerate(self.caches):
            if any(cache is argument for argument in (*args, *kwargs.values())):
                self.users[j].add(i)
        output = call(*args, **kwargs)
        self.given[i] = trace.snapshot((output, _writable(args, kwargs, self.caches)))
        return output

    def crossing(self, at: int) -> tuple[Crossing, ...]:
        """What layers before `at` give and the rest of the model uses."""
        if at in (0, len(self.layers)):
            return ()
        for users in self.users.values():
            if min(users) < at <= max(users):
                raise PlanError(f"No cut before layer {at}: layers {sorted(users)} share a cache.")
        everything = tuple(
            (i, n) for i in range(at) for n in range(len(trace.arrays_in(self.given[i])))
        )
        outputs, sources = self._rest(at, everything)
        used = trace.depends_on(outputs, sources)
        # A forward that evaluates hides its graph: then a plain one is assumed.
        return tuple(key for key in everything if key in used) or tuple(
            key for key in everything if key[0] == at - 1
        )

    def _rest(
        self, at: int, keys: tuple[Crossing, ...]
    ) -> tuple[list[mx.array], dict[Crossing, mx.array]]:
        """The model's output from layer `at` on, and what it was given instead of the
        layers before."""
        blanks = {(i, n): _blank(trace.arrays_in(self.given[i])[n]) for i, n in keys}
        made = {i: _refill(i, self.given[i], blanks) for i in range(at)}
        caches = self.new_caches()

        def seam(i: int) -> trace.Seam:
            def run(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
                if i >= at:
                    return call(*args, **kwargs)
                output, written = made[i]
                trace.write_back(_writable(args, kwargs, caches or ()), written)
                return output

            return run

        try:
            with trace.seams(self.layers, seam):
                output = self.model(mx.array(_TRIAL_TOKENS), cache=caches)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise PlanError(
                f"No cut before layer {at}: the rest does not run ({error})."
            ) from error
        return trace.arrays_in(output), blanks


def _writable(args: tuple[Any, ...], kwargs: dict[str, Any], caches: Sequence[Any]) -> list[Any]:
    """The objects among a layer's arguments that it may leave something in."""
    others = (mx.array, nn.Module, tuple, *{type(cache) for cache in caches})
    values = (*args, *kwargs.values())
    return [
        v
        for v in values
        if (isinstance(v, (dict, list)) or hasattr(v, "__dict__")) and not isinstance(v, others)
    ]


def _refill(i: int, value: Any, arrays: dict[Crossing, mx.array]) -> Any:
    count = len(trace.arrays_in(value))
    return trace.with_arrays(value, iter([arrays.get((i, n)) for n in range(count)]))


def _blank(array: mx.array) -> mx.array:
    """An array without memory. It must not reach a result, so it is NaN."""
    return mx.broadcast_to(mx.array(float("nan")).astype(array.dtype), array.shape)


# --- caches


class _Caching:
    """Which of the model's caches a stage keeps: those of its own layers, those that
    the forward itself reads, and one ghost for each kind that only other layers
    have. A ghost takes part in counting positions and holds no memory."""

    def __init__(self, trial: _Trial, start: int, end: int) -> None:
        kinds = [_kind(cache) for cache in trial.caches]
        users = [trial.users.get(j, set()) for j in range(len(kinds))]
        own = {j for j, u in enumerate(users) if not u or start <= min(u) < end}
        leader = {kind: j for j, kind in reversed(list(enumerate(kinds)))}
        leader |= {kinds[j]: j for j in sorted(own, reverse=True) if users[j]}
        self._kept = sorted(own | set(leader.values()))
        place = {j: n for n, j in enumerate(self._kept)}
        self._slots = [place.get(j, place[leader[kind]]) for j, kind in enumerate(kinds)]
        self._ghosts = [place[j] for j in self._kept if j not in own]

    def own_part(self, caches: list[Any]) -> list[Any]:
        return [caches[j] for j in self._kept]

    def as_model_expects(self, cache: list[Any]) -> list[Any]:
        """The full list: a cache of other layers is stood for by one of its kind."""
        return [cache[slot] for slot in self._slots]

    def advance_ghosts(self, cache: list[Any], num_rows: int, num_tokens: int) -> None:
        for n in self._ghosts:
            _advance(cache[n], num_rows, num_tokens)


def _kind(cache: Any) -> tuple[Any, ...]:
    """What two new caches have in common if they track the same positions."""
    if hasattr(cache, "caches"):
        return tuple(_kind(part) for part in cache.caches)
    return (type(cache), *((k, v) for k, v in vars(cache).items() if isinstance(v, int)))


def _advance(cache: Any, num_rows: int, num_tokens: int) -> None:
    if hasattr(cache, "caches"):
        for part in cache.caches:
            _advance(part, num_rows, num_tokens)
    elif hasattr(cache, "update_and_fetch"):
        nothing = mx.zeros((num_rows, 1, num_tokens, 0))
        cache.update_and_fetch(nothing, nothing)
    else:
        cache.cache = [mx.zeros((num_rows, 0)) for _ in cache.cache]
        cache.advance(num_tokens)


# --- weights


def stand_in_for_weights(model: nn.Module) -> dict[str, mx.array]:
    """Puts blanks in the place of all arrays, and returns these by name. So a trial
    sees where a weight is used and not how it is made, which may take 50,000 nodes."""
    arrays = dict(named_arrays(model))
    blanks = {id(array): _blank(array) for array in arrays.values()}  # tied ones stay tied
    _set_arrays(model, {name: blanks[id(array)] for name, array in arrays.items()})
    return arrays


def _put_back(model: nn.Module, weights: dict[str, mx.array]) -> None:
    _set_arrays(model, {name: weights[name] for name, _ in named_arrays(model)})


def _keep_own_weights(stage: Stage) -> None:
    """Takes every array that the stage does not need out of the module tree.

    Layers are kept whole. Outside of layers a module stays, whole, if the outputs
    depend on one of its arrays.
    """
    arrays = dict(named_arrays(stage.model))
    layer_of = {id(a): i for i, layer in enumerate(stage.layers) for _, a in named_arrays(layer)}
    owner = {name: layer_of.get(id(array)) for name, array in arrays.items()}
    outside = {name for name, i in owner.items() if i is None}
    used = {name for cached in (True, False) for name in _trial_uses(stage, cached, arrays)}
    modules = {_module_of(name) for name in (used or outside) & outside}
    keep = {name for name, i in owner.items() if i is not None and stage.start <= i < stage.end}
    _prune(stage.model, keep | {name for name in outside if _module_of(name) in modules})


def _trial_uses(stage: Stage, cached: bool, arrays: dict[str, mx.array]) -> set[str]:
    caches = make_prompt_cache(stage.model) if cached else None
    received = [_blank(array) for array in stage.cuts[cached].example()]
    outputs = stage._run(mx.array(_TRIAL_TOKENS), caches, received)
    return trace.depends_on(outputs, arrays)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


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
                tree[key] = arrays[f"{path}{key}"]
        elif isinstance(value, (dict, list, tuple)):
            _set_arrays(value, arrays, f"{path}{key}.")


def _prune(tree: Any, keep: set[str], path: str = "") -> bool:
    """Blanks the arrays that are not kept, and takes branches without a kept one out
    of the module tree. What they hold can still be read as attributes."""
    entries = [
        (key, value)
        for key, value in (list(tree.items()) if isinstance(tree, dict) else enumerate(tree))
        if isinstance(value, (mx.array, dict, list))
    ]
    stays = {
        key: path + str(key) in keep
        if isinstance(value, mx.array)
        else _prune(value, keep, f"{path}{key}.")
        for key, value in entries
    }
    for key, value in entries:
        if not stays[key]:
            if isinstance(value, mx.array):
                tree[key] = _blank(value)
            if any(stays.values()):
                _detach(tree, key, value)
    return any(stays.values())


def _detach(tree: Any, key: Any, value: Any) -> None:
    if isinstance(tree, nn.Module):
        vars(tree)[key] = dict.pop(tree, key)
    elif isinstance(value, nn.Module):
        vars(value).update(value)
        value.clear()
