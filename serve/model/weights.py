"""The weights of one stage, out of a model folder. Those of other stages are never
read: mlx-lm builds the model on lazy arrays, and only what the stage keeps is
evaluated. A folder of the hub has holes, which are filled in between."""

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm import utils

from serve.core.errors import ModelError
from serve.hub.partial import PartialModel
from serve.model.stage import Stage
from serve.model.trace import depends_on
from serve.model.trial import named_arrays

_PART_BYTES = 64 << 20
_NUM_TRACED = 400  # arrays in one call of the tracer

Item = TypeVar("Item")
Made = TypeVar("Made")
# Told what goes on ("fetching" or "loading"), the bytes that are done, and all of them.
Progress = Callable[[str, int, int], None]
Prepare = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """bytes_read is what the process really read from files, None where the system
    does not tell (it does on Linux). bytes_fetched came from the hub."""

    stage: Stage
    bytes_owned: int
    bytes_read: int | None
    bytes_fetched: int


def load_stage(
    model: Path | PartialModel,
    start: int,
    end: int,
    progress: Progress,
    prepare: Prepare = lambda _: None,
) -> LoadedStage:
    """Builds layers [start, end) and reads their weights. prepare may change the whole lazy
    model before it is cut."""

    def cut(whole: nn.Module) -> Stage:
        prepare(whole)
        return Stage(whole, start, end)

    before = _bytes_read()
    bytes_fetched = 0
    if isinstance(model, PartialModel):
        folder = model.folder
        stage, bytes_fetched = _filled(model, progress, cut, lambda s: s.weights().values())
    else:
        folder = model
        stage = cut(build_model(folder))
    weights = list(stage.weights().values())
    bytes_owned = sum(array.nbytes for array in weights)
    done = 0
    for part in _parts(weights):
        try:
            mx.eval(part)  # Here, in parts, so that loading can be seen to go on.
        except RuntimeError as error:
            raise ModelError(f"The weights in {folder} cannot be read: {error}.") from error
        done += sum(array.nbytes for array in part)
        progress("loading", done, bytes_owned)
    after = _bytes_read()
    read = None if before is None or after is None else after - before
    return LoadedStage(stage, bytes_owned, read, bytes_fetched)


def load_changed(model: Path | PartialModel, changed: Mapping[str, mx.array]) -> nn.Module:
    """The whole model, lazily, with these weights in the place of its own."""

    def change(whole: nn.Module) -> nn.Module:
        whole.update(tree_unflatten(list(changed.items())))
        return whole

    if not isinstance(model, PartialModel):
        return change(build_model(model))
    whole, _ = _filled(model, lambda *_: None, change, lambda m: dict(named_arrays(m)).values())
    return whole


def build_model(folder: Path, raw: dict[str, mx.array] | None = None) -> nn.Module:
    """The whole model, lazily. raw is filled with the arrays of the files, as they are
    before `sanitize` renames, stacks or splits them."""

    def classes(config: dict[str, Any]) -> Any:
        model_class, args_class = utils._get_classes(config=config)
        if raw is None:
            return model_class, args_class
        return lambda args: _recording(model_class(args), raw), args_class

    collects = gc.isenabled()
    gc.disable()  # It would look again and again at 100,000 arrays, half of the time.
    try:
        model, _ = utils.load_model(folder, lazy=True, get_model_classes=classes)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
        reason = str(error).rstrip(".\n")
        raise ModelError(f"mlx-lm cannot build the model in {folder}: {reason}.") from error
    finally:
        if collects:
            gc.enable()
    return model


def _recording(model: nn.Module, raw: dict[str, mx.array]) -> nn.Module:
    """The model, whose first call of sanitize leaves in raw what it is given."""
    sanitize = getattr(model, "sanitize", lambda weights: weights)

    def record(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        object.__delattr__(model, "sanitize")
        raw.update(weights)
        sanitized: dict[str, mx.array] = sanitize(weights)
        return sanitized

    object.__setattr__(model, "sanitize", record)
    return model


# --- a folder with holes


def _filled(
    partial: PartialModel,
    progress: Progress,
    make: Callable[[nn.Module], Made],
    weights: Callable[[Made], Iterable[mx.array]],
) -> tuple[Made, int]:
    """What is made of the lazy model, with the bytes of its weights in place, not evaluated;
    and how many of them were fetched.

    Code of a model that evaluates while it is built has read what was not there yet:
    then that is fetched too, and the model built again.
    """
    wanted: set[str] = set()
    bytes_fetched = 0
    while True:
        raw: dict[str, mx.array] = {}
        made = make(build_model(partial.folder, raw))
        early = _evaluated(raw) - wanted
        wanted |= early | _made_of(list(weights(made)), raw)
        bytes_fetched += partial.fetch(wanted, functools.partial(progress, "fetching"))
        if not early:
            return made, bytes_fetched


def _made_of(weights: Sequence[mx.array], raw: Mapping[str, mx.array]) -> set[str]:
    """The raw arrays that the weights are computed from. Most are weights themselves."""
    names = {id(array): name for name, array in raw.items()}
    direct = {names[id(array)] for array in weights if id(array) in names}
    computed = [array for array in weights if id(array) not in names]
    others = {name: array for name, array in raw.items() if name not in direct}
    return direct.union(
        *(
            depends_on(outputs, dict(sources))
            for outputs in _batches(computed)
            for sources in _batches(others.items())
        )
    )


def _evaluated(raw: Mapping[str, mx.array]) -> set[str]:
    """The arrays that are not lazy any more: the graph has no Load before them."""
    found: set[str] = set()
    for batch in _batches(raw.items()):
        names = {f"in{n}": name for n, (name, _) in enumerate(batch)}
        dot = StringIO()
        mx.export_to_dot(dot, **{f"in{n}": array for n, (_, array) in enumerate(batch)})
        lazy = {line.rpartition(" -> ")[2].strip('"') for line in dot.getvalue().splitlines()}
        found |= {name for node, name in names.items() if node not in lazy}
    return found


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    left = iter(items)
    while batch := list(islice(left, _NUM_TRACED)):
        yield batch


def _parts(weights: list[mx.array]) -> list[list[mx.array]]:
    parts: list[list[mx.array]] = [[]]
    size = 0
    for array in weights:
        if size > _PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(array)
        size += array.nbytes
    return parts


def _bytes_read() -> int | None:
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in text.splitlines())["rchar"])
