"""Digests of files, and of the pieces in which their bytes go from one machine to another.

A part of a file cannot be checked against the digest of the whole file. So the digest of each piece
is recorded when the piece is written, or when the whole file is checked.
"""

import base64
import hashlib
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from serve.hub.snapshot import write_whole

BLOCK_BYTES = 8 << 20
"""The size of the largest piece. Pieces end at multiples of it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")


class FilePiece(NamedTuple):
    """Bytes [start, end) of a file, and their digest in hex."""

    start: int
    end: int
    sha256: str


class FileDigests(msgspec.Struct, frozen=True):
    """The digests of a file as it was at one time. `whole` is its sha256, or its git hash."""

    path: str
    size: int
    mtime_ns: int
    whole: str
    blocks: list[str]

    def pieces(self) -> list[FilePiece]:
        pieces: list[FilePiece] = []
        for number, block in enumerate(self.blocks):
            start = number * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, self.size)
            pieces.append(FilePiece(start, end, block))
        return pieces


@dataclass(frozen=True, slots=True)
class DigestStore:
    """Remembers the digests of files as long as their size and time of change stay the same."""

    folder: Path

    @classmethod
    def of(cls, cache: Path) -> "DigestStore":
        return cls(cache / "digests")

    def digests(self, path: Path, is_git: bool = False) -> FileDigests | None:
        """Returns the digests of a file, which is read if they are not known. Raises OSError."""
        return self.known(path, is_git) or self.compute(path, is_git)

    def known(self, path: Path, is_git: bool) -> FileDigests | None:
        try:
            known = msgspec.json.decode(self._place(path, is_git).read_bytes(), type=FileDigests)
            status = path.stat()
        except (OSError, ValueError, msgspec.DecodeError):
            return None
        if (known.path, known.size, known.mtime_ns) != (
            str(path),
            status.st_size,
            status.st_mtime_ns,
        ):
            return None
        return known

    def compute(
        self,
        path: Path,
        is_git: bool,
        stop: threading.Event | None = None,
    ) -> FileDigests | None:
        """Reads the whole file. Returns None if it changed meanwhile, or after stop. Raises
        OSError."""
        found = _compute(path, is_git, stop)
        if found and found.size > BLOCK_BYTES:  # A small file is quicker read than remembered.
            write_whole(self._place(path, is_git), msgspec.json.encode(found))
        return found

    def _place(self, path: Path, is_git: bool) -> Path:
        name = hashlib.sha256(f"{is_git} {path}".encode()).hexdigest()[:40]
        return self.folder / f"{name}.json"


def _compute(path: Path, is_git: bool, stop: threading.Event | None) -> FileDigests | None:
    blocks: list[str] = []
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        whole = _git_hash(before.st_size) if is_git else hashlib.sha256()
        while data := file.read(BLOCK_BYTES):
            if stop and stop.is_set():
                return None
            whole.update(data)
            blocks.append(hashlib.sha256(data).hexdigest())
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return None
    return FileDigests(str(path), after.st_size, after.st_mtime_ns, whole.hexdigest(), blocks)


def can_verify(etag: str) -> bool:
    """Whether an etag is a digest of the file."""
    return is_git_hash(etag) or _SHA256.fullmatch(etag) is not None


def is_git_hash(etag: str) -> bool:
    return _GIT.fullmatch(etag) is not None


def matches_etag(data: bytes, etag: str) -> bool:
    """Whether these are the bytes of a whole file with this etag."""
    whole = _git_hash(len(data)) if is_git_hash(etag) else hashlib.sha256()
    whole.update(data)
    return whole.hexdigest() == etag


def content_digest(sha256: str) -> str:
    """Returns the header Content-Digest for a content with this digest in hex (RFC 9530)."""
    digest = base64.b64encode(bytes.fromhex(sha256)).decode()
    return f"sha-256=:{digest}:"


def _git_hash(size: int) -> "hashlib._Hash":
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
