"""Copies of those caches of a sequence that cannot be cut to an earlier position.

Keys and values of plain attention are cut where a shared prefix ends. A window, a chunk or a
recurrent layer's state cannot return to an earlier position, so a copy is kept.
"""

import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache

_CUTTABLE = (KVCache, QuantizedKVCache, BatchKVCache)


@dataclass(frozen=True, slots=True)
class SavedState:
    """The states of a stage's caches after num_tokens tokens: None for a cache that can be cut, a
    list for one that consists of several, else a copy."""

    num_tokens: int
    states: list[Any]
    num_bytes: int


def can_cut(cache: Any) -> bool:
    """Whether a cache can be cut to an earlier position."""
    parts = getattr(cache, "caches", None)
    if parts is not None:
        return all(can_cut(part) for part in parts)
    return type(cache) in _CUTTABLE


def state_of(cache: Any, row: int | None) -> Any:
    """Copies the state of a cache, lazily. row is the row of a batch; None for a plain cache."""
    parts = getattr(cache, "caches", None)
    if parts is not None:
        return [state_of(part, row) for part in parts]
    if can_cut(cache):
        return None
    if row is None:
        return _compact(copy.deepcopy(cache))
    return _compact(cache.extract(row))


def restored(cache: Any, state: Any, num_surplus: int) -> Any:
    """Returns a plain cache that continues from a state. The parts that can be cut come from
    `cache`, without its last num_surplus tokens. `cache` is a copy that the caller gives away."""
    parts = getattr(cache, "caches", None)
    if parts is not None:
        pairs = zip(parts, state or [None] * len(parts), strict=True)
        cache.caches = tuple(restored(part, own, num_surplus) for part, own in pairs)
        return cache
    if state is not None:
        return copy.deepcopy(state)
    _cut(cache, num_surplus)
    return cache


def arrays(states: list[Any]) -> list[mx.array]:
    found: list[mx.array] = []
    for state in states:
        if isinstance(state, list):
            found += arrays(state)
        elif state is not None:
            entries = tree_flatten(state.state)
            found += [entry[1] for entry in entries if isinstance(entry[1], mx.array)]
    return found


def _cut(cache: Any, num_surplus: int) -> None:
    """Cuts a cache and its arrays: if only the offset shrank, the next token would copy all."""
    cache.trim(num_surplus)
    if cache.keys is None:
        return
    end = cache.offset
    cache.keys = tree_map(lambda array: mx.contiguous(array[..., :end, :]), cache.keys)
    cache.values = tree_map(lambda array: mx.contiguous(array[..., :end, :]), cache.values)


def _compact(cache: Any) -> Any:
    """Removes tokens older than the window from a copy, and large buffers behind small arrays."""
    if type(cache) is RotatingKVCache and not cache.keep:
        _cut_to_window(cache)
    for name, value in vars(cache).items():
        setattr(cache, name, tree_map(_contiguous, value))
    return cache


def _cut_to_window(cache: Any) -> None:
    if cache.keys is None:
        return
    num_held = cache.keys.shape[-2]
    num_surplus = num_held - cache.max_size
    # Only a prompt's chunk leaves more tokens than the window, and these are in order.
    if num_surplus > 0 and cache._idx == num_held:
        cache.keys = cache.keys[..., num_surplus:, :]
        cache.values = cache.values[..., num_surplus:, :]
        cache._idx = cache.max_size


def _contiguous(value: Any) -> Any:
    return mx.contiguous(value) if isinstance(value, mx.array) else value
