"""The head on what is learned alone: the same loss and gradients, where a model allows it."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from serve.model.stage import Stage
from serve.tune.backward import TrainedStage, loss_sum
from serve.tune.head import Head
from tests.models import ARCHITECTURES, build
from tests.tune.ranks import (
    batches_of,
    config_of,
    largest_difference,
    tuned,
    unsplit_gradients,
)

pytestmark = pytest.mark.long


def last_stage(model: nn.Module, start: int = 0) -> TrainedStage:
    return TrainedStage(Stage(model, start, 4), False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_computing_the_head_only_for_labels_gives_the_same_loss_and_gradients(name: str) -> None:
    config = config_of(fine_tune_type="full")
    stage = last_stage(tuned(config, name))
    assert stage._head
    assert stage._head.is_exact
    seen: list[tuple[int, ...]] = []
    watch_head(stage.stage.model, seen)
    (batch,) = batches_of([(9, 5, 12)])
    made = stage.forward_backward(batch, [], 1 / batch.num_labels, False)
    assert seen == [(1, batch.num_labels)], "it ran on more"
    loss, gradients = unsplit_gradients(tuned(config, name), [batch])
    assert made.outputs[0].item() == pytest.approx(loss, rel=1e-5)
    assert largest_difference(made.gradients, gradients) < 1e-5


def watch_head(model: nn.Module, seen: list[tuple[int, ...]]) -> None:
    """Notes of which (B, L) the final norm is called."""
    norm = model.model.norm

    class Watched(type(norm)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            seen.append(tuple(x.shape[:2]))
            return super().__call__(x)

    norm.__class__ = Watched


class Looks(nn.RMSNorm):
    """A norm that looks at all positions."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) + x.mean(axis=1, keepdims=True)


class Refuses(nn.RMSNorm):
    """A norm that wants more positions."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.shape[1] < 3:
            raise ValueError("too short")
        return super().__call__(x)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("norm", [Looks, Refuses])
def test_the_head_is_computed_for_all_positions_if_it_mixes_them(norm: Any, start: int) -> None:
    model = build("llama")
    model.model.norm.__class__ = norm
    assert not Head(Stage(model, start, 4)).is_exact
    if norm is Looks:
        model = build("llama")
        model.model.norm.__class__ = norm
        whole = build("llama")
        whole.model.norm.__class__ = norm
        (batch,) = batches_of([(9, 5)])
        found = last_stage(model).forward(batch, [], 1.0).outputs[0].item()
        assert found == pytest.approx(loss_sum(whole(batch.inputs), batch).item(), rel=1e-6)


def test_a_batch_without_labels_has_a_loss_of_zero() -> None:
    (batch,) = batches_of([(9, 5)])
    nothing = type(batch)(batch.inputs, batch.targets, mx.zeros_like(batch.mask), 0, 12)
    assert last_stage(build("llama")).forward(nothing, [], 1.0).outputs[0].item() == 0
