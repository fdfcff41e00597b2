"""How much memory MLX may still use on this machine."""

import mlx.core as mx
import psutil

_MOST_SHARE = 0.8  # Other programs live here too.


def free_bytes() -> int:
    """On a GPU what the system recommends, less what is in use; on a CPU what is available."""
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        return max(0, recommended - mx.get_active_memory())
    return int(_MOST_SHARE * psutil.virtual_memory().available)
