"""Folders of the shape of large models: real names, sizes and headers, and holes for weights.

python -m tests.shapes FOLDER llama-70b deepseek-v3
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape

_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
_FP8_BLOCK = 128

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def _llama() -> Iterator[Tensor]:
    config = LLAMA_70B
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    vocabulary = (config["vocab_size"], hidden)
    yield "model.embed_tokens.weight", "BF16", vocabulary
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            yield f"{layer}.{name}.weight", "BF16", shape
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", vocabulary


def _fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """A matrix of one byte a number, and the scales of its blocks."""
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    blocks = (-(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK))
    yield f"{name}.weight_scale_inv", "F32", blocks


def _gated(name: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield from _fp8(f"{name}.gate_proj", inner, hidden)
    yield from _fp8(f"{name}.up_proj", inner, hidden)
    yield from _fp8(f"{name}.down_proj", hidden, inner)


def _deepseek() -> Iterator[Tensor]:
    config = DEEPSEEK_V3
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], 64
    nope, value, experts = 128, config["v_head_dim"], config["n_routed_experts"]
    expert_inner = config["moe_intermediate_size"]
    vocabulary = (config["vocab_size"], hidden)
    yield "model.embed_tokens.weight", "BF16", vocabulary
    # One layer more than the config says: it predicts a second token, and is not used.
    for i in range(config["num_hidden_layers"] + 1):
        layer = f"model.layers.{i}"
        yield from _fp8(f"{layer}.self_attn.q_a_proj", q_rank, hidden)
        yield from _fp8(f"{layer}.self_attn.q_b_proj", heads * (nope + rope), q_rank)
        yield from _fp8(f"{layer}.self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden)
        yield from _fp8(f"{layer}.self_attn.kv_b_proj", heads * (nope + value), kv_rank)
        yield from _fp8(f"{layer}.self_attn.o_proj", hidden, heads * value)
        yield f"{layer}.self_attn.q_a_layernorm.weight", "BF16", (q_rank,)
        yield f"{layer}.self_attn.kv_a_layernorm.weight", "BF16", (kv_rank,)
        yield f"{layer}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,)
        if i < config["first_k_dense_replace"]:
            yield from _gated(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{layer}.mlp.gate.weight", "BF16", (experts, hidden)
        yield f"{layer}.mlp.gate.e_score_correction_bias", "F32", (experts,)
        yield from _gated(f"{layer}.mlp.shared_experts", hidden, expert_inner)
        for e in range(experts):
            yield from _gated(f"{layer}.mlp.experts.{e}", hidden, expert_inner)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", vocabulary


SHAPES: dict[str, tuple[dict[str, Any], list[Tensor], int]] = {
    "llama-70b": (LLAMA_70B, list(_llama()), 30),
    "deepseek-v3": (DEEPSEEK_V3, list(_deepseek()), 163),
}
"""Config, tensors and the number of files."""


def write(folder: Path, name: str) -> Path:
    """Takes as much of the disk as the headers do."""
    config, tensors, num_files = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rest, where = iter(tensors), {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = list(islice(rest, -(-len(tensors) // num_files)))
        header, offset = {}, 0
        for tensor, dtype, shape in part:
            end = offset + prod(shape) * _BYTES[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            where[tensor], offset = file, end
        head = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(head).to_bytes(8, "little") + head)
            out.truncate(8 + len(head) + offset)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


if __name__ == "__main__":
    for shape in sys.argv[2:]:
        print(write(Path(sys.argv[1]) / shape, shape))
