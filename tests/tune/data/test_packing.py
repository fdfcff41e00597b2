"""Examples in one row: the same loss and gradients as alone, or a refusal by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from serve.core.errors import BrigadeError, PlanError
from serve.model.stage import Stage
from serve.tune.backward import TrainedStage, loss_sum
from serve.tune.data import packing
from serve.tune.data.examples import Example, MicroBatch, Split, micro_batches, pad
from serve.tune.transport import LocalLinks
from tests import architectures
from tests.errors import fails
from tests.models import build
from tests.tune.ranks import (
    BUILDING,
    config_of,
    largest_difference,
    run_ranks,
    trainer,
    tuned,
    unsplit_gradients,
)

TOLERANCE = 1e-5
WINDOW = 40


def split_of(lengths: list[int], seed: int = 2) -> Split:
    """Examples of random tokens, of which ranges in the middle and at the end are learned."""
    random = np.random.default_rng(seed)
    examples = []
    for length in lengths:
        tokens = tuple(random.integers(1, 96, length).tolist())
        labels = ((0, 2), (length // 2, length)) if length > 3 else ((0, length),)
        examples.append(Example(tokens, labels))
    return Split(examples, 0, 0, "")


SPLIT = split_of([17, 5, 9, 12, 3, 7, 20, 2])


# --- rows


def test_each_example_is_packed_into_one_row_within_the_window() -> None:
    random = np.random.default_rng(0)
    split = split_of(random.integers(2, WINDOW + 1, 200).tolist())
    rows = packing.pack(split, WINDOW)
    assert rows.is_packed
    found = []
    for row in rows.examples:
        assert len(row.tokens) <= WINDOW
        ends = [*row.starts[1:], len(row.tokens)]
        found += [row.tokens[a:b] for a, b in zip(row.starts, ends, strict=True)]
    assert sorted(found) == sorted(example.tokens for example in split.examples)
    full = sum(len(example.tokens) for example in split.examples) / WINDOW
    assert len(rows.examples) < 1.1 * full + 1, "the rows are not full"
    assert packing.pack(split, WINDOW).examples == rows.examples


def test_a_packed_row_learns_the_same_tokens_as_its_examples() -> None:
    row = packing.join(SPLIT.examples)
    assert row.num_labels == sum(example.num_labels for example in SPLIT.examples)
    (alone,), (batch,) = micro_batches(SPLIT, [0], 1), [pad([row])]
    learned = np.array(batch.targets)[np.array(batch.mask) == 1].tolist()
    expected = []
    for n in range(len(SPLIT.examples)):
        (alone,) = micro_batches(SPLIT, [n], 1)
        expected += np.array(alone.targets)[np.array(alone.mask) == 1].tolist()
    assert learned == expected
    assert batch.num_labels == len(expected) == batch.mask.sum().item()
    assert batch.num_tokens == sum(len(example.tokens) - 1 for example in SPLIT.examples)


def test_a_packed_row_with_a_single_example_needs_no_mask() -> None:
    assert pad([packing.join([SPLIT.examples[0]])]).segments is None
    batch = pad([packing.join(SPLIT.examples[:2]), SPLIT.examples[2]])
    assert batch.segments is not None
    assert batch.segments.tolist() == [[1] * 17 + [2] * 4, [1] * 21]


def test_the_mask_hides_earlier_examples_of_the_row() -> None:
    segments = mx.array([[1, 1, 2, 2, 2]])
    mask = packing.Packed(segments).make_mask(5, window_size=2)
    assert mask[0, 0].astype(mx.int32).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]


# --- loss and gradients


def packed_batches() -> list[MicroBatch]:
    rows = packing.pack(SPLIT, WINDOW)
    assert len(rows.examples) == 2
    return micro_batches(rows, [0, 1], 1)


def assert_packing_is_exact(name: str, make: Any, num_ranks: int, **changes: Any) -> float:
    """Against the unsplit model with each example alone."""
    config = config_of(**changes)

    def rank(links: LocalLinks) -> Any:
        own = trainer(config, links, name, make)
        batches = packed_batches()
        scale = 1 / sum(batch.num_labels for batch in batches)
        return own.pipeline.run(own.schedule(len(batches)), batches, scale)

    ranks = run_ranks(num_ranks, rank)
    gradients = {name: gradient for ran in ranks for name, gradient in ran.gradients.items()}
    alone = micro_batches(SPLIT, list(range(len(SPLIT.examples))), 1)
    loss, expected = unsplit_gradients(tuned(config, name, make=make), alone)
    assert sum(ran.loss for ran in ranks) == pytest.approx(loss, rel=TOLERANCE)
    return largest_difference(gradients, expected)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_loss_and_gradients_of_packed_examples_equal_those_of_single_examples(
    name: str, num_ranks: int
) -> None:
    assert assert_packing_is_exact(name, build, num_ranks) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "olmo3"])
def test_packing_is_exact_with_sliding_windows(name: str) -> None:
    assert assert_packing_is_exact(name, architectures.build, 2) < 5 * TOLERANCE


@pytest.mark.long
def test_packing_is_exact_with_recomputation_and_with_all_weights() -> None:
    changes: dict[str, Any]
    for changes in ({"grad_checkpoint": True}, {"fine_tune_type": "full"}):
        assert assert_packing_is_exact("llama", build, 2, **changes) < TOLERANCE


def no_mask(self: packing.Packed, n: int, window_size: int | None = None, **_: Any) -> mx.array:
    return packing.create_causal_mask(n, window_size=window_size)


def no_window(self: packing.Packed, n: int, **_: Any) -> mx.array:
    same = self._segments[:, None, :, None] == self._segments[:, None, None, :]
    return packing.create_causal_mask(n) & same


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "name", "make"),
    [(no_mask, "llama", build), (no_window, "gemma3_text", architectures.build)],
)
def test_a_broken_mask_would_change_the_loss(
    fault: Any, name: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing.Packed, "make_mask", fault)
    with pytest.raises(AssertionError):
        assert assert_packing_is_exact(name, make, 2) < 5 * TOLERANCE


@pytest.mark.long
def test_learning_the_first_token_of_each_example_would_change_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_of(examples: Any) -> Example:
        row = join(examples)
        return Example(row.tokens, ((1, len(row.tokens)),), row.starts)

    join = packing.join
    monkeypatch.setattr(packing, "join", all_of)
    with pytest.raises(AssertionError):
        assert_packing_is_exact("llama", build, 2)


# --- whether a model is such


def tried(name: str, make: Callable[[str], nn.Module] = architectures.build) -> None:
    """What a run on one rank does before it trains."""
    with BUILDING:
        model = make(name)
        stage = TrainedStage(Stage(model, 0, len(model.layers)), False)
    packing.check_stage(stage.stage, name)
    packing.check_exact(SPLIT, WINDOW, name, partial(loss_of, stage), 1e-4)


def loss_of(stage: TrainedStage, batches: list[MicroBatch]) -> float:
    (batch,) = batches
    (loss,) = stage.forward(batch, [], 1 / batch.num_labels).outputs
    return float(loss.item())


@pytest.mark.parametrize("name", ["gpt2", "mamba", "lfm2"])
def test_models_whose_results_packing_would_change_are_refused(name: str) -> None:
    with fails(PlanError, "not_packable", match=name):
        tried(name)


def test_packing_is_refused_for_a_model_that_ignores_the_mask_of_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried("llama")
    monkeypatch.setattr(packing.Packed, "make_mask", no_mask)
    with fails(PlanError, "not_packable", match="llama"):
        tried("llama")


# mlx-lm's own cannot be trained: it does not begin as a module.
BROKEN = {"recurrent_gemma"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(architectures.architectures()) - BROKEN))
def test_packing_is_exact_or_refused_for_every_architecture(name: str) -> None:
    try:
        tried(name)
    except architectures.CannotBuildError as error:
        pytest.skip(str(error))
    except BrigadeError as error:
        pytest.skip(str(error))
    model = architectures.build(name)
    with BUILDING:
        stage = TrainedStage(Stage(model, 0, len(model.layers)), False)
    (packed,) = [pad([packing.join(SPLIT.examples)])]
    alone = micro_batches(SPLIT, list(range(len(SPLIT.examples))), 1)
    expected = sum(loss_sum(model(b.inputs), b).item() for b in alone) / packed.num_labels
    assert loss_of(stage, [packed]) == pytest.approx(expected, rel=1e-4)
