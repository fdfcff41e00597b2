"""The names of the files of the prefix cache. A name contains a checksum, so a damaged file is
detected when it is read."""

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from serve.core.messages import PrefixFile
from serve.core.ops import Write

SUFFIX = ".safetensors"
UNFINISHED = "unfinished-"
_NAME = re.compile(
    r"(?P<name>[0-9a-f]{32})-(?P<parent>[0-9a-f]{32})-(?P<start>\d+)-(?P<end>\d+)"
    r"-(?P<checksum>[0-9a-f]{8})\.safetensors"
)
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file on disk. file describes it for rank 0."""

    path: Path
    file: PrefixFile
    checksum: int


def path_of(folder: Path, write: Write, checksum: int) -> Path:
    """Returns the path that a file has when it is complete."""
    position = f"{write.start}-{write.end}"
    return folder / f"{write.name}-{write.parent}-{position}-{checksum:08x}{SUFFIX}"


def stored_file(path: Path, num_bytes: int) -> StoredFile | None:
    """Describes a file by its path and size. Returns None if the name is not one of `path_of`."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    start, end = int(match["start"]), int(match["end"])
    file = PrefixFile(match["name"], match["parent"], start, end, num_bytes)
    return StoredFile(path, file, int(match["checksum"], 16))


def checksum_of(descriptor: int) -> int:
    """Computes the checksum of an open file."""
    checksum = 0
    position = 0
    while block := os.pread(descriptor, _BLOCK_BYTES, position):
        checksum = zlib.crc32(block, checksum)
        position += len(block)
    return checksum
