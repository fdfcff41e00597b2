"""A stage: consecutive layers of any mlx-lm model, cut out without changing the model's code.

The whole model is built with lazy weights. Layers before the stage return the received arrays
instead of running, and the first layer after the stage ends the forward pass. A trial run on lazy
arrays shows which weights the stage needs. A stage neither communicates nor evaluates.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.model import trace, trial
from serve.model.trial import Crossing, Layers, Trial, named_arrays

_LAYERS_BETWEEN_SEAMS = 8
_NOTHING = (0,)
"""The shape of the array that stands for None: the model has no array there yet."""
AtSeam = Callable[[list[mx.array]], None]
"""Takes the lazy output of every eighth layer, which it may begin to evaluate: a GPU then computes
while Python builds the graph of the other layers. All shards of a stage have the same seams."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The arrays that a stage receives, and those that it sends. `given` contains the values of the
    layers in a trial with tokens: received arrays replace the trial's."""

    tokens: mx.array
    given: dict[int, Any]
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]

    def example(self) -> list[mx.array]:
        """Returns blank arrays of the shapes and dtypes that were received in the trial."""
        blanks: list[mx.array] = []
        for i, place in self.receives:
            arrays = trace.places_in(self.given[i])
            blanks.append(trial.blank(arrays[place]))
        return blanks


class _LeftStage(Exception):
    """Ends a forward pass at the first layer after the stage."""


class Stage:
    """Layers [start, end) of a model. The model object is changed into this stage for good. Raises
    PlanError if the model cannot be cut there. Weights keep their names in the whole model."""

    def __init__(self, model: nn.Module, start: int, end: int) -> None:
        self.model = model
        self.start = start
        self.end = end
        self.layers: Layers = list(model.layers)
        self._caches: Sequence[Any] = ()
        self._given: dict[int, Any] = {}
        self._hidden: mx.array | None = None
        self._at_seam: AtSeam | None = None
        self._backbone = _backbone(model, self.layers)
        with trial.without_weights(model):
            with_caches = Trial(model, self.layers, cached=True)
            trials = [with_caches, Trial(model, self.layers, cached=False)]
            receives = trial.crossings(trials, start)
            sends = trial.crossings(trials, end)
            self.cuts: dict[bool, Cut] = {}
            for run in trials:
                self.cuts[run.cached] = Cut(
                    tokens=run.tokens,
                    given=run.given,
                    receives=receives[run.cached],
                    sends=sends[run.cached],
                )
            self._open_seams()
            self._caching = _Caching(with_caches, start, end)
            used = _weights_in_use(self)
        _remove_other_weights(self, used)

    @property
    def is_last(self) -> bool:
        return self.end == len(self.layers)

    def weights(self) -> trace.Arrays:
        """Returns all arrays that the stage owns, by their original names."""
        return dict(named_arrays(self.model))

    def reuse(self, loaded: trace.Arrays) -> set[int]:
        """Replaces weights by loaded ones of the same name, shape and type. Returns their ids."""
        own = self.weights()
        # By identity, so that tied weights stay tied.
        found: dict[int, mx.array] = {}
        for name, array in own.items():
            other = loaded.get(name)
            if other is None or other.shape != array.shape or other.dtype != array.dtype:
                continue
            found[id(array)] = other
        reused: trace.Arrays = {}
        for name, array in own.items():
            other = found.get(id(array))
            if other is not None:
                reused[name] = other
        trial.set_arrays(self.model, reused)
        reused_ids = {id(array) for array in reused.values()}
        own_ids = {id(array) for array in self.weights().values()}
        return reused_ids & own_ids

    def make_cache(self) -> list[Any]:
        """Returns new mlx-lm caches for the stage's own layers, and for counting positions."""
        return self._caching.own_part(make_prompt_cache(self.model))

    def logits(self) -> mx.array:
        """Returns the last stage's lazy logits, for their shape and type. Do not evaluate them."""
        cut = self.cuts[False]
        (logits,) = self._run(cut.tokens, None, cut.example())
        return logits

    def record_hidden(self) -> None:
        """Makes calls of the last stage record their hidden states for pop_hidden."""
        if self._backbone is not None:
            trace.open_seam(self._backbone, self._record_hidden)

    def pop_hidden(self) -> mx.array | None:
        """Returns and removes the hidden states (B, L, D) of the last call, after the norm, not
        evaluated; None if the model computes logits where it calls its layers."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def __call__(
        self,
        tokens: mx.array,
        cache: list[Any] | None,
        received: Sequence[mx.array],
        at_seam: AtSeam | None = None,
    ) -> list[mx.array]:
        """Runs the stage lazily on tokens (B, L) and on the previous stage's arrays ([] for the
        first). Returns arrays for the next; the last returns [logits (B, L, vocabulary)]."""
        self._at_seam = at_seam
        if cache is None:
            return self._run(tokens, None, received)
        outputs = self._run(tokens, self._caching.as_model_expects(cache), received)
        self._caching.advance_ghosts(cache, *tokens.shape)
        return outputs

    def _run(
        self,
        tokens: mx.array,
        caches: list[Any] | None,
        received: Sequence[mx.array],
    ) -> list[mx.array]:
        cut = self.cuts[caches is not None]
        arrays: dict[Crossing, mx.array | None] = {}
        for key, array in zip(cut.receives, received, strict=True):
            if array.shape == _NOTHING:
                arrays[key] = None
            else:
                arrays[key] = array
        self._caches = caches or ()
        self._given = {}
        for i in range(self.start):
            given_in_trial = cut.given[i]
            self._given[i] = trial.refill(i, given_in_trial, arrays)
        try:
            output = self.model(tokens, cache=caches)
            return trace.arrays_in(output)
        except _LeftStage:
            return self._arrays_to_send(cut.sends)
        finally:
            self._given = {}
            self._at_seam = None

    def _arrays_to_send(self, sends: Sequence[Crossing]) -> list[mx.array]:
        to_send: list[mx.array] = []
        for i, place in sends:
            arrays = trace.places_in(self._given[i])
            to_send.append(arrays.get(place, mx.zeros(_NOTHING)))
        return to_send

    # --- seams

    def _open_seams(self) -> None:
        sources: set[int] = set()
        for cut in self.cuts.values():
            sources.update(i for i, _ in cut.sends)
        for i, layer in enumerate(self.layers):
            if i < self.start:
                trace.open_seam(layer, functools.partial(self._replay, i))
            elif i >= self.end:
                trace.open_seam(layer, self._leave)
            elif i in sources:
                trace.open_seam(layer, functools.partial(self._record, i))
            elif (i + 1 - self.start) % _LAYERS_BETWEEN_SEAMS == 0:
                trace.open_seam(layer, self._pass_seam)

    def _replay(self, i: int, _call: trace.Call, args: Any, kwargs: Any) -> Any:
        output, written = self._given[i]
        targets = trial.writable(args, kwargs, self._caches)
        trace.write_back(targets, written)
        return output

    def _record(self, i: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        written = trial.writable(args, kwargs, self._caches)
        self._given[i] = trace.snapshot((output, written))
        return output

    def _pass_seam(self, call: trace.Call, args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if self._at_seam:
            self._at_seam(trace.arrays_in(output))
        return output

    def _record_hidden(self, call: trace.Call, args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._hidden = output if isinstance(output, mx.array) else None
        return output

    def _leave(self, _call: trace.Call, _args: Any, _kwargs: Any) -> Any:
        raise _LeftStage


def shows_hidden_states(model: nn.Module) -> bool:
    """Whether a last stage of this model can return its hidden states after the norm."""
    layers = list(model.layers)
    backbone = _backbone(model, layers)
    if backbone is None:
        return False
    is_called = False

    def observe(_: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
        nonlocal is_called
        is_called = True
        return call(*args, **kwargs)

    with trial.without_weights(model), trace.seams([backbone], observe):
        Trial(model, layers, cached=False)
    return is_called


def _backbone(model: nn.Module, layers: Layers) -> nn.Module | None:
    """Returns the module within a model that holds the layers and calls them."""
    modules: list[nn.Module] = model.modules()
    for module in modules:
        if module is model:
            continue
        lists = [value for value in module.values() if isinstance(value, list) and value]
        if any(first is layers[0] for first, *_ in lists):
            return module
    return None


# --- caches


class _Caching:
    """Decides which caches (numbered j) a stage keeps: those of its layers, those that no layer
    uses, and one ghost for each other kind, which counts positions and stores nothing."""

    def __init__(self, whole: Trial, start: int, end: int) -> None:
        kinds = [_kind(cache) for cache in whole.caches]
        own: set[int] = set()
        used_here: list[int] = []
        for j in range(len(kinds)):
            users = whole.users.get(j)
            if users and start <= min(users) < end:
                used_here.append(j)
                own.add(j)
            elif not users:
                own.add(j)
        # One cache of each kind represents the others: the first one in the stage's layers, or else
        # the first of all.
        representative: dict[tuple[Any, ...], int] = {}
        for j in (*used_here, *range(len(kinds))):
            representative.setdefault(kinds[j], j)
        self._kept = sorted(own.union(representative.values()))
        index = {j: n for n, j in enumerate(self._kept)}
        self._slots: list[int] = []
        for j, kind in enumerate(kinds):
            kept = j if j in index else representative[kind]
            self._slots.append(index[kept])
        self._ghosts = [n for n, j in enumerate(self._kept) if j not in own]

    def own_part(self, caches: list[Any]) -> list[Any]:
        return [caches[j] for j in self._kept]

    def as_model_expects(self, cache: list[Any]) -> list[Any]:
        """Returns a cache for every layer; for layers of other stages, one of the same kind."""
        return [cache[slot] for slot in self._slots]

    def advance_ghosts(
        self,
        cache: list[Any],
        num_rows: int,
        num_tokens: int,
    ) -> None:
        for n in self._ghosts:
            _advance(cache[n], num_rows, num_tokens)


def _kind(cache: Any) -> tuple[Any, ...]:
    """Returns the kind of a new cache: caches of the same kind track the same positions."""
    if hasattr(cache, "caches"):
        return tuple(_kind(part) for part in cache.caches)
    kind: list[Any] = [type(cache)]
    for name, value in vars(cache).items():
        if isinstance(value, int):
            kind.append((name, value))
    return tuple(kind)


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


def _remove_other_weights(stage: Stage, used: set[str]) -> None:
    """Removes arrays that the stage does not need from the module tree. Its layers, and modules
    outside of layers that its outputs depend on, stay whole; other layers keep used arrays."""
    owners = _owners(stage)
    keep = used & owners.keys()  # A forward pass may have made arrays that are gone by now.
    kept_outside = [name for name in keep if owners[name] is None]
    modules = {_module_of(name) for name in kept_outside}
    own_layers = range(stage.start, stage.end)
    for name, layer in owners.items():
        if layer is None:
            is_kept = _module_of(name) in modules
        else:
            is_kept = layer in own_layers
        if is_kept:
            keep.add(name)
    _prune(stage.model, keep)


def _owners(stage: Stage) -> dict[str, int | None]:
    """Returns the layer that each array belongs to, by the array's name; None outside of layers."""
    layer_by_array: dict[int, int] = {}
    for i, layer in enumerate(stage.layers):
        for _, array in named_arrays(layer):
            layer_by_array[id(array)] = i
    owners: dict[str, int | None] = {}
    for name, array in named_arrays(stage.model):
        owners[name] = layer_by_array.get(id(array))
    return owners


def _weights_in_use(stage: Stage) -> set[str]:
    """Returns the names of the arrays that the outputs depend on. If the model's code evaluates,
    which hides its graph, all arrays outside of layers count as used too."""
    arrays = dict(named_arrays(stage.model))
    owners = _owners(stage)
    outside = {name for name, layer in owners.items() if layer is None}
    found: set[str] = set()
    for cached, cut in stage.cuts.items():
        received = cut.example()
        caches = make_prompt_cache(stage.model) if cached else None
        outputs = stage._run(cut.tokens, caches, received)
        found |= trace.depends_on(outputs, arrays)
        inputs = dict(enumerate(received or [cut.tokens]))
        has_graph = bool(trace.depends_on(outputs, inputs))
        if not has_graph:
            found |= outside
    return found


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _prune(tree: Any, keep: set[str], path: str = "") -> bool:
    """Blanks the arrays that are not in keep, and removes branches without an array of keep from
    the module tree. The contents of these branches can still be read as attributes. Returns whether
    the tree contains an array in `keep`."""
    is_any_kept = False
    dropped: list[tuple[Any, Any]] = []
    for key, value in trial.entries(tree):
        if isinstance(value, mx.array):
            is_kept = f"{path}{key}" in keep
        elif isinstance(value, (dict, list)):
            is_kept = _prune(value, keep, f"{path}{key}.")
        else:
            continue
        if is_kept:
            is_any_kept = True
        else:
            dropped.append((key, value))
    for key, value in dropped:
        if isinstance(value, mx.array):
            tree[key] = trial.blank(value)
        if is_any_kept:
            _detach(tree, key, value)
    return is_any_kept


def _detach(tree: Any, key: Any, value: Any) -> None:
    if isinstance(tree, nn.Module):
        vars(tree)[key] = dict.pop(tree, key)
    elif isinstance(value, nn.Module):
        vars(value).update(value)
        value.clear()
