"""A model that costs what a real one of its size does, and answers with words without end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TOKENIZER = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny-chat"
SEED = 0
SPREAD = 0.02  # standard deviation of the weights
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    # One of the few that `mlx_lm.server --pipeline` can split.
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 16,
    "intermediate_size": 2752,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_model(folder: Path) -> Path:
    """A folder with 150 M random float32 weights; made once."""
    return save_model(folder / f"random-150m-{SEED}", CONFIG, _weights)


def make_window_model(folder: Path) -> Path:
    """The same model, without biases, in which three of four layers look back 512 tokens."""
    config = {
        **CONFIG,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "layer_types": _three_of_four("sliding_attention"),
        "sliding_window": 512,
    }

    def weights() -> dict[str, np.ndarray]:
        return {name: array for name, array in _weights().items() if not name.endswith(".bias")}

    return save_model(folder / f"random-150m-windows-{SEED}", config, weights)


def make_state_model(folder: Path) -> Path:
    """A model of the same size in which three of four layers are convolutions with a state."""
    config = {
        **CONFIG,
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": _three_of_four("conv"),
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": CONFIG["hidden_size"],
        "block_ff_dim": CONFIG["intermediate_size"],
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    }
    del config["rms_norm_eps"]
    return save_model(folder / f"random-150m-states-{SEED}", config, _state_weights)


def _three_of_four(kind: str) -> list[str]:
    """The types of the 16 layers: each fourth one has full attention."""
    return [kind, kind, kind, "full_attention"] * 4


def save_model(
    model: Path, config: dict[str, object], make_weights: Callable[[], dict[str, np.ndarray]]
) -> Path:
    """Writes a model's folder with the tokenizer of tiny-chat, unless it is there."""
    if (model / "config.json").exists():
        return model
    model.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, model / name)
    tokenizer = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    tokenizer["model_max_length"] = CONFIG["max_position_embeddings"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    weights = make_weights()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    # `mlx_lm.server --pipeline` looks for it, for a single file too.
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    # Last, because it says that the folder is whole.
    (model / "config.json").write_text(json.dumps(config, indent=2))
    return model


def _weights() -> dict[str, np.ndarray]:
    drawn = _drawer()
    hidden, inner, vocab = _sizes()
    heads = 2 * hidden // 14  # keys and values of the two key-value heads
    weights = {"model.embed_tokens.weight": drawn(vocab, hidden)}
    for i in range(16):
        layer = f"model.layers.{i}."
        for name, rows in (("q", hidden), ("k", heads), ("v", heads)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = drawn(rows, hidden)
            weights[f"{layer}self_attn.{name}_proj.bias"] = drawn(rows)
        weights[f"{layer}self_attn.o_proj.weight"] = drawn(hidden, hidden)
        weights[f"{layer}mlp.gate_proj.weight"] = drawn(inner, hidden)
        weights[f"{layer}mlp.up_proj.weight"] = drawn(inner, hidden)
        weights[f"{layer}mlp.down_proj.weight"] = drawn(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = np.ones(hidden, np.float32)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    # Any token but a plain word has logit 0, and of many random logits one is above it: greedy
    # answers never end early, and each token is a piece of text that servers send at once.
    weights["lm_head.weight"] = drawn(vocab, hidden) * _is_word(vocab)[:, None]
    return weights


def _state_weights() -> dict[str, np.ndarray]:
    drawn = _drawer()
    hidden, inner, vocab = _sizes()
    heads = 2 * hidden // 14
    # The head is the embedding: what is no word has logit 0, as above.
    weights = {"model.embed_tokens.weight": drawn(vocab, hidden) * _is_word(vocab)[:, None]}
    for i in range(16):
        layer = f"model.layers.{i}."
        if i % 4 == 3:
            for name, rows in (("q_proj", hidden), ("k_proj", heads), ("v_proj", heads)):
                weights[f"{layer}self_attn.{name}.weight"] = drawn(rows, hidden)
            weights[f"{layer}self_attn.out_proj.weight"] = drawn(hidden, hidden)
            for name in ("q_layernorm", "k_layernorm"):
                weights[f"{layer}self_attn.{name}.weight"] = np.ones(hidden // 14, np.float32)
        else:
            weights[f"{layer}conv.in_proj.weight"] = drawn(3 * hidden, hidden)
            weights[f"{layer}conv.conv.weight"] = drawn(hidden, 3, 1)
            weights[f"{layer}conv.out_proj.weight"] = drawn(hidden, hidden)
        for name, shape in (
            ("w1", (inner, hidden)),
            ("w2", (hidden, inner)),
            ("w3", (inner, hidden)),
        ):
            weights[f"{layer}feed_forward.{name}.weight"] = drawn(*shape)
        for name in ("operator_norm", "ffn_norm"):
            weights[f"{layer}{name}.weight"] = np.ones(hidden, np.float32)
    weights["model.embedding_norm.weight"] = np.ones(hidden, np.float32)
    return weights


def _drawer() -> Callable[..., np.ndarray]:
    """A function that draws an array of a shape, the same arrays in the same order each time."""
    random = np.random.default_rng(SEED)
    return lambda *shape: random.standard_normal(shape, np.float32) * np.float32(SPREAD)


def _sizes() -> tuple[int, int, int]:
    """The hidden size, the inner size and the number of tokens in the vocabulary."""
    names = ("hidden_size", "intermediate_size", "vocab_size")
    hidden, inner, vocab = (int(CONFIG[name]) for name in names)  # type: ignore[call-overload]
    return hidden, inner, vocab


def _is_word(vocab: int) -> np.ndarray:
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    found = np.zeros(vocab, np.float32)
    for text, token in tokenizer["model"]["vocab"].items():
        word = text.removeprefix("Ġ")  # how byte-level tokenizers write a space
        found[token] = word.isascii() and word.isalpha() and token not in special
    return found
