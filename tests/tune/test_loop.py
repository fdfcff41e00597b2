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
from serve.rank.trace import uncompiled
from serve.tune.config import FineTuneConfig
from serve.tune.data import MicroBatch
from serve.tune.loop import Ran, Trainer, Update
from serve.tune.model import Draw
from serve.tune.optimizer import make_optimizer
from serve.tune.schedule import Op, Shape
from serve.tune.transport import LocalLinks
from tests.models import build
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


def run_schedule(
    config: FineTuneConfig, num_ranks: int, name: str, make: Any = build
) -> tuple[float, dict[str, mx.array]]:
    """Loss and gradients of one update's micro-batches, those of all ranks together."""

    def rank(links: LocalLinks) -> Ran:
        own = trainer(config, links, name, make)
        batches = batches_of(BATCHES)
        scale = 1 / sum(batch.num_labels for batch in batches)
        ran = own.pipeline.run(own.schedule(len(batches)), batches, scale)
        own._sum_shared(ran.gradients)
        return ran

    ranks = run_ranks(num_ranks, rank)
    merged = {name: gradient for ran in ranks for name, gradient in ran.gradients.items()}
    return sum(ran.loss for ran in ranks), merged


def assert_equal_to_the_unsplit_model(
    config: FineTuneConfig, num_ranks: int, name: str, make: Any = build
) -> None:
    loss, gradients = run_schedule(config, num_ranks, name, make)
    whole = tuned(config, name, make=make)
    expected_loss, expected = unsplit_gradients(whole, batches_of(BATCHES))
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert largest_difference(gradients, expected) < TOLERANCE


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_of_every_schedule(schedule: str, num_ranks: int) -> None:
    assert_equal_to_the_unsplit_model(config_of(schedule=schedule), num_ranks, "llama")


@pytest.mark.parametrize(("num_ranks", "stages"), [(1, 4), (2, 2)])
def test_gradients_of_several_stages_a_rank(num_ranks: int, stages: int) -> None:
    config = config_of(schedule="interleaved", stages_per_rank=stages)
    assert_equal_to_the_unsplit_model(config, num_ranks, "qwen3")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_gradients_of_every_kind_and_model(kind: str, name: str, checkpointing: bool) -> None:
    if (kind, name) == ("dora", "deepseek_v3"):
        pytest.skip("mlx_lm has no DoRA of experts")
    config = config_of(fine_tune_type=kind, grad_checkpoint=checkpointing)
    assert_equal_to_the_unsplit_model(config, 2, name)


def quantized(name: str) -> nn.Module:
    model = build(name, hidden_size=64, intermediate_size=64, head_dim=16)
    nn.quantize(model, group_size=32, bits=4)
    return model


def test_gradients_on_a_quantized_base() -> None:
    assert_equal_to_the_unsplit_model(config_of(), 3, "llama", quantized)


def test_numbers_of_four_bits_cannot_be_trained() -> None:
    with pytest.raises(UsageError, match=r"model\..*weight is quantised"):
        tuned(config_of(fine_tune_type="full"), "llama", make=quantized)


def test_stages_below_the_first_trained_layer_have_no_backward() -> None:
    """The last layer is trained alone, so three of four ranks only go forward."""
    config = config_of(num_layers=1)
    assert_equal_to_the_unsplit_model(config, 4, "llama")

    def rank(links: LocalLinks) -> set[str]:
        return {op.kind for op in trainer(config, links).schedule(3).of_rank(links.rank)}

    assert run_ranks(4, rank) == [{"F", "B", "W"}, {"F"}, {"F"}, {"F"}]


def test_an_adapter_of_a_tied_embedding_gets_the_gradients_of_both_ends() -> None:
    """It is on the first rank and on the last, and on none between."""
    keys = ["model.embed_tokens", "self_attn.q_proj"]
    config = config_of(lora_parameters={**LORA, "keys": keys})
    assert_equal_to_the_unsplit_model(config, 3, "llama-tied")

    def rank(links: LocalLinks) -> tuple[set[str], set[str], dict[str, mx.array]]:
        own = trainer(config, links, "llama-tied")
        own.update(0, batches_of(BATCHES), own.schedule(len(BATCHES)))
        return own.shared, own.owned & own.shared, own.parameters()

    last, middle, first = run_ranks(3, rank)
    shared = {"model.embed_tokens.lora_a", "model.embed_tokens.lora_b"}
    assert last[0] == middle[0] == first[0] == shared
    assert (last[1], first[1]) == (set(), shared), "its norm is counted once"
    assert all(mx.array_equal(last[2][name], first[2][name]) for name in shared)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_full_tuning_trains_a_tied_embedding_from_both_ends(num_ranks: int) -> None:
    """And the final norm. The negative control: the gradient of one end alone is another."""
    config = config_of(fine_tune_type="full")
    assert_equal_to_the_unsplit_model(config, num_ranks, "llama-tied")

    def rank(links: LocalLinks) -> tuple[Ran, Trainer]:
        own = trainer(config, links, "llama-tied")
        batches = batches_of(BATCHES)
        scale = 1 / sum(batch.num_labels for batch in batches)
        return own.pipeline.run(own.schedule(len(batches)), batches, scale), own

    ranks = run_ranks(num_ranks, rank)
    name = "model.embed_tokens.weight"
    assert all(own.shared == {name} for _, own in ranks)
    assert [name in own.owned for _, own in ranks] == [False] * (num_ranks - 1) + [True]
    _, expected = unsplit_gradients(tuned(config, "llama-tied"), batches_of(BATCHES))
    assert {name, "model.norm.weight"} < expected.keys()
    for ran in (ranks[0][0], ranks[-1][0]):
        one_end = {name: ran.gradients[name]}
        assert largest_difference(one_end, {name: expected[name]}) > 0.1
    mx.eval([ran.gradients for ran, _ in ranks])


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (1, {"schedule": "interleaved", "stages_per_rank": 4}),
        (2, {"schedule": "interleaved", "stages_per_rank": 2}),
        (3, {"schedule": "zero-bubble"}),
        (2, {"schedule": "gpipe", "grad_checkpoint": True}),
    ],
)
def test_full_tuning_of_a_tied_model_by_other_schedules(
    num_ranks: int, changes: dict[str, Any]
) -> None:
    """With several stages a rank both ends may be on one."""
    config = config_of(fine_tune_type="full", **changes)
    assert_equal_to_the_unsplit_model(config, num_ranks, "llama-tied")


def test_a_tied_embedding_stays_the_same_on_both_ends() -> None:
    config = config_of(fine_tune_type="full", optimizer="adamw", learning_rate=1e-2)

    def rank(links: LocalLinks) -> mx.array:
        own = trainer(config, links, "llama-tied")
        before = own.parameters().get("model.embed_tokens.weight")
        for number, batches in enumerate(steps(3)):
            own.update(number, batches, own.schedule(2))
        after = own.parameters().get("model.embed_tokens.weight")
        assert before is None or not mx.allclose(before, after)
        return after

    last, middle, first = run_ranks(3, rank)
    assert middle is None
    assert mx.array_equal(last, first)


def test_without_all_layers_nothing_around_them_is_trained() -> None:
    for num_layers, trained in ((2, {2, 3}), (4, {0, 1, 2, 3}), (-1, {0, 1, 2, 3})):
        model = tuned(config_of(fine_tune_type="full", num_layers=num_layers))
        names = dict(tree_flatten(model.trainable_parameters()))
        inside = {name for name in names if ".layers." in name}
        assert {int(name.split(".")[2]) for name in inside} == trained
        around = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        assert names.keys() - inside == (around if len(trained) == 4 else set())


def slightly_more(send: Callable[..., None], op: Op, shape: Shape, arrays: list[mx.array]) -> None:
    arrays = [array * 1.001 for array in arrays] if op.kind == "B" else arrays
    mx.eval(arrays)
    send(op, shape, arrays)


@pytest.mark.parametrize("fault", ["scale", "micro-batch", "swap", "dx"])
def test_what_is_wrong_would_be_seen(fault: str) -> None:
    """The negative controls of the tests above."""
    config = config_of()

    def rank(links: LocalLinks) -> Ran:
        own = trainer(config, links)
        batches = batches_of(BATCHES)
        scale = 1 / sum(batch.num_labels for batch in batches)
        if fault == "scale":
            scale = 1 / sum(batch.mask.size for batch in batches)
        if fault == "micro-batch":
            batches[1] = batches_of([(3,)], seed=9)[0]
        if fault == "dx":
            own.pipeline._send = partial(slightly_more, own.pipeline._send)
        return own.pipeline.run(own.schedule(len(batches)), batches, scale)

    ranks = run_ranks(2, rank)
    gradients = {name: g for ran in ranks for name, g in ran.gradients.items()}
    if fault == "swap":
        names = [f"model.layers.{n}.self_attn.q_proj.lora_a" for n in (1, 2)]
        first, second = (gradients[name] for name in names)
        gradients |= {names[0]: second, names[1]: first}
    _, expected = unsplit_gradients(tuned(config), batches_of(BATCHES))
    assert largest_difference(gradients, expected) > 5 * TOLERANCE


def dropped(num_ranks: int, **changes: Any) -> list[float]:
    """Losses of three updates with dropout."""
    config = config_of(lora_parameters={**LORA, "dropout": 0.5}, learning_rate=1e-2, **changes)

    def rank(links: LocalLinks) -> list[float]:
        own = trainer(config, links)
        batches, schedule = batches_of(BATCHES), own.schedule(len(BATCHES))
        return [own.update(n, batches, schedule).loss for n in range(3)]

    return run_ranks(num_ranks, rank)[0]


def test_dropout_is_the_same_on_any_ranks_and_when_computed_again() -> None:
    alone = dropped(1)
    assert dropped(1, seed=1) != pytest.approx(alone, rel=1e-3)
    for losses in (dropped(3), dropped(2, grad_checkpoint=True), dropped(2, schedule="gpipe")):
        assert losses == pytest.approx(alone, rel=TOLERANCE)


# --- updates


def losses_of(config: FineTuneConfig, num_ranks: int, num_updates: int) -> list[Update]:
    def rank(links: LocalLinks) -> list[Update]:
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
def test_losses_equal_mlx_lms_trainer(optimizer: str, tmp_path: Any) -> None:
    config = config_of(optimizer=optimizer, learning_rate=3e-3)
    expected = losses_of_mlx_lm(config, 8, tmp_path)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    for num_ranks in (1, 2, 4):
        losses = [update.loss for update in losses_of(config, num_ranks, 8)]
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_long_run_is_the_same_on_any_ranks() -> None:
    config = config_of(
        learning_rate=1e-3,
        lr_schedule={"name": "cosine_decay", "arguments": [1e-3, 50], "warmup": 5},
    )
    alone, *others = ([u.loss for u in losses_of(config, n, 50)] for n in (1, 2, 4))
    assert max(most_apart(alone, run) for run in others) < 1e-4
    # The negative control: half a percent more of the learning rate would be seen.
    schedule = {"name": "cosine_decay", "arguments": [1.005e-3, 50], "warmup": 5}
    other = [u.loss for u in losses_of(replace(config, lr_schedule=schedule), 2, 50)]
    assert most_apart(alone, other) > 1e-4


def most_apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_clipping_is_by_the_norm_of_all_ranks_together() -> None:
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


def test_an_update_that_is_not_finite_is_skipped_on_all_ranks() -> None:
    config = config_of(learning_rate=1e-2)

    def rank(links: LocalLinks) -> tuple[list[Update], list[bool]]:
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


def broken(add: Callable[[Any, Ran], None], op: Any, ran: Ran) -> None:
    add(op, ran)
    name = min(ran.gradients)
    ran.gradients[name] = ran.gradients[name] * float("inf")


def test_validation_is_the_mean_over_labels_without_dropout() -> None:
    config = config_of(lora_parameters={**LORA, "dropout": 0.5})
    batches = batches_of([(5 + n % 4,) for n in range(40)])  # more than one round

    def rank(links: LocalLinks) -> tuple[float, bool]:
        own = trainer(config, links)
        loss = own.loss_of(batches)
        return loss, all(stage.stage.model.training for stage in own.stages.values())

    whole = tuned(config, draw=Draw(0, is_on=False))
    expected, _ = unsplit_gradients(whole, batches)
    noisy, _ = unsplit_gradients(tuned(config, draw=Draw(0)), batches)
    assert noisy != pytest.approx(expected, rel=10 * TOLERANCE), "dropout would not be seen"
    for loss, is_training in run_ranks(2, rank):
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert is_training


def test_nothing_to_train_and_wrong_arguments_are_refused() -> None:
    nothing = config_of(lora_parameters={**LORA, "keys": []})
    with pytest.raises(UsageError, match="Nothing is trained"):
        run_ranks(2, lambda links: trainer(nothing, links))
    with pytest.raises(UsageError, match="does not fit adam"):
        make_optimizer(config_of(optimizer_config={"adam": {"momentun": 1}}))
    with pytest.raises(UsageError, match="lr_schedule"):
        make_optimizer(config_of(lr_schedule={"name": "cosine_decay", "arguments": []}))
