"""Small random models of real architectures, in memory and as folders."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import deepseek_v3, llama, qwen2, qwen3, qwen3_moe

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "attention_bias": False,
}
_QWEN3_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
ARCHITECTURES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "llama": (llama, {}),
    "llama-tied": (llama, {"tie_word_embeddings": True}),
    "qwen2": (qwen2, {}),
    "qwen3": (qwen3, {}),
    "deepseek_v3": (deepseek_v3, _DEEPSEEK),
}
_ALL = {**ARCHITECTURES, "qwen3_moe": (qwen3_moe, _QWEN3_MOE)}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    module, special = _ALL[name]
    model_type = module.__name__.rpartition(".")[2]
    return {**_COMMON, **special, "model_type": model_type, **changes}


def build(name: str, **changes: Any) -> nn.Module:
    """The same weights at each call. They are large enough for greedy answers to
    change from token to token."""
    module, _ = _ALL[name]
    model = module.Model(module.ModelArgs.from_dict(config_of(name, **changes)))
    mx.random.seed(7)
    model.update(tree_map(lambda a: mx.random.normal(a.shape) * 0.3, model.parameters()))
    mx.eval(model.parameters())
    return model


def save(folder: Path, name: str, **changes: Any) -> Path:
    """Without a tokenizer: for what needs none."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(build(name, **changes).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config_of(name, **changes)))
    return folder
