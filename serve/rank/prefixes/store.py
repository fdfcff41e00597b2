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
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from serve.core.errors import EngineError
from serve.core.facts import versions
from serve.core.folder import sync
from serve.core.messages import (
    ForgetPrefixFiles,
    Order,
    PrefixFile,
    PrefixFiles,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
)
from serve.core.types import Write
from serve.rank.prefixes import contents, stored_files
from serve.rank.prefixes.contents import FileContent, StageCaches
from serve.rank.prefixes.stored_files import SUFFIX, UNFINISHED, StoredFile

_logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_LENGTH_BYTES = 8  # A safetensors file begins with the length of its header.


Report = Callable[[PrefixRead | PrefixFileWritten], None]


class _DamagedFile(Exception):
    """A file is missing, or is not what was written."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class PrefixStore:
    """The files of a stage, in the folder of its rank. It also reads those in the folders of other
    ranks beside it, which an earlier division into stages may have left there.

    digest identifies everything but weights and layers that the files depend on, weights the
    weights of the stage. report sends a message to rank 0, and can be called from any thread.
    Raises OSError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        digest: str,
        max_bytes: int,
        stage: StageCaches,
        report: Report,
        weights: Mapping[str, str] | None = None,
    ) -> None:
        self._root = folder
        self._folder = folder / digest
        self._max_bytes = max_bytes
        self._stage = stage
        self._report = report
        self._weights = dict(weights or {})
        for path in (folder.parent, folder, self._folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder_lock = _locked(folder)
        self._known: dict[str, list[StoredFile]] = {}  # files that together have all layers
        self._others: list[StoredFile] = []  # own files that are of no use to this stage
        self._loaded: dict[int, list[Any]] = {}
        self._lock = threading.Lock()
        self._has_warned = False
        self._files = self._scan()
        self._writer = ThreadPoolExecutor(1, "prefix-writer")
        self._reader = ThreadPoolExecutor(1, "prefix-reader")

    def files(self) -> PrefixFiles:
        """Lists the files that were there at the start or at the last rescan, the least recently
        used one first."""
        return PrefixFiles(self._files, self._max_bytes, self._weights)

    def write(self, write: Write, content: FileContent) -> None:
        """Writes a file in the background. The arrays have to be evaluated."""
        self._writer.submit(self._write, write, content)

    def refuse(self, write: Write, error: EngineError) -> None:
        """Reports, after all earlier writes, that a file cannot be written, and logs the reason."""
        self._writer.submit(self._report_failed, write, error)

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
        self._others.clear()
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
                checksum = _checksum(file.fileno())
                os.fsync(file.fileno())
            path = stored_files.path_of(self._folder, write, self._stage.layers, checksum)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync(self._folder)
        stored = stored_files.stored_file(path, is_own=True)
        assert stored
        with self._lock:
            self._known[write.name] = [stored]
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
            restored = contents.restore(self._stage, segments, state, message.num_tokens)
            caches, arrays = restored
            mx.eval(arrays)
        except (KeyError, ValueError) as error:
            raise _DamagedFile(message.state or message.names[-1]) from error
        return caches

    def _content(self, name: str) -> FileContent:
        """Checks the files with this name, and reads them lazily. Raises _DamagedFile."""
        with self._lock:
            files = self._known.get(name)
        if files is None:
            raise _DamagedFile(name)
        return contents.merged([_checked(file) for file in files])

    def _forget(self, message: ForgetPrefixFiles) -> None:
        for sequence in message.sequences:
            with self._lock:
                self._loaded.pop(sequence, None)
        names = message.names
        if message.everything:
            with self._lock:
                names = tuple(self._known)
        for name in names:
            self._delete(name)
        if message.everything:
            self._limit_others(0)
            self._clear_unused_folders()

    def _delete(self, name: str) -> None:
        """Deletes the files of this stage with this name. Files of another division into stages may
        be of use later, but are the first to go when room is needed."""
        with self._lock:
            own = [file for file in self._known.pop(name, []) if file.is_own]
            self._others += [file for file in own if file.layers != self._stage.layers]
        for file in own:
            if file.layers == self._stage.layers:
                _unlink(file.path)

    # --- files

    def _scan(self) -> list[PrefixFile]:
        """Finds the files that this stage can use, and its own others. Deletes own unfinished
        files."""
        by_name: defaultdict[str, list[StoredFile]] = defaultdict(list)
        for path in self._root.glob(f"*/{UNFINISHED}*"):
            _unlink(path)
        # glob skips folders that cannot be read, such as those of another user.
        for path in self._root.parent.glob(f"*/{self._folder.name}/*"):
            with suppress(OSError):  # Another rank may delete its files meanwhile.
                if file := stored_files.stored_file(path, path.parent == self._folder):
                    by_name[file.name].append(file)
        found: list[tuple[float, PrefixFile]] = []
        for name, files in by_name.items():
            chosen = stored_files.covering(files, self._stage.layers)
            if chosen:
                self._known[name] = chosen
                last_used = max(file.modified for file in chosen)
                found.append((last_used, stored_files.reported(chosen)))
            self._others += [file for file in files if file.is_own and file not in chosen]
        self._others += self._files_of_other_models()
        self._others.sort(key=lambda file: file.modified)
        found.sort(key=lambda entry: entry[0])
        return [file for _, file in found]

    def _files_of_other_models(self) -> list[StoredFile]:
        """Describes this rank's files of other models and versions, whatever their names are."""
        paths = [path for path in self._root.glob(f"*/*{SUFFIX}") if path.parent != self._folder]
        return [stored_files.unusable_file(path) for path in paths]

    def _make_room(self) -> None:
        with self._lock:
            known = [file for files in self._known.values() for file in files if file.is_own]
            own_bytes = sum(file.num_bytes for file in known)
        self._limit_others(self._max_bytes - own_bytes)

    def _limit_others(self, max_bytes: int) -> None:
        """Deletes files that are of no use to this stage until the rest has at most max_bytes."""
        with self._lock:
            total = sum(file.num_bytes for file in self._others)
            deleted: list[StoredFile] = []
            while self._others and total > max_bytes:
                deleted.append(self._others.pop(0))
                total -= deleted[-1].num_bytes
        for file in deleted:
            _unlink(file.path)

    def _clear_unused_folders(self) -> None:
        """Deletes the files of ranks that do not run: this cluster may have had more ranks."""
        for folder in self._root.parent.glob("rank-*"):
            if folder == self._root:
                continue
            try:
                lock = _locked(folder)
            except OSError:
                continue  # Its rank runs, and deletes its files itself.
            for path in folder.glob(f"*/*{SUFFIX}"):
                _unlink(path)
            os.close(lock)

    def _warn(self, action: str, error: Exception) -> None:
        """Logs the first error only: a full disk would fill the log as well."""
        if not self._has_warned:
            self._has_warned = True
            kind = type(error).__name__
            reason = json.dumps(f"{kind}: {error}")
            _logger.warning("event=prefix_cache_disk_failed action=%s reason=%s", action, reason)


def open_store(
    order: Order,
    config: str,
    weights: Mapping[str, mx.array],
    stage: StageCaches,
    report: Report,
) -> PrefixStore | None:
    """Opens the store of a rank, if there is a folder for it. config is the text of the model's
    config.json. If the folder cannot be used, logs the reason and returns None. The server then
    works without a prefix cache on disk."""
    if order.prefix_dir is None:
        return None
    rank = order.ring[order.rank]
    folder = Path(order.prefix_dir) / f"rank-{rank}"
    shard = f"{order.rank % order.num_shards} of {order.num_shards}"
    facts = {"shard": shard, "kv_bits": str(order.kv_bits), "config": config}
    digest = facts_digest(versions() | facts)
    digests = weight_digests(weights)
    digests_of_shard = {f"{shard}: {name}": each for name, each in digests.items()}
    try:
        return PrefixStore(
            folder,
            digest,
            order.prefix_bytes,
            stage,
            report,
            digests_of_shard,
        )
    except OSError as error:
        path = json.dumps(str(folder))
        reason = json.dumps(str(error))
        _logger.warning(
            "event=prefix_cache_disk_failed action=open path=%s reason=%s", path, reason
        )
        return None


def facts_digest(facts: Mapping[str, str]) -> str:
    """Computes the name of the folder for files that depend on facts, such as the versions of
    packages."""
    in_order = sorted(facts.items())
    text = json.dumps(in_order)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def weight_digests(weights: Mapping[str, mx.array]) -> dict[str, str]:
    """Computes a digest of each weight of a stage. Keys and values depend on the
    weights. A digest depends on the place of every bit, so negated, reversed or permuted weights
    have other digests."""
    digests: dict[str, str] = {}
    for name, array in weights.items():
        kind = f"{array.shape} {array.dtype}"
        digest = hashlib.blake2b(kind.encode(), digest_size=8)
        for hashes in _row_hashes(array):
            digest.update(memoryview(cast(Any, hashes)))
        digests[name] = digest.hexdigest()
    return digests


def _row_hashes(array: mx.array) -> Iterator[mx.array]:
    """Yields a hash of 64 bits for each row, for some rows at a time, so that a large array needs
    little more memory.

    The hash is the sum of the row's elements, as integers of at most 32 bits, times random numbers
    of 64 bits (multilinear hashing, Carter and Wegman). Rows differ in the upper half of their
    hashes with a probability of 1 - 2**-32, however alike they are.
    """
    bits = array.view(_BITS[array.dtype.size])
    width = bits.shape[-1] if bits.ndim else 1
    if bits.size == 0:
        return
    rows = bits.reshape(-1, width)
    # MLX draws integers with less than 32 random bits, so a factor is made of four.
    words = mx.random.randint(0, 1 << 16, (4, width), mx.uint64, key=mx.random.key(0))
    factors = words[0] | (words[1] << 16) | (words[2] << 32) | (words[3] << 48)
    num_rows = max(1, _HASHED_AT_ONCE // width)
    for start in range(0, rows.shape[0], num_rows):
        part = rows[start : start + num_rows].astype(mx.uint64)
        hashes = (part * factors).sum(axis=-1)
        mx.eval(hashes)
        yield hashes


_HASHED_AT_ONCE = 1 << 22  # elements
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}


def _locked(folder: Path) -> int:
    """Locks a folder until the returned descriptor is closed or this process ends. Raises
    BlockingIOError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _checked(file: StoredFile) -> FileContent:
    """Reads a file lazily, after a check of its checksum. Deletes it and raises _DamagedFile if it
    is not right, or does not have the keys and values of all its tokens."""
    try:
        with file.path.open("rb") as opened:
            is_right = _checksum(opened.fileno()) == file.checksum
        if is_right:
            arrays, metadata = mx.load(str(file.path), return_metadata=True)
            content = FileContent(arrays, metadata)  # type: ignore[arg-type]
            if contents.has_tokens(content.arrays, file.start, file.end):
                os.utime(file.path)
                return content
    except (OSError, RuntimeError) as error:
        raise _DamagedFile(file.name) from error
    if file.is_own:
        _unlink(file.path)
    raise _DamagedFile(file.name)


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
