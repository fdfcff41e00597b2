"""Loss and every gradient of one update, as they reach the optimizers: every schedule on any
ranks against the unsplit model."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from serve.core.errors import UsageError
from serve.tune import backward
from serve.tune.backward import Pass, TrainedStage, loss_sum
from serve.tune.config import FineTuneConfig
from serve.tune.data.examples import MicroBatch
from serve.tune.pipeline import Pipeline, ScheduleRun
from serve.tune.schedule import SCHEDULES, PipelineOp, Shape
from serve.tune.transport import LocalLinks
from tests.errors import fails
from tests.models import build
from tests.tune.ranks import (
    KINDS,
    LORA,
    MICRO_BATCHES,
    Found,
    batches_of,
    config_of,
    error_of,
    largest_difference,
    quantized,
    run_ranks,
    trainer,
    tuned,
    unsplit_gradients,
    update_of,
)

TOLERANCE = 1e-5


def split(
    config: FineTuneConfig,
    num_ranks: int,
    name: str = "llama",
    make: Callable[[str], nn.Module] = build,
) -> Found:
    def rank(links: LocalLinks) -> Found:
        return update_of(trainer(config, links, name, make), batches_of(MICRO_BATCHES))

    return run_ranks(num_ranks, rank)[0]


def unsplit(
    config: FineTuneConfig, name: str = "llama", make: Callable[[str], nn.Module] = build
) -> Found:
    return unsplit_gradients(tuned(config, name, make=make), batches_of(MICRO_BATCHES))


@cache
def expected_of(kind: str) -> Found:
    """Layers are never computed again there."""
    return unsplit(config_of(fine_tune_type=KINDS[kind].fine_tune_type), *KINDS[kind][1:])


def error_in(num_ranks: int, schedule: str, kind: str, checkpointing: bool) -> float:
    changes = {"schedule": schedule, "grad_checkpoint": checkpointing}
    config = config_of(fine_tune_type=KINDS[kind].fine_tune_type, **changes)
    return error_of(split(config, num_ranks, *KINDS[kind][1:]), expected_of(kind))


QUICK = [
    (1, "interleaved", "full", True),
    (2, "naive", "lora", False),
    (3, "gpipe", "dora, 4 bits", True),
    (4, "1f1b", "dora", False),
    (2, "interleaved", "lora, 4 bits", True),
    (3, "zero-bubble", "full", False),
    (4, "interleaved", "lora", True),
]
CELLS = [
    pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow)
    for cell in itertools.product((1, 2, 3, 4), SCHEDULES, KINDS, (False, True))
]


@pytest.mark.parametrize(("num_ranks", "schedule", "kind", "checkpointing"), CELLS)
def test_gradients_of_all_ranks_equal_those_of_the_unsplit_model(
    num_ranks: int, schedule: str, kind: str, checkpointing: bool
) -> None:
    assert error_in(num_ranks, schedule, kind, checkpointing) < TOLERANCE


# --- the negative controls


def mean_of_means(logits: mx.array, batch: MicroBatch, learned: mx.array | None = None) -> mx.array:
    """Each micro-batch counts alike, however much of it is learned."""
    batches = batches_of(MICRO_BATCHES)
    mean = sum(batch.num_labels for batch in batches) / len(batches)
    return loss_sum(logits, batch, learned) * (mean / batch.num_labels)


def without_one(
    pipeline: Pipeline, op: PipelineOp, ran: ScheduleRun, add: Any = Pipeline._add_gradients
) -> None:
    if op.micro_batch == 3:
        pipeline._passes.pop((op.micro_batch, op.stage))
    else:
        add(pipeline, op, ran)


def swapped(*args: Any, forward_backward: Any = TrainedStage.forward_backward) -> Pass:
    """Two gradients of one shape."""
    made: Pass = forward_backward(*args)
    pairs = itertools.combinations(sorted(made.gradients), 2)
    a, b = next((a, b) for a, b in pairs if made.gradients[a].shape == made.gradients[b].shape)
    made.gradients |= {a: made.gradients[b], b: made.gradients[a]}
    return made


def slightly_more(
    pipeline: Pipeline,
    op: PipelineOp,
    shape: Shape,
    arrays: list[mx.array],
    send: Any = Pipeline._send,
) -> None:
    """Gradients of inputs by a tenth of a percent."""
    arrays = [array * 1.001 for array in arrays] if op.kind == "B" else arrays
    mx.eval(arrays)
    send(pipeline, op, shape, arrays)


FAULTS = {
    "scale": (backward, "loss_sum", mean_of_means),
    "micro-batch": (Pipeline, "_add_gradients", without_one),
    "swap": (TrainedStage, "forward_backward", swapped),
    "dx": (Pipeline, "_send", slightly_more),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("1f1b", "lora"),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in zip(SCHEDULES, itertools.cycle(reversed(KINDS)), strict=False)
        ),
    ],
)
def test_the_comparison_detects_wrong_gradients(
    fault: str, schedule: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_of(kind)  # Before anything is broken.
    monkeypatch.setattr(*FAULTS[fault])
    assert error_in(2, schedule, kind, checkpointing=False) > 5 * TOLERANCE


# --- other models, and parameters in other places


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("fine_tune_type", "name"),
    [("lora", "deepseek_v3"), ("full", "deepseek_v3"), ("lora", "qwen3"), ("full", "qwen3")],
)
def test_gradients_of_other_architectures_equal_those_of_the_unsplit_model(
    fine_tune_type: str, name: str, checkpointing: bool
) -> None:
    config = config_of(fine_tune_type=fine_tune_type, grad_checkpoint=checkpointing)
    assert error_of(split(config, 2, name), unsplit(config, name)) < TOLERANCE


def test_training_all_weights_of_a_four_bit_model_is_refused() -> None:
    with fails(UsageError, "unsupported_layer", match=r"model\..*weight"):
        tuned(config_of(fine_tune_type="full"), "llama", make=quantized)


@pytest.mark.long
def test_stages_below_the_first_trained_layer_compute_only_the_forward_pass() -> None:
    """The last layer is trained alone, so three of four ranks only go forward."""
    config = config_of(num_layers=1)
    assert error_of(split(config, 4), unsplit(config)) < TOLERANCE

    def rank(links: LocalLinks) -> set[str]:
        return {op.kind for op in trainer(config, links).schedule(3).of_rank(links.rank)}

    assert run_ranks(4, rank) == [{"F", "B", "W"}, {"F"}, {"F"}, {"F"}]


@pytest.mark.long
def test_an_adapter_of_a_tied_embedding_gets_gradients_from_first_and_last_rank() -> None:
    """It is on the first rank and on the last, and on none between."""
    keys = ["model.embed_tokens", "self_attn.q_proj"]
    config = config_of(lora_parameters={**LORA, "keys": keys})
    assert error_of(split(config, 3, "llama-tied"), unsplit(config, "llama-tied")) < TOLERANCE

    def rank(links: LocalLinks) -> tuple[set[str], set[str], dict[str, mx.array]]:
        own, batches = trainer(config, links, "llama-tied"), batches_of(MICRO_BATCHES)
        own.update(0, batches, own.schedule(len(batches)))
        return own.shared, own.counted & own.shared, own.parameters()

    last, middle, first = run_ranks(3, rank)
    shared = {"model.embed_tokens.lora_a", "model.embed_tokens.lora_b"}
    assert last[0] == middle[0] == first[0] == shared
    assert (last[1], first[1]) == (set(), shared), "its norm is counted once"
    assert all(mx.array_equal(last[2][name], first[2][name]) for name in shared)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_gradient_of_a_tied_embedding_is_incomplete_on_a_single_rank(num_ranks: int) -> None:
    """The negative control of what the ranks sum."""
    config = config_of(fine_tune_type="full")
    name = "model.embed_tokens.weight"

    def rank(links: LocalLinks) -> tuple[bool, bool, dict[str, mx.array]]:
        own, batches = trainer(config, links, "llama-tied"), batches_of(MICRO_BATCHES)
        scale = 1 / sum(batch.num_labels for batch in batches)
        ran = own.pipeline.run(own.schedule(len(batches)), batches, scale)
        return own.shared == {name}, name in own.counted, ran.gradients

    ranks = run_ranks(num_ranks, rank)
    assert all(is_shared for is_shared, *_ in ranks)
    assert [is_owned for _, is_owned, _ in ranks] == [False] * (num_ranks - 1) + [True]
    _, expected = unsplit(config, "llama-tied")
    assert {name, "model.norm.weight"} < expected.keys()
    for *_, gradients in (ranks[0], ranks[-1]):
        assert largest_difference({name: gradients[name]}, {name: expected[name]}) > 0.1


@pytest.mark.long
def test_a_tied_embedding_stays_equal_on_first_and_last_rank() -> None:
    config = config_of(fine_tune_type="full", optimizer="adamw", learning_rate=1e-2)

    def rank(links: LocalLinks) -> mx.array:
        own, batches = trainer(config, links, "llama-tied"), batches_of(MICRO_BATCHES)
        before = own.parameters().get("model.embed_tokens.weight")
        for number in range(3):
            own.update(number, batches, own.schedule(len(batches)))
        after = own.parameters().get("model.embed_tokens.weight")
        assert before is None or not mx.allclose(before, after)
        return after

    last, middle, first = run_ranks(3, rank)
    assert middle is None
    assert mx.array_equal(last, first)


def half(name: str) -> nn.Module:
    model = build(name)
    model.set_dtype(mx.bfloat16)
    return model


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradient_sums_over_ranks_keep_the_type_of_the_weights(num_ranks: int) -> None:
    """Also of the rank in the middle, which has nothing to add to a tied embedding's."""
    config = config_of(fine_tune_type="full", learning_rate=1e-3)

    def rank(links: LocalLinks) -> set[mx.Dtype]:
        own, batches = trainer(config, links, "llama-tied", half), batches_of(MICRO_BATCHES)
        for number in range(2):
            assert not own.update(number, batches, own.schedule(len(batches))).is_skipped
        return {array.dtype for array in own.parameters().values()}

    assert run_ranks(num_ranks, rank) == [{mx.bfloat16}] * num_ranks


def test_weights_outside_of_layers_are_trained_only_if_all_layers_are_trained() -> None:
    for num_layers, trained in ((2, {2, 3}), (4, {0, 1, 2, 3}), (-1, {0, 1, 2, 3})):
        model = tuned(config_of(fine_tune_type="full", num_layers=num_layers))
        names = dict(tree_flatten(model.trainable_parameters()))
        inside = {name for name in names if ".layers." in name}
        assert {int(name.split(".")[2]) for name in inside} == trained
        around = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        assert names.keys() - inside == (around if len(trained) == 4 else set())
