"""A pipeline of stages gives exactly what the whole model gives."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import PlanError
from serve.model import stage as stage_module
from serve.model.stage import Stage
from serve.model.weights import load_stage
from tests.errors import fails
from tests.models import ARCHITECTURES, build, save

CUTS = [[0, 4], [0, 2, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]


def split(name: str, cuts: list[int]) -> list[Stage]:
    return [Stage(build(name), a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_prefill_and_decode_of_stages_equal_those_of_the_whole_model_exactly(
    name: str, cuts: list[int]
) -> None:
    whole, stages = build(name), split(name, cuts)
    whole_cache = make_prompt_cache(whole)
    caches = [stage.make_cache() for stage in stages]
    for tokens in ([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], [[6], [7]], [[8], [9]]):
        fed = mx.array(tokens)
        expected, passed = whole(fed, cache=whole_cache), []
        for stage, cache in zip(stages, caches, strict=True):
            passed = stage(fed, cache, passed)
        assert mx.array_equal(passed[0], expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefill_of_stages_without_caches_equals_that_of_the_whole_model_exactly(name: str) -> None:
    tokens = mx.array([[3, 1, 4, 1, 5]])
    passed: list[mx.array] = []
    for stage in split(name, [0, 1, 4]):
        passed = stage(tokens, None, passed)
    assert mx.array_equal(passed[0], build(name)(tokens))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_weight_belongs_to_one_stage_and_keeps_its_name(name: str) -> None:
    whole = dict(tree_flatten(build(name).parameters()))
    stages = split(name, [0, 1, 3, 4])
    owned = [stage.weights() for stage in stages]
    assert whole.keys() <= set().union(*owned)
    for stage, weights in zip(stages, owned, strict=True):
        for key in weights:
            if key.startswith("model.layers."):
                assert stage.start <= int(key.split(".")[2]) < stage.end
    twice = {key for key in whole if sum(key in weights for weights in owned) > 1}
    assert twice == ({"model.embed_tokens.weight"} if name == "llama-tied" else set())


def test_a_middle_stage_has_neither_embedding_nor_head() -> None:
    middle = split("llama", [0, 1, 3, 4])[1]
    assert all(key.startswith(("model.layers.1.", "model.layers.2.")) for key in middle.weights())


def test_a_stage_reads_only_its_own_weights(tmp_path: Path) -> None:
    """The tensors of other stages may even be missing behind the file's header."""
    folder = save(tmp_path / "m", "llama")
    loaded = load_stage(folder, 2, 4, progress=lambda *_: None)
    whole = sum(a.nbytes for _, a in tree_flatten(build("llama").parameters()))
    own = sum(a.nbytes for k, a in loaded.stage.weights().items() if "layers" in k or "norm" in k)
    assert own < loaded.bytes_owned < 0.7 * whole
    if loaded.bytes_read is not None:
        header = 16 << 10
        assert loaded.bytes_owned <= loaded.bytes_read < loaded.bytes_owned + 4 * header


def test_only_the_hidden_state_is_passed_between_stages() -> None:
    first, *_ = split("qwen3", [0, 2, 4])
    (hidden,) = first(mx.array([[1, 2, 3]]), first.make_cache(), [])
    assert hidden.shape == (1, 3, 32)


def test_a_model_that_skips_layers_is_refused() -> None:
    broken = build("llama")

    class Skipping(type(broken.model)):
        def __call__(self, tokens, cache=None, input_embeddings=None):
            hidden = self.embed_tokens(tokens)
            for layer in self.layers[:3]:
                hidden = layer(hidden, None, None)
            return self.norm(hidden)

    broken.model.__class__ = Skipping
    with fails(PlanError, "unsplittable"):
        Stage(broken, 0, 2)


def test_a_model_that_runs_layers_twice_is_refused() -> None:
    looping = build("llama")

    class Looping(type(looping.model)):
        def __call__(self, tokens, cache=None, input_embeddings=None):
            hidden = self.embed_tokens(tokens)
            for layer in (*self.layers, *self.layers):
                hidden = layer(hidden, None, None)
            return self.norm(hidden)

    looping.model.__class__ = Looping
    with fails(PlanError, "unsplittable"):
        Stage(looping, 0, 2)


def test_the_output_of_every_second_layer_can_be_evaluated_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What begins early is computed once, and changes nothing."""
    monkeypatch.setattr(stage_module, "_LAYERS_BETWEEN_SEAMS", 2)
    tokens = mx.array([[3, 1, 4, 1, 5]])
    passed: list[mx.array] = []
    begun: list[list[tuple[int, ...]]] = []
    for stage in split("llama", [0, 3, 4]):
        found: list[mx.array] = []

        def begin(arrays: list[mx.array], found: list[mx.array] = found) -> None:
            mx.async_eval(arrays)
            found += arrays

        passed = stage(tokens, stage.make_cache(), passed, begin)
        begun.append([array.shape for array in found])
    assert begun == [[(1, 5, 32)], []]
    assert mx.array_equal(passed[0], build("llama")(tokens))
    (logits,) = Stage(build("llama"), 0, 4)(tokens, None, [])
    assert mx.array_equal(logits, passed[0])
