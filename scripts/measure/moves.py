"""What it costs that a row joins or leaves a group, in slots and in mlx-lm's batch caches."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from scripts.measure.settings import Row, Settings
from serve.rank.slots import SlotBatch

NUM_ROWS, NUM_TOKENS, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 16, 4000, 8, 2, 64
NUM_TIMES = 5


def moves(_: Settings) -> Row:
    """The stage of the random model: half of its layers."""
    mx.set_default_device(mx.cpu)
    slots, merged = _slots(), _merged()
    data = {"rows": NUM_ROWS, "tokens": NUM_TOKENS, "slots": slots, "merged": merged}
    columns = ("", "joins, ms", "leaves, ms")
    rows = [
        ("slots", *(f"{1e3 * slots[key]:.1f}" for key in ("join", "leave"))),
        ("mlx-lm's batch caches", *(f"{1e3 * merged[key]:.1f}" for key in ("join", "leave"))),
    ]
    title = f"a row of {NUM_TOKENS} tokens joins or leaves a group of {NUM_ROWS}"
    return Row({"moves": data}, {title: (columns, rows)})


def _plain() -> list[Any]:
    caches: list[Any] = []
    for _ in range(NUM_LAYERS):
        cache: Any = KVCache()
        shape = (1, NUM_HEADS, NUM_TOKENS, HEAD_DIM)
        cache.keys, cache.values = mx.random.normal(shape), mx.random.normal(shape)
        cache.offset = NUM_TOKENS
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    return caches


def _feed(caches: list[Any], num_rows: int) -> None:
    """What a decode step does to the caches."""
    new = mx.zeros((num_rows, NUM_HEADS, 1, HEAD_DIM))
    for cache in caches:
        cache.update_and_fetch(new, new)
    mx.eval([cache.state for cache in caches])


def _seconds(change: Callable[[], None], feed: Callable[[], None]) -> float:
    """How much longer a step with the change takes than one without."""
    start = time.perf_counter()
    feed()
    plain = time.perf_counter() - start
    start = time.perf_counter()
    change()
    feed()
    return max(0.0, time.perf_counter() - start - plain)


def _slots() -> dict[str, float]:
    batch, rows = SlotBatch(), list(range(NUM_ROWS))
    for row in rows:
        batch.add([(row, _plain(), NUM_TOKENS)])
    ids = list(rows)

    def feed() -> None:
        _feed(batch.caches, len(batch.arrange(dict.fromkeys(ids, 1))))

    feed()
    joins, leaves = [], []
    for n in range(NUM_TIMES):
        joining = _plain()

        def leave() -> None:
            batch.remove(ids.pop())

        def join(joining: list[Any] = joining, n: int = n) -> None:
            ids.append(NUM_ROWS + n)
            batch.add([(ids[-1], joining, NUM_TOKENS)])

        leaves.append(_seconds(leave, feed))
        joins.append(_seconds(join, feed))
    return {"join": median(joins), "leave": median(leaves)}


def _merged() -> dict[str, float]:
    caches = [
        BatchKVCache.merge(list(layer))
        for layer in zip(*(_plain() for _ in range(NUM_ROWS)), strict=True)
    ]
    num_rows = [NUM_ROWS]

    def feed() -> None:
        _feed(caches, num_rows[0])

    def leave() -> None:
        num_rows[0] -= 1
        for cache in caches:
            cache.filter(mx.arange(num_rows[0]))

    joins, leaves = [], []
    for _ in range(NUM_TIMES):
        joining = _plain()

        def join(joining: list[Any] = joining) -> None:
            num_rows[0] += 1
            for cache, row in zip(caches, joining, strict=True):
                cache.extend(BatchKVCache.merge([row]))

        feed()
        leaves.append(_seconds(leave, feed))
        joins.append(_seconds(join, feed))
    return {"join": median(joins), "leave": median(leaves)}
