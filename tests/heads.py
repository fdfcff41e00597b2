"""Small checkpoints with multi-token-prediction heads, with the names of tensors that the original
checkpoints of their families have."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import utils

from serve.model.mtp import FAMILIES
from tests import architectures

_SCALE = 0.3


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    config = architectures.config_of(model_type)
    return {**config, "num_nextn_predict_layers": 1, **changes}


def model_weights(config: dict[str, Any]) -> dict[str, mx.array]:
    """Random weights of the model, with mlx-lm's names."""
    model_class, args_class = utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    return {name: _random(array) for name, array in tree_flatten(model.parameters())}


def head_weights(config: dict[str, Any]) -> dict[str, mx.array]:
    """Random weights of the head, with the names of the original checkpoint."""
    family = FAMILIES[config["model_type"]]
    prefix = family.prefix.format(layer=config["num_hidden_layers"])
    size = config["hidden_size"]
    one_layer = {**config, "num_hidden_layers": 1, **family.config}
    weights: dict[str, mx.array] = {}
    for name, array in model_weights(one_layer).items():
        rest = name.removeprefix("model.layers.0.")
        if rest != name:
            weights |= _in_checkpoint(f"{prefix}{rest}", array, one_layer)
    for module in (family.embedding_norm, family.hidden_norm, family.norm):
        weights[f"{prefix}{module}.weight"] = _random(mx.zeros(size)) + 1
    weights[f"{prefix}{family.projection}.weight"] = _random(mx.zeros((size, 2 * size)))
    return weights


def save(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    """Without a tokenizer: for what needs none."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make(folder: Path, model_type: str, **changes: Any) -> Path:
    """A random model with a random head; the same weights at each call."""
    config = config_of(model_type, **changes)
    mx.random.seed(5)
    return save(folder, config, model_weights(config) | head_weights(config))


def chat_model(folder: Path, chat: Path) -> Path:
    """A Llama model as one of MiMo's family, which says the same, with a random head."""
    config = _mimo_config(chat)
    weights = mx.load(str(chat / "model.safetensors"))
    assert isinstance(weights, dict)
    for name, array in model_weights(config).items():
        if name.endswith(".bias"):
            weights[name] = mx.zeros(array.shape)
    return _with_tokenizer(folder, chat, config, weights | head_weights(config))


def cyclic_model(folder: Path, chat: Path, reads: str) -> Path:
    """A model in which each token determines the next, in one cycle of all tokens, and whose head
    is always right. It reads only the hidden state or only the embedding. Embeddings are the unit
    vectors, and layers add nothing to them."""
    config = _mimo_config(chat)
    size = config["vocab_size"]
    config |= {"hidden_size": size, "num_hidden_layers": 6, "tie_word_embeddings": False}
    order = list(range(2, size))
    random.Random(8).shuffle(order)
    followers = dict(zip(order, [*order[1:], order[0]], strict=True)) | {0: order[0], 1: order[1]}
    next_tokens = mx.array([followers[token] for token in range(size)])
    unit = mx.eye(size)
    weights = model_weights(config) | head_weights(config)
    for name, array in weights.items():
        weights[name] = mx.ones(array.shape) if "norm" in name else mx.zeros(array.shape)
    weights["model.embed_tokens.weight"] = unit
    # The logits of the next token are the number at the place of the token itself.
    follows = mx.zeros((size, size))
    follows[next_tokens, mx.arange(size)] = 1
    weights["lm_head.weight"] = follows
    # The hidden state is that of the token before the newest one.
    projections = {"hidden": [follows, 0 * unit], "embedding": [0 * unit, unit]}
    name = "model.mtp_layers.0.input_proj.weight"
    weights[name] = mx.concatenate(projections[reads], axis=1)
    return _with_tokenizer(folder, chat, config, weights)


def _mimo_config(chat: Path) -> dict[str, Any]:
    config = json.loads((chat / "config.json").read_text())
    return {**config, "model_type": "mimo", "num_nextn_predict_layers": 1}


def _with_tokenizer(
    folder: Path, chat: Path, config: dict[str, Any], weights: dict[str, mx.array]
) -> Path:
    shutil.copytree(chat, folder)
    return save(folder, config, weights)


def _random(array: mx.array) -> mx.array:
    return mx.random.normal(array.shape) * _SCALE


def _in_checkpoint(name: str, array: mx.array, config: dict[str, Any]) -> dict[str, mx.array]:
    """Undoes what mlx-lm's `sanitize` does: experts that are stacked, and keys and values of
    compressed attention that are divided."""
    if ".switch_mlp." in name:
        separate: dict[str, mx.array] = {}
        for number in range(len(array)):
            separate[name.replace("switch_mlp", f"experts.{number}")] = array[number]
        return separate
    if name.endswith("embed_q.weight"):
        size = config["qk_nope_head_dim"] + config["v_head_dim"]
        shape = (config["num_attention_heads"] * size, config["kv_lora_rank"])
        return {name.replace("embed_q", "kv_b_proj"): _random(mx.zeros(shape))}
    if name.endswith("unembed_out.weight"):
        return {}
    return {name: array}
