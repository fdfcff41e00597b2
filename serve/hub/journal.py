"""The journal of a partial file: a file beside it that records which of its bytes are present.

Lines are only appended, each with one write, after their data is on the disk. Each line has a
checksum that covers the identity of the file, so a line that a crash has cut off, or that belongs
to another version of the file, is ignored.
"""

import os
import zlib
from pathlib import Path

from serve.core.folder import full_sync
from serve.hub.ranges import Range, union


class Journal:
    """The journal at one path. content identifies the file that it describes, for example by etag
    and length. Reading is not thread-safe; adding is safe from several threads and processes."""

    def __init__(self, path: Path, content: str) -> None:
        self.path = path
        self._content = content
        self._present: list[Range] = []
        self._num_read = 0

    def present(self) -> list[Range]:
        """Reads new lines and returns all present ranges, whichever process wrote them."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._num_read)
                unread = stream.read()
        except FileNotFoundError:
            return []
        whole_lines, newline, _ = unread.rpartition(b"\n")
        self._num_read += len(whole_lines) + len(newline)
        found = list(self._present)
        for line in whole_lines.split(b"\n"):
            written = self._parse(line)
            if written is not None:
                found.append(written)
        self._present = union(found)
        return self._present

    def add(self, start: int, end: int) -> None:
        # The first newline separates this line from one that a crash has cut off.
        record = b"\n" + self._line(start, end) + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, record)
            full_sync(handle)
        finally:
            os.close(handle)

    def _line(self, start: int, end: int) -> bytes:
        check = zlib.crc32(f"{self._content} {start} {end}".encode())
        return f"{start} {end} {check:08x}".encode()

    def _parse(self, line: bytes) -> Range | None:
        fields = line.split()
        if len(fields) != 3:
            return None
        if not fields[0].isdigit() or not fields[1].isdigit():
            return None
        start = int(fields[0])
        end = int(fields[1])
        is_intact = line == self._line(start, end)
        return (start, end) if is_intact else None
