"""Which bytes of a partial file are really there, kept on disk beside it.

Lines are only ever appended, each by one write, after the data that it speaks of is
on the disk. A line names the content that it belongs to in its checksum: one that a
crash has torn, or that belongs to another version of the file, counts for nothing.
"""

import os
import zlib
from pathlib import Path

from serve.hub.ranges import Range, union


class Journal:
    """content says of which bytes this is the journal, such as etag and length. Not
    thread-safe for reading; adding is safe from threads and processes alike."""

    def __init__(self, path: Path, content: str) -> None:
        self.path, self._content = path, content
        self._present: list[Range] = []
        self._num_read = 0

    def present(self) -> list[Range]:
        """What is there, whoever has written it."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._num_read)
                whole_lines, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._num_read += len(whole_lines) + len(newline)
        found = [r for line in whole_lines.split(b"\n") if (r := self._parse(line)) is not None]
        self._present = union([*self._present, *found])
        return self._present

    def add(self, start: int, end: int) -> None:
        """Says that bytes [start, end) are on the disk."""
        # The newline before it keeps a line that a crash has torn away from this one.
        record = b"\n" + self._line(start, end) + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, record)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _line(self, start: int, end: int) -> bytes:
        check = zlib.crc32(f"{self._content} {start} {end}".encode())
        return f"{start} {end} {check:08x}".encode()

    def _parse(self, line: bytes) -> Range | None:
        fields = line.split()
        if len(fields) != 3 or not (fields[0].isdigit() and fields[1].isdigit()):
            return None
        start, end = int(fields[0]), int(fields[1])
        return (start, end) if line == self._line(start, end) else None
