"""Losses, gradient norms and weights are the same on all layouts of replicas, stages and shards."""

import hashlib
from typing import Any, NamedTuple

import pytest

from serve.core.errors import UsageError
from serve.tune.layout import Layout, check_shares, layout_of
from serve.tune.transport import LocalLinks
from tests.errors import fails
from tests.tune.ranks import LORA, batches_of, config_of, run_ranks, trainer

# Unequal rows, lengths and numbers of labels.
BATCHES = [(9, 5), (3,), (12, 11, 4), (7, 7), (2,), (6, 3, 8), (4, 4), (10,)]
NUM_UPDATES = 20
TOLERANCE = 1e-5


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    valid: float
    weights: bytes


def trained(num_ranks: int, num_updates: int = NUM_UPDATES, **changes: Any) -> list[Trained]:
    """What each rank has after some updates with dropout, and the loss of other micro-batches,
    whose number the replicas cannot divide evenly."""
    lora = {**LORA, "dropout": 0.3}
    config = config_of(lora_parameters=lora, learning_rate=1e-3, max_grad_norm=0.5, **changes)

    def rank(links: LocalLinks) -> Trained:
        own = trainer(config, links)
        batches = batches_of(BATCHES)
        schedule = own.update_schedule(len(BATCHES))
        updates = [own.update(number, batches, schedule) for number in range(num_updates)]
        valid = own.loss_of(batches_of(BATCHES[:5], seed=2))
        digest = hashlib.sha256()
        for name, array in sorted(own.parameters().items()):
            digest.update(name.encode())
            digest.update(memoryview(array))  # type: ignore[arg-type]
        losses = [update.loss for update in updates]
        norms = [update.gradient_norm for update in updates]
        return Trained(losses, norms, valid, digest.digest())

    return run_ranks(num_ranks, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_replicas"),
    [(2, 2), (4, 2), (4, 4), (8, 2)],
)
def test_updates_of_replicas_equal_those_of_one_pipeline(num_ranks: int, num_replicas: int) -> None:
    (alone,) = trained(1)
    ranks = trained(num_ranks, data_parallel_size=num_replicas)
    size = num_ranks // num_replicas
    for number, found in enumerate(ranks):
        assert found.losses == pytest.approx(alone.losses, rel=TOLERANCE)
        assert found.norms == pytest.approx(alone.norms, rel=TOLERANCE)
        assert found.valid == pytest.approx(alone.valid, rel=TOLERANCE)
        assert found.weights == ranks[number % size].weights, "replicas have drifted apart"
    print(alone.losses)
    assert alone.losses[-1] < alone.losses[0] / 1.01, "it has learned nothing"


def test_updates_of_replicas_are_the_same_with_every_schedule() -> None:
    (alone,) = trained(1, 2)
    for schedule in ("interleaved", "zero-bubble"):
        found, *_ = trained(4, 2, schedule=schedule, data_parallel_size=2)
        assert found.losses == pytest.approx(alone.losses, rel=TOLERANCE)


# --- places


def test_ranks_are_numbered_by_shard_then_stage_then_replica() -> None:
    layout = Layout(pipeline_size=3, num_shards=2, num_replicas=2)
    assert layout.num_ranks == 12
    assert (layout.replica(9), layout.place(9), layout.shard(9)) == (1, 1, 1)
    assert layout.pipeline(9) == [7, 9, 11]
    assert layout.shards(9) == [8, 9]
    assert layout.replicas(9) == [3, 9]
    assert str(layout) == "2 replicas of 3 stages with 2 shards each"


def test_numbers_of_ranks_that_do_not_form_a_layout_are_refused() -> None:
    assert layout_of(8, 2, 2) == Layout(2, 2, 2)
    with fails(UsageError, "uneven_ranks", match="--data-parallel-size 2 .* 3"):
        layout_of(3, 1, 2)
    with fails(
        UsageError, "uneven_ranks", match="--tensor-parallel-size 2 and --data-parallel-size 2 .* 4"
    ):
        layout_of(6, 2, 2)


def test_micro_batches_must_divide_evenly_among_replicas() -> None:
    check_shares(6, 3)
    with fails(UsageError, "uneven_batches", match="--data-parallel-size 4 .* 6"):
        check_shares(6, 4)


def test_without_stages_a_batch_has_one_micro_batch_for_each_replica() -> None:
    config = config_of(batch_size=4, data_parallel_size=2)
    assert config.num_micro_batches(config.layout(2)) == 2
    assert config.num_micro_batches(config.layout(4)) == 4
    accumulated = config_of(batch_size=4, data_parallel_size=4, grad_accumulation_steps=2, iters=8)
    assert accumulated.num_micro_batches(Layout(1, 1, 4)) == 2
    uneven = config_of(batch_size=4, data_parallel_size=3)
    with fails(UsageError, "uneven_batches", match="--batch-size 4.* 3"):
        uneven.num_micro_batches(Layout(1, 1, 3))
    uneven = config_of(batch_size=5, data_parallel_size=4, grad_accumulation_steps=2, iters=8)
    with fails(UsageError, "uneven_batches", match="--batch-size 5.* 2"):
        uneven.num_micro_batches(Layout(1, 1, 4))
