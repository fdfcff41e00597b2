"""A stage: consecutive layers of any mlx-lm model, whose code does not know it.

The whole model is built with lazy weights. The layers before the stage return
what was received instead of running, and the first layer after it ends the
forward. A trial run on lazy arrays tells which values cross a cut and which
weights the stage needs; only those stay. Names keep their original index.
Owns no communication and evaluates nothing.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.rank import trace, trial
from serve.rank.trial import Crossing, Trial, named_arrays

_NOTHING = (0,)
"""The shape of an array that says: the model has nothing there yet."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a stage gets from the one before and gives to the next, and what its earlier
    layers gave in the trial, to put received arrays in."""

    tokens: mx.array
    given: dict[int, Any]
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]

    def example(self) -> list[mx.array]:
        """Arrays without memory of the shapes and dtypes received in the trial."""
        return [trial.blank(trace.places_in(self.given[i])[place]) for i, place in self.receives]


class _LeftStage(Exception):
    """Ends the forward where it leaves the stage."""


class Stage:
    """Layers [start, end) of a model, which becomes this stage for good.

    Raises PlanError if the model cannot be cut there.
    """

    def __init__(self, model: nn.Module, start: int, end: int) -> None:
        self.model, self.start, self.end = model, start, end
        self.layers: list[nn.Module] = list(model.layers)
        self._caches: Sequence[Any] = ()
        self._made: dict[int, Any] = {}
        with trial.without_weights(model):
            trials = [Trial(model, self.layers, cached) for cached in (True, False)]
            receives, sends = (trial.crossings(trials, at) for at in (start, end))
            self.cuts = {
                t.cached: Cut(t.tokens, t.given, receives[t.cached], sends[t.cached])
                for t in trials
            }
            self.can_batch = trial.can_batch(model)
            self._open_seams()
            self._caching = _Caching(trials[0], start, end)
            used = _weights_in_use(self)
        _keep_own_weights(self, used)

    @property
    def is_last(self) -> bool:
        return self.end == len(self.layers)

    def weights(self) -> dict[str, mx.array]:
        """Every array that the stage owns, by its original name."""
        return dict(named_arrays(self.model))

    def make_cache(self) -> list[Any]:
        """mlx-lm caches of the local layers, and what else their positions need."""
        return self._caching.own_part(make_prompt_cache(self.model))

    def logits(self) -> mx.array:
        """Logits of the last stage, not to be evaluated, for their shape and type."""
        cut = self.cuts[False]
        (logits,) = self._run(cut.tokens, None, cut.example())
        return logits

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
        arrays = {
            key: None if array.shape == _NOTHING else array
            for key, array in zip(cut.receives, received, strict=True)
        }
        self._caches = caches or ()
        self._made = {i: trial.refill(i, cut.given[i], arrays) for i in range(self.start)}
        try:
            return trace.arrays_in(self.model(tokens, cache=caches))
        except _LeftStage:
            made = {i: trace.places_in(value) for i, value in self._made.items()}
            return [made[i].get(place, mx.zeros(_NOTHING)) for i, place in cut.sends]
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
        trace.write_back(trial.writable(args, kwargs, self._caches), written)
        return output

    def _record(self, i: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._made[i] = trace.snapshot((output, trial.writable(args, kwargs, self._caches)))
        return output

    def _leave(self, _call: Callable[..., Any], _args: Any, _kwargs: Any) -> Any:
        raise _LeftStage


# --- caches


class _Caching:
    """Which of the model's caches a stage keeps: those of its own layers, those that
    the forward itself reads, and one ghost for each kind that only other layers
    have. A ghost takes part in counting positions and holds no memory."""

    def __init__(self, whole: Trial, start: int, end: int) -> None:
        kinds = [_kind(cache) for cache in whole.caches]
        users = [whole.users.get(j, set()) for j in range(len(kinds))]
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


def _keep_own_weights(stage: Stage, used: set[str]) -> None:
    """Takes every array that the stage does not need out of the module tree.

    Its layers are kept whole, and of other layers what the outputs depend on. Outside of
    layers a module stays, whole, if the outputs depend on one of its arrays.
    """
    owner = _owners(stage)
    used &= owner.keys()  # without what a forward made and forgot
    modules = {_module_of(name) for name in used if owner[name] is None}
    keep = {name for name, i in owner.items() if i is not None and stage.start <= i < stage.end}
    keep |= {name for name, i in owner.items() if i is None and _module_of(name) in modules}
    _prune(stage.model, keep | used)


def _owners(stage: Stage) -> dict[str, int | None]:
    """Which layer each array belongs to, by its name."""
    layer_of = {id(a): i for i, layer in enumerate(stage.layers) for _, a in named_arrays(layer)}
    return {name: layer_of.get(id(array)) for name, array in named_arrays(stage.model)}


def _weights_in_use(stage: Stage) -> set[str]:
    """The names of the arrays that the outputs depend on. If the forward evaluates, which
    hides its graph, those are all arrays outside of layers too."""
    arrays = dict(named_arrays(stage.model))
    outside = {name for name, i in _owners(stage).items() if i is None}
    found: set[str] = set()
    for cached, cut in stage.cuts.items():
        inputs = cut.example() or [cut.tokens]
        caches = make_prompt_cache(stage.model) if cached else None
        outputs = stage._run(cut.tokens, caches, inputs if cut.receives else [])
        found |= trace.depends_on(outputs, arrays)
        if not trace.depends_on(outputs, dict(enumerate(inputs))):
            found |= outside
    return found


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


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
                tree[key] = trial.blank(value)
            if any(stays.values()):
                _detach(tree, key, value)
    return any(stays.values())


def _detach(tree: Any, key: Any, value: Any) -> None:
    if isinstance(tree, nn.Module):
        vars(tree)[key] = dict.pop(tree, key)
    elif isinstance(value, nn.Module):
        vars(value).update(value)
        value.clear()
