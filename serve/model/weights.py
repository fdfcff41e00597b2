"""Loads one stage's weights from a model folder, and never reads other stages' weights.

mlx-lm builds the model on lazy arrays, and only what the stage keeps is evaluated. In a partial
folder of the hub, the missing bytes are fetched before that.
"""

import functools
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm import utils

from serve.core.checkpoint import TensorRange, read_checkpoint
from serve.core.errors import ModelError
from serve.hub.parts import TensorPart
from serve.model.sharding import Divisions, Sharding
from serve.model.stage import Stage
from serve.model.trace import Arrays, depends_on, edges
from serve.model.trial import named_arrays

if TYPE_CHECKING:
    from serve.hub.partial import FetchOrder, PartialModel

_GROUP_BYTES = 64 << 20
_IN_LAYER = re.compile(r"\.\d+\.")
_MAX_TRACED = 400  # the most arrays in one call of the tracer

Item = TypeVar("Item")
Made = TypeVar("Made")
Parts = dict[int, TensorPart]
"""The parts of tensors that lazy arrays stand for, by the id of the array."""
Progress = Callable[[str, int, int], None]
"""Called with the state ("fetching" or "loading"), the bytes done, and the bytes in all."""
Prepare = Callable[[nn.Module], Sharding | None]
"""Changes a whole lazy model. Returns a Sharding if it divides the model among shards."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Another model on the same files: changes of the config, and of mlx-lm's class."""

    config: dict[str, Any]
    changed: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage with its weights, its divided modules, and bytes. sharding_digest is Sharding's
    digest, "" without shards. bytes_read were really read (None if the system does not count
    reads), bytes_fetched came from the hub and, bytes_from_neighbours of them, from other machines.
    bytes_kept of bytes_owned were in memory before."""

    stage: Stage
    divisions: Divisions
    sharding_digest: str
    bytes_owned: int
    bytes_read: int | None
    bytes_fetched: int
    bytes_kept: int = 0
    bytes_from_neighbours: int = 0


def open_model(
    model: str,
    commit: str | None,
    cache_dir: str | None,
) -> "Path | PartialModel":
    """Returns a model's folder, partial for a commit of a hub model. Raises ModelError."""
    if commit is None:
        return Path(model)
    # Imported here, because a model in a folder does not need it.
    from serve.hub.partial import open_partial

    cache = Path(cache_dir) if cache_dir else None
    return open_partial(model, commit, cache)


def load_stage(
    model: "Path | PartialModel",
    start: int,
    end: int,
    progress: Progress,
    prepare: Prepare = lambda _: None,
    loaded: Arrays | None = None,
) -> LoadedStage:
    """Builds layers [start, end) and reads their weights. `prepare` may change the lazy model
    first. `loaded` are the evaluated weights of an earlier stage without shards, by name: those
    needed are not read again; the dict is emptied to free others. Raises ModelError or
    PlanError."""

    def cut(whole: nn.Module) -> _Cut:
        sharding = prepare(whole)
        stage = Stage(whole, start, end)
        return _Cut(stage, sharding, stage.reuse(loaded or {}))

    before = _bytes_read()
    from_neighbours = _neighbour_bytes(model)
    raw: Arrays = {}
    own, bytes_fetched = _build(
        model,
        progress,
        cut,
        _Cut.missing,
        raw,
        own_parts=_Cut.parts,
        order=_Cut.order,
    )
    if isinstance(model, Path):
        folder = model
        tensors = read_checkpoint(folder).tensors if own.sharding else {}
    else:
        folder = model.folder
        tensors = model.tensors
    weights = list(own.weights())
    missing = list(own.missing())
    parts = own.parts(raw, tensors)
    # Whole tensors would stay in memory while something refers to them.
    raw.clear()
    if own.sharding:
        own.sharding.made.clear()
    if loaded:
        loaded.clear()
        mx.clear_cache()
    _read(missing, parts, folder, progress)
    after = _bytes_read()
    bytes_read = None
    if before is not None and after is not None:
        bytes_read = after - before
    return LoadedStage(
        stage=own.stage,
        divisions=own.sharding.divisions if own.sharding else {},
        sharding_digest=own.sharding.digest if own.sharding else "",
        bytes_owned=_num_bytes(weights),
        bytes_read=bytes_read,
        bytes_fetched=bytes_fetched,
        bytes_kept=_num_bytes(weights) - _num_bytes(missing),
        bytes_from_neighbours=_neighbour_bytes(model) - from_neighbours,
    )


def load_variant(
    model: "Path | PartialModel",
    variant: Variant,
    progress: Progress,
    make: Callable[[nn.Module], Made],
    weights: Callable[[Made], Iterable[mx.array]],
) -> Made:
    """Builds a model on the same files, applies make, and reads the weights that make has left.
    Raises ModelError."""
    made, _ = _build(model, progress, make, weights, {}, variant)
    folder = model if isinstance(model, Path) else model.folder
    _read(list(weights(made)), {}, folder, progress)
    return made


def _read(weights: list[mx.array], parts: Parts, folder: Path, progress: Progress) -> None:
    bytes_owned = _num_bytes(weights)
    bytes_done = 0
    for group in _groups(weights):
        for array in group:
            part = parts.get(id(array))
            if part:
                _read_part(array, part)
        try:
            mx.eval(group)  # In groups, so that the progress of loading can be shown.
        except RuntimeError as error:
            raise ModelError(f"The weights in {folder} cannot be read: {error}.") from error
        bytes_done += _num_bytes(group)
        progress("loading", bytes_done, bytes_owned)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A lazy stage, its sharding or None, and the ids of the weights that were in memory before."""

    stage: Stage
    sharding: Sharding | None
    kept: set[int]

    def weights(self) -> Iterable[mx.array]:
        return self.stage.weights().values()

    def missing(self) -> Iterator[mx.array]:
        for array in self.weights():
            if id(array) not in self.kept:
                yield array

    def parts(self, raw: Arrays, tensors: Mapping[str, TensorRange]) -> Parts:
        """Finds a shard's arrays that are plain parts of a file's tensor."""
        if self.sharding is None:
            return {}
        names = {id(array): name for name, array in raw.items()}
        found: Parts = {}
        for key, made in self.sharding.made.items():
            source = made.source
            name = names.get(id(source))
            if name is None:
                continue
            tensor = tensors[name]
            shape = tuple(source.shape)
            if tensor.shape == shape:
                division = made.division
                axis = division.axis % len(shape)
                found[key] = TensorPart(tensor, axis, division.ranges)
        return found

    def order(self, names: set[str]) -> "FetchOrder":
        """Chooses an order in which the hub sends each tensor once, although several ranks need it.
        The first stage begins with the embedding; if it is tied, the last stage ends with it. Where
        shards need whole tensors, each shard begins with its share of them."""
        from serve.hub.partial import FetchOrder

        outside = {name for name in names if not _IN_LAYER.search(name)}
        is_first = self.stage.start == 0
        later = set() if is_first else outside
        if self.sharding:
            own, num_shards = self.sharding.shard, self.sharding.num_shards
            later |= {
                name for number, name in enumerate(sorted(names)) if number % num_shards != own
            }
        return FetchOrder(outside - later, later)


def _read_part(array: mx.array, part: TensorPart) -> None:
    data: Any = part.read()
    numbers = mx.array(data)
    flat = numbers.view(array.dtype)
    whole = flat.reshape(array.shape)
    array[...] = whole


def load_changed(model: "Path | PartialModel", changed: Mapping[str, mx.array]) -> nn.Module:
    """Builds the whole lazy model, with these weights in place of its own."""

    def change(whole: nn.Module) -> nn.Module:
        parameters = tree_unflatten(list(changed.items()))
        whole.update(parameters)
        return whole

    def weights(whole: nn.Module) -> Iterable[mx.array]:
        return dict(named_arrays(whole)).values()

    whole, _ = _build(model, lambda *_: None, change, weights, {})
    return whole


# Errors that mlx-lm's constructors may raise for absurd numbers in config.json: divisions by zero,
# sizes beyond 32 bits, failed assertions.
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def build_model(
    folder: Path,
    raw: Arrays | None = None,
    variant: Variant | None = None,
) -> nn.Module:
    """Builds the whole lazy model, or a variant of it. `raw` is filled with the arrays of the files
    as they are before the model's `sanitize`. Raises ModelError."""

    def classes(config: dict[str, Any]) -> Any:
        model_class, args_class = utils._get_classes(config=config)
        if variant:
            model_class = variant.changed(model_class)
        if raw is None:
            return model_class, args_class
        return lambda args: _recording(model_class(args), raw), args_class

    collects = gc.isenabled()
    gc.disable()  # Scanning 100,000 arrays again and again would take half of the time.
    try:
        model, _ = utils.load_model(
            folder,
            lazy=True,
            model_config=variant.config if variant else None,
            get_model_classes=classes,
        )
    except _BUILD_ERRORS as error:
        reason = str(error).rstrip(".\n") or type(error).__name__
        raise ModelError(f"mlx-lm cannot build the model in {folder}: {reason}.") from error
    finally:
        if collects:
            gc.enable()
    return model


def _recording(model: nn.Module, raw: Arrays) -> nn.Module:
    """Returns the same model, whose first call of sanitize also copies its argument into raw."""
    sanitize = getattr(model, "sanitize", lambda weights: weights)

    def record(weights: Arrays) -> Arrays:
        object.__delattr__(model, "sanitize")
        raw.update(weights)
        sanitized: Arrays = sanitize(weights)
        return sanitized

    object.__setattr__(model, "sanitize", record)
    return model


def _build(
    model: "Path | PartialModel",
    progress: Progress,
    make: Callable[[nn.Module], Made],
    weights: Callable[[Made], Iterable[mx.array]],
    raw: Arrays,
    variant: Variant | None = None,
    own_parts: Callable[[Made, Arrays, Mapping[str, TensorRange]], Parts] = lambda *_: {},
    order: Callable[[Made, set[str]], "FetchOrder | None"] = lambda *_: None,
) -> tuple[Made, int]:
    """Builds the lazy model and applies make to it. `raw` is filled with the arrays of the files.
    From a partial folder, fetches the tensors that the weights are computed from. For a weight in
    own_parts, only the part of its tensor is fetched, if it is in few pieces. `order` gets the
    names of the other tensors. Returns the result of make, not evaluated, and the bytes fetched. If
    the model's code evaluates arrays early, it reads bytes that are not there yet: the bytes are
    then fetched too, and the model is built again."""
    if isinstance(model, Path):
        return make(build_model(model, raw, variant)), 0
    wanted: set[str] = set()
    bytes_fetched = 0
    while True:
        raw.clear()
        made = make(build_model(model.folder, raw, variant))
        early = _evaluated(raw) - wanted
        wanted |= early
        parts: list[TensorPart] = []
        whole: list[mx.array] = []
        found = own_parts(made, raw, model.tensors)
        for array in weights(made):
            part = found.get(id(array))
            if part and part.is_in_few_pieces:
                parts.append(part)
            else:
                whole.append(array)
        wanted |= _computed_from(whole, raw)
        report = functools.partial(progress, "fetching")
        bytes_fetched += model.fetch(wanted, report, parts, order(made, wanted))
        if not early:
            return made, bytes_fetched


def _neighbour_bytes(model: "Path | PartialModel") -> int:
    return 0 if isinstance(model, Path) else model.neighbour_bytes


def _computed_from(weights: Sequence[mx.array], raw: Mapping[str, mx.array]) -> set[str]:
    """Returns the names of the raw arrays from which the weights are computed; most are weights."""
    names = {id(array): name for name, array in raw.items()}
    found: set[str] = set()
    computed: list[mx.array] = []
    for array in weights:
        if id(array) in names:
            found.add(names[id(array)])
        else:
            computed.append(array)
    others = []
    for name, array in raw.items():
        if name not in found:
            others.append((name, array))
    for outputs in _batches(computed):
        for sources in _batches(others):
            found |= depends_on(outputs, dict(sources))
    return found


def _evaluated(raw: Mapping[str, mx.array]) -> set[str]:
    """Returns the names of arrays that are no longer lazy: their graph contains no Load."""
    found: set[str] = set()
    for batch in _batches(raw.items()):
        nodes: Arrays = {}
        names: dict[str, str] = {}
        for number, (name, array) in enumerate(batch):
            nodes[f"in{number}"] = array
            names[f"in{number}"] = name
        lazy = {child for _, child in edges(nodes)}
        evaluated = nodes.keys() - lazy
        found.update(names[node] for node in evaluated)
    return found


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    left = iter(items)
    while batch := list(islice(left, _MAX_TRACED)):
        yield batch


def _num_bytes(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def _groups(weights: list[mx.array]) -> list[list[mx.array]]:
    groups: list[list[mx.array]] = [[]]
    size = 0
    for array in weights:
        if size > _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(array)
        size += array.nbytes
    return groups


def _bytes_read() -> int | None:
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    counters = dict(line.split(": ") for line in text.splitlines())
    return int(counters["rchar"])
