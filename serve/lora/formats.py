"""An adapter in the other format: mlx-lm's as PEFT's, and PEFT's as mlx-lm's. Exact: the
numbers of the matrices stay as they are, and rank and scale say the same."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx

from serve.core.errors import AdapterError
from serve.lora.files import CONFIG_FILE, MLX_FILE, PEFT_FILE, AdapterFiles, read_adapter

_MLX_PARTS = {"a": "lora_a", "b": "lora_b", "m": "m"}
_PEFT_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "m": "lora_magnitude_vector"}
_PEFT_PARTS_OF_EMBEDDINGS = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


def convert(source: Path, target: Path) -> str:
    """Writes the adapter in the folder source to the new folder target. Returns the name of
    its new format. Raises AdapterError."""
    if target.exists():
        raise AdapterError(f"{target} is there already: give a folder that is not.", 409)
    files = read_adapter(str(source))
    config = _mlx_config(files) if files.is_peft else _peft_config(files)
    try:
        tensors = mx.load(str(files.file))
        assert isinstance(tensors, dict)
        renamed = _renamed(files, tensors)
        target.mkdir(parents=True)
        file = str(target / (MLX_FILE if files.is_peft else PEFT_FILE))
        mx.save_safetensors(file, renamed, {"format": "mlx" if files.is_peft else "pt"})
        (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"{target} cannot be written: {error}.") from error
    return "mlx-lm" if files.is_peft else "PEFT"


def _renamed(files: AdapterFiles, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Under their new names, and transposed."""
    renamed = {}
    for module, target in files.targets.items():
        for part, name in target.parts.items():
            array = tensors[name]
            if array.ndim > 2:
                raise AdapterError(f"{name} is for experts, which PEFT's format does not know.")
            new = mx.contiguous(array.T) if part in "ab" else array
            renamed[_new_name(files, module, part)] = new
    return renamed


def _new_name(files: AdapterFiles, module: str, part: str) -> str:
    if files.is_peft:
        return f"{module}.{_MLX_PARTS[part]}"
    # In mlx-lm's format only the name tells.
    is_embedding = "embed" in module.rpartition(".")[2] or module.endswith("wte")
    parts = _PEFT_PARTS_OF_EMBEDDINGS if is_embedding else _PEFT_PARTS
    return f"base_model.model.{module}.{parts[part]}"


def _mlx_config(files: AdapterFiles) -> dict[str, Any]:
    """mlx-lm knows one rank and scale, and takes full names as keys."""
    (first, *others) = files.targets.items()
    for name, target in others:
        if (target.rank, target.scale) != (first[1].rank, first[1].scale):
            raise AdapterError(
                f"{name} has another rank or scale than {first[0]}: mlx-lm's format has one."
            )
    return {
        "fine_tune_type": "dora" if files.is_dora else "lora",
        "model": files.config.get("base_model_name_or_path"),
        "num_layers": -1,
        "lora_parameters": {
            "rank": first[1].rank,
            "scale": first[1].scale,
            "dropout": files.config.get("lora_dropout", 0.0),
            "keys": sorted(files.targets),
        },
    }


def _peft_config(files: AdapterFiles) -> dict[str, Any]:
    target = next(iter(files.targets.values()))
    alpha, is_stabilised = _alpha(target.rank, target.scale)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": files.config.get("model"),
        "r": target.rank,
        "lora_alpha": alpha,
        "lora_dropout": files.config["lora_parameters"].get("dropout", 0.0),
        "use_dora": files.is_dora,
        "use_rslora": is_stabilised,
        "bias": "none",
        "target_modules": sorted(files.targets),
        "inference_mode": True,
    }


def _alpha(rank: int, scale: float) -> tuple[float, bool]:
    """The lora_alpha that gives exactly this scale when it is divided by the rank or, if there
    is none, by its root; and whether that is so."""
    for divisor, is_stabilised in ((rank, False), (math.sqrt(rank), True)):
        near = divisor * scale
        for alpha in (near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf)):
            if alpha / divisor == scale:
                return int(alpha) if alpha.is_integer() else alpha, is_stabilised
    raise AdapterError(f"No lora_alpha gives the scale {scale} at rank {rank} in PEFT's format.")
