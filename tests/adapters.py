"""Random adapters for tests, written by mlx-lm's own layers, and the same in PEFT's format."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers

KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


def save_adapter(
    folder: Path,
    model: nn.Module,
    seed: int = 0,
    *,
    rank: int = 4,
    scale: float = 1.7,
    keys: list[str] | None = KEYS,
    num_layers: int = -1,
    dora: bool = False,
    size: float = 0.2,
) -> Path:
    """In mlx-lm's format. model becomes the adapted one."""
    settings = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, num_layers, settings, use_dora=dora)
    mx.random.seed(seed)

    def changed(name: str, array: mx.array) -> mx.array:
        leaf = name.rpartition(".")[2]
        if leaf in ("lora_a", "lora_b"):
            return mx.random.normal(array.shape) * size
        return array * mx.random.uniform(0.5, 1.5, array.shape) if leaf == "m" else array

    model.update(tree_map_with_path(changed, model.parameters()))
    leaves = ("lora_a", "lora_b", "m")
    tensors = {
        name: array
        for name, array in tree_flatten(model.parameters())
        if name.rpartition(".")[2] in leaves
    }
    config = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": num_layers,
        "lora_parameters": settings,
    }
    return write(folder, "adapters.safetensors", tensors, config)


def write(folder: Path, file: str, tensors: dict[str, mx.array], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / file), tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    (file,) = folder.glob("*.safetensors")
    tensors = mx.load(str(file))
    mx.eval(tensors)
    return tensors, json.loads((folder / "adapter_config.json").read_text())


def as_peft(source: Path, folder: Path, **more: Any) -> Path:
    """What PEFT would save of the same adapter; more are fields of its config."""
    tensors, config = read(source)
    rank, scale = (config["lora_parameters"][name] for name in ("rank", "scale"))
    renamed = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
    peft = {}
    for name, array in tensors.items():
        module, _, leaf = name.rpartition(".")
        key = renamed[leaf]
        if "embed" in module:
            key = key.removesuffix(".weight").replace("lora_", "lora_embedding_")
        peft[f"base_model.model.{module}.{key}"] = array if leaf == "m" else mx.contiguous(array.T)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": scale * rank,
        "use_dora": config["fine_tune_type"] == "dora",
        "target_modules": [key.rpartition(".")[2] for key in config["lora_parameters"]["keys"]],
        "bias": "none",
    }
    return write(folder, "adapter_model.safetensors", peft, {**settings, **more})
