"""Measures how much memory MLX may still use on this machine, and how fast it reads memory."""

import time

import mlx.core as mx
import psutil

_MAX_SHARE = 0.8  # The rest is for other programs.
_NUM_MEASURED = 1 << 26  # numbers of four bytes, more than a cache holds
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
    """Measures the bytes per second at which MLX reads a large array on this machine."""
    numbers = mx.ones(_NUM_MEASURED)
    numbers.sum().item()  # Makes the array.
    times: list[float] = []
    for _ in range(_NUM_MEASUREMENTS):
        started = time.perf_counter()
        numbers.sum().item()
        seconds = time.perf_counter() - started
        times.append(seconds)
    return numbers.nbytes / min(times)  # Other programs can only make it slower.
