"""Training of half-precision models: float32 master weights and optimizer state, and the scale of a
float16 loss, against a slow, obvious trainer of the unsplit model."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from serve.tune.backward import Arrays, loss_sum
from serve.tune.config import FineTuneConfig
from serve.tune.data.examples import MicroBatch
from serve.tune.loop import Trainer, UpdateMetrics
from serve.tune.optimizer import make_optimizer, states_of
from serve.tune.precision import MAX_SCALE, LossScale, master_weights
from serve.tune.transport import LocalLinks
from tests.models import build
from tests.tune.ranks import (
    batches_of,
    config_of,
    largest_difference,
    quantized,
    run_ranks,
    trainer,
    tuned,
)

pytestmark = pytest.mark.long

HALVES = [mx.float16, mx.bfloat16]
BATCHES = [(9, 5), (3,), (12, 11, 4), (7, 7)]
FULL: dict[str, Any] = {"fine_tune_type": "full", "num_layers": -1}
TINY = 1e-6  # factor of a loss, as of a mean over very many tokens
OPTIMIZERS = ["adam", "adamw", "adafactor", "sgd", "muon"]
Make = Callable[[str], nn.Module]


def half(dtype: mx.Dtype) -> Make:
    def make(name: str) -> nn.Module:
        model = build(name)
        model.set_dtype(dtype)
        return model

    return make


def wide_gradients(
    model: nn.Module, batches: Sequence[MicroBatch], loss_scale: float = 1.0
) -> Arrays:
    """The gradients of the mean loss, of each micro-batch in the model's type, their sum in
    float32."""
    num_labels = sum(batch.num_labels for batch in batches)
    parameters = model.trainable_parameters()
    total: Arrays = {}
    for batch in batches:

        def loss(parameters: Any, batch: MicroBatch = batch) -> mx.array:
            model.update(parameters)
            return loss_sum(model(batch.inputs), batch) * (loss_scale / num_labels)

        for name, gradient in tree_flatten(mx.grad(loss)(parameters)):
            wide = gradient.astype(mx.float32) / loss_scale
            total[name] = total[name] + wide if name in total else wide
    model.update(parameters)
    mx.eval(total)
    return total


def reference(config: FineTuneConfig, name: str, make: Make, num_updates: int) -> Arrays:
    """float32 weights of the unsplit model, updated in float32 by the gradients of its
    half-precision copy."""
    model = tuned(config, name, make=make)
    scale = 1.0
    weights = dict(tree_flatten(model.trainable_parameters()))
    dtypes = {key: array.dtype for key, array in weights.items()}
    wide = {key: array.astype(mx.float32) for key, array in weights.items()}
    optimizer = make_optimizer(config)
    optimizer.init(wide)
    for number in range(num_updates):
        gradients = wide_gradients(model, batches_of(BATCHES, seed=number), scale)
        wide = optimizer.apply_gradients(gradients, wide)
        mx.eval(wide, optimizer.state)
        model.update(tree_unflatten([(k, a.astype(dtypes[k])) for k, a in wide.items()]))
    return wide


def after_updates(
    config: FineTuneConfig, num_ranks: int, name: str, make: Make, num_updates: int
) -> list[Trainer]:
    def rank(links: LocalLinks) -> Trainer:
        own = trainer(config, links, name, make)
        own.loss_scale = LossScale()  # As in the reference.
        schedule = own.schedule(len(BATCHES))
        for number in range(num_updates):
            assert not own.update(number, batches_of(BATCHES, seed=number), schedule).is_skipped
        return own

    return run_ranks(num_ranks, rank)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_master_weights_after_updates_equal_those_of_the_unsplit_model(
    optimizer: str, dtype: mx.Dtype
) -> None:
    config = config_of(**FULL, optimizer=optimizer, learning_rate=1e-4)
    expected = reference(config, "llama-tied", half(dtype), 3)
    first = dict(tree_flatten(tuned(config, "llama-tied", make=half(dtype)).parameters()))
    moved = {name: array - first[name] for name, array in expected.items()}
    ranks = after_updates(config, 2, "llama-tied", half(dtype), 3)
    found = {name: array for own in ranks for name, array in own.masters.items()}
    found = {name: array - first[name] for name, array in found.items()}
    # The gradients of a tied embedding come from two ranks and are rounded apart.
    tied = {name for name in found if "embed" in name}
    assert (
        largest_difference(
            {name: array for name, array in found.items() if name not in tied},
            {name: array for name, array in moved.items() if name not in tied},
        )
        < 0.02
    )
    for own in ranks:
        assert {array.dtype for array in own.parameters().values()} == {dtype}
        assert {array.dtype for array in own.masters.values()} == {mx.float32}
        states = [array for state in states_of(own.optimizer).values() for array in state.values()]
        assert {array.dtype for array in states} <= {mx.float32}
        for key, array in own.parameters().items():
            assert mx.array_equal(array, own.masters[key].astype(dtype))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_master_weights_of_a_tied_embedding_are_equal_on_both_ranks(
    dtype: mx.Dtype, checkpointing: bool
) -> None:
    config = config_of(**FULL, learning_rate=1e-3, grad_checkpoint=checkpointing)
    last, _, first = after_updates(config, 3, "llama-tied", half(dtype), 3)
    name = "model.embed_tokens.weight"
    assert name in last.shared
    assert mx.array_equal(last.masters[name], first.masters[name])
    assert mx.array_equal(last.parameters()[name], first.parameters()[name])
    owners = [f"{name}.master" in own.owned_state() for own in (last, first)]
    assert owners == [False, True], "a checkpoint has it once"


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("adam", mx.float16),
        pytest.param("adam", mx.bfloat16, marks=pytest.mark.slow),
        pytest.param("adafactor", mx.float16, marks=pytest.mark.slow),
        pytest.param("adafactor", mx.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_updates_far_below_the_precision_of_the_model_add_up(
    optimizer: str, dtype: mx.Dtype
) -> None:
    """Forty updates, each of which is less than half of the distance to the next number."""

    def moved(make: Make) -> Arrays:
        # Of adafactor the step must not follow from the size of the weights.
        options = {"adafactor": {"scale_parameter": False, "relative_step": False}}
        changes = {"optimizer": optimizer, "learning_rate": 1e-5, "optimizer_config": options}
        config = config_of(**FULL, **changes)
        first = dict(tree_flatten(tuned(config, make=make).trainable_parameters()))
        (own,) = after_updates(config, 1, "llama", make, 40)
        return {
            name: own.masters.get(name, a) - first[name] for name, a in own.parameters().items()
        }

    def as_float32(name: str) -> nn.Module:
        model = half(dtype)(name)
        model.set_dtype(mx.float32)
        return model

    found, expected = moved(half(dtype)), moved(as_float32)
    pairs = [(found[name].flatten(), expected[name].flatten()) for name in expected]
    a, b = (mx.concatenate(list(side)) for side in zip(*pairs, strict=True))
    cosine = (a @ b / (mx.linalg.norm(a) * mx.linalg.norm(b))).item()
    assert cosine > 0.9
    assert mx.linalg.norm(a).item() == pytest.approx(mx.linalg.norm(b).item(), rel=0.1)


@pytest.mark.parametrize("fine_tune_type", ["lora", "dora"])
@pytest.mark.parametrize("dtype", HALVES)
def test_adapters_of_half_precision_models_are_float32(
    dtype: mx.Dtype, fine_tune_type: str
) -> None:
    config = config_of(fine_tune_type=fine_tune_type, learning_rate=1e-3)
    for own in after_updates(config, 2, "llama", half(dtype), 3):
        assert {array.dtype for array in own.parameters().values()} == {mx.float32}
        assert not own.masters
        assert own.find_not_finite() is None


def quantized_half(name: str) -> nn.Module:
    model = quantized(name)
    model.set_dtype(mx.float16)
    return model


def test_adapters_of_a_quantised_float16_model_can_be_trained() -> None:
    config = config_of(learning_rate=1e-3)

    def rank(links: LocalLinks) -> tuple[float, list[UpdateMetrics]]:
        own = trainer(config, links, "llama", quantized_half)
        batches, schedule = batches_of(BATCHES), own.schedule(len(BATCHES))
        updates = [own.update(number, batches, schedule) for number in range(3)]
        assert {array.dtype for array in own.parameters().values()} == {mx.float32}
        return own.loss_scale.value, updates

    for scale, updates in run_ranks(2, rank):
        assert scale > 1
        assert not any(update.is_skipped for update in updates)
        assert updates[-1].loss < updates[0].loss


# --- the scale of the loss


def test_a_loss_scale_keeps_small_float16_gradients_from_vanishing() -> None:
    config = config_of(**FULL)

    def gradients(links: LocalLinks, loss_scale: float) -> Arrays:
        own = trainer(config, links, "llama", half(mx.float16))
        schedule, batches = own.schedule(len(BATCHES)), batches_of(BATCHES)
        return own.pipeline.run(schedule, batches, TINY, loss_scale).gradients

    (plain,) = run_ranks(1, partial(gradients, loss_scale=1.0))
    (scaled,) = run_ranks(1, partial(gradients, loss_scale=2.0**19))

    def wide(name: str) -> nn.Module:
        model = half(mx.float16)(name)
        model.set_dtype(mx.float32)
        return model

    model, batches = tuned(config, "llama", make=wide), batches_of(BATCHES)
    num_labels = sum(batch.num_labels for batch in batches)
    expected = {name: g * (TINY * num_labels) for name, g in wide_gradients(model, batches).items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    errors = [largest_difference({name: f[name]}, {name: expected[name]}) for f in (plain, scaled)]
    assert errors[0] > 0.3, "without a scale nothing would be lost"
    assert errors[1] < 0.05


def test_gradients_that_overflow_are_computed_again_with_a_lower_loss_scale() -> None:
    config = config_of(**FULL, learning_rate=1e-4, max_grad_norm=1.0)

    def rank(links: LocalLinks) -> tuple[list[UpdateMetrics], list[float]]:
        own = trainer(config, links, "llama-tied", half(mx.float16))
        own.loss_scale = LossScale(MAX_SCALE, 0, MAX_SCALE)
        batches, schedule = batches_of(BATCHES), own.schedule(len(BATCHES))
        updates, scales = [], []
        for number in range(3):
            updates.append(own.update(number, batches, schedule))
            scales.append(own.loss_scale.value)
        return updates, scales

    ranks = run_ranks(2, rank)
    assert ranks[0][1] == ranks[1][1], "the ranks do not agree"
    updates, scales = ranks[0]
    assert not any(update.is_skipped for update in updates)
    assert 1 <= scales[-1] < MAX_SCALE
    assert scales[0] == scales[-1], "found at the first update"


def test_a_batch_that_overflows_at_every_loss_scale_is_skipped() -> None:
    config = config_of(**FULL)

    def rank(links: LocalLinks) -> tuple[UpdateMetrics, float]:
        own = trainer(config, links, "llama", half(mx.float16))
        add = own.pipeline._add_gradients

        def broken(op: Any, ran: Any) -> None:
            add(op, ran)
            name = min(ran.gradients)
            ran.gradients[name] = ran.gradients[name] * math.inf

        own.pipeline._add_gradients = broken
        before = own.loss_scale.value
        update = own.update(0, batches_of(BATCHES), own.schedule(len(BATCHES)))
        assert own.loss_scale.value == before
        return update, before

    for update, before in run_ranks(2, rank):
        assert update.is_skipped
        assert math.isfinite(update.loss)
        assert before > 1


def test_loss_scale_rises_after_many_finite_updates_within_its_bounds() -> None:
    scale = LossScale.of_model(is_float16=True)
    start = scale.value
    assert scale.lower()
    lowered = scale.value
    for _ in range(499):
        scale.count_finite()
    assert scale.value == lowered
    scale.count_finite()
    assert lowered < scale.value <= start
    for _ in range(100_000):
        scale.count_finite()
    assert scale.value == MAX_SCALE
    while scale.lower():
        assert math.log2(scale.value).is_integer()
    assert scale.value == 1


def test_loss_scale_is_always_1_without_float16() -> None:
    scale = LossScale.of_model(is_float16=False)
    assert not scale.lower()
    for _ in range(2000):
        scale.count_finite()
    assert scale.value == 1


def test_master_weights_exist_only_for_half_precision_weights() -> None:
    arrays = {
        "a": mx.ones((2,), mx.bfloat16),
        "b": mx.ones((2,), mx.float16),
        "c": mx.ones((2,)),
    }
    masters = master_weights(arrays)
    assert masters.keys() == {"a", "b"}
    assert {array.dtype for array in masters.values()} == {mx.float32}


@pytest.mark.parametrize("place", ["weight", "state", "master"])
def test_numbers_that_are_not_finite_are_found_in_weights_and_master_weights_and_state(
    place: str,
) -> None:
    config = config_of(**FULL)

    def rank(links: LocalLinks) -> str | None:
        own = trainer(config, links, "llama", half(mx.bfloat16))
        assert own.find_not_finite() is None
        if links.rank == 1:
            name = min(own.masters)
            if place == "weight":
                own.set_whole(own.parameters() | {name: own.parameters()[name] * math.nan})
            elif place == "master":
                own.masters[name] = own.masters[name] * math.inf
            else:
                state = states_of(own.optimizer)[name]
                state["v"] = state["v"] + math.inf
        return own.find_not_finite()

    alone, broken = run_ranks(2, rank)
    assert alone is None
    assert broken is not None
