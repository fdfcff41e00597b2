"""Reads the description of a model folder: config.json and the headers of its safetensors files.

No weights and no MLX are needed, so a broken folder is reported in milliseconds, before any process
starts. Headers give the byte range of each tensor.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any, BinaryIO, NamedTuple

from serve.core.errors import ModelError

_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_PREFIX_BYTES = 8  # A safetensors file begins with the length of its header, as a uint64.
# The limit of one JSON text. While an engine parses an adapter's JSON, it computes nothing: 32 MB
# of numbers take two seconds. The header of a file with 100,000 tensors takes 15 MB.
MAX_JSON_BYTES = 32 << 20
_LAYER_KEYS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_MANY_LAYERS = 1000
_DTYPES_BY_BITS = {
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
    16: ("U16", "I16", "F16", "BF16"),
    32: ("U32", "I32", "F32"),
    64: ("U64", "I64", "F64", "C64"),
}
_DTYPE_BITS: dict[str, int] = {}
for _bits, _dtypes in _DTYPES_BY_BITS.items():
    _DTYPE_BITS |= dict.fromkeys(_dtypes, _bits)
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


class TensorRange(NamedTuple):
    """The place of one tensor: bytes [start, end) of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The description of a model folder. digest covers the config and the tensors' byte ranges."""

    folder: Path
    model_type: str
    num_layers: int
    max_context: int | None
    tensors: dict[str, TensorRange]
    digest: str


def not_a_folder(model: Path, flag: str = "--model") -> str:
    return (
        f"{flag} {model} is not a folder: give the path of a downloaded model, or org/name of one "
        "on the Hugging Face hub."
    )


def read_checkpoint(folder: Path, flag: str = "--model") -> Checkpoint:
    """Reads the description of a model folder. Errors name the flag that gave it. Raises ModelError
    if it is not a complete model."""
    if not is_folder(folder):
        raise ModelError(not_a_folder(folder, flag), code="no_folder")
    config_file = folder / "config.json"
    config = read_json(config_file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(
            f"{config_file} has no model_type: is this a language model?", code="missing_setting"
        )
    if config.get("model_file"):
        raise ModelError(
            f"{config_file} requires its own code ({config['model_file']}), which Brigade "
            "never runs: use a model that mlx-lm supports.",
            code="own_code",
        )
    num_layers = _first_number(config, _LAYER_KEYS)
    if num_layers is None:
        raise ModelError(f"{config_file} has no num_hidden_layers.", code="missing_setting")
    tensors: dict[str, TensorRange] = {}
    config_text = json.dumps(config, sort_keys=True)
    digest = hashlib.sha256(config_text.encode())
    for file in _weight_files(folder):
        header, file_bytes = _read_header(file)
        tensors |= parse_header(header, file, file_bytes)
        digest.update(header)
    if num_layers > max(_MANY_LAYERS, len(tensors)):
        # Building these layers would take minutes, only to find that their tensors are missing.
        raise ModelError(
            f"{config_file} says that the model has {num_layers} layers, but its files contain "
            f"only {len(tensors)} tensors: correct num_hidden_layers, or fetch the model again.",
            code="missing_tensor",
        )
    return Checkpoint(
        folder=folder,
        model_type=model_type,
        num_layers=num_layers,
        max_context=_first_number(config, _CONTEXT_KEYS),
        tensors=tensors,
        digest=digest.hexdigest()[:16],
    )


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # For example because the name is too long.
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a model's folder. Raises ModelError."""
    try:
        with path.open("rb") as stream:
            return read_json_from(stream, path)
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.absolute()} is missing: the folder is not a model's, or not complete.",
            code="missing_file",
        ) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", code="unreadable") from error


def read_json_from(stream: BinaryIO, path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, which errors call `path`. Raises ModelError and OSError."""
    text = stream.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ModelError(
            f"{path} is larger than {MAX_JSON_BYTES} bytes: fetch it again.", code="too_large"
        )
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deeply: fetch it again.") from error
    except ValueError as error:
        raise ModelError(
            f"{path} is not JSON ({error}): fetch it again.", code="wrong_format"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object: fetch it again.", code="wrong_format")
    return value


def read_header(file: Path) -> dict[str, TensorRange]:
    """Reads the places of the tensors in a safetensors file. Raises ModelError."""
    text, file_bytes = _read_header(file)
    return parse_header(text, file, file_bytes)


def read_header_from(stream: BinaryIO, file: Path) -> dict[str, TensorRange]:
    """Reads the places of the tensors from an open file, which errors call `file`. Raises
    ModelError and OSError."""
    text, file_bytes = _header_of(stream, file)
    return parse_header(text, file, file_bytes)


def _read_header(file: Path) -> tuple[bytes, int]:
    try:
        with file.open("rb") as stream:
            return _header_of(stream, file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.", code="unreadable") from error


def _header_of(stream: BinaryIO, file: Path) -> tuple[bytes, int]:
    prefix = stream.read(_PREFIX_BYTES)
    text = stream.read(header_bytes(prefix, file))
    return text, os.fstat(stream.fileno()).st_size


def header_bytes(prefix: bytes, file: Path) -> int:
    """Returns the length of a safetensors header, from the 8 bytes before it. Raises ModelError."""
    if len(prefix) != _PREFIX_BYTES:
        raise _not_safetensors(file, f"{_PREFIX_BYTES} bytes expected")
    (size,) = struct.unpack("<Q", prefix)
    if size > MAX_JSON_BYTES:
        raise _not_safetensors(file, f"a header of {size} bytes")
    return int(size)


def parse_header(
    text: bytes,
    file: Path,
    file_bytes: int,
) -> dict[str, TensorRange]:
    """Returns the tensors that the header (text) of a file of file_bytes bytes describes. Raises
    ModelError if it is not a header, or if its tensors overlap or do not fit into the file."""
    data_start = _PREFIX_BYTES + len(text)
    tensors: dict[str, TensorRange] = {}
    try:
        for name, entry in json.loads(text, object_pairs_hook=_without_duplicates).items():
            if name != "__metadata__":
                tensors[name] = _parse_entry(entry, file, data_start)
        _check_places(tensors, data_start)
    except (LookupError, TypeError, AttributeError) as error:
        raise _not_safetensors(file, "its header does not describe tensors") from error
    except RecursionError as error:
        raise _not_safetensors(file, "its header is nested too deeply") from error
    except ValueError as error:
        raise _not_safetensors(file, error) from error
    expected = max((tensor.end for tensor in tensors.values()), default=0)
    if file_bytes < expected:
        raise ModelError(
            f"{file} has {file_bytes} of {expected} bytes: fetch it again.", code="cut_short"
        )
    return tensors


def _parse_entry(entry: dict[str, Any], file: Path, data_start: int) -> TensorRange:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return TensorRange(file, entry["dtype"], shape, data_start + start, data_start + end)


def _not_safetensors(file: Path, reason: object) -> ModelError:
    return ModelError(
        f"{file} is not a safetensors file ({reason}): fetch it again.", code="wrong_format"
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object. Raises ValueError if a name occurs twice in it."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        repeated = mode(name for name, _ in pairs)
        raise ValueError(f"{repeated} occurs twice")
    return entries


def _check_places(tensors: dict[str, TensorRange], data_start: int) -> None:
    """Raises ValueError for a tensor that overlaps another one or the header, or that is not as
    long as its shape says."""
    previous_end = data_start
    in_order = sorted(tensors, key=lambda name: (tensors[name].start, tensors[name].end))
    for name in in_order:
        tensor = tensors[name]
        if tensor.start < previous_end or tensor.end < tensor.start:
            raise ValueError(f"{name} overlaps the header or another tensor")
        bits = _DTYPE_BITS.get(tensor.dtype)
        if bits and tensor.num_bytes * 8 != bits * math.prod(tensor.shape):
            raise ValueError(f"{name} has {tensor.num_bytes} bytes, which does not fit its shape")
        previous_end = tensor.end


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelError(
                f"{index} has no weight_map: fetch the model again.", code="wrong_format"
            )
        if not all(isinstance(shard, str) for shard in shards.values()):
            raise ModelError(f"{index} has a file name that is not text: fetch the model again.")
        names = sorted(set(shards.values()))
        return [folder / name for name in names]
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        refuse_pickles(str(folder), [path.name for path in folder.iterdir()])
        raise ModelError(
            f"{folder} has no model*.safetensors: convert or fetch the weights.",
            code="missing_file",
        )
    return files


def refuse_pickles(place: str, names: Iterable[str]) -> None:
    """Raises ModelError if one of the files in place, which has no safetensors, is a pickle."""
    for name in sorted(names):
        if Path(name).suffix in _PICKLE_SUFFIXES:
            raise ModelError(
                f"{place} has its weights only as pickles ({name}), which could run code when "
                "they are read: convert them to safetensors.",
                code="pickles",
            )


def _first_number(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """Returns the first positive number under one of these keys, in the config or in the text part
    of a multimodal model's config."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        for key in keys:
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return int(value)
    return None
