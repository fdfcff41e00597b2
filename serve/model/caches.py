"""Kinds of key-value caches that a stage can be asked for."""

from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from serve.core.errors import PlanError

# Values that share a scale and a bias. 32 divides more head sizes than 64.
_GROUP_SIZE = 32


def quantized(caches: list[Any], bits: int | None) -> list[Any]:
    """New caches that keep values in this many bits; None returns the given ones. Raises
    PlanError if a layer keeps anything but plain keys and values."""
    if bits is None:
        return caches
    if not all(type(cache) is KVCache for cache in caches):
        raise PlanError("--kv-bits is for models whose layers all keep plain keys and values.")
    return [QuantizedKVCache(_GROUP_SIZE, bits) for _ in caches]
