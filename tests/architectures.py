"""A tiny random model of every architecture of the installed mlx-lm.

A config is made from words: names that configs share, with small values. An architecture is listed
here only where these do not fit it.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_map_with_path

from tests import standins

NUM_LAYERS = 4
WINDOW = 6  # the longest rows of the tests go around it
_ALTERNATE = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}

WORDS: dict[str, Any] = {
    # sizes
    **dict.fromkeys(["hidden_size", "hidden_dim", "d_model", "n_embd", "model_dim"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_hidden_size", "n_inner", "mlp_hidden_size"], 64),
    **dict.fromkeys(["ff_intermediate_size", "intermediate_size_mlp", "block_dim"], 64),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["expert_ffn_hidden_size", "shared_intermediate_size", "share_expert_dim"], 32),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "hidden_size_per_layer_input"], 32),
    **dict.fromkeys(["vocab_size", "embedding_size", "vocab_size_per_layer_input"], 96),
    "num_vocab": 96,
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "model_max_length"], 512),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers"], NUM_LAYERS),
    "num_transformer_layers": NUM_LAYERS,
    # attention
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_heads", "n_head"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "n_kv_heads"], 2),
    **dict.fromkeys(["num_attention_groups", "num_global_key_value_heads"], 2),
    **dict.fromkeys(["swa_num_attention_heads", "num_swa_attention_heads"], 4),
    **dict.fromkeys(["swa_num_key_value_heads", "num_swa_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "global_head_dim", "hidden_size_per_head", "kv_channels"], 16),
    **dict.fromkeys(["v_head_dim", "swa_head_dim", "swa_v_head_dim"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"], 16),
    "qk_head_dim": 32,
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "o_lora_rank"], 32),
    **dict.fromkeys(["index_head_dim"], 32),
    **dict.fromkeys(["index_n_heads"], 2),
    "index_topk": 4,
    **dict.fromkeys(["partial_rotary_factor", "global_partial_rotary_factor", "rotary_pct"], 0.5),
    **dict.fromkeys(["rope_theta", "swa_rope_theta", "rope_local_base_freq"], 10000.0),
    **dict.fromkeys(["rotary_emb_base", "rope_local_theta", "compress_rope_theta"], 10000),
    **dict.fromkeys(["sliding_window", "sliding_window_size", "window_size"], WINDOW),
    **dict.fromkeys(["attention_window_size", "attention_chunk_size"], WINDOW),
    "sliding_window_pattern": 2,
    "full_attention_interval": 2,
    "layer_types": _ALTERNATE,
    "rope_parameters": {
        **_ROPE,
        **dict.fromkeys(["sliding_attention", "full_attention"], _ROPE),
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 8,
    },
    "layer_rope_theta": [10000.0, 0] * (NUM_LAYERS // 2),
    # mixtures of experts
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts"], 4),
    "moe_num_experts": 4,
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"], 2),
    **dict.fromkeys(["top_k_experts", "moe_top_k"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "num_shared_expert"], 1),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group", "moe_layer_freq"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "zero_expert_num"], 1),
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    # recurrent layers
    **dict.fromkeys(["linear_num_key_heads", "mamba_n_heads", "mamba_num_heads"], 4),
    "linear_num_value_heads": 4,
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim"], 16),
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "state_size"], 16),
    **dict.fromkeys(["mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "conv1d_width"], 3),
    **dict.fromkeys(["conv_L_cache", "short_conv_kernel_size", "conv_window"], 3),
    **dict.fromkeys(["mamba_n_groups", "n_groups", "layer_group_size", "mamba_expand"], 2),
    "group_norm_size": 1,
    **dict.fromkeys(["a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"], 32),
    "decay_low_rank_dim": 32,
    "time_step_rank": 4,
    # scales and norms
    **dict.fromkeys(["rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"], 1e-5),
    **dict.fromkeys(["layernorm_epsilon"], 1e-5),
    **dict.fromkeys(["logits_scaling", "attention_multiplier", "embedding_multiplier"], 1.0),
    "residual_multiplier": 1.0,
}

_KDA = {"num_heads": 4, "head_dim": 16, "kda_layers": [1, 3], "short_conv_kernel_size": 3}
_MAMBA = ["mamba", "attention"] * (NUM_LAYERS // 2)
SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"num_layers": 5, "num_kv_reuse_layers": 2},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek_v41": {
        "compress_ratios": (0, 4, 4, 4),
        "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1,),
        "num_key_value_heads": 1,
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n": {
        "activation_sparsity_pattern": [0.5] * 6,
        "altup_num_inputs": 2,
        "altup_coef_clip": 1.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_text": {"num_kv_shared_layers": 2},
    "granitemoehybrid": {"layer_types": _MAMBA, "mamba_proj_bias": False, "mamba_conv_bias": True},
    "hunyuan": {
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {"layers_block_type": _MAMBA},
    "kimi_k3": {
        "linear_attn_config": _KDA,
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 1.0,
        "attn_res_block_size": 2,
    },
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "rope_scaling": None},
    "llama4_text": {"no_rope_layers": [1, 0] * 2, "tie_word_embeddings": False},
    "longcat_flash": {"zero_expert_type": "identity"},
    "longcat_flash_ngram": {"zero_expert_type": "identity"},
    "mamba2": {"time_step_limit": (0.001, 100.0)},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0] * 2, "moe_layer_freq": [0, 1, 1, 1]},
    "minicpm3": {"rope_scaling": {**_YARN, "short_factor": 1.0, "long_factor": 1.0}},
    "minimax_m3_vl": {"moe_layer_freq": [0, 1, 1, 1], "mlp_layer_types": None},
    "muse_spark": {"final_logit_softcapping": 20.0, "num_shared_experts": 0},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        ]
        * 2
    },
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": ["M", "E", "*", "-"]},
    "openelm": {
        "num_query_heads": [4] * NUM_LAYERS,
        "num_kv_heads": [2] * NUM_LAYERS,
        "ffn_multipliers": [1.0] * NUM_LAYERS,
        "ffn_dim_divisor": 32,
    },
    # Its forward writes to the logits of fixed tokens, in the vocabulary or not.
    "phi3small": {"dense_attention_every_n_layers": 2, "vocab_size": 100352},
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "hidden_size": 128,
        "modules": [
            {
                "path": "model.layers.1.self_attn.q_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            }
        ],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    # Neither its head nor that of llama4_text can be an embedding of 4 bits.
    "seed_oss": {"tie_word_embeddings": False},
}
_MISSING = dataclasses.MISSING
_SMALL: list[tuple[tuple[str, ...], Any]] = [
    (("int",), 4),
    (("float",), 1.0),
    (("bool",), True),
    (("str",), ""),
    (("Optional", "Union"), None),
    (("dict", "Dict"), {}),
    (("list", "List"), []),
]
_TEXT_CLASSES = ("TextArgs", "TextConfig", "TextModelArgs")


class CannotBuildError(Exception):
    """The words and the table do not make a config of an architecture."""


@cache
def architectures() -> list[str]:
    """The names of the modules that hold an architecture."""
    names = sorted(info.name for info in pkgutil.iter_modules(mlx_lm.models.__path__))
    return [name for name in names if {"Model", "ModelArgs"} <= vars(_module(name)).keys()]


def _module(name: str) -> ModuleType:
    standins.pretend_installed("hf_olmo")
    module = importlib.import_module(f"mlx_lm.models.{name}")
    standins.install(module)
    return module


def model_class(name: str) -> type[nn.Module]:
    found: type[nn.Module] = _module(name).Model
    return found


def config_of(name: str) -> dict[str, Any]:
    """The words that an architecture knows, and small values for what has neither a
    word nor a default."""
    module = _module(name)
    special = SPECIAL.get(name, {})
    config = {"model_type": name, **_fields_of(module.ModelArgs, special)}
    if "text_config" in config:
        inner, arguments = _text_of(module)
        special = SPECIAL.get(inner, {}) | special
        config["text_config"] = {"model_type": inner, **_fields_of(arguments, special)}
    return config


def _fields_of(arguments: type, special: dict[str, Any]) -> dict[str, Any]:
    config = {}
    for field in dataclasses.fields(arguments):
        if field.name in (words := WORDS | special):
            config[field.name] = words[field.name]
        elif field.name == "text_config" or field.default is field.default_factory is _MISSING:
            config[field.name] = _small(field)
    config.pop("model_type", None)
    return config


def _text_of(module: ModuleType) -> tuple[str, type]:
    """The name and the arguments of the text model inside of a model."""
    parent = sys.modules[module.Model.__base__.__module__]
    for place in (module, parent) if hasattr(parent, "Model") else (module,):
        for arguments in (getattr(place, name, None) for name in _TEXT_CLASSES):
            if arguments:
                return place.__name__.rpartition(".")[2], arguments
    for other in vars(module).values():
        if isinstance(other, ModuleType) and hasattr(other, "ModelArgs"):
            return other.__name__.rpartition(".")[2], other.ModelArgs
    raise CannotBuildError("no arguments for its text_config")


def _small(field: "dataclasses.Field[Any]") -> Any:
    kind = str(getattr(field.type, "__name__", field.type))
    for words, value in _SMALL:
        if kind.startswith(words):
            return value
    raise CannotBuildError(f"no word for its {field.name}: {kind}")


def build(name: str, **changes: Any) -> nn.Module:
    """The same weights at each call, none of them zero. Changes are those of the config."""
    module = _module(name)
    mx.random.seed(11)
    model = module.Model(module.ModelArgs.from_dict(config_of(name) | changes))
    model.update(tree_map_with_path(_shaken, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def quantized(model: nn.Module) -> nn.Module:
    """4 bits where the widths allow it, and the model."""
    allows = getattr(model, "quant_predicate", lambda *_: True)

    def fits(path: str, module: nn.Module) -> bool:
        to_quantized = getattr(module, "to_quantized", None)
        # mlx calls it with a mode, which not every module of mlx-lm takes.
        known = to_quantized and "mode" in inspect.signature(to_quantized).parameters
        return bool(known and module.weight.shape[-1] % 32 == 0 and allows(path, module))

    nn.quantize(model, group_size=32, bits=4, class_predicate=fits)
    mx.eval(model.parameters())
    return model


def _shaken(path: str, array: mx.array) -> mx.array:
    if mx.issubdtype(array.dtype, mx.floating):
        # A fake quantization stays fine: its steps would drown a comparison.
        shaken = array + 0.1 * mx.random.normal(array.shape).astype(array.dtype)
        return array * 0.01 if "quant_" in path else shaken
    if array.dtype in (mx.uint8, mx.uint32):  # packed weights
        shape = (*array.shape[:-1], array.shape[-1] * array.itemsize)
        return mx.random.randint(0, 256, shape).astype(mx.uint8).view(array.dtype)
    return array
