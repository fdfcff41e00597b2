"""Divides the caches of a sequence into arrays that files can hold, and restores caches from them.

Caches that can be cut are divided into ranges of tokens. The others are written whole: their arrays
as such, and their other attributes as JSON. A cache that consists of several caches is replaced by
these. A cache's name is its place.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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

MakeCaches = Callable[[], list[Any]]
"""Makes the empty caches of a stage for one row."""


@dataclass(frozen=True, slots=True)
class FileContent:
    """The content of a file of the prefix cache: named arrays, and text beside them. The arrays of
    a file to be written share no memory with a cache, once they are evaluated."""

    arrays: Arrays
    metadata: dict[str, str] = field(default_factory=dict)


def segment(caches: list[Any], start: int, end: int) -> FileContent:
    """Copies, lazily, the keys and values of the tokens [start, end) from plain caches."""
    # A file needs at least one array.
    arrays = {_RANGE: mx.array([start, end])}
    for i, cache in enumerate(_leaves(caches)):
        if not can_cut(cache):
            continue
        for buffer_name in _BUFFERS:
            buffer = getattr(cache, buffer_name)
            for j, array in enumerate(_as_tuple(buffer)):
                columns = array[..., start:end, :]
                arrays[f"{i}.{buffer_name}.{j}"] = mx.contiguous(columns)
    return FileContent(arrays)


def has_tokens(arrays: Arrays, start: int, end: int) -> bool:
    """Whether the arrays of a segment have a column for each of the tokens [start, end). A state,
    whose end is its start, has arrays of any shape."""
    if start == end:
        return True
    num_tokens = end - start
    buffers = [array for name, array in arrays.items() if name != _RANGE]
    return all(array.shape[-2:-1] == (num_tokens,) for array in buffers)


def state(states: list[Any], num_tokens: int) -> FileContent:
    """Makes the content of a file from the states of a checkpoint (`rank.checkpoints`). Raises
    EngineError if a cache has an attribute that is neither an array nor JSON."""
    arrays = {_RANGE: mx.array([num_tokens, num_tokens])}
    attributes: dict[str, Any] = {}
    for i, cache in enumerate(_leaves(states)):
        if cache is None:
            continue
        for entry in tree_flatten(vars(cache)):
            name, value = entry[0], entry[1]
            if isinstance(value, mx.array):
                arrays[f"{i}.{name}"] = mx.contiguous(value)
            else:
                attributes[f"{i}.{name}"] = value
    try:
        text = json.dumps(attributes)
    except TypeError as error:
        raise EngineError(f"The caches of this model cannot be written: {error}.") from error
    return FileContent(arrays, {_ATTRIBUTES: text})


def restore(
    make_caches: MakeCaches,
    segments: list[FileContent],
    state: FileContent | None,
    num_tokens: int,
) -> tuple[list[Any], list[mx.array]]:
    """Makes caches with the content of files: segments in order, and a state if some caches cannot
    be cut. Returns the caches, and their arrays to evaluate. Raises KeyError if a file lacks data
    that the caches need."""
    caches = make_caches()
    restored: list[mx.array] = []
    for i, cache in enumerate(_leaves(caches)):
        prefix = f"{i}."
        if can_cut(cache):
            restored += _restore_tokens(cache, prefix, segments, num_tokens)
        elif state is None:
            raise KeyError(f"state of cache {i}")
        else:
            restored += _restore_state(cache, prefix, state)
    return caches, restored


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


def _restore_state(cache: Any, prefix: str, state: FileContent) -> list[mx.array]:
    """Sets the attributes of a cache, and returns its arrays."""
    arrays = _below(prefix, state.arrays)
    attributes: dict[str, Any] = json.loads(state.metadata[_ATTRIBUTES])
    own = arrays | _below(prefix, attributes)
    if not own:
        raise KeyError(prefix)
    entries = list(own.items())
    for name, value in tree_unflatten(entries).items():
        # In files, tuples are the same as lists.
        is_tuple = isinstance(getattr(cache, name, None), tuple)
        setattr(cache, name, tuple(value) if is_tuple else value)
    return list(arrays.values())


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values whose names begin with the prefix, under the rest of their names."""
    own: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith(prefix):
            own[name.removeprefix(prefix)] = value
    return own


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """Yields caches, or their states; a cache that consists of several yields these instead."""
    for cache in caches:
        parts = cache if isinstance(cache, list) else getattr(cache, "caches", None)
        if parts is None:
            yield cache
        else:
            yield from _leaves(parts)


def _as_tuple(buffer: Any) -> tuple[mx.array, ...]:
    return buffer if isinstance(buffer, tuple) else (buffer,)
