"""Measures how much memory MLX may still use on this machine."""

import mlx.core as mx
import psutil

_MAX_SHARE = 0.8  # The rest is for other programs.


def free_bytes() -> int:
    """The bytes that MLX may still use: on Apple's GPU the recommended working set minus what MLX
    has allocated, on a CPU a share of the memory that is available."""
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        return max(0, recommended - mx.get_active_memory())
    available = psutil.virtual_memory().available
    return int(_MAX_SHARE * available)
