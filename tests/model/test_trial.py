"""What the trial of a model must not do to it."""

import copy
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from serve.core.errors import PlanError
from serve.model import trial
from serve.model.stage import Stage
from serve.rank.batching import can_batch
from tests.errors import fails
from tests.models import build, save


def _evaluating(model: nn.Module) -> nn.Module:
    """A forward that looks at numbers on the way, as dbrx's looks at its experts."""

    class Evaluating(type(model.model)):
        def __call__(self, *args, **kwargs):
            output = super().__call__(*args, **kwargs)
            mx.eval(output)
            return output

    model.model.__class__ = Evaluating
    return model


def test_trying_a_model_that_evaluates_arrays_reads_no_weights(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "llama")
    model = _evaluating(build("llama"))
    model.load_weights(str(folder / "model.safetensors"))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(RuntimeError):
        mx.eval(copy.copy(model).lm_head.weight)
    Stage(model, 1, 3)


def test_a_model_that_evaluates_arrays_can_still_be_split() -> None:
    tokens, passed = mx.array([[1, 2, 3]]), []
    for start, end in ((0, 1), (1, 4)):
        stage = Stage(_evaluating(build("llama")), start, end)
        passed = stage(tokens, stage.make_cache(), passed)
    assert mx.array_equal(passed[0], build("llama")(tokens))


def test_weights_are_restored_after_a_trial() -> None:
    model = build("llama")
    before = {name: id(array) for name, array in tree_flatten(model.parameters())}
    model.norm_kept = None
    with trial.without_weights(model):
        assert not mx.isfinite(model.lm_head.weight).any()
        model.norm_kept = model.model.norm.weight * 2
    assert model.norm_kept is None
    assert {name: id(array) for name, array in tree_flatten(model.parameters())} == before


def test_a_model_whose_forward_pass_fails_is_refused() -> None:
    model = build("llama")
    model.model.embed_tokens = nn.Linear(2, 2)
    with fails(PlanError, "unsplittable"):
        Stage(model, 0, 2)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "deepseek_v3"])
def test_listed_architectures_can_compute_several_rows_in_one_forward_pass(name: str) -> None:
    assert can_batch(build(name))


def test_the_rope_function_of_mlx_is_restored_after_a_trial() -> None:
    rope = mx.fast.rope
    can_batch(build("llama"))
    assert mx.fast.rope is rope
