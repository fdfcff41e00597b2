"""Gradients, losses and updates of a pipeline against the unsplit model and mlx_lm's trainer."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx import optimizers
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, train

from serve.core.errors import UsageError
from serve.model.trace import uncompiled
from serve.tune.config import FineTuneConfig
from serve.tune.data.examples import MicroBatch
from serve.tune.loop import UpdateMetrics
from serve.tune.model import DropoutKeys
from serve.tune.optimizer import make_optimizer
from serve.tune.pipeline import ScheduleRun
from serve.tune.transport import LocalLinks
from tests.errors import fails
from tests.tune.ranks import (
    LORA,
    batches_of,
    config_of,
    largest_difference,
    run_ranks,
    trainer,
    tuned,
    unsplit_gradients,
)

pytestmark = pytest.mark.long

# Unequal rows, lengths and numbers of labels.
BATCHES = [(9, 5), (3,), (12, 11, 4), (7, 7)]
TOLERANCE = 1e-5


def dropped(num_ranks: int, **changes: Any) -> list[float]:
    """Losses of three updates with dropout."""
    config = config_of(lora_parameters={**LORA, "dropout": 0.5}, learning_rate=1e-2, **changes)

    def rank(links: LocalLinks) -> list[float]:
        own = trainer(config, links)
        batches, schedule = batches_of(BATCHES), own.schedule(len(BATCHES))
        return [own.update(n, batches, schedule).loss for n in range(3)]

    return run_ranks(num_ranks, rank)[0]


def test_dropout_is_the_same_on_any_number_of_ranks_and_when_recomputed() -> None:
    alone = dropped(1)
    assert dropped(1, seed=1) != pytest.approx(alone, rel=1e-3)
    for losses in (dropped(3), dropped(2, grad_checkpoint=True), dropped(2, schedule="gpipe")):
        assert losses == pytest.approx(alone, rel=TOLERANCE)


# --- updates


def losses_of(config: FineTuneConfig, num_ranks: int, num_updates: int) -> list[UpdateMetrics]:
    def rank(links: LocalLinks) -> list[UpdateMetrics]:
        own = trainer(config, links)
        batches, schedule = list(steps(num_updates)), own.schedule(2)
        return [own.update(n, batch, schedule) for n, batch in enumerate(batches)]

    ranks = run_ranks(num_ranks, rank)
    for others in ranks[1:]:
        assert [update.loss for update in others] == [update.loss for update in ranks[0]]
    return ranks[0]


def steps(count: int) -> Iterator[list[MicroBatch]]:
    """Each two micro-batches of two rows, all of one length."""
    return (batches_of([(9, 9), (9, 9)], seed=n) for n in range(count))


class Losses(TrainingCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_loss_report(self, train_info: dict) -> None:
        self.losses.append(train_info["train_loss"])


def losses_of_mlx_lm(config: FineTuneConfig, num_updates: int, folder: Any) -> list[float]:
    """Its trainer on the same batches, each as one, with our labels in its loss."""

    def batches(**_: Any) -> Iterator[tuple[mx.array, ...]]:
        for pair in steps(num_updates):
            inputs = mx.concatenate([batch.inputs for batch in pair])
            targets = mx.concatenate([batch.targets for batch in pair])
            yield inputs, targets, mx.concatenate([batch.mask for batch in pair])

    def loss(
        model: nn.Module, inputs: mx.array, targets: mx.array, mask: mx.array
    ) -> tuple[mx.array, mx.array]:
        losses = nn.losses.cross_entropy(model(inputs), targets) * mask
        return losses.sum() / mask.sum(), mask.sum()

    seen = Losses()
    arguments = TrainingArgs(
        iters=num_updates, steps_per_report=1, adapter_file=str(folder / "adapters.safetensors")
    )
    with uncompiled():
        train(tuned(config), make_optimizer(config), [0], None, arguments, loss, batches, seen)
    return seen.losses


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "muon", "adafactor"])
def test_losses_equal_those_of_the_trainer_of_mlx_lm(optimizer: str, tmp_path: Any) -> None:
    config = config_of(optimizer=optimizer, learning_rate=3e-3)
    expected = losses_of_mlx_lm(config, 8, tmp_path)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    for num_ranks in (1, 2, 4):
        losses = [update.loss for update in losses_of(config, num_ranks, 8)]
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_losses_of_a_long_run_are_the_same_on_any_number_of_ranks() -> None:
    config = config_of(
        learning_rate=1e-3,
        lr_schedule={"name": "cosine_decay", "arguments": [1e-3, 50], "warmup": 5},
    )
    alone, *others = ([u.loss for u in losses_of(config, n, 50)] for n in (1, 2, 4))
    assert max(max_difference(alone, run) for run in others) < 1e-4
    # The negative control: half a percent more of the learning rate would be seen.
    schedule = {"name": "cosine_decay", "arguments": [1.005e-3, 50], "warmup": 5}
    other = [u.loss for u in losses_of(replace(config, lr_schedule=schedule), 2, 50)]
    assert max_difference(alone, other) > 1e-4


def max_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_gradients_are_clipped_by_their_norm_over_all_ranks() -> None:
    config = config_of(max_grad_norm=0.01, optimizer="sgd", learning_rate=0.5)
    (batches,) = steps(1)
    model = tuned(config)
    before = dict(tree_flatten(model.trainable_parameters()))
    _, gradients = unsplit_gradients(model, batches)
    clipped, norm = optimizers.clip_grad_norm(gradients, 0.01)
    assert norm.item() > 0.1, "there is nothing to clip"
    expected = {name: before[name] - 0.5 * clipped[name] for name in before}

    def rank(links: LocalLinks) -> tuple[float, dict[str, mx.array]]:
        own = trainer(config, links)
        update = own.update(0, batches, own.schedule(2))
        return update.gradient_norm, own.parameters()

    for num_ranks in (1, 3):
        ranks = run_ranks(num_ranks, rank)
        norms = [found for found, _ in ranks]
        assert norms == pytest.approx([norm.item()] * num_ranks, rel=TOLERANCE)
        after = {name: array for _, parameters in ranks for name, array in parameters.items()}
        moved = {name: after[name] - before[name] for name in before}
        wanted = {name: expected[name] - before[name] for name in before}
        assert largest_difference(moved, wanted) < 1e-3  # of differences of near numbers


def test_an_update_with_infinite_gradients_is_skipped_on_all_ranks() -> None:
    config = config_of(learning_rate=1e-2)

    def rank(links: LocalLinks) -> tuple[list[UpdateMetrics], list[bool]]:
        own = trainer(config, links)
        schedule, updates, same = own.schedule(2), [], []
        for number, batches in enumerate(steps(3)):
            if number == 1 and links.rank == links.num_ranks - 1:
                # Only the first stage's gradients break: the others' are finite.
                own.pipeline._add_gradients = partial(broken, own.pipeline._add_gradients)
            before = own.parameters()
            updates.append(own.update(number, batches, schedule))
            vars(own.pipeline).pop("_add_gradients", None)
            after = own.parameters()
            same.append(all(mx.array_equal(before[n], after[n]).item() for n in before))
        return updates, same

    for updates, same in run_ranks(3, rank):
        assert [update.is_skipped for update in updates] == same == [False, True, False]
        assert math.isfinite(updates[2].loss)


def broken(add: Callable[[Any, ScheduleRun], None], op: Any, ran: ScheduleRun) -> None:
    add(op, ran)
    name = min(ran.gradients)
    ran.gradients[name] = ran.gradients[name] * float("inf")


def test_validation_loss_is_the_mean_over_labels_without_dropout() -> None:
    config = config_of(lora_parameters={**LORA, "dropout": 0.5})
    batches = batches_of([(5 + n % 4,) for n in range(40)])  # more than one round

    def rank(links: LocalLinks) -> tuple[float, bool]:
        own = trainer(config, links)
        loss = own.loss_of(batches)
        return loss, all(stage.stage.model.training for stage in own.stages.values())

    whole = tuned(config, draw=DropoutKeys(0, is_on=False))
    expected, _ = unsplit_gradients(whole, batches)
    noisy, _ = unsplit_gradients(tuned(config, draw=DropoutKeys(0)), batches)
    assert noisy != pytest.approx(expected, rel=10 * TOLERANCE), "dropout would not be seen"
    for loss, is_training in run_ranks(2, rank):
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert is_training


def test_runs_with_nothing_to_train_or_wrong_settings_are_refused() -> None:
    nothing = config_of(lora_parameters={**LORA, "keys": []})
    with fails(UsageError, "wrong_setting", match="lora_parameters"):
        run_ranks(2, lambda links: trainer(nothing, links))
    with fails(UsageError, "wrong_setting", match="adam"):
        make_optimizer(config_of(optimizer_config={"adam": {"momentun": 1}}))
    with fails(UsageError, "wrong_setting", match="lr_schedule"):
        make_optimizer(config_of(lr_schedule={"name": "cosine_decay", "arguments": []}))
