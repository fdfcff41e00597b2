"""What is tuned of a model, which stage has which layers, and models of the hub."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from serve.core.errors import PlanError, UsageError
from serve.model.weights import load_stage
from serve.tune.model import DropoutKeys, KeyedDropout, load_adapter, make_trainable, split_layers
from serve.tune.results.checkpoint import ADAPTERS, METRICS
from tests.cluster.servers import TINY_CHAT
from tests.errors import fails
from tests.hub.server import REPO, FakeHub
from tests.hub.test_serve import tiny_hub
from tests.models import build, save
from tests.tune.ranks import LORA, config_of
from tests.tune.whole.test_run import arrays_of, finish, flags, launch

pytestmark = pytest.mark.long

__all__ = ["tiny_hub"]  # a fixture of others


def test_initial_adapters_of_all_stages_equal_the_adapter_of_mlx_lm(tmp_path: Path) -> None:
    """Each rank draws all of it and keeps its own."""
    config, path = config_of(seed=5), save(tmp_path / "m", "llama")
    mx.random.seed(5)
    whole = build("llama")
    mx.random.seed(5)
    whole.freeze()
    linear_to_lora_layers(whole, 4, LORA)
    expected = dict(tree_flatten(whole.trainable_parameters()))
    found = {}
    for start, end in ((0, 1), (1, 4)):
        loaded = load_stage(
            path, start, end, lambda *_: None, lambda m: make_trainable(config, DropoutKeys(5), m)
        )
        found |= dict(tree_flatten(loaded.stage.model.trainable_parameters()))
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)


def test_loading_an_adapter_that_does_not_fit_changes_nothing() -> None:
    model = build("llama")
    make_trainable(config_of(), DropoutKeys(0), model)
    right = dict(tree_flatten(model.trainable_parameters()))
    name = next(iter(right))
    ones = {key: mx.ones(array.shape) for key, array in right.items()}
    for wrong in (
        {key: array for key, array in ones.items() if key != name},
        ones | {"model.layers.9.lora_a": mx.ones((1,))},
        ones | {name: mx.ones((2, 2))},
    ):
        with fails(UsageError, "other_model"):
            load_adapter(wrong, "file", model)
    after = dict(tree_flatten(model.trainable_parameters()))
    assert all(mx.array_equal(after[key], right[key]) for key in right)
    load_adapter(ones, "file", model)
    assert model.layers[3].self_attn.q_proj.lora_b.min().item() == 1


@pytest.mark.parametrize("key", ["self_attn.qproj", "q_proj", 7])
def test_an_adapter_key_that_names_no_module_is_refused(key: str) -> None:
    """Beside one that does: mlx_lm would train that alone."""
    config = config_of(lora_parameters={**LORA, "keys": ["self_attn.v_proj", key]})
    with fails(UsageError, "unknown_name", match=str(key)):
        make_trainable(config, DropoutKeys(0), build("llama"))
    right = config_of(lora_parameters={**LORA, "keys": ["self_attn.v_proj", "lm_head"]})
    make_trainable(right, DropoutKeys(0), build("llama"))


def test_dora_of_experts_is_refused_with_an_explanation() -> None:
    with fails(UsageError, "usage", match="--fine-tune-type dora"):
        make_trainable(config_of(fine_tune_type="dora"), DropoutKeys(0), build("deepseek_v3"))


def test_dropout_depends_only_on_seed_and_update_and_micro_batch_and_name() -> None:
    x, draw = mx.ones((64, 64)), DropoutKeys(1)
    masks = {}
    for name in ("a", "b"):
        dropout = KeyedDropout(name, 0.75, draw)
        for draw.update in (0, 1):
            for draw.micro_batch in (0, 1):
                mask = dropout(x)
                assert mx.array_equal(mask, dropout(x))
                assert mask.mean().item() == pytest.approx(1, abs=0.05)
                assert {round(value, 4) for value in mask.reshape(-1).tolist()} == {0, 1.3333}
                masks[name, draw.update, draw.micro_batch] = mask.tolist()
    assert len({json.dumps(mask) for mask in masks.values()}) == 8
    draw.is_on = False
    assert mx.array_equal(dropout(x), x)


# --- splits


def test_layers_are_split_by_cost_unless_a_split_is_given() -> None:
    config = replace(config_of(), model=TINY_CHAT)
    even = replace(config, split="even")
    assert split_layers(even, TINY_CHAT, 2) == [(0, 4), (4, 8)]
    by_hand = replace(config, split="2,3,3")  # rank 0, with the last layers, first
    assert split_layers(by_hand, TINY_CHAT, 3) == [(0, 3), (3, 6), (6, 8)]
    with fails(PlanError, "too_many_ranks"):
        split_layers(config, TINY_CHAT, 9)


def test_layers_without_a_backward_pass_count_half_in_the_split() -> None:
    config = replace(config_of(), model=TINY_CHAT)
    (_, all_trained), _ = split_layers(replace(config, num_layers=-1), TINY_CHAT, 2)
    (_, two_trained), _ = split_layers(replace(config, num_layers=2), TINY_CHAT, 2)
    assert all_trained == 4
    assert two_trained > all_trained


# --- the hub


def test_a_model_on_the_hub_is_fetched_once_and_only_in_part(
    tiny_hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = flags(folder, out, "--iters", "2", "--save-every", "2")
    words[words.index("--model") + 1] = REPO
    finish(launch(2, words))
    model, _ = mlx_lm.load(str(TINY_CHAT), adapter_path=str(out))
    loaded = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(loaded[name], a) for name, a in arrays_of(out).items())
    served = sum(s.end - s.start for s in tiny_hub.served if s.file.endswith(".safetensors"))
    assert served < 1.1 * (TINY_CHAT / "model.safetensors").stat().st_size
    assert (out / METRICS).exists()
    assert (out / ADAPTERS).exists()
