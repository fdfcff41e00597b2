"""The device on which MLX runs steps, and the speeds from which layouts are forecast: of reading
memory, and of crossing between a GPU and the CPU."""

import time
from collections.abc import Callable

import mlx.core as mx

_MEASURED_SHAPE = (1 << 14, 1 << 12)  # a matrix of 256 MiB in float32: more than a cache holds
_NUM_MEASUREMENTS = 5
_NUM_PRODUCTS = 4
_NUM_FENCES = 100
_FENCED_SIZE = 256


def on_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def memory_speed() -> float:
    """Measures the bytes per second at which MLX reads the weights of a decode step: it multiplies
    one row with a large matrix. On a CPU, other operations are slower than memory. Times many
    products at once, and subtracts an empty evaluation: a GPU's start costs as much as 100 MB."""
    weights = mx.ones(_MEASURED_SHAPE)
    rows = [mx.full((1, _MEASURED_SHAPE[1]), n) for n in range(_NUM_PRODUCTS)]
    mx.eval(weights, rows)
    num_bytes = weights.nbytes * _NUM_PRODUCTS
    empty = fastest(lambda: mx.eval(rows[0] + 1))
    products = fastest(lambda: mx.eval([row @ weights.T for row in rows]))
    return num_bytes / max(products - empty, 1e-6)


def fence_seconds() -> float:
    """Measures how long a GPU and the CPU wait for each other where the CPU computes a sum between
    two products of the GPU. The result is about 0 where MLX runs on the CPU."""
    if not on_gpu():
        return 0.0

    def chain(device: mx.DeviceType) -> None:
        row = mx.ones((1, _FENCED_SIZE))
        for _ in range(_NUM_FENCES):
            row = mx.add(row @ matrix, 1, stream=device)
        mx.eval(row)

    matrix = mx.zeros((_FENCED_SIZE, _FENCED_SIZE))
    crossing = fastest(lambda: chain(mx.cpu))
    staying = fastest(lambda: chain(mx.gpu))
    return max(0.0, crossing - staying) / _NUM_FENCES


def fastest(run: Callable[[], object], num_runs: int = _NUM_MEASUREMENTS) -> float:
    """Returns the seconds of the fastest of several runs: other programs only slow a run down."""
    times: list[float] = []
    for _ in range(num_runs):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
