"""The parts of trained adapters that shards have."""

import math

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from serve.core.errors import PlanError
from serve.lora.sharded import ArrayDivision, ShardedLoRALinear, shard_trained
from serve.model import pairs
from serve.model.sharding import Division, StandIn
from serve.tune.model import DropoutKeys, make_trainable
from tests.errors import fails
from tests.models import build
from tests.tune.ranks import LORA, config_of

NUM_SHARDS = 2


@pytest.mark.parametrize("axis", [0, 1])
def test_the_parts_of_all_shards_add_up_to_the_whole_array(axis: int) -> None:
    """A weight of 24 numbers in two segments, of each of which every shard has a half. The trained
    array has half as many numbers."""
    divisions = [Division(-2, 24, ((0, 4), (8, 16))), Division(-2, 24, ((4, 8), (16, 24)))]
    whole = mx.random.normal((12, 12))
    parts = [ArrayDivision(division, axis) for division in divisions]
    own = [part.own_part(whole) for part in parts]
    assert own[0].shape[axis] == 6
    assert parts[0].whole_shape(own[0].shape) == (12, 12)
    total = sum(
        (part.among_zeros(array) for part, array in zip(parts, own, strict=True)), mx.array(0)
    )
    assert mx.array_equal(total, whole)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_part_of_a_shard_is_a_copy_and_not_a_view(axis: int) -> None:
    """OpenBLAS rounds a product with a view in another way than one with the same numbers of an
    update, so a run that is continued would drift away from one that is not interrupted."""
    whole = mx.random.normal((12, 12))
    own = ArrayDivision(Division(-2, 24, ((12, 24),)), axis).own_part(whole)
    mx.eval(own)
    assert memoryview(own).c_contiguous


def test_each_trained_adapter_has_one_of_its_two_matrices_divided() -> None:
    config = config_of(num_layers=-1)
    model = build("qwen2")
    make_trainable(config, DropoutKeys(0), model)
    whole = {name: array.shape for name, array in tree_flatten(model.trainable_parameters())}
    sharding, parts = shard_trained(model, StandIn(NUM_SHARDS))
    own = {name: array.shape for name, array in tree_flatten(model.trainable_parameters())}
    assert sharding.divisions
    assert own.keys() == whole.keys() == parts.divided.keys() | parts.partial
    assert not parts.divided.keys() & parts.partial
    for name, part in parts.divided.items():
        assert part.whole_shape(own[name]) == whole[name]
        assert own[name] != whole[name]
    for name in parts.partial:
        assert own[name] == whole[name]
    layer = model.layers[0]
    assert isinstance(layer.self_attn.o_proj, ShardedLoRALinear)
    assert "model.layers.0.self_attn.o_proj.lora_b" in parts.partial
    assert "model.layers.0.self_attn.q_proj.lora_a" in parts.partial


def test_trained_adapters_can_be_divided_into_unequal_parts() -> None:
    """Three heads of keys and values on two shards."""
    whole: dict[str, tuple[int, ...]] = {}
    totals: dict[str, int] = {}
    for number in range(NUM_SHARDS):
        model = build("qwen3", num_attention_heads=6, num_key_value_heads=3)
        make_trainable(config_of(num_layers=-1), DropoutKeys(0), model)
        whole = {name: array.shape for name, array in tree_flatten(model.trainable_parameters())}
        _, parts = shard_trained(model, StandIn(NUM_SHARDS, number))
        own = dict(tree_flatten(model.trainable_parameters()))
        for name, part in parts.divided.items():
            assert part.whole_shape(own[name].shape) == whole[name]
            totals[name] = totals.get(name, 0) + own[name].size
    assert any("self_attn" in name for name in totals)
    for name, size in totals.items():
        assert size == math.prod(whole[name])


def test_gradients_are_summed_around_matrices_that_stay_whole() -> None:
    """A part of the keys comes from a matrix that every shard has, and so do the routes to
    experts. What each shard computes with it is only a part of its gradient."""
    model = build("deepseek_v3")
    make_trainable(config_of(num_layers=-1), DropoutKeys(0), model)
    whole = {name: array.shape for name, array in tree_flatten(model.trainable_parameters())}
    sharding, parts = shard_trained(model, StandIn(NUM_SHARDS))
    own = {name: array.shape for name, array in tree_flatten(model.trainable_parameters())}
    assert own.keys() == whole.keys() == parts.divided.keys() | parts.partial
    assert {"model.layers.1.self_attn", "model.layers.1.mlp"} <= set(sharding.blocks)
    for name, part in parts.divided.items():
        assert part.whole_shape(own[name]) == whole[name]
    assert "model.layers.1.self_attn.kv_a_proj_with_mqa.lora_a" in parts.partial
    assert "model.layers.1.mlp.switch_mlp.down_proj.lora_b" in parts.partial
    assert parts.divided["model.layers.1.mlp.switch_mlp.down_proj.lora_a"].axis == -1


def test_dora_is_refused_on_inputs_that_are_divided_in_a_block() -> None:
    model = build("deepseek_v3")
    lora = {**LORA, "keys": ["self_attn.o_proj"]}
    config = config_of(num_layers=-1, fine_tune_type="dora", lora_parameters=lora)
    make_trainable(config, DropoutKeys(0), model)
    with fails(PlanError, "unsupported_layer", match="DoRA.*o_proj"):
        shard_trained(model, StandIn(NUM_SHARDS))


def test_training_a_model_that_shards_cannot_divide_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A norm over all heads keeps the attention whole; here the MLP stays whole, too."""
    monkeypatch.setattr(pairs._Layer, "_can_be_summed", lambda *_: False)
    model = build("deepseek_v3")
    make_trainable(config_of(num_layers=-1), DropoutKeys(0), model)
    with fails(PlanError, "unsupported_layer", match="down_proj"):
        shard_trained(model, StandIn(NUM_SHARDS))


def test_training_with_key_value_heads_that_shards_share_is_refused() -> None:
    """Two heads of keys on four shards."""
    model = build("llama")
    make_trainable(config_of(num_layers=-1), DropoutKeys(0), model)
    with fails(PlanError, "unsupported_layer", match="_proj"):
        shard_trained(model, StandIn(4))
