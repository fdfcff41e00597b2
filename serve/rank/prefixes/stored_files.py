"""The files of the prefix cache in the folders of a host: their names, and which of them together
have all layers of a stage.

The name of a file has the layers whose caches it holds. So a stage can also use files that were
written when the model was divided into other stages, and those of other ranks of its host.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from serve.core.messages import PrefixFile
from serve.core.types import Write

SUFFIX = ".safetensors"
UNFINISHED = "unfinished-"
_NAME = re.compile(
    r"(?P<name>[0-9a-f]{32})-(?P<parent>[0-9a-f]{32})-(?P<start>\d+)-(?P<end>\d+)"
    r"-layers-(?P<first>\d+)-(?P<last>\d+)-(?P<checksum>[0-9a-f]{8})\.safetensors"
)

Layers = tuple[int, int]
"""Consecutive layers: the first one, and the one after the last."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file on disk. modified has the seconds at which it was last used. Only the rank whose
    folder it is in (is_own) may delete it."""

    path: Path
    name: str
    parent: str
    start: int
    end: int
    layers: Layers
    checksum: int
    num_bytes: int
    modified: float
    is_own: bool


def path_of(folder: Path, write: Write, layers: Layers, checksum: int) -> Path:
    """Returns the path that a file has when it is complete."""
    first, end = layers
    position = f"{write.start}-{write.end}-layers-{first}-{end - 1}"
    return folder / f"{write.name}-{write.parent}-{position}-{checksum:08x}{SUFFIX}"


def stored_file(path: Path, is_own: bool) -> StoredFile | None:
    """Describes a file by its path. Returns None for other files. Raises OSError."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    status = path.stat()
    return StoredFile(
        path=path,
        name=match["name"],
        parent=match["parent"],
        start=int(match["start"]),
        end=int(match["end"]),
        layers=(int(match["first"]), int(match["last"]) + 1),
        checksum=int(match["checksum"], 16),
        num_bytes=status.st_size,
        modified=status.st_mtime,
        is_own=is_own,
    )


def unusable_file(path: Path) -> StoredFile:
    """Describes an own file that no stage of this model can use: only its size and the time of its
    last use count. Raises OSError."""
    status = path.stat()
    return StoredFile(
        path=path,
        name="",
        parent="",
        start=0,
        end=0,
        layers=(0, 0),
        checksum=0,
        num_bytes=status.st_size,
        modified=status.st_mtime,
        is_own=True,
    )


def covering(files: Collection[StoredFile], layers: Layers) -> list[StoredFile]:
    """Chooses files that together have all these layers. Returns nothing if there are none."""
    chosen: list[StoredFile] = []
    position, end = layers
    while position < end:
        fitting = [file for file in files if file.layers[0] <= position < file.layers[1]]
        if not fitting:
            return []
        best = max(fitting, key=partial(_worth, end=end))
        chosen.append(best)
        position = best.layers[1]
    return chosen


def _worth(file: StoredFile, end: int) -> tuple[int, bool, int]:
    """Orders files: the best one reaches farthest, up to end; then it is an own one; then it has
    the fewest layers."""
    first, last = file.layers
    return min(last, end), file.is_own, first - last


def reported(files: Collection[StoredFile]) -> PrefixFile:
    """Describes files with the same name for rank 0. The size is that of the rank's own files."""
    first, *_ = files
    num_bytes = sum(file.num_bytes for file in files if file.is_own)
    return PrefixFile(first.name, first.parent, first.start, first.end, num_bytes)
