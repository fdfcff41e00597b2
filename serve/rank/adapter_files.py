"""What an adapter's folder says about itself, in mlx-lm's format or in PEFT's.

Reads no weights and needs no MLX: ranks, scales and places come from adapter_config.json and
from the header of a safetensors file. Whether they fit the model only its stages know.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.core.checkpoint import TensorRange, read_header, read_json, refuse_pickles
from serve.core.errors import AdapterError, ModelError

CONFIG_FILE = "adapter_config.json"
MLX_FILE, PEFT_FILE = "adapters.safetensors", "adapter_model.safetensors"
_MLX_NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_PEFT_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|"
    r"magnitude_vector)(\.weight)?"
)
_PARTS = {"lora_a": "a", "A": "a", "embedding_A": "a", "lora_b": "b", "B": "b"}
_PARTS |= {"embedding_B": "b", "m": "m", "magnitude_vector": "m"}
_DTYPES = ("F32", "F16", "BF16")
# Of PEFT: what would change the answers and is not computed here.
_PEFT_REFUSED = (
    *("modules_to_save", "layer_replication", "trainable_token_indices", "lora_bias"),
    *("target_parameters", "use_qalora", "alora_invocation_tokens", "arrow_config"),
)
_CHANGED_BASE = re.compile(r"pissa|olora|corda|loftq|eva_base|lora_ga", re.IGNORECASE)

# Whether a module ought to have an adapter: its full name, the number of its layer and its name
# in it (None and "" outside of layers), and how many layers the model has.
Expects = Callable[[str, int | None, str, int], bool]


@dataclass(frozen=True, slots=True)
class Target:
    """Matrices for one module: parts tells the names in the file of "a" and "b", with DoRA
    of the magnitudes "m"."""

    rank: int
    scale: float
    parts: dict[str, str]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """In PEFT's format a is (rank, in) and b (out, rank), in mlx-lm's (in, rank) and
    (rank, out). digest is equal on two hosts if config and header are."""

    folder: Path
    file: Path
    config: dict[str, Any]
    is_peft: bool
    is_dora: bool
    targets: dict[str, Target]
    tensors: dict[str, TensorRange]
    expects: Expects
    digest: str

    @property
    def rank(self) -> int:
        return max(target.rank for target in self.targets.values())


def read_adapter(path: str, root: str | None = None) -> AdapterFiles:
    """The folder at path, which with a root must lie below it, links resolved. Raises
    AdapterError."""
    folder = _resolve(Path(root or ".") / path, path, root)
    try:
        config = read_json(_resolve(folder / CONFIG_FILE, path, root))
        is_peft = "peft_type" in config
        file = folder / (PEFT_FILE if is_peft else MLX_FILE)
        if not file.exists():
            refuse_pickles(path, (entry.name for entry in folder.iterdir()))
        tensors = read_header(_resolve(file, path, root))
    except ModelError as error:
        raise AdapterError(str(error)) from error
    settings = _peft(config) if is_peft else _mlx(config)
    targets = _targets(tensors, _PEFT_NAME if is_peft else _MLX_NAME, settings)
    described = repr((sorted(config.items()), sorted((n, *t[1:]) for n, t in tensors.items())))
    return AdapterFiles(
        folder=folder,
        file=file,
        config=config,
        is_peft=is_peft,
        is_dora=settings.is_dora,
        targets=targets,
        tensors=tensors,
        expects=settings.expects,
        digest=hashlib.sha256(described.encode()).hexdigest()[:16],
    )


def _resolve(path: Path, given: str, root: str | None) -> Path:
    try:
        resolved = path.resolve()
        inside = root is None or resolved.is_relative_to(Path(root).resolve())
        exists = resolved.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links
        raise AdapterError(f"{given!r} is no path: {error}.") from error
    if not inside:
        raise AdapterError(f"{given} is not below --adapter-root.", 403)
    if not exists:
        raise AdapterError(f"No adapter found for {given}: there is no {resolved.name}.", 404)
    return resolved


@dataclass(frozen=True, slots=True)
class _Settings:
    is_dora: bool
    rank_and_scale: Callable[[str], tuple[int, float]]
    expects: Expects


def _targets(
    tensors: dict[str, TensorRange], pattern: re.Pattern[str], settings: _Settings
) -> dict[str, Target]:
    parts: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        part = _PARTS[match["part"]] if match else ""
        if not match or (part == "m" and not settings.is_dora):
            raise AdapterError(f"{name} is no tensor of such an adapter.")
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{name} is {tensor.dtype}, not one of {', '.join(_DTYPES)}.")
        if part in parts.setdefault(match["module"], {}):
            raise AdapterError(f"{name} is there twice, under two names.")
        parts[match["module"]][part] = name
    if not parts:
        raise AdapterError("The adapter has no tensors.")
    wanted = {"a", "b", "m"} if settings.is_dora else {"a", "b"}
    for module, found in parts.items():
        if missing := wanted - found.keys():
            raise AdapterError(f"{module} has no matrix {min(missing)!r}: the file is not whole.")
    return {name: Target(*settings.rank_and_scale(name), found) for name, found in parts.items()}


# --- what adapter_config.json says


def _mlx(config: dict[str, Any]) -> _Settings:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise AdapterError(f"fine_tune_type is {kind!r}: an adapter is lora or dora.")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{CONFIG_FILE} has no lora_parameters.")
    rank, scale = _rank(parameters.get("rank")), _number("scale", parameters.get("scale"))
    keys = parameters.get("keys")
    if keys is not None and not _is_strings(keys):
        raise AdapterError(f"keys in {CONFIG_FILE} must be a list of names.")
    num_layers = config.get("num_layers")
    if type(num_layers) is not int:
        raise AdapterError(f"{CONFIG_FILE} does not say num_layers.")

    def expects(name: str, layer: int | None, inside: str, total: int) -> bool:
        if layer is None:
            return name in (keys or ())
        is_adapted = num_layers <= 0 or layer >= total - num_layers  # the last ones
        return (is_adapted and (keys is None or inside in keys)) or name in (keys or ())

    return _Settings(kind == "dora", lambda _: (rank, scale), expects)


def _peft(config: dict[str, Any]) -> _Settings:
    if config["peft_type"] != "LORA":
        raise AdapterError(f"peft_type is {config['peft_type']!r}: only LORA is supported.")
    for name in _PEFT_REFUSED:
        if config.get(name):
            raise AdapterError(f"{name} in {CONFIG_FILE} is not supported.")
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"bias is {config['bias']!r} in {CONFIG_FILE}: only 'none' is supported."
        )
    if _CHANGED_BASE.search(str(config.get("init_lora_weights", ""))):
        raise AdapterError(
            f"The adapter belongs to changed weights ({config['init_lora_weights']}): save it with "
            "path_initial_model_for_weight_conversion."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    ranks, alphas = (_pattern(config, name) for name in ("rank_pattern", "alpha_pattern"))
    is_stabilised = bool(config.get("use_rslora"))

    def rank_and_scale(name: str) -> tuple[int, float]:
        own = _rank(_by_pattern(ranks, name, rank))
        divisor = math.sqrt(own) if is_stabilised else own
        return own, _number("lora_alpha", _by_pattern(alphas, name, alpha)) / divisor

    wanted, left_out = config.get("target_modules"), config.get("exclude_modules")
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers

    def expects(name: str, layer: int | None, _: str, __: int) -> bool:
        is_layer = layers is None or layer in layers
        return is_layer and _is_named(name, wanted) and not _is_named(name, left_out)

    return _Settings(bool(config.get("use_dora")), rank_and_scale, expects)


def _is_named(name: str, wanted: Any) -> bool:
    """As PEFT reads target_modules: the ends of names, or one regular expression."""
    if isinstance(wanted, str):
        return wanted != "all-linear" and _matches(wanted, name)
    return _is_strings(wanted) and any(name == w or name.endswith(f".{w}") for w in wanted)


def _pattern(config: dict[str, Any], name: str) -> dict[str, Any]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise AdapterError(f"{name} in {CONFIG_FILE} is not an object.")
    return pattern


def _by_pattern(patterns: dict[str, Any], name: str, otherwise: Any) -> Any:
    found = (value for key, value in patterns.items() if _matches(rf"(.*\.)?({key})", name))
    return next(found, otherwise)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise AdapterError(f"{pattern!r} in {CONFIG_FILE} is no regular expression.") from error


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"The rank in {CONFIG_FILE} is {value!r}, not a number above 0.")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise AdapterError(f"{name} in {CONFIG_FILE} is {value!r}, not a number.")
    return float(value)
