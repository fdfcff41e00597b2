"""What this machine's caches hold of models and adapters, for other machines.

Every byte is checked before it is given: a piece of a partial file against the digest from when it
was written, a block of a whole file against the digest from when the whole file was checked.
"""

import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from serve.core.errors import ModelError
from serve.hub.claims import claimed_by_others
from serve.hub.digests import (
    BLOCK_BYTES,
    DigestStore,
    FileDigests,
    FilePiece,
    can_verify,
    is_git_hash,
)
from serve.hub.journal import Journal
from serve.hub.ranges import Range, subtract, union
from serve.hub.snapshot import (
    ADAPTER,
    MODEL,
    RepoFile,
    Snapshot,
    cache_folder,
    cached_by_hub,
    cached_whole,
    folder_name,
    is_offered,
    remembered,
)

_NUM_CHECKED_AT_ONCE = 4
_REPO = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_REVISION = re.compile(r"[\w-][\w./-]*")

_logger = logging.getLogger(__name__)


class NotHeldError(Exception):
    """This machine does not hold the bytes, or they are not those that were fetched."""


class BusyError(Exception):
    """The file is still being checked."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file of which this machine holds some pieces."""

    path: Path
    file: RepoFile
    pieces: list[FilePiece]
    claims_path: Path | None = None

    @property
    def ranges(self) -> list[Range]:
        return union((piece.start, piece.end) for piece in self.pieces)

    def coming(self) -> list[Range]:
        """Returns the missing bytes that ranks of this machine are fetching now."""
        if self.claims_path is None:
            return []
        return claimed_by_others(self.claims_path, subtract([(0, self.file.size)], self.ranges))

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yields bytes [start, end), each piece after it was checked. Raises NotHeldError."""
        position = start
        while position < end:
            piece = self._piece_at(position)
            data = self._checked(piece)
            yield data[position - piece.start : end - piece.start]
            position = piece.end

    def read_whole(self, start: int, end: int) -> tuple[bytes, str]:
        """Returns bytes [start, end) and their digest. Raises NotHeldError."""
        piece = self._piece_at(start) if start < end else None
        if piece and (piece.start, piece.end) == (start, end):
            return self._checked(piece), piece.sha256
        data = b"".join(self.read(start, end))
        return data, sha256(data).hexdigest()

    def _piece_at(self, position: int) -> FilePiece:
        for piece in self.pieces:
            if piece.start <= position < piece.end:
                return piece
        raise NotHeldError

    def _checked(self, piece: FilePiece) -> bytes:
        try:
            with self.path.open("rb") as stream:
                stream.seek(piece.start)
                data = stream.read(piece.end - piece.start)
        except OSError as error:
            raise NotHeldError from error
        if sha256(data).hexdigest() != piece.sha256:
            _logger.warning(
                "event=damaged_file path=%s start=%d end=%d", self.path, piece.start, piece.end
            )
            raise NotHeldError
        return data


class Holdings:
    """Brigade's cache (None: the default one) and the hub's (None: the default one)."""

    def __init__(self, cache: Path | None = None, hub_cache: Path | None = None) -> None:
        self._cache = cache_folder(cache)
        self._hub_cache = hub_cache
        self._digests = DigestStore.of(self._cache)
        self._pool = ThreadPoolExecutor(_NUM_CHECKED_AT_ONCE, "digests")
        self._lock = threading.Lock()
        self._running: dict[Path, Future[FileDigests | None]] = {}
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def snapshot(self, repo: str, revision: str) -> Snapshot | None:
        """Returns what is known of the commit to which a revision last pointed."""
        if not _REPO.fullmatch(repo) or not _REVISION.fullmatch(revision):
            return None
        known = remembered(repo, revision, self._cache)
        for kind in (MODEL, ADAPTER):
            if known is None:
                try:
                    known = cached_by_hub(repo, revision, kind, self._hub_cache)
                except ModelError:  # The name is not one of a repository.
                    return None
        return known

    def file(self, snapshot: Snapshot, name: str, wait_seconds: float) -> HeldFile:
        """Returns what is held of a file. Raises NotHeldError, and BusyError if checking a large
        file for the first time takes longer than wait_seconds."""
        file = snapshot.files.get(name)
        if file is None or not is_offered(name) or not can_verify(file.etag):
            raise NotHeldError
        folder = self._cache / folder_name(snapshot.repo) / snapshot.commit
        path = folder / name
        is_partial = path.suffix == ".safetensors" and not path.is_symlink()
        if path.exists() and not is_partial:
            whole: Path | None = path
        else:
            whole = cached_whole(snapshot, name, self._hub_cache)
        if whole:
            found = self._digests_of(whole.resolve(), file, wait_seconds)
            if found and (found.whole, found.size) == (file.etag, file.size):
                return HeldFile(whole, file, found.pieces())
        if not is_partial:
            raise NotHeldError
        journal = Journal.of(folder, file)
        return HeldFile(path, file, journal.pieces(), journal.claims_path)

    def _digests_of(
        self,
        path: Path,
        file: RepoFile,
        wait_seconds: float,
    ) -> FileDigests | None:
        is_git = is_git_hash(file.etag)
        try:
            if path.stat().st_size != file.size:
                return None
            if file.size <= BLOCK_BYTES:
                return self._digests.compute(path, is_git)
        except OSError:
            return None
        return self._digests.known(path, is_git) or self._wait_for(path, is_git, wait_seconds)

    def _wait_for(self, path: Path, is_git: bool, seconds: float) -> FileDigests | None:
        with self._lock:
            future = self._running.get(path)
            if future is None:
                _logger.info("event=checking_file path=%s", path)
                compute = self._digests.compute
                future = self._pool.submit(compute, path, is_git, self._closed)
                self._running[path] = future
        try:
            found = future.result(seconds)
        except TimeoutError as error:
            raise BusyError from error
        except (OSError, ModelError):
            found = None
        with self._lock:
            self._running.pop(path, None)
        return found
