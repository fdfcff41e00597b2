"""The key-value caches of a stage, as mlx-lm makes them or quantized."""

from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from serve.core.errors import PlanError

# The number of values that share a scale and a bias. 32 divides more head sizes than 64.
_GROUP_SIZE = 32


def quantized(caches: list[Any], bits: int | None) -> list[Any]:
    """Returns new caches that store keys and values in this many bits; without bits, the given
    caches. Raises PlanError unless the caches of all layers store plain keys and values."""
    if bits is None:
        return caches
    if not all(type(cache) is KVCache for cache in caches):
        raise PlanError(
            "--kv-bits works only with models whose layers all store plain keys and values."
        )
    return [QuantizedKVCache(_GROUP_SIZE, bits) for _ in caches]
