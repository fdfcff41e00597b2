"""What a model folder says about itself: config.json and safetensors headers.

Reads no weights and needs no MLX, so that a broken folder is told in milliseconds,
before any process starts. Tensors are found by byte range.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from serve.core.errors import ModelError

_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_MAX_HEADER_BYTES = 100 << 20
_LAYER_KEYS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


class TensorRange(NamedTuple):
    """One tensor: bytes [start, end) of file."""

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
    """digest is equal on two hosts if their configs and tensors' places are."""

    folder: Path
    model_type: str
    num_layers: int
    max_context: int | None
    tensors: dict[str, TensorRange]
    digest: str


def not_a_folder(model: Path) -> str:
    return (
        f"--model {model} is not a folder: give the path of a downloaded model, or org/name of one "
        "on the Hugging Face hub."
    )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises ModelError if the folder is no complete model."""
    if not is_folder(folder):
        raise ModelError(not_a_folder(folder))
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{folder / 'config.json'} has no model_type: is this a language model?")
    if config.get("model_file"):
        raise ModelError(
            f"{folder / 'config.json'} wants its own code ({config['model_file']}) to be run, "
            "which Brigade never does: use a model that mlx-lm knows."
        )
    num_layers = _first_number(config, _LAYER_KEYS)
    if num_layers is None:
        raise ModelError(f"{folder / 'config.json'} does not say num_hidden_layers.")
    files = _weight_files(folder)
    tensors: dict[str, TensorRange] = {}
    described = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        text, file_bytes = _read_header(file)
        tensors |= parse_header(text, file, file_bytes)
        described.update(text)
    return Checkpoint(
        folder=folder,
        model_type=model_type,
        num_layers=num_layers,
        max_context=_first_number(config, _CONTEXT_KEYS),
        tensors=tensors,
        digest=described.hexdigest()[:16],
    )


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # Such as a name that is too long.
        return False


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path.absolute()} is missing: its folder is not complete.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}): fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object: fetch it again.")
    return value


def read_header(file: Path) -> dict[str, TensorRange]:
    """The tensors of a safetensors file. Raises ModelError if the file is cut short."""
    text, file_bytes = _read_header(file)
    return parse_header(text, file, file_bytes)


def _read_header(file: Path) -> tuple[bytes, int]:
    """The header's text, and how long the whole file is."""
    try:
        with file.open("rb") as stream:
            size = header_bytes(stream.read(8), file)
            return stream.read(size), file.stat().st_size
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from error


def header_bytes(prefix: bytes, file: Path) -> int:
    """How long the header is that follows the first 8 bytes of a safetensors file."""
    if len(prefix) != 8:
        raise ModelError(f"{file} is no safetensors file (8 bytes expected): fetch it again.")
    (size,) = struct.unpack("<Q", prefix)
    if size > _MAX_HEADER_BYTES:
        raise ModelError(
            f"{file} is no safetensors file (a header of {size} bytes): fetch it again."
        )
    return int(size)


def parse_header(text: bytes, file: Path, file_bytes: int) -> dict[str, TensorRange]:
    """The tensors that the header of a file of file_bytes bytes tells. Raises ModelError
    if it is no header, or if its tensors overlap or do not fit into the file."""
    data = 8 + len(text)
    try:
        tensors = {
            name: TensorRange(
                file,
                entry["dtype"],
                tuple(entry["shape"]),
                *(data + offset for offset in entry["data_offsets"]),
            )
            for name, entry in json.loads(text, object_pairs_hook=_once).items()
            if name != "__metadata__"
        }
        _check_places(tensors, data)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no safetensors file ({error}): fetch it again.") from error
    expected = max((t.end for t in tensors.values()), default=0)
    if file_bytes < expected:
        raise ModelError(f"{file} has {file_bytes} of {expected} bytes: fetch it again.")
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)} is there twice")
    return entries


def _check_places(tensors: dict[str, TensorRange], data: int) -> None:
    """Raises ValueError for a tensor that is where another one or the header is, or
    that is not as long as its shape says."""
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start < end or tensor.end < tensor.start:
            raise ValueError(f"{name} overlaps what is before it")
        bits = _DTYPE_BITS.get(tensor.dtype)
        if bits and tensor.num_bytes * 8 != bits * math.prod(tensor.shape):
            raise ValueError(f"{name} has {tensor.num_bytes} bytes, its shape says otherwise")
        end = tensor.end


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelError(f"{index} has no weight_map: fetch the model again.")
        if not all(isinstance(shard, str) for shard in shards.values()):
            raise ModelError(f"{index} names a file that is no string: fetch the model again.")
        return [folder / shard for shard in sorted(set(shards.values()))]
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        refuse_pickles(str(folder), [path.name for path in folder.iterdir()])
        raise ModelError(f"{folder} has no model*.safetensors: convert or fetch the weights.")
    return files


def refuse_pickles(place: str, names: Iterable[str]) -> None:
    """Raises ModelError if there are any among the files of a place without safetensors."""
    for name in sorted(names):
        if Path(name).suffix in _PICKLE_SUFFIXES:
            raise ModelError(
                f"{place} has its weights as pickles only ({name}), which could run code when "
                "they are read: convert them to safetensors."
            )


def _first_number(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """A number of the config or of the text part of a multimodal one."""
    for part in (config, config.get("text_config")):
        for key in keys:
            if isinstance(part, dict) and isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    return None
