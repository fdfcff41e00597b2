"""Measures how much memory MLX may still use on this machine, and how fast it reads memory."""

import time

import mlx.core as mx
import psutil

_MAX_SHARE = 0.8  # The rest is for other programs.
_MEASURED_SHAPE = (1 << 14, 1 << 12)  # numbers of four bytes, 256 MiB: more than a cache holds
_NUM_MEASUREMENTS = 5


def free_bytes() -> int:
    """Returns the bytes that MLX may still use: on Apple's GPU the recommended working set minus
    what MLX has allocated, on a CPU a share of the memory that is available."""
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        return max(0, recommended - mx.get_active_memory())
    available = psutil.virtual_memory().available
    return int(_MAX_SHARE * available)


def memory_speed() -> float:
    """Measures the bytes per second at which MLX reads the weights of a decode step: it multiplies
    one row with a large matrix. Other operations are slower than memory on a CPU."""
    weights = mx.ones(_MEASURED_SHAPE)
    row = mx.ones((1, _MEASURED_SHAPE[1]))
    (row @ weights.T).sum().item()  # Makes both arrays.
    times: list[float] = []
    for _ in range(_NUM_MEASUREMENTS):
        started = time.perf_counter()
        (row @ weights.T).sum().item()
        seconds = time.perf_counter() - started
        times.append(seconds)
    return weights.nbytes / min(times)  # Other programs can only make it slower.
