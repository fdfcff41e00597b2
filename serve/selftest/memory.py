"""Measures what macOS does with the memory of a GPU: cached, wired, and after a pause."""

import random
import time
from collections.abc import Iterator

import mlx.core as mx

from serve.rank import memory
from serve.rank.speeds import on_gpu
from serve.selftest.compute import ON_CPU, fastest, scaled
from serve.selftest.report import Line, not_tried
from serve.selftest.section import Context

_NUM_LENGTHS = 200
_NUM_WIDE = 4096
_NUM_LAYERS = 32  # the layers of weights, 2 GB in all
_PAUSES = (0.5, 2.0, 10.0, 60.0)


def free(_: Context) -> Iterator[Line]:
    yield Line("memory.free", memory.free_bytes() / 1e9)


def cache(_: Context) -> Iterator[Line]:
    memory.limit_cache()
    lengths = random.Random(0)
    for _number in range(_NUM_LENGTHS):
        length = lengths.randrange(1, scaled(4096))
        mx.eval(mx.ones((length, _NUM_WIDE), dtype=mx.float16) + 1)
    yield Line("memory.cache", mx.get_cache_memory() / 1e9)
    memory.tidy()


def wired(context: Context) -> Iterator[Line]:
    """Reads weights as a decode step does, before and after they are wired, and after pauses."""
    num_layers = scaled(_NUM_LAYERS)
    layers = [mx.full((_NUM_WIDE, _NUM_WIDE), 1e-4) for _ in range(num_layers)]
    mx.eval(layers)

    def step() -> None:
        x = mx.ones((1, _NUM_WIDE))
        for layer in layers:
            x = x @ layer
        mx.eval(x)

    before = fastest(step)
    memory.wire(1)
    steady = fastest(step)
    if on_gpu():
        series = {"ms without": before, "ms wired": steady}
        yield Line("memory.wired", steady / before, series)
    else:
        yield not_tried("memory.wired", ON_CPU)
    series = {}
    for seconds in _PAUSES:
        if seconds <= 4 * context.minutes:
            time.sleep(seconds)
            started = time.perf_counter()
            step()
            series[f"{seconds:g} s"] = (time.perf_counter() - started) * 1e3
    yield Line("memory.pause", max(series.values()) / steady, series)
    memory.give_back()


MEASUREMENTS = [free, cache, wired]
