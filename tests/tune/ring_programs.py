"""What the ranks of a real ring do in test_transport: python -m … NAME."""

import itertools
import os
import sys
from typing import Any

import mlx.core as mx

from serve.core.errors import ClusterError
from serve.rank.transport import Ring
from serve.tune.transport import RingLinks, exchange, gather, sum_arrays
from tests.tune.ranks import (
    batches_of,
    config_of,
    largest_difference,
    trainer,
    tuned,
    unsplit_gradients,
)

RANK = int(os.environ["MLX_RANK"])
NUM_RANKS = int(os.environ["NUM_RANKS"])
LEFT, RIGHT = (RANK - 1) % NUM_RANKS, (RANK + 1) % NUM_RANKS


def join() -> RingLinks:
    return RingLinks(Ring(RANK, ("127.0.0.1",) * NUM_RANKS, 5, 10.0))


def tensors(rank: int, number: int) -> list[mx.array]:
    """Equal sizes, so that swapped ones would be read without an error."""
    mx.random.seed(100 * rank + number)
    return [
        mx.random.normal((2, 3, 4)),
        mx.random.normal((2, 3, 4)).astype(mx.bfloat16),
        mx.array([[number]]),
        mx.zeros((0,)),
    ]


def both_ways() -> None:
    """All ranks send 40 MB to both neighbours before they take anything, then take messages
    in another order than they came."""
    links, large = join(), mx.full((10 << 20,), float(RANK))
    mx.eval(large)
    for side, peer in (("left", LEFT), ("right", RIGHT)):
        links.send(peer, f"large {side}", None, [large])
        for number in range(8):
            arrays = tensors(RANK, number)
            mx.eval(arrays)
            links.send(peer, f"{number} {side}", [RANK, None, 0.1], arrays)
    for number in reversed(range(8)):
        for side, peer in (("left", RIGHT), ("right", LEFT)):
            note, arrays = links.receive(f"{number} {side}")
            assert note == [peer, None, 0.1]
            expected = tensors(peer, number)
            assert all(mx.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))
    for side, peer in (("left", RIGHT), ("right", LEFT)):
        _, (arrived,) = links.receive(f"large {side}")
        assert arrived.shape == large.shape
        assert (arrived.min().item(), arrived.max().item()) == (peer, peer)
    assert exchange(links, {"rank": RANK}) == [{"rank": rank} for rank in range(NUM_RANKS)]
    (total,) = sum_arrays(links, [mx.array([1.0, RANK])])
    assert total.tolist() == [NUM_RANKS, sum(range(NUM_RANKS))]
    gathered = gather(links, {f"of {RANK}": mx.array([RANK])})
    if RANK == 0:
        assert {name: a.item() for name, a in gathered.items()} == {
            f"of {rank}": rank for rank in range(NUM_RANKS)
        }
    exchange(links, "done")
    links.close()
    print("fine", flush=True)
    os._exit(0)


def peer_ends() -> None:
    """The last rank ends while the others wait for it; those beside it say so."""
    links = join()
    if RANK < NUM_RANKS - 1:
        try:
            links.receive("never")
        except ClusterError as error:
            print(error, flush=True)
    os._exit(0)


def gradients() -> None:
    """Those of every schedule and kind, gathered to rank 0, against the unsplit model."""
    links, worst = join(), 0.0
    settings: list[dict[str, Any]] = [{"schedule": s} for s in ("naive", "gpipe", "1f1b")]
    settings += [{"schedule": "interleaved", "stages_per_rank": 2}, {"grad_checkpoint": True}]
    settings += [{"schedule": "zero-bubble", "fine_tune_type": "full"}]
    for name, changes in itertools.product(("llama", "deepseek_v3"), settings):
        config, batches = config_of(**changes), batches_of([(9, 5), (3,), (12, 11), (7, 7)])
        own = trainer(config, links, name)
        scale = 1 / sum(batch.num_labels for batch in batches)
        ran = own.pipeline.run(own.schedule(len(batches)), batches, scale)
        found = gather(links, ran.gradients)
        if RANK == 0:
            _, expected = unsplit_gradients(tuned(config, name), batches)
            worst = max(worst, largest_difference(found, expected))
    exchange(links, "done")
    links.close()
    print(worst, flush=True)
    os._exit(0)


if __name__ == "__main__":
    {"both_ways": both_ways, "gradients": gradients, "peer_ends": peer_ends}[sys.argv[1]]()
