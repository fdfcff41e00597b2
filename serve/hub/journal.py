"""The journal of a partial file: a file beside it that records which of its bytes are present, and
the digest of each piece as it was written.

Lines are only appended, each with one write, after their data is on the disk. Each line has a
checksum that covers the identity of the file, so a line that a crash has cut off, or that belongs
to another version of the file, is ignored.
"""

import os
import re
import zlib
from pathlib import Path

from serve.core.folder import full_sync
from serve.hub.digests import FilePiece
from serve.hub.ranges import Range, union
from serve.hub.snapshot import STATE_FOLDER, RepoFile

_LINE = re.compile(
    rb"(?P<fields>(?P<start>\d+) (?P<end>\d+)(?: (?P<sha256>[0-9a-f]{64}))?) [0-9a-f]{8}"
)


class Journal:
    """The journal at one path. content identifies the file that it describes, for example by etag
    and length. Reading is not thread-safe; adding is safe from several threads and processes."""

    def __init__(self, path: Path, content: str) -> None:
        self.path = path
        self._content = content
        self._present: list[Range] = []
        self._pieces: list[FilePiece] = []
        self._num_read = 0

    @classmethod
    def of(cls, folder: Path, file: RepoFile) -> "Journal":
        """Returns the journal of a file in the folder of its commit."""
        path = folder / STATE_FOLDER / f"{file.name}.journal"
        return cls(path, f"{file.etag} {file.size}")

    @property
    def claims_path(self) -> Path:
        """The file whose locks are claims on the bytes of the partial file."""
        return self.path.with_suffix(".claims")

    def present(self) -> list[Range]:
        """Reads new lines and returns all present ranges, whichever process wrote them."""
        self._read()
        return self._present

    def pieces(self) -> list[FilePiece]:
        """Reads new lines and returns the pieces whose digest is recorded."""
        self._read()
        return self._pieces

    def _read(self) -> None:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._num_read)
                unread = stream.read()
        except FileNotFoundError:
            self._present = []
            self._pieces = []
            self._num_read = 0
            return
        whole_lines, newline, _ = unread.rpartition(b"\n")
        self._num_read += len(whole_lines) + len(newline)
        found = list(self._present)
        for line in whole_lines.split(b"\n"):
            written = self._parse(line)
            if written is None:
                continue
            found.append((written.start, written.end))
            if written.sha256:
                self._pieces.append(written)
        self._present = union(found)

    def add(self, piece: FilePiece) -> None:
        # The first newline separates this line from one that a crash has cut off.
        record = b"\n" + self._line(f"{piece.start} {piece.end} {piece.sha256}") + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, record)
            full_sync(handle)
        finally:
            os.close(handle)

    def _line(self, fields: str) -> bytes:
        check = zlib.crc32(f"{self._content} {fields}".encode())
        return f"{fields} {check:08x}".encode()

    def _parse(self, line: bytes) -> FilePiece | None:
        # Earlier versions recorded no digest.
        matched = _LINE.fullmatch(line)
        if matched is None or line != self._line(matched["fields"].decode()):
            return None
        sha256 = (matched["sha256"] or b"").decode()
        return FilePiece(int(matched["start"]), int(matched["end"]), sha256)
