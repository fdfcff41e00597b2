"""Divides the caches of a sequence into arrays that files can hold, and restores caches from them.

Caches that can be cut are divided into ranges of tokens. The others are written whole: their arrays
as such, and their other attributes as JSON. Each cache is known by its number among the caches of
the whole model, which is the same however the model is divided into stages.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from serve.core.errors import EngineError
from serve.rank.checkpoints import can_cut

_BUFFERS = ("keys", "values")
_ATTRIBUTES = "attributes"
_RANGE = "range"


@dataclass(frozen=True, slots=True)
class FileContent:
    """The content of a file of the prefix cache. Once evaluated, its arrays share no memory with a
    cache."""

    arrays: dict[str, mx.array]
    metadata: dict[str, str] = field(default_factory=dict)


Numbers = ReadableList[int | None]
"""The number of each cache of a stage among those of the model; None if it only counts
positions."""


@dataclass(frozen=True, slots=True)
class StageCaches:
    """The caches of a stage. make returns empty caches for one row. count advances those that only
    count positions by a number of tokens."""

    layers: tuple[int, int]
    numbers: Numbers
    make: Callable[[], list[Any]]
    count: Callable[[list[Any], int], None]


def segment(caches: list[Any], numbers: Numbers, start: int, end: int) -> FileContent:
    """Copies, lazily, the keys and values of the tokens [start, end) from plain caches."""
    # A file needs at least one array.
    arrays = {_RANGE: mx.array([start, end])}
    for n, cache in _leaves(caches, numbers):
        if not can_cut(cache):
            continue
        for buffer in _BUFFERS:
            for i, array in enumerate(_as_tuple(getattr(cache, buffer))):
                arrays[f"{n}.{buffer}.{i}"] = mx.contiguous(array[..., start:end, :])
    return FileContent(arrays)


def has_tokens(arrays: Mapping[str, mx.array], start: int, end: int) -> bool:
    """Whether the arrays of a segment have a column for each of the tokens [start, end). A state,
    whose end is its start, has arrays of any shape."""
    if start == end:
        return True
    buffers = [array for name, array in arrays.items() if name != _RANGE]
    return all(array.shape[-2:-1] == (end - start,) for array in buffers)


def state(states: list[Any], numbers: Numbers, num_tokens: int) -> FileContent:
    """Makes the content of a file from the states of a checkpoint (`rank.checkpoints`). Raises
    EngineError if a cache has an attribute that is neither an array nor JSON."""
    arrays = {_RANGE: mx.array([num_tokens, num_tokens])}
    attributes: dict[str, Any] = {}
    for n, cache in _flat(states, numbers):
        if cache is None:
            continue
        for entry in tree_flatten(vars(cache)):
            key, value = entry[0], entry[1]
            if isinstance(value, mx.array):
                arrays[f"{n}.{key}"] = mx.contiguous(value)
            else:
                attributes[f"{n}.{key}"] = value
    try:
        text = json.dumps(attributes)
    except TypeError as error:
        raise EngineError(f"The caches of this model cannot be written: {error}.") from error
    return FileContent(arrays, {_ATTRIBUTES: text})


def restore(
    stage: StageCaches,
    segments: list[dict[str, mx.array]],
    state: tuple[dict[str, mx.array], dict[str, str]] | None,
    num_tokens: int,
) -> tuple[list[Any], list[mx.array]]:
    """Makes caches with the content of files: segments in order, and a state with its metadata if
    some caches cannot be cut. Returns the caches, and their arrays, which have to be evaluated.
    Raises KeyError if a file lacks something that the caches need."""
    caches = stage.make()
    stage.count(caches, num_tokens)
    restored: list[mx.array] = []
    for cache, number in zip(caches, stage.numbers, strict=True):
        if number is None:
            entries = tree_flatten(cache.state)
            restored += [entry[1] for entry in entries if isinstance(entry[1], mx.array)]
    for n, cache in _leaves(caches, stage.numbers):
        if can_cut(cache):
            for buffer in _BUFFERS:
                joined = _joined(segments, f"{n}.{buffer}.")
                restored += joined
                setattr(cache, buffer, joined[0] if len(joined) == 1 else tuple(joined))
            cache.offset = num_tokens
        elif state is None:
            raise KeyError(f"state of cache {n}")
        else:
            restored += _restore_state(cache, f"{n}.", *state)
    return caches, restored


def merged(
    files: list[tuple[dict[str, mx.array], dict[str, str]]],
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Joins the contents of files with different layers, as MLX reads them."""
    arrays: dict[str, mx.array] = {}
    attributes: dict[str, Any] = {}
    for own_arrays, metadata in files:
        arrays |= own_arrays
        attributes |= json.loads(metadata.get(_ATTRIBUTES, "{}"))
    return arrays, {_ATTRIBUTES: json.dumps(attributes)}


def _joined(segments: list[dict[str, mx.array]], prefix: str) -> list[mx.array]:
    names = sorted(name for name in segments[0] if name.startswith(prefix))
    if not names:
        raise KeyError(prefix)
    joined: list[mx.array] = []
    for name in names:
        parts = [own[name] for own in segments]
        whole = mx.concatenate(parts, axis=-2)
        joined.append(whole)
    return joined


def _restore_state(
    cache: Any, prefix: str, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]
) -> list[mx.array]:
    """Sets the attributes of a cache, and returns its arrays."""
    attributes: dict[str, Any] = json.loads(metadata[_ATTRIBUTES])
    own_arrays = _below(prefix, arrays)
    own = own_arrays | _below(prefix, attributes)
    if not own:
        raise KeyError(prefix)
    for name, value in tree_unflatten(list(own.items())).items():
        is_tuple = isinstance(getattr(cache, name, None), tuple)
        setattr(cache, name, tuple(value) if is_tuple else value)
    return list(own_arrays.values())


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


def _leaves(caches: list[Any], numbers: Numbers) -> Iterator[tuple[str, Any]]:
    """Yields all caches with their numbers, and the parts of one that consists of several in its
    place. Leaves out those that only count positions."""
    for cache, number in zip(caches, numbers, strict=True):
        if number is not None:
            yield from _parts(cache, str(number))


def _parts(cache: Any, name: str) -> Iterator[tuple[str, Any]]:
    parts = getattr(cache, "caches", None)
    if parts is None:
        yield name, cache
        return
    for i, part in enumerate(parts):
        yield from _parts(part, f"{name}_{i}")


def _flat(states: list[Any], numbers: Numbers) -> Iterator[tuple[str, Any]]:
    """Yields states with the names that `_leaves` gives to their caches."""
    for state, number in zip(states, numbers, strict=True):
        if number is not None:
            yield from _flat_parts(state, str(number))


def _flat_parts(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(state, list):
        yield name, state
        return
    for i, part in enumerate(state):
        yield from _flat_parts(part, f"{name}_{i}")


def _as_tuple(buffer: Any) -> tuple[mx.array, ...]:
    return buffer if isinstance(buffer, tuple) else (buffer,)
