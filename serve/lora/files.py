"""Reads and checks the description of an adapter in its folder, in mlx-lm's format or PEFT's.

This reads no weights and needs no MLX: ranks, scales and modules come from adapter_config.json and
from the header of a safetensors file. The stages check whether they fit the model.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import regex

from serve.core.checkpoint import (
    TensorRange,
    read_header,
    read_header_from,
    read_json_from,
    refuse_pickles,
)
from serve.core.errors import AdapterError, ModelError

CONFIG_FILE = "adapter_config.json"
MLX_FILE = "adapters.safetensors"
PEFT_FILE = "adapter_model.safetensors"
_MLX_NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_PEFT_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|"
    r"magnitude_vector)(\.weight)?"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d{1,6})(?=\.)")
_PARTS = {
    "lora_a": "a",
    "A": "a",
    "embedding_A": "a",
    "lora_b": "b",
    "B": "b",
}
_PARTS |= {"embedding_B": "b", "m": "m", "magnitude_vector": "m"}
_DTYPES = ("F32", "F16", "BF16")
_MAX_RANK = 1 << 16
_MAX_NUMBER = 1e9
_MATCH_SECONDS = 0.1
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 256
# Fields of PEFT's LoraConfig that are read below.
_PEFT_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "init_lora_weights",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
}
# Fields about the origin or the training of an adapter, which do not affect answers.
_PEFT_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",  # The adapter's own matrices are stored in the same way.
    "inference_mode",
    "layers_pattern",  # The model itself defines its layers.
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "merge_weights",
    "peft_version",
    "qalora_group_size",  # Only use_qalora, which is refused, uses this field.
    "revision",
    "runtime_config",
    "task_type",
}
# Any other field may change the answers: unless it is empty, an error names it.
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
_PEFT_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Files of older versions contain alpha, which mlx_lm does not read either.
_MLX_LORA_FIELDS = {"rank", "scale", "dropout", "keys", "alpha"}

# Whether the config promises an adapter for a module. Arguments: the module's full name, its
# layer's number, its name in the layer (None and "" outside of layers), and the number of layers.
Expects = Callable[[str, int | None, str, int], bool]


@dataclass(frozen=True, slots=True)
class TargetModule:
    """An adapted module: parts are the names of tensors "a", "b" and, with DoRA, "m"."""

    rank: int
    scale: float
    parts: dict[str, str]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The checked config and tensors of an adapter on disk. a is (rank, in) and b (out, rank) in
    PEFT's format, (in, rank) and (rank, out) in mlx-lm's. digest covers config and samples of the
    weights, which is enough because training changes all of them. stamp changes with the file."""

    folder: Path
    file: Path
    config: dict[str, Any]
    is_peft: bool
    is_dora: bool
    targets: dict[str, TargetModule]
    tensors: dict[str, TensorRange]
    expects: Expects
    digest: str
    stamp: tuple[int, ...] | None  # None while the rest of the file has to be fetched

    @property
    def rank(self) -> int:
        return max(target.rank for target in self.targets.values())

    @property
    def num_layers(self) -> int:
        """The smallest number of layers that its model can have, judging by the tensors' names."""
        matches = [_LAYER.search(name) for name in self.targets]
        numbers = [int(match[1]) for match in matches if match]
        last_layer = max(numbers, default=-1)
        return last_layer + 1


def read_adapter(
    path: str,
    root: str | None = None,
    *,
    is_whole: bool = True,
) -> AdapterFiles:
    """Reads the adapter in the folder at path, below root if one is given. is_whole is False for a
    file of which only one rank's tensors are fetched. Raises AdapterError."""
    given = Path(root or ".") / path
    folder = _resolve(given, path, root)
    stamp = None
    samples = b""
    try:
        with _open(folder / CONFIG_FILE, path, root) as stream:
            config = read_json_from(stream, folder / CONFIG_FILE)
        is_peft = "peft_type" in config
        file = folder / (PEFT_FILE if is_peft else MLX_FILE)
        if not file.exists():
            names = (entry.name for entry in folder.iterdir())
            refuse_pickles(path, names)
        if is_whole:
            with _open(file, path, root) as stream:
                tensors = read_header_from(stream, file)
                stamp = _stamp(os.fstat(stream.fileno()))
                samples = _samples(stream)
        else:
            tensors = read_header(file)
    except ModelError as error:
        raise AdapterError(str(error), code=error.code) from error
    except OSError as error:
        raise AdapterError(str(error), code="unreadable") from error
    if is_peft:
        settings = _peft(config)
        pattern = _PEFT_NAME
    else:
        settings = _mlx(config)
        pattern = _MLX_NAME
    targets = _targets(tensors, pattern, settings)
    digest = _digest(config, tensors, samples)
    return AdapterFiles(
        folder=folder,
        file=file,
        config=config,
        is_peft=is_peft,
        is_dora=settings.is_dora,
        targets=targets,
        tensors=tensors,
        expects=settings.expects,
        digest=digest,
        stamp=stamp,
    )


def _digest(
    config: dict[str, Any],
    tensors: dict[str, TensorRange],
    samples: bytes,
) -> str:
    header: list[tuple[Any, ...]] = []
    for name, tensor in sorted(tensors.items()):
        _, *described = tensor  # all fields but the path, which differs between hosts
        header.append((name, *described))
    fields = sorted(config.items())
    text = repr((fields, header, samples))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return digest[:16]


def _samples(stream: BinaryIO) -> bytes:
    """Returns some bytes from all parts of a file."""
    size = stream.seek(0, os.SEEK_END)
    parts: list[bytes] = []
    for n in range(_NUM_SAMPLES):
        start = size * n // _NUM_SAMPLES
        stream.seek(start)
        sample = stream.read(_SAMPLE_BYTES)
        parts.append(sample)
    return b"".join(parts)


def file_stamp(file: Path) -> tuple[int, ...]:
    """Identifies the content of a file: it changes when the file is written or replaced."""
    return _stamp(file.stat())


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _open(path: Path, given: str, root: str | None) -> BinaryIO:
    """Opens a regular file: a pipe, for example, could block. No link is followed, because anyone
    who can write below the root could make one at any moment. Raises AdapterError."""
    resolved = _resolve(path, given, root)
    if not resolved.is_file():
        raise AdapterError(f"{path.name} of {given} is not a file.", code="not_a_file")
    folder = os.open(resolved.anchor, os.O_RDONLY)
    try:
        for part in resolved.parts[1:-1]:
            parent = folder
            folder = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=parent)
            os.close(parent)
        # Without O_NONBLOCK, a pipe put there meanwhile would block this call.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.fdopen(os.open(resolved.name, flags, dir_fd=folder), "rb")
    finally:
        os.close(folder)


def _resolve(path: Path, given: str, root: str | None) -> Path:
    try:
        resolved = path.resolve()
        inside = True
        if root is not None:
            inside = resolved.is_relative_to(Path(root).resolve())
        exists = resolved.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a null byte, or a loop
        raise AdapterError(f"{given!r} is not a path: {error}.", code="malformed") from error
    if not inside:
        raise AdapterError(f"{given} is not below --adapter-root.", 403, code="not_allowed")
    if not exists:
        where = "below --adapter-root" if root else "on this host"
        if path == Path(root or ".") / given:
            missing = f"there is no such folder {where}"
        else:
            missing = f"its folder has no {path.name}"
        raise AdapterError(
            f"No adapter found for {given}: {missing}.", 404, code="adapter_not_found"
        )
    return resolved


@dataclass(frozen=True, slots=True)
class _Settings:
    is_dora: bool
    rank_and_scale: Callable[[str], tuple[int, float]]
    expects: Expects


def _targets(
    tensors: dict[str, TensorRange],
    pattern: re.Pattern[str],
    settings: _Settings,
) -> dict[str, TargetModule]:
    wanted = {"a", "b"}
    if settings.is_dora:
        wanted.add("m")
    parts: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        part = _PARTS[match["part"]] if match else None
        if not match or part not in wanted:
            raise AdapterError(
                f"{name[:300]} is not a tensor of a LoRA adapter.", code="wrong_tensor"
            )
        if tensor.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise AdapterError(
                f"{name} is {tensor.dtype}, not one of {known}.", code="wrong_tensor"
            )
        if part in parts.setdefault(match["module"], {}):
            raise AdapterError(f"{name} occurs twice, under two names.", code="wrong_tensor")
        parts[match["module"]][part] = name
    if not parts:
        raise AdapterError("The adapter has no tensors.", code="missing_tensor")
    targets: dict[str, TargetModule] = {}
    for module, found in parts.items():
        missing = wanted - found.keys()
        if missing:
            raise AdapterError(
                f"{module} has no matrix {min(missing)!r}: the file is incomplete.",
                code="missing_tensor",
            )
    for module, found in parts.items():
        rank, scale = settings.rank_and_scale(module)
        targets[module] = TargetModule(rank, scale, found)
    return targets


# --- adapter_config.json


def _mlx(config: dict[str, Any]) -> _Settings:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise AdapterError(
            f"fine_tune_type is {kind!r}: an adapter is lora or dora.", code="unsupported_setting"
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{CONFIG_FILE} has no lora_parameters.", code="missing_setting")
    _check_known(parameters, _MLX_LORA_FIELDS, f"lora_parameters in {CONFIG_FILE}")
    rank = _rank(parameters.get("rank"))
    scale = _number("scale", parameters.get("scale"))
    keys = parameters.get("keys")
    if keys is not None and not _is_all(keys, str):
        raise AdapterError(f"keys in {CONFIG_FILE} must be a list of names.", code="wrong_setting")
    num_layers = config.get("num_layers")
    if type(num_layers) is not int:
        raise AdapterError(f"{CONFIG_FILE} has no num_layers.", code="missing_setting")

    def expects(name: str, layer: int | None, inside: str, total: int) -> bool:
        if keys and name in keys:
            return True
        if layer is None:
            return False
        first_adapted = total - num_layers if num_layers > 0 else 0
        is_adapted_layer = layer >= first_adapted
        return is_adapted_layer and (keys is None or inside in keys)

    return _Settings(kind == "dora", lambda _: (rank, scale), expects)


def _peft(config: dict[str, Any]) -> _Settings:
    if config["peft_type"] != "LORA":
        raise AdapterError(
            f"peft_type is {config['peft_type']!r}: only LORA is supported.",
            code="unsupported_setting",
        )
    _check_known(config, _PEFT_READ | _PEFT_HARMLESS, CONFIG_FILE)
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"bias is {config['bias']!r} in {CONFIG_FILE}: only 'none' is supported.",
            code="unsupported_setting",
        )
    initial = config.get("init_lora_weights")
    if initial not in _PEFT_INITS:
        raise AdapterError(
            f"init_lora_weights is {_short(initial)} in {CONFIG_FILE}: such an adapter may "
            "belong to changed weights of the model: save it with "
            "path_initial_model_for_weight_conversion.",
            code="unsupported_setting",
        )
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    ranks = _pattern(config, "rank_pattern")
    alphas = _pattern(config, "alpha_pattern")
    is_stabilised = bool(config.get("use_rslora"))

    def rank_and_scale(name: str) -> tuple[int, float]:
        configured_rank = _by_pattern(ranks, name, rank)
        configured_alpha = _by_pattern(alphas, name, alpha)
        own_rank = _rank(configured_rank)
        own_alpha = _number("lora_alpha", configured_alpha)
        divisor = math.sqrt(own_rank) if is_stabilised else own_rank
        return own_rank, own_alpha / divisor

    wanted = config.get("target_modules")
    left_out = config.get("exclude_modules")
    layers = config.get("layers_to_transform")
    if type(layers) is int:
        layers = [layers]
    if layers is not None and not _is_all(layers, int):
        raise AdapterError(
            f"layers_to_transform in {CONFIG_FILE} must be a list of numbers.", code="wrong_setting"
        )

    def expects(name: str, layer: int | None, _: str, __: int) -> bool:
        if layers is not None and layer not in layers:
            return False
        return _is_named(name, wanted) and not _is_named(name, left_out)

    return _Settings(bool(config.get("use_dora")), rank_and_scale, expects)


def _check_known(config: dict[str, Any], known: set[str], place: str) -> None:
    """Raises AdapterError for an unknown field, unless it is empty."""
    for name in sorted(config.keys() - known):
        if config[name] not in _EMPTY:
            raise AdapterError(
                f"{name[:100]} in {place} is {_short(config[name])}: this is not supported, and "
                "could change what the model answers.",
                code="unsupported_setting",
            )


def _is_named(name: str, wanted: Any) -> bool:
    """Whether target_modules matches a module: by the ends of names, or as a regular expression."""
    if isinstance(wanted, str):
        return wanted != "all-linear" and _matches(wanted, name)
    if not _is_all(wanted, str):
        return False
    return name in wanted or any(name.endswith(f".{end}") for end in wanted)


def _pattern(config: dict[str, Any], name: str) -> dict[str, Any]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise AdapterError(f"{name} in {CONFIG_FILE} is not an object.", code="wrong_setting")
    return pattern


def _by_pattern(patterns: dict[str, Any], name: str, otherwise: Any) -> Any:
    for key, value in patterns.items():
        pattern = rf"(.*\.)?({key})"
        if _matches(pattern, name):
            return value
    return otherwise


def _matches(pattern: str, name: str) -> bool:
    """Matches a regular expression with a time limit, because some run forever."""
    try:
        return regex.fullmatch(pattern, name, timeout=_MATCH_SECONDS) is not None
    except (regex.error, OverflowError, RecursionError, TimeoutError) as error:
        raise AdapterError(
            f"{pattern[:100]!r} in {CONFIG_FILE} is not a regular expression, or takes too long "
            "to match.",
            code="wrong_setting",
        ) from error


def _is_all(value: Any, kind: type) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(item) is kind for item in value)


def _rank(value: Any) -> int:
    if type(value) is not int or not 0 < value <= _MAX_RANK:
        raise AdapterError(
            f"The rank in {CONFIG_FILE} is {_short(value)}, not a number from 1 to {_MAX_RANK}.",
            code="wrong_setting",
        )
    return value


def _number(name: str, value: Any) -> float:
    is_number = type(value) in (int, float)
    # math.isfinite fails for very large integers.
    is_usable = is_number and abs(value) < _MAX_NUMBER
    if not is_usable:
        raise AdapterError(
            f"{name} in {CONFIG_FILE} is {_short(value)}, not a usable number.",
            code="wrong_setting",
        )
    return float(value)


def _short(value: Any) -> str:
    if type(value) is int and abs(value) > _MAX_NUMBER:
        return "too large"
    text = repr(value)
    return text[:100]
