"""A model that costs what a real one of its size does, and never ends its answers."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from scripts.measure.servers import ROOT

FOLDER = Path.home() / ".cache" / "brigade-bench"
TOKENIZER = ROOT / "examples" / "tiny-chat"
SEED = 0
SPREAD = 0.02  # standard deviation of the weights
NUM_LAYERS = 16
HIDDEN, INNER, VOCAB = 896, 2752, 1024
KEYS = 128  # of two heads; the values have as many
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    # One of the few that `mlx_lm.server --pipeline` can split.
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": INNER,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_model(folder: Path) -> Path:
    """A folder with 150 M random float32 weights and the tokenizer of tiny-chat; made once."""
    model = folder.resolve() / f"random-150m-{SEED}"
    if (model / "config.json").exists():
        return model
    model.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, model / name)
    tokenizer = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    tokenizer["model_max_length"] = CONFIG["max_position_embeddings"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    weights = _weights()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    # `mlx_lm.server --pipeline` looks for it, for a single file too.
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    # Last, because it says that the folder is whole.
    (model / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return model


def _weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(SEED)

    def drawn(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32) * np.float32(SPREAD)

    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN)}
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}."
        for name, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = drawn(rows, HIDDEN)
            weights[f"{layer}self_attn.{name}_proj.bias"] = drawn(rows)
        weights[f"{layer}self_attn.o_proj.weight"] = drawn(HIDDEN, HIDDEN)
        weights[f"{layer}mlp.gate_proj.weight"] = drawn(INNER, HIDDEN)
        weights[f"{layer}mlp.up_proj.weight"] = drawn(INNER, HIDDEN)
        weights[f"{layer}mlp.down_proj.weight"] = drawn(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    # Any token but a plain word has logit 0, and of many random logits one is above it: greedy
    # answers never end early, and each token is a piece of text that servers send at once.
    weights["lm_head.weight"] = drawn(VOCAB, HIDDEN) * is_word()[:, None]
    return weights


def is_word() -> np.ndarray:
    """1 for each token (VOCAB,) that is a plain word, and 0 for the others."""
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    found = np.zeros(VOCAB, np.float32)
    for text, token in tokenizer["model"]["vocab"].items():
        word = text.removeprefix("Ġ")  # how byte-level tokenizers write a space
        found[token] = word.isascii() and word.isalpha() and token not in special
    return found
