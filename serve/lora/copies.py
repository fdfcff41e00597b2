"""What a rank has read of adapters, in files that outlive its engine: the next one has the same
again, whatever has become of the adapters' own files.
"""

import logging
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from serve.core.messages import AdapterRead
from serve.lora.layers import Matrices

_logger = logging.getLogger(__name__)
_PARTS = ("a", "b", "gain")


def write(folder: Path, version: int, matrices: dict[str, Matrices], answer: AdapterRead) -> None:
    """answer is what rank 0 is told. Without room there is no copy, and the next engine reads
    the adapter's files."""
    parts = {f"{name}.{part}": getattr(m, part) for name, m in matrices.items() for part in _PARTS}
    arrays = {name: array for name, array in parts.items() if array is not None}
    file = _file(folder, version)
    part = file.with_name(f"{version}.part.safetensors")
    try:
        # An engine may be killed at any time: what is there under its name is whole.
        mx.save_safetensors(str(part), arrays, {"answer": msgspec.json.encode(answer).decode()})
        part.rename(file)
    except (RuntimeError, OSError) as error:
        part.unlink(missing_ok=True)
        _logger.warning("event=adapter_not_copied version=%d reason=%s", version, error)


def read(
    folder: Path, version: int, held: Collection[int]
) -> tuple[dict[str, Matrices], AdapterRead] | None:
    """Matrices, which are lazy, and the answer; None without a copy. held are the versions that
    engines before this one may have read: copies of others go."""
    for file in folder.glob("*.safetensors"):
        if file.stem not in map(str, held):
            file.unlink()
    if not (file := _file(folder, version)).exists():
        return None
    try:
        loaded: Any = mx.load(str(file), return_metadata=True)
    except RuntimeError as error:
        _logger.warning("event=adapter_copy_broken version=%d reason=%s", version, error)
        return None
    modules: defaultdict[str, dict[str, mx.array]] = defaultdict(dict)
    for key, array in loaded[0].items():
        name, _, part = key.rpartition(".")
        modules[name][part] = array
    matrices = {name: Matrices(**parts) for name, parts in modules.items()}
    return matrices, msgspec.json.decode(loaded[1]["answer"], type=AdapterRead)


def _file(folder: Path, version: int) -> Path:
    return folder / f"{version}.safetensors"
