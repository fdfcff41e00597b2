"""Claims on byte ranges, so that several processes of a machine do not fetch the same bytes.

A claim is a lock on the same bytes of another file. The system releases it when the process ends,
however it ends.
"""

import fcntl
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serve.hub.digests import BLOCK_BYTES
from serve.hub.ranges import Range, union


class Claims:
    """The claims of this process, in the file at one path. The file is made when it is opened, and
    closed only when the last thread drops this object: closing it releases all claims."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def open(self) -> None:
        """Opens the file, before any claim. Raises OSError."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            weakref.finalize(self, os.close, self._descriptor)

    @contextmanager
    def claim(self, wanted: Range) -> Iterator[bool]:
        """Yields whether the range is claimed; False if another process has claimed a part."""
        start, end = wanted
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, end - start, start)
        except (BlockingIOError, PermissionError):
            yield False
            return
        except OSError:
            # The file system has no locks: two processes may fetch the same bytes.
            yield True
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, end - start, start)


def claimed_by_others(path: Path, ranges: Iterable[Range]) -> list[Range]:
    """Returns which blocks of these ranges other processes have claimed. Not for a process that has
    claims in this file: it would lose them."""
    found: list[Range] = []
    try:
        with path.open("rb") as file:
            for start, end in _blocks(ranges):
                try:
                    fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, end - start, start)
                except (BlockingIOError, PermissionError):
                    found.append((start, end))
                else:
                    fcntl.lockf(file, fcntl.LOCK_UN, end - start, start)
    except OSError:
        return []  # There is no such file, or the file system has no locks.
    return union(found)


def _blocks(ranges: Iterable[Range]) -> Iterator[Range]:
    for start, end in ranges:
        while start < end:
            block_end = min((start // BLOCK_BYTES + 1) * BLOCK_BYTES, end)
            yield start, block_end
            start = block_end
