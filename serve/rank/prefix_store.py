"""The files of the prefix cache of one stage. Rank 0 decides which files are written, read and
deleted.

Threads of their own write and read files while steps run. A file gets its final name, which has its
checksum, when it is completely on the disk. So a file that a kill left unfinished is deleted at the
next start, and a damaged file is detected and deleted when it is read.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from serve.core.errors import EngineError
from serve.core.messages import (
    ForgetPrefixFiles,
    PrefixFile,
    PrefixFiles,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
)
from serve.core.types import Write
from serve.rank import prefix_parts
from serve.rank.prefix_parts import FileContent

_logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_UNFINISHED = "unfinished-"
_FILE_NAME = re.compile(
    r"(?P<name>[0-9a-f]{32})-(?P<parent>[0-9a-f]{32})-(?P<start>\d+)-(?P<end>\d+)"
    r"-(?P<checksum>[0-9a-f]{8})\.safetensors"
)
_BLOCK_BYTES = 1 << 20
_LENGTH_BYTES = 8  # A safetensors file begins with the length of its header.


MakeCache = Callable[[], list[Any]]
Report = Callable[[PrefixRead | PrefixFileWritten], None]


class _DamagedFile(Exception):
    """A file is missing, or is not what was written."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class _Known:
    path: Path
    checksum: int
    num_bytes: int


class PrefixStore:
    """The files of a stage, below the folder of its rank. digest identifies the stage: its layers,
    its weights, and everything else that its keys and values depend on.

    make_cache makes the plain caches of one new row. report sends a message to rank 0, and can be
    called from any thread. Raises OSError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        digest: str,
        max_bytes: int,
        make_cache: MakeCache,
        report: Report,
    ) -> None:
        self._root = folder
        self._folder = folder / digest
        self._max_bytes = max_bytes
        self._make_cache, self._report = make_cache, report
        for path in (folder.parent, folder, self._folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder_lock = _locked(folder)
        self._known: dict[str, _Known] = {}
        self._loaded: dict[int, list[Any]] = {}
        self._lock = threading.Lock()
        self._has_warned = False
        self._files = self._scan()
        self._others = self._scan_others()
        self._writer = ThreadPoolExecutor(1, "prefix-writer")
        self._reader = ThreadPoolExecutor(1, "prefix-reader")

    def files(self) -> PrefixFiles:
        """Lists the files that were there at the start or at the last rescan, the least recently
        used one first."""
        return PrefixFiles(self._files, self._max_bytes)

    def write(self, write: Write, content: FileContent) -> None:
        """Writes a file in the background. The arrays have to be evaluated."""
        self._writer.submit(self._write, write, content)

    def obey(self, message: ReadPrefix | ForgetPrefixFiles) -> None:
        """Reads a prefix or deletes files, in the background. Files are deleted after all earlier
        writes."""
        if isinstance(message, ReadPrefix):
            self._reader.submit(self._read, message)
        else:
            self._writer.submit(self._forget, message)

    def wait(self) -> None:
        """Waits until all earlier writes, deletions and reads are done."""
        for pool in (self._writer, self._reader):
            pool.submit(lambda: None).result()

    def rescan(self) -> None:
        """Looks again which files there are, and forgets what was read for sequences. No thread
        has work."""
        self._loaded.clear()
        self._known.clear()
        self._files = self._scan()

    def close(self) -> None:
        """Ends the threads once their work is done, and unlocks the folder."""
        self._writer.shutdown()
        self._reader.shutdown()
        os.close(self._folder_lock)

    def take(self, sequence: int) -> list[Any]:
        """Returns the caches that were read for a sequence, and does not keep them. Raises
        EngineError if there are none."""
        with self._lock:
            caches = self._loaded.pop(sequence, None)
        if caches is None:
            raise EngineError(f"No prefix was read for sequence {sequence}.")
        return caches

    # --- in the threads

    def _write(self, write: Write, content: FileContent) -> None:
        try:
            num_bytes = self._written(write, content)
        except Exception as error:  # The top of this thread's work: a full disk costs only speed.
            self._warn("write", error)
            num_bytes = 0
        self._report(PrefixFileWritten(write.name, num_bytes))

    def _written(self, write: Write, content: FileContent) -> int:
        """Writes a file and returns its size. The file is renamed last, so a kill leaves no
        incomplete file with a final name."""
        unfinished = self._folder / f"{_UNFINISHED}{write.name}{_SUFFIX}"
        try:
            mx.save_safetensors(str(unfinished), content.arrays, content.metadata)
            with unfinished.open("rb") as file:
                num_bytes = _check_length(file.fileno(), content.arrays)
                checksum = _checksum(file.fileno())
                os.fsync(file.fileno())
            name = f"{write.name}-{write.parent}-{write.start}-{write.end}-{checksum:08x}{_SUFFIX}"
            path = self._folder / name
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync_folder(self._folder)
        with self._lock:
            self._known[write.name] = _Known(path, checksum, num_bytes)
        self._make_room()
        return num_bytes

    def _read(self, message: ReadPrefix) -> None:
        damaged = None
        try:
            caches = self._restored(message)
            with self._lock:
                self._loaded[message.sequence] = caches
        except _DamagedFile as error:
            damaged = error.name
            self._delete(error.name)
            _logger.warning("event=prefix_file_dropped name=%s", error.name)
        except Exception as error:  # The top of this thread's work: the prefix is computed instead.
            damaged = message.names[-1]
            self._warn("read", error)
        self._report(PrefixRead(message.sequence, damaged))

    def _restored(self, message: ReadPrefix) -> list[Any]:
        segments = [self._content(name)[0] for name in message.names]
        state = self._content(message.state) if message.state else None
        caches = self._make_cache()
        try:
            mx.eval(prefix_parts.restore(caches, segments, state, message.num_tokens))
        except (KeyError, ValueError) as error:
            raise _DamagedFile(message.state or message.names[-1]) from error
        return caches

    def _content(self, name: str) -> tuple[dict[str, mx.array], dict[str, str]]:
        """Checks the checksum of a file, and reads the file lazily. Raises _DamagedFile."""
        with self._lock:
            known = self._known.get(name)
        if known is None:
            raise _DamagedFile(name)
        try:
            with known.path.open("rb") as file:
                is_right = _checksum(file.fileno()) == known.checksum
            if not is_right:
                raise _DamagedFile(name)
            os.utime(known.path)
            return mx.load(str(known.path), return_metadata=True)  # type: ignore[return-value]
        except (OSError, RuntimeError) as error:
            raise _DamagedFile(name) from error

    def _forget(self, message: ForgetPrefixFiles) -> None:
        for sequence in message.sequences:
            with self._lock:
                self._loaded.pop(sequence, None)
        names = message.names
        if message.everything:
            with self._lock:
                names = tuple(self._known)
            self._limit_others(0)
        for name in names:
            self._delete(name)

    def _delete(self, name: str) -> None:
        with self._lock:
            known = self._known.pop(name, None)
        if known:
            _unlink(known.path)

    # --- files

    def _scan(self) -> list[PrefixFile]:
        """Finds the files of this stage, and deletes unfinished ones."""
        found: list[tuple[float, PrefixFile]] = []
        for path in self._folder.iterdir():
            match = _FILE_NAME.fullmatch(path.name)
            if match is None:
                if path.name.startswith(_UNFINISHED):
                    _unlink(path)
                continue
            status = path.stat()
            file = PrefixFile(
                match["name"],
                match["parent"],
                int(match["start"]),
                int(match["end"]),
                status.st_size,
            )
            checksum = int(match["checksum"], 16)
            self._known[file.name] = _Known(path, checksum, file.num_bytes)
            found.append((status.st_mtime, file))
        found.sort(key=lambda entry: entry[0])
        return [file for _, file in found]

    def _scan_others(self) -> list[tuple[Path, int]]:
        """Finds the files of other stages and models in this rank's folder, the oldest first. This
        engine cannot use them, so they are the first to be deleted when room is needed."""
        found: list[tuple[float, Path, int]] = []
        for path in self._root.glob(f"*/*{_SUFFIX}"):
            if path.parent != self._folder:
                status = path.stat()
                found.append((status.st_mtime, path, status.st_size))
        found.sort()
        return [(path, num_bytes) for _, path, num_bytes in found]

    def _make_room(self) -> None:
        with self._lock:
            own_bytes = sum(known.num_bytes for known in self._known.values())
        self._limit_others(self._max_bytes - own_bytes)

    def _limit_others(self, max_bytes: int) -> None:
        """Deletes files of other stages until the rest has at most max_bytes."""
        total = sum(num_bytes for _, num_bytes in self._others)
        while self._others and total > max_bytes:
            path, num_bytes = self._others.pop(0)
            total -= num_bytes
            _unlink(path)

    def _warn(self, action: str, error: Exception) -> None:
        """Logs the first error only: a full disk would fill the log as well."""
        if not self._has_warned:
            self._has_warned = True
            kind = type(error).__name__
            reason = json.dumps(f"{kind}: {error}")
            _logger.warning("event=prefix_cache_disk_failed action=%s reason=%s", action, reason)


def open_store(
    folder: Path,
    digest: str,
    max_bytes: int,
    make_cache: MakeCache,
    report: Report,
) -> PrefixStore | None:
    """Opens a store. If the folder cannot be used, logs the reason and returns None. The server
    then works without a prefix cache on disk."""
    try:
        return PrefixStore(folder, digest, max_bytes, make_cache, report)
    except OSError as error:
        _logger.warning(
            "event=prefix_cache_disk_failed action=open path=%s reason=%s",
            *(json.dumps(str(folder)), json.dumps(str(error))),
        )
        return None


def stage_digest(weights: Mapping[str, mx.array], facts: Mapping[str, str]) -> str:
    """Computes a digest of everything that the keys and values of a stage depend on: its weights,
    and facts such as its layers and the versions of packages."""
    digest = hashlib.blake2b(json.dumps(sorted(facts.items())).encode(), digest_size=16)
    for name, array in sorted(weights.items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        # Sums of the bits differ for other weights, and need no copy of the weights.
        bits = array.view(_BITS[array.dtype.size])
        sums = bits.sum(axis=-1) if bits.ndim else bits
        digest.update(memoryview(mx.contiguous(sums)))  # type: ignore[arg-type]
    return digest.hexdigest()


_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def _locked(folder: Path) -> int:
    """Locks a folder until the returned descriptor is closed or this process ends. Raises
    BlockingIOError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _checksum(descriptor: int) -> int:
    checksum = 0
    position = 0
    while block := os.pread(descriptor, _BLOCK_BYTES, position):
        checksum = zlib.crc32(block, checksum)
        position += len(block)
    return checksum


def _check_length(descriptor: int, arrays: Mapping[str, mx.array]) -> int:
    """Returns the length of a file. Raises OSError if the file is too short for its arrays, because
    MLX does not notice when a disk is full."""
    num_bytes = os.fstat(descriptor).st_size
    header_bytes = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    array_bytes = sum(array.nbytes for array in arrays.values())
    if num_bytes < _LENGTH_BYTES + header_bytes + array_bytes:
        raise OSError("the file was not written completely")
    return num_bytes


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _logger.warning("event=prefix_file_kept path=%s reason=%s", path, json.dumps(str(error)))
