"""Prediction heads are planned, and weights of a checkpoint that is quantized keep their form."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from serve.core.errors import ModelError, PlanError
from serve.core.plan import MAX_DRAFT_ROWS, MAX_DRAFT_TOKENS, DraftSource, PlanRequest, with_slack
from serve.lora.layers import Adapted, Matrices, Rows
from serve.model.mtp import HeadInputs, PredictionHead, load_head
from serve.model.planning import make_plan
from serve.model.stage import Stage
from serve.model.weights import build_model
from tests import heads
from tests.errors import fails


def no_progress(_state: str, _done: int, _total: int) -> None:
    return


def load(folder: Path) -> PredictionHead:
    return load_head(folder, no_progress, lambda _: None)


def test_memory_of_a_prediction_head_is_counted_on_rank_0(tmp_path: Path) -> None:
    folder = heads.make(tmp_path, "mimo")
    source = DraftSource(str(folder), None, None, is_head=True)
    loaded = sum(array.nbytes for array in load(folder).weights().values())
    layer = make_plan(folder, PlanRequest(num_ranks=4, split="even")).stages[1]
    num_tokens = MAX_DRAFT_ROWS * MAX_DRAFT_TOKENS
    expected = loaded + with_slack(num_tokens * layer.cache_bytes_per_token)
    request = PlanRequest(num_ranks=2, concurrency=32, min_tokens=256, memory="9MB")
    plan = make_plan(folder, replace(request, draft=source))
    assert [stage.draft_bytes for stage in plan.stages] == [expected, 0]
    with fails(PlanError, "no_memory", match="draft model"):
        make_plan(folder, replace(request, draft=source, memory=f"{expected // 1000}KB"))


def test_a_quantized_prediction_head_is_loaded_as_it_is_stored(tmp_path: Path) -> None:
    """Its layer has another number in the checkpoint than in the model with one layer."""
    config = heads.config_of("glm4_moe", num_hidden_layers=2)
    size = config["hidden_size"]
    weights = heads.model_weights(config) | heads.head_weights(config)
    name = "model.layers.2.eh_proj"
    packed = mx.quantize(weights.pop(f"{name}.weight"), group_size=32, bits=4)
    for kind, array in zip(("weight", "scales", "biases"), packed, strict=True):
        weights[f"{name}.{kind}"] = array
    other = {"model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 8}}
    config["quantization"] = {"group_size": 32, "bits": 4, **other}
    head = load(heads.save(tmp_path, config, weights))
    own = head.weights()["model.layers.0.eh_proj.scales"]
    assert own.shape == (size, 2 * size // 32)


def test_weights_of_a_deepseek_prediction_head_are_converted_like_those_of_its_layers(
    tmp_path: Path,
) -> None:
    """Experts are stacked, and compressed keys and values divided."""
    folder = heads.make(tmp_path, "deepseek_v3", num_hidden_layers=3)
    head = load(folder)
    names = {name.removeprefix("model.layers.0.") for name in head.weights()}
    assert {"enorm.weight", "mlp.switch_mlp.up_proj.weight", "self_attn.embed_q.weight"} <= names
    size = head.weights()["model.norm.weight"].size
    normed, output = head(mx.array([[1, 2, 3]]), mx.ones((1, 3, size)), head.make_cache())
    assert normed.shape == output.shape == (1, 3, size)
    assert mx.all(mx.isfinite(normed)).item()


@pytest.mark.parametrize("is_tied", [True, False])
def test_logits_for_a_prediction_head_are_computed_without_adapters(
    tmp_path: Path, is_tied: bool
) -> None:
    """The adapter of the head belongs to rows of another forward pass. The engine ended if their
    number did not divide that of the prediction head's rows."""
    folder = heads.make(tmp_path, "mimo", tie_word_embeddings=is_tied)
    model = build_model(folder)
    stage = Stage(model, 0, len(model.layers))
    inputs = HeadInputs(stage, before_norm=True)
    size = inputs.example.shape[-1]
    hidden = mx.ones((1, 6, size))
    expected = inputs.logits(hidden)
    rows = Rows(used={1}, alone=None, index=mx.array([0, 1, 1, 0, 1]))
    if is_tied:
        adapted = Adapted("embed_tokens", model.model.embed_tokens, rows)
        sizes = (inputs.vocabulary_size, size)
    else:
        adapted = Adapted("lm_head", model.lm_head, rows)
        sizes = (size, inputs.vocabulary_size)
    adapted.write(1, Matrices(mx.ones((sizes[0], 2)), mx.ones((2, sizes[1]))), num_slots=2)
    assert mx.array_equal(inputs.logits(hidden), expected)


def test_a_model_without_the_layers_of_a_prediction_head_is_refused(tmp_path: Path) -> None:
    config = heads.config_of("mimo")
    folder = heads.save(tmp_path, config, heads.model_weights(config))
    with fails(ModelError, "model", match="--draft-model mtp"):
        make_plan(
            folder,
            PlanRequest(num_ranks=2, draft=DraftSource(str(folder), None, None, is_head=True)),
        )
