"""Copies of the adapters that a rank has read, in files that outlive its engine.

The rank's next engine reads the copies, so it has the same adapters even if the original files
have changed or are gone.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from serve.core.messages import AdapterRead
from serve.lora.layers import Matrices, ModuleMatrices

_logger = logging.getLogger(__name__)
_PARTS = ("a", "b", "gain")


def write(
    folder: Path,
    version: int,
    matrices: ModuleMatrices,
    answer: AdapterRead,
    division: str,
) -> None:
    """Writes a copy of one version of an adapter, with the answer about it, for one division of
    modules. If the disk is full, there is no copy, and the next engine reads the original files."""
    arrays: dict[str, mx.array] = {}
    for name, own in matrices.items():
        for part in _PARTS:
            array = getattr(own, part)
            if array is not None:
                arrays[f"{name}.{part}"] = array
    encoded = msgspec.json.encode(answer)
    text = encoded.decode()
    file = _file(folder, version)
    partial_name = f"{version}.part.safetensors"
    partial = file.with_name(partial_name)
    try:
        # The engine may be killed at any time. A file under its final name is always whole.
        mx.save_safetensors(str(partial), arrays, {"answer": text, "division": division})
        partial.rename(file)
    except (RuntimeError, OSError) as error:
        partial.unlink(missing_ok=True)
        _logger.warning(
            "event=adapter_not_copied version=%d reason=%s", version, json.dumps(str(error))
        )


def read(
    folder: Path,
    version: int,
    loaded: Collection[int],
    division: str,
) -> tuple[ModuleMatrices, AdapterRead] | None:
    """Reads a copy: its lazy matrices and the answer, or None if there is none for this division.
    Removes the copies of versions that are not loaded."""
    loaded_names = {str(each) for each in loaded}
    for copy in folder.glob("*.safetensors"):
        if copy.stem not in loaded_names:
            copy.unlink()
    file = _file(folder, version)
    if not file.exists():
        return None
    try:
        contents: Any = mx.load(str(file), return_metadata=True)
    except RuntimeError as error:
        _logger.warning(
            "event=adapter_copy_broken version=%d reason=%s", version, json.dumps(str(error))
        )
        return None
    arrays, metadata = contents
    if metadata["division"] != division:
        return None
    modules: defaultdict[str, dict[str, mx.array]] = defaultdict(dict)
    for key, array in arrays.items():
        name, _, part = key.rpartition(".")
        modules[name][part] = array
    matrices = {name: Matrices(**parts) for name, parts in modules.items()}
    answer = msgspec.json.decode(metadata["answer"], type=AdapterRead)
    return matrices, answer


def _file(folder: Path, version: int) -> Path:
    return folder / f"{version}.safetensors"
