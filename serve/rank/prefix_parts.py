"""Divides the caches of a sequence into arrays that files can hold, and restores caches from them.

Caches that can be cut are divided into ranges of tokens. The others are written whole: their arrays
as such, and their other attributes as JSON.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from serve.core.errors import EngineError
from serve.rank.checkpoints import can_cut

_BUFFERS = ("keys", "values")
_ATTRIBUTES = "attributes"


@dataclass(frozen=True, slots=True)
class FileContent:
    """The content of a file of the prefix cache. Once evaluated, its arrays share no memory with a
    cache."""

    arrays: dict[str, mx.array]
    metadata: dict[str, str] = field(default_factory=dict)


def segment(caches: list[Any], start: int, end: int) -> FileContent:
    """Copies, lazily, the keys and values of the tokens [start, end) from plain caches."""
    # A file needs at least one array.
    arrays = {"range": mx.array([start, end])}
    for n, cache in enumerate(_leaves(caches)):
        if not can_cut(cache):
            continue
        for buffer in _BUFFERS:
            for i, array in enumerate(_as_tuple(getattr(cache, buffer))):
                arrays[f"{n}.{buffer}.{i}"] = mx.contiguous(array[..., start:end, :])
    return FileContent(arrays)


def state(states: list[Any], num_tokens: int) -> FileContent:
    """Makes the content of a file from the states of a checkpoint (`rank.checkpoints`). Raises
    EngineError if a cache has an attribute that is neither an array nor JSON."""
    arrays = {"range": mx.array([num_tokens, num_tokens])}
    attributes: dict[str, Any] = {}
    for n, cache in enumerate(_flat(states)):
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
    caches: list[Any],
    segments: list[dict[str, mx.array]],
    state: tuple[dict[str, mx.array], dict[str, str]] | None,
    num_tokens: int,
) -> list[mx.array]:
    """Fills new plain caches with the content of files: segments in order, and a state with its
    metadata if some caches cannot be cut. Returns the arrays of the caches, which have to be
    evaluated. Raises KeyError if a file lacks something that the caches need."""
    restored: list[mx.array] = []
    for n, cache in enumerate(_leaves(caches)):
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
    return restored


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


def _leaves(caches: list[Any]) -> Iterator[Any]:
    """Yields all caches, with the parts of one that consists of several in its place."""
    for cache in caches:
        parts = getattr(cache, "caches", None)
        if parts is None:
            yield cache
        else:
            yield from _leaves(parts)


def _flat(states: list[Any]) -> Iterator[Any]:
    """Yields states in the order of `_leaves`."""
    for state in states:
        if isinstance(state, list):
            yield from _flat(state)
        else:
            yield state


def _as_tuple(buffer: Any) -> tuple[mx.array, ...]:
    return buffer if isinstance(buffer, tuple) else (buffer,)
