"""The files of the prefix cache of one stage. Rank 0 decides which files are written, read and
deleted.

Threads of their own write and read files while steps run. A file gets its final name, which
contains its checksum, when it is completely on the disk. So a file that a kill left unfinished is
deleted at the next start, and a damaged file is detected and deleted when it is read.
"""

import fcntl
import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from serve.core.errors import EngineError
from serve.core.facts import stamp, versions
from serve.core.folder import full_sync, make_cache_folder, sync
from serve.core.messages import (
    ForgetPrefixFiles,
    Order,
    PrefixFiles,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
)
from serve.core.ops import Write
from serve.rank.parts.disk import contents, stored_files
from serve.rank.parts.disk.contents import FileContent, MakeCaches
from serve.rank.parts.disk.stored_files import SUFFIX, UNFINISHED, StoredFile

_logger = logging.getLogger(__name__)

_LENGTH_BYTES = 8  # A safetensors file begins with the length of its header.


Report = Callable[[PrefixRead | PrefixFileWritten], None]


class _DamagedFile(Exception):
    """A file is missing or damaged."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class PrefixStore:
    """The files of a stage, in the folder of its rank.

    digest identifies all that the files depend on besides tokens and adapters. Files with another
    digest are never read, and are deleted first when room is needed. `report` sends a message to
    rank 0, and can be called from any thread. Raises OSError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        digest: str,
        max_bytes: int,
        make_caches: MakeCaches,
        report: Report,
    ) -> None:
        self._root = folder
        self._digest = digest
        self._folder = folder / digest
        self._max_bytes = max_bytes
        self._make_caches = make_caches
        self._report = report
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_cache_folder(folder, 0o700)
        self._folder_lock = _locked(folder)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # Both dictionaries begin with the least recently used files.
        self._files: dict[str, StoredFile] = {}
        self._others: deque[tuple[Path, int]] = deque()  # files with other digests: path and bytes
        self._loaded: dict[int, list[Any]] = {}
        self._lock = threading.Lock()
        self._has_warned = False
        self._scan()
        self._writer = ThreadPoolExecutor(1, "prefix-writer")
        self._reader = ThreadPoolExecutor(1, "prefix-reader")

    def files(self) -> PrefixFiles:
        """Lists the files, the least recently used one first."""
        with self._lock:
            files = [stored.file for stored in self._files.values()]
        return PrefixFiles(files, self._max_bytes, self._digest)

    def write(self, write: Write, content: FileContent) -> None:
        """Writes a file in the background. Evaluates its arrays at once, because the next step
        changes the buffers that they come from."""
        mx.eval(content.arrays)
        self._writer.submit(self._write, write, content)

    def refuse(self, write: Write, error: EngineError) -> None:
        """Reports, after all earlier writes, that a file cannot be written, and logs the reason."""
        self._writer.submit(self._report_failed, write, error)

    def obey(self, message: ReadPrefix | ForgetPrefixFiles) -> None:
        """In the background, reads a prefix or, after all earlier writes, deletes files."""
        if isinstance(message, ReadPrefix):
            self._reader.submit(self._read, message)
        else:
            self._writer.submit(self._forget, message)

    def wait(self) -> None:
        """Waits until all earlier writes, deletions and reads are done."""
        for pool in (self._writer, self._reader):
            pool.submit(lambda: None).result()

    def forget_loaded(self) -> None:
        """Drops the caches that were read for sequences."""
        with self._lock:
            self._loaded.clear()

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
            self._report_failed(write, error)
        else:
            self._report(PrefixFileWritten(write.name, num_bytes))

    def _report_failed(self, write: Write, error: Exception) -> None:
        self._warn("write", error)
        self._report(PrefixFileWritten(write.name, 0))

    def _written(self, write: Write, content: FileContent) -> int:
        """Writes a file and returns its size. The file is renamed last, so a kill leaves no
        incomplete file with a final name."""
        unfinished = self._folder / f"{UNFINISHED}{write.name}{SUFFIX}"
        try:
            mx.save_safetensors(str(unfinished), content.arrays, content.metadata)
            with unfinished.open("rb") as file:
                num_bytes = _check_length(file.fileno(), content.arrays)
                checksum = stored_files.checksum_of(file.fileno())
                full_sync(file.fileno())
            path = stored_files.path_of(self._folder, write, checksum)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync(self._folder)
        self._add(path, num_bytes)
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
        segments = [self._content(name) for name in message.names]
        state = self._content(message.state) if message.state else None
        try:
            restored = contents.restore(self._make_caches, segments, state, message.num_tokens)
            caches, arrays = restored
            mx.eval(arrays)
        except (KeyError, ValueError) as error:
            raise _DamagedFile(message.state or message.names[-1]) from error
        return caches

    def _content(self, name: str) -> FileContent:
        """Checks a file, and reads it lazily. Raises _DamagedFile."""
        with self._lock:
            stored = self._files.pop(name, None)
            if stored is None:
                raise _DamagedFile(name)
            self._files[name] = stored  # as the most recently used file
        return _checked(stored)

    def _forget(self, message: ForgetPrefixFiles) -> None:
        names = message.names
        with self._lock:
            for sequence in message.sequences:
                self._loaded.pop(sequence, None)
            if message.everything:
                names = tuple(self._files)
        for name in names:
            self._delete(name)
        if message.everything:
            self._limit_others(0)

    def _delete(self, name: str) -> None:
        with self._lock:
            stored = self._files.pop(name, None)
        if stored:
            _unlink(stored.path)

    # --- files

    def _scan(self) -> None:
        """Finds the files of this stage, and the others in the rank's folder, whatever their names
        are. Deletes unfinished files."""
        for path in self._root.glob(f"*/{UNFINISHED}*"):
            _unlink(path)
        found: list[tuple[float, Path, int]] = []
        for path in self._root.glob(f"*/*{SUFFIX}"):
            status = path.stat()
            found.append((status.st_mtime, path, status.st_size))
        for _, path, num_bytes in sorted(found):
            if path.parent != self._folder or not self._add(path, num_bytes):
                self._others.append((path, num_bytes))
        self._remove_empty_folders()

    def _add(self, path: Path, num_bytes: int) -> bool:
        """Adds a file as the most recently used one. Returns False if its name is not valid."""
        stored = stored_files.stored_file(path, num_bytes)
        if stored is None:
            return False
        with self._lock:
            self._files[stored.file.name] = stored
        return True

    def _make_room(self) -> None:
        with self._lock:
            num_bytes = sum(stored.file.num_bytes for stored in self._files.values())
        self._limit_others(self._max_bytes - num_bytes)

    def _limit_others(self, max_bytes: int) -> None:
        """Deletes files with other digests until the rest has at most max_bytes."""
        total = sum(num_bytes for _, num_bytes in self._others)
        while self._others and total > max_bytes:
            path, num_bytes = self._others.popleft()
            total -= num_bytes
            _unlink(path)
        self._remove_empty_folders()

    def _remove_empty_folders(self) -> None:
        """Removes the folders of other digests that have no files left."""
        for path in self._root.iterdir():
            if path != self._folder:
                with suppress(OSError):  # The folder has files.
                    path.rmdir()

    def _warn(self, action: str, error: Exception) -> None:
        """Logs the first error only: a full disk would fill the log as well."""
        if not self._has_warned:
            self._has_warned = True
            kind = type(error).__name__
            reason = json.dumps(f"{kind}: {error}")
            _logger.warning("event=prefix_cache_disk_failed action=%s reason=%s", action, reason)


def open_store(order: Order, report: Report, make_caches: MakeCaches) -> PrefixStore | None:
    """Opens the store of a rank, if there is a folder for it. If the folder cannot be used, logs
    the reason and returns None. The server then works without a prefix cache on disk."""
    if order.prefix_dir is None:
        return None
    rank = order.ring[order.rank]
    folder = Path(order.prefix_dir) / f"rank-{rank}"
    digest = _digest(order)
    try:
        return PrefixStore(folder, digest, order.prefix_bytes, make_caches, report)
    except OSError as error:
        path = json.dumps(str(folder))
        reason = json.dumps(str(error))
        _logger.warning(
            "event=prefix_cache_disk_failed action=open path=%s reason=%s", path, reason
        )
        return None


def _digest(order: Order) -> str:
    """Identifies everything, besides tokens and adapters, that a stage's files depend on."""
    facts = {
        "model": order.commit or stamp(Path(order.model)),
        "layers": order.layers,
        "shard": order.rank % order.num_shards,
        "num_shards": order.num_shards,
        "kv_bits": order.kv_bits,
        "versions": versions(),
    }
    text = json.dumps(facts)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _locked(folder: Path) -> int:
    """Locks a folder until the returned descriptor is closed or this process ends. Raises
    BlockingIOError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _checked(stored: StoredFile) -> FileContent:
    """Reads a file lazily, after a check of its checksum. Raises _DamagedFile if it is damaged, or
    lacks keys and values of some of its tokens."""
    file = stored.file
    try:
        with stored.path.open("rb") as opened:
            is_right = stored_files.checksum_of(opened.fileno()) == stored.checksum
        if is_right:
            arrays, metadata = mx.load(str(stored.path), return_metadata=True)
            content = FileContent(arrays, metadata)  # type: ignore[arg-type]
            if contents.has_tokens(content.arrays, file.start, file.end):
                os.utime(stored.path)
                return content
    except (OSError, RuntimeError) as error:
        raise _DamagedFile(file.name) from error
    raise _DamagedFile(file.name)


def _check_length(descriptor: int, arrays: Mapping[str, mx.array]) -> int:
    """Returns the length of a file. Raises OSError if the file is too short for its arrays, because
    MLX does not notice when a disk is full."""
    num_bytes = os.fstat(descriptor).st_size
    length = os.pread(descriptor, _LENGTH_BYTES, 0)
    header_bytes = int.from_bytes(length, "little")
    array_bytes = sum(array.nbytes for array in arrays.values())
    if num_bytes < _LENGTH_BYTES + header_bytes + array_bytes:
        raise OSError("the file was not written completely")
    return num_bytes


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        reason = json.dumps(str(error))
        _logger.warning("event=prefix_file_kept path=%s reason=%s", path, reason)
