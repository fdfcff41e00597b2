"""What an engine keeps when its next order has other layers: its weights, and nothing of sequences.

The stages may be any part of the model here, because the ring has one rank.
"""

import os
import socket
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from serve.core.errors import ClusterError, EngineError
from serve.core.messages import Leave, Left, Order
from serve.core.types import Row, Sampling, Step
from serve.core.wire import FrameReader
from serve.model.weights import load_stage
from serve.rank.loading import why_it_cannot_stay
from serve.rank.parent import Parent
from serve.rank.worker import Worker
from tests.errors import fails
from tests.models import save
from tests.rank.ordered import SIZES, Ordered

SMALL = 40_000  # bytes of headers, config and code; a layer has more
# The whole model comes first, then fewer layers, more of them, none of the former, and all again.
MOVES = [(0, 4), (0, 2), (1, 3), (3, 4), (0, 4), (2, 4)]


def num_bytes(weights: dict[str, mx.array], names: set[str]) -> int:
    return sum(weights[name].nbytes for name in names)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "deepseek_v3"])
def test_an_engine_that_gets_other_layers_reads_only_weights_that_it_lacks(
    ordered: Ordered, tmp_path: Path, name: str
) -> None:
    """They are the same, and of the same name, as in an engine that reads all of them."""
    model = save(tmp_path / name, name, **SIZES)
    earlier: set[str] = set()
    for layers in MOVES:
        loaded = ordered.load(model=str(model), layers=layers)
        weights = ordered.stage.weights()
        expected = load_stage(model, *layers, lambda *_: None)
        assert weights.keys() == expected.stage.weights().keys()
        for key, array in expected.stage.weights().items():
            assert mx.array_equal(weights[key], array), key
        kept = num_bytes(weights, earlier & weights.keys())
        assert loaded.bytes_kept == kept
        assert loaded.bytes_owned == expected.bytes_owned
        if loaded.bytes_read is not None:
            missing = loaded.bytes_owned - kept
            assert missing <= loaded.bytes_read < missing + SMALL
        earlier = set(weights)


def test_an_engine_never_holds_more_than_its_own_layers(ordered: Ordered) -> None:
    before = mx.get_active_memory()
    owned = ordered.load(layers=(0, 3)).bytes_owned
    for layers in ((2, 4), (0, 3), (1, 3)):
        mx.reset_peak_memory()
        largest = max(owned, own := ordered.load(layers=layers).bytes_owned)
        owned = own
        assert mx.get_peak_memory() - before < largest + SMALL
        assert mx.get_active_memory() - before < owned + SMALL


def step(number: int, position: int, tokens: tuple[int, ...], sample: bool) -> Step:
    return Step(number, 0, (Row(5, position, len(tokens)),), tokens, sample)


def answer(ordered: Ordered, prompt: tuple[int, ...]) -> list[int]:
    """The next two tokens of a sequence, greedy."""
    loop = ordered.worker.loop
    assert loop
    loop.chooser.admit(5, Sampling(temperature=0), len(prompt), list(prompt))
    results = loop.run()
    loop.transport.send(step(1, 0, prompt[:-1], sample=False), [])
    loop.transport.send(step(2, len(prompt) - 1, prompt[-1:], sample=True), [])
    assert not next(results).tokens
    first = next(results).tokens[0]
    loop.transport.send(step(3, len(prompt), (first,), sample=True), [])
    return [first, next(results).tokens[0]]


def test_an_engine_that_gets_other_layers_forgets_all_sequences(ordered: Ordered) -> None:
    """Its keys and values belong to other layers, even those of layers that it still has."""
    ordered.load()
    expected = answer(ordered, (5, 6, 7))
    ordered.load(layers=(2, 4))
    assert ordered.worker.loop
    assert not ordered.worker.loop.caches.positions
    ordered.load(layers=(0, 4))
    assert answer(ordered, (5, 6, 7)) == expected
    with fails(EngineError, "engine"):
        ordered.load(layers=(2, 4), positions={5: 3})


@pytest.mark.parametrize(
    "change",
    [{"kv_bits": 8}, {"commit": "c"}, {"num_shards": 2}, {"model": "other"}, {"join_timeout": 9.0}],
    ids=lambda change: next(iter(change)),
)
def test_an_engine_refuses_an_order_that_changes_more_than_its_layers(
    ordered: Ordered, change: dict[str, Any]
) -> None:
    ordered.load()
    with fails(EngineError, "engine"):
        ordered.load(layers=(1, 4), **change)


def test_an_engine_refuses_to_mix_layers_from_two_versions_of_the_files(
    ordered: Ordered, order: Order
) -> None:
    ordered.load(layers=(0, 2))
    weights = Path(order.model) / "model.safetensors"
    os.utime(weights, (1, 1))
    with fails(ClusterError, "changed_file"):
        ordered.load(layers=(0, 4))


def test_an_engine_of_a_shard_says_that_it_cannot_stay(order: Order) -> None:
    assert why_it_cannot_stay(order) is None
    of_shard = msgspec.structs.replace(order, num_shards=2)
    assert "shards" in (why_it_cannot_stay(of_shard) or "")


def test_a_worker_without_a_ring_can_be_given_other_layers(order: Order) -> None:
    """As rank 0 does when another rank is back."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(Parent(theirs), order)
        worker._leave(Leave(4))
        loop = worker._start()
        worker.loop = None
        assert worker.transport
        worker.transport.close()
        reason = worker._run_steps(loop)
        worker._leave_ring(loop, reason)
        (left,) = FrameReader(Left).feed(ours.recv(1 << 16))
        assert left == Left(4, {})
