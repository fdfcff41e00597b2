"""Divides the caches of a sequence into arrays that files can hold, and restores caches from them.

Caches that can be cut are divided into ranges of tokens. The others are written whole: their arrays
as such, and their other attributes as JSON. Each cache is known by its number among the caches of
the whole model, which is the same however the model is divided into stages.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from serve.core.errors import EngineError
from serve.model.trace import Arrays
from serve.rank.checkpoints import can_cut

_BUFFERS = ("keys", "values")
_ATTRIBUTES = "attributes"
_RANGE = "range"

_Named = Iterator[tuple[str, Any]]
_PartsOf = Callable[[Any], Iterable[Any] | None]  # None for what does not consist of parts


@dataclass(frozen=True, slots=True)
class FileContent:
    """The content of a file of the prefix cache: named arrays, and text beside them. The arrays of
    a file to be written share no memory with a cache, once they are evaluated."""

    arrays: Arrays
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
    for name, cache in _leaves(caches, numbers):
        if not can_cut(cache):
            continue
        for buffer_name in _BUFFERS:
            buffer = getattr(cache, buffer_name)
            for i, array in enumerate(_as_tuple(buffer)):
                columns = array[..., start:end, :]
                arrays[f"{name}.{buffer_name}.{i}"] = mx.contiguous(columns)
    return FileContent(arrays)


def has_tokens(arrays: Arrays, start: int, end: int) -> bool:
    """Whether the arrays of a segment have a column for each of the tokens [start, end). A state,
    whose end is its start, has arrays of any shape."""
    if start == end:
        return True
    num_tokens = end - start
    buffers = [array for name, array in arrays.items() if name != _RANGE]
    return all(array.shape[-2:-1] == (num_tokens,) for array in buffers)


def state(states: list[Any], numbers: Numbers, num_tokens: int) -> FileContent:
    """Makes the content of a file from the states of a checkpoint (`rank.checkpoints`). Raises
    EngineError if a cache has an attribute that is neither an array nor JSON."""
    arrays = {_RANGE: mx.array([num_tokens, num_tokens])}
    attributes: dict[str, Any] = {}
    for name, cache in _flat(states, numbers):
        if cache is None:
            continue
        for key, value in _attributes(cache):
            if isinstance(value, mx.array):
                arrays[f"{name}.{key}"] = mx.contiguous(value)
            else:
                attributes[f"{name}.{key}"] = value
    try:
        text = json.dumps(attributes)
    except TypeError as error:
        raise EngineError(f"The caches of this model cannot be written: {error}.") from error
    return FileContent(arrays, {_ATTRIBUTES: text})


def _attributes(cache: Any) -> _Named:
    """Yields all attributes of a cache, the entries of lists and tuples one by one."""
    for entry in tree_flatten(vars(cache)):
        yield entry[0], entry[1]


def merged(files: list[FileContent]) -> FileContent:
    """Joins the contents of files with different layers."""
    arrays: Arrays = {}
    attributes: dict[str, Any] = {}
    for file in files:
        arrays |= file.arrays
        attributes |= _read_attributes(file)
    text = json.dumps(attributes)
    return FileContent(arrays, {_ATTRIBUTES: text})


def restore(
    stage: StageCaches,
    segments: list[FileContent],
    state: FileContent | None,
    num_tokens: int,
) -> tuple[list[Any], list[mx.array]]:
    """Makes caches with the content of files: segments in order, and a state if some caches cannot
    be cut. Returns the caches, and their arrays, which have to be evaluated. Raises KeyError if a
    file lacks something that the caches need."""
    caches = stage.make()
    stage.count(caches, num_tokens)
    restored = _arrays_of_counters(caches, stage.numbers)
    attributes = _read_attributes(state) if state else {}
    for name, cache in _leaves(caches, stage.numbers):
        prefix = f"{name}."
        if can_cut(cache):
            restored += _restore_tokens(cache, prefix, segments, num_tokens)
        elif state is None:
            raise KeyError(f"state of cache {name}")
        else:
            restored += _restore_state(cache, prefix, state.arrays, attributes)
    return caches, restored


def _arrays_of_counters(caches: list[Any], numbers: Numbers) -> list[mx.array]:
    """Lists the arrays of the caches that only count positions."""
    found: list[mx.array] = []
    for cache, number in zip(caches, numbers, strict=True):
        if number is None:
            found += _arrays(cache)
    return found


def _arrays(cache: Any) -> list[mx.array]:
    entries = tree_flatten(cache.state)
    values = [entry[1] for entry in entries]
    return [value for value in values if isinstance(value, mx.array)]


def _restore_tokens(
    cache: Any,
    prefix: str,
    segments: list[FileContent],
    num_tokens: int,
) -> list[mx.array]:
    """Sets the keys and values of a plain cache, and returns their arrays."""
    restored: list[mx.array] = []
    for buffer_name in _BUFFERS:
        joined = _joined(segments, f"{prefix}{buffer_name}.")
        # Quantized keys are a tuple of arrays, others are one array.
        buffer = joined[0] if len(joined) == 1 else tuple(joined)
        setattr(cache, buffer_name, buffer)
        restored += joined
    cache.offset = num_tokens
    return restored


def _joined(segments: list[FileContent], prefix: str) -> list[mx.array]:
    """Joins the parts of each array whose name begins with the prefix, in the order of the
    segments. Raises KeyError if there are none."""
    names = sorted(name for name in segments[0].arrays if name.startswith(prefix))
    if not names:
        raise KeyError(prefix)
    joined: list[mx.array] = []
    for name in names:
        parts = [segment.arrays[name] for segment in segments]
        whole = mx.concatenate(parts, axis=-2)
        joined.append(whole)
    return joined


def _restore_state(
    cache: Any,
    prefix: str,
    arrays: Arrays,
    attributes: Mapping[str, Any],
) -> list[mx.array]:
    """Sets the attributes of a cache, and returns its arrays."""
    own_arrays = _below(prefix, arrays)
    own = own_arrays | _below(prefix, attributes)
    if not own:
        raise KeyError(prefix)
    entries = list(own.items())
    for name, value in tree_unflatten(entries).items():
        # In files, tuples are the same as lists.
        is_tuple = isinstance(getattr(cache, name, None), tuple)
        setattr(cache, name, tuple(value) if is_tuple else value)
    return list(own_arrays.values())


def _read_attributes(file: FileContent) -> dict[str, Any]:
    text = file.metadata.get(_ATTRIBUTES, "{}")
    attributes: dict[str, Any] = json.loads(text)
    return attributes


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values whose names begin with the prefix, under the rest of their names."""
    own: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith(prefix):
            own[name.removeprefix(prefix)] = value
    return own


def _leaves(caches: list[Any], numbers: Numbers) -> _Named:
    """Yields all caches with their numbers as names. A cache that consists of several is replaced
    by these. Caches that only count positions are left out."""
    return _named(caches, numbers, lambda cache: getattr(cache, "caches", None))


def _flat(states: list[Any], numbers: Numbers) -> _Named:
    """Yields states with the names that `_leaves` gives to their caches."""
    return _named(states, numbers, lambda state: state if isinstance(state, list) else None)


def _named(values: list[Any], numbers: Numbers, parts_of: _PartsOf) -> _Named:
    for value, number in zip(values, numbers, strict=True):
        if number is not None:
            yield from _named_parts(value, str(number), parts_of)


def _named_parts(value: Any, name: str, parts_of: _PartsOf) -> _Named:
    parts = parts_of(value)
    if parts is None:
        yield name, value
        return
    for i, part in enumerate(parts):
        yield from _named_parts(part, f"{name}_{i}", parts_of)


def _as_tuple(buffer: Any) -> tuple[mx.array, ...]:
    return buffer if isinstance(buffer, tuple) else (buffer,)
