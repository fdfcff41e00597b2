"""Converts an adapter between mlx-lm's format and PEFT's.

The conversion is exact: the values of the matrices do not change, nor do rank and scale.
"""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx

from serve.core.errors import AdapterError
from serve.lora.files import CONFIG_FILE, MLX_FILE, PEFT_FILE, AdapterFiles, read_adapter

_MLX_PARTS = {"a": "lora_a", "b": "lora_b", "m": "m"}
_PEFT_PARTS = {
    "a": "lora_A.weight",
    "b": "lora_B.weight",
    "m": "lora_magnitude_vector",
}
_PEFT_PARTS_OF_EMBEDDINGS = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


def convert(source: Path, target: Path) -> str:
    """Converts an adapter into a new folder. Returns the new format. Raises AdapterError."""
    if target.exists():
        raise AdapterError(
            f"{target} exists already: give the name of a new folder.", 409, code="file_exists"
        )
    files = read_adapter(str(source))
    if files.is_peft:
        config = _mlx_config(files)
        file_name = MLX_FILE
        file_format = "mlx"
        format_name = "mlx-lm"
    else:
        config = _peft_config(files)
        file_name = PEFT_FILE
        file_format = "pt"
        format_name = "PEFT"
    try:
        tensors = mx.load(str(files.file))
        assert isinstance(tensors, dict)
        converted = _converted(files, tensors)
        target.mkdir(parents=True)
        mx.save_safetensors(str(target / file_name), converted, {"format": file_format})
        text = json.dumps(config, indent=2)
        (target / CONFIG_FILE).write_text(f"{text}\n")
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"{target} cannot be written: {error}.", code="unwritable") from error
    return format_name


def _converted(files: AdapterFiles, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns the tensors, transposed and renamed for the other format."""
    converted = {}
    for module, target in files.targets.items():
        for part, name in target.parts.items():
            array = tensors[name]
            if array.ndim > 2:
                raise AdapterError(
                    f"{name} is for experts, which PEFT's format does not support.",
                    code="not_convertible",
                )
            is_matrix = part in ("a", "b")
            name_in_target = _new_name(files, module, part)
            if is_matrix:
                converted[name_in_target] = mx.contiguous(array.T)
            else:
                converted[name_in_target] = array
    return converted


def _new_name(files: AdapterFiles, module: str, part: str) -> str:
    if files.is_peft:
        return f"{module}.{_MLX_PARTS[part]}"
    # In mlx-lm's format only the module's name says whether it is an embedding.
    _, _, last_name = module.rpartition(".")
    is_embedding = "embed" in last_name or last_name.endswith("wte")
    parts = _PEFT_PARTS_OF_EMBEDDINGS if is_embedding else _PEFT_PARTS
    return f"base_model.model.{module}.{parts[part]}"


def _mlx_config(files: AdapterFiles) -> dict[str, Any]:
    """Returns mlx-lm's config, whose keys are full names. Raises AdapterError if modules differ in
    rank or scale, because mlx-lm's config contains one of each."""
    (first_name, first), *others = files.targets.items()
    for name, target in others:
        is_same = target.rank == first.rank and target.scale == first.scale
        if not is_same:
            raise AdapterError(
                f"{name} has another rank or scale than {first_name}: mlx-lm's format "
                "allows only one.",
                code="not_convertible",
            )
    base_model = files.config.get("base_model_name_or_path")
    dropout = files.config.get("lora_dropout", 0.0)
    return {
        "fine_tune_type": "dora" if files.is_dora else "lora",
        "model": base_model,
        "num_layers": -1,
        "lora_parameters": {
            "rank": first.rank,
            "scale": first.scale,
            "dropout": dropout,
            "keys": sorted(files.targets),
        },
    }


def _peft_config(files: AdapterFiles) -> dict[str, Any]:
    target = next(iter(files.targets.values()))
    alpha, is_rank_stabilised = _alpha(target.rank, target.scale)
    dropout = files.config["lora_parameters"].get("dropout", 0.0)
    base_model = files.config.get("model")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": target.rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_dora": files.is_dora,
        "use_rslora": is_rank_stabilised,
        "bias": "none",
        "target_modules": sorted(files.targets),
        "inference_mode": True,
    }


def _alpha(rank: int, scale: float) -> tuple[float, bool]:
    """Returns the lora_alpha that means exactly this scale, and whether the adapter is
    rank-stabilised: then PEFT divides lora_alpha by the root of the rank, else by the rank."""
    alpha = _dividend(rank, scale)
    if alpha is not None:
        return alpha, False
    alpha = _dividend(math.sqrt(rank), scale)
    if alpha is not None:
        return alpha, True
    raise AdapterError(
        f"No lora_alpha gives the scale {scale} at rank {rank} in PEFT's format.",
        code="not_convertible",
    )


def _dividend(divisor: float, quotient: float) -> float | None:
    """Returns a number, if possible an integer, for which number / divisor == quotient."""
    product = divisor * quotient
    above = math.nextafter(product, math.inf)
    below = math.nextafter(product, -math.inf)
    for number in (product, above, below):
        if number / divisor == quotient:
            if number.is_integer():
                return int(number)
            return number
    return None
