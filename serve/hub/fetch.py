"""Byte ranges of remote files, written in place into sparse files: several
connections, and several processes on one folder that do not fetch the same twice.

A range is claimed by a lock on these bytes of a file beside it, which the system
releases when the process ends, however it ends.
"""

import fcntl
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve.core.errors import ModelError
from serve.hub.journal import Journal
from serve.hub.ranges import Range, requests, subtract, total
from serve.hub.remote import RemoteFile

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes to be done in all, from any thread."""

_ELSEWHERE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked for at a time. spare_share is the share of gap bytes that may be
    fetched along; what arrives is safe from a kill after commit_bytes."""

    request_bytes: int = 64 << 20
    commit_bytes: int = 8 << 20
    gap_bytes: int = 64 << 10
    spare_share: float = 0.005
    num_connections: int = 8


STANDARD = Sizes()


class Shard:
    """A sparse file that is being filled. path has its full length already."""

    def __init__(self, path: Path, journal: Path, remote: RemoteFile) -> None:
        self.path, self.remote = path, remote
        self._journal = Journal(journal, f"{remote.file.etag} {remote.file.size}")
        self._claims = journal.with_suffix(".claims")
        self._lock = threading.Lock()
        self._data = self._locks = -1

    def present(self) -> list[Range]:
        with self._lock:
            return list(self._journal.present())

    def open(self) -> None:
        """Before claims and writes. What is opened closes with the last thread that
        uses this object: closing the file of claims would give up all of them."""
        if self._data < 0:
            self._data = os.open(self.path, os.O_WRONLY)
            weakref.finalize(self, os.close, self._data)
            self._locks = os.open(self._claims, os.O_RDWR | os.O_CREAT, 0o644)
            weakref.finalize(self, os.close, self._locks)

    @contextmanager
    def claim(self, wanted: Range) -> Iterator[bool]:
        """False if another process has some of it."""
        start, end = wanted
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, end - start, start)
        except (BlockingIOError, PermissionError):
            yield False
            return
        except OSError:
            # A file system without locks: two processes may fetch the same bytes.
            yield True
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, end - start, start)

    def fill(
        self,
        wanted: Range,
        pieces: Generator[bytes, None, None],
        commit_bytes: int,
        advance: Callable[[int], None],
    ) -> None:
        """Writes what comes and tells advance how much. What has come before a failure
        is committed too."""
        at = committed = wanted[0]
        try:
            with closing(pieces):
                for data in pieces:
                    self._write(data, at)
                    at += len(data)
                    if at - committed >= commit_bytes:
                        self._commit(committed, at)
                        committed = at
                    advance(len(data))
        finally:
            if at > committed:
                self._commit(committed, at)

    def _write(self, data: bytes, at: int) -> None:
        rest = memoryview(data)
        with self._explained():
            while rest:
                written = os.pwrite(self._data, rest, at)
                rest, at = rest[written:], at + written

    def _commit(self, start: int, end: int) -> None:
        with self._explained():
            os.fsync(self._data)
            self._journal.add(start, end)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(f"{self.path} cannot be written: {error.strerror}.") from error


@dataclass(frozen=True, slots=True)
class _Job:
    shard: Shard
    asked: Range


class _Stopped(Exception):
    """Another thread has failed."""


class Fetch:
    """Everything that one rank wants, once."""

    def __init__(
        self, wanted: Mapping[Shard, list[Range]], sizes: Sizes, progress: Progress
    ) -> None:
        self._sizes, self._progress = sizes, progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wanted = {shard: ranges for shard, ranges in wanted.items() if ranges}
        self._jobs = deque(
            _Job(shard, asked)
            for shard, ranges in self._wanted.items()
            for asked in self._requests(shard, ranges)
        )
        self._shards = {job.shard for job in self._jobs}
        self._total = sum(total(ranges) for ranges in self._wanted.values())
        self.num_missing = sum(
            total(subtract(ranges, shard.present())) for shard, ranges in self._wanted.items()
        )
        self._done = self._total - self.num_missing

    def _requests(self, shard: Shard, wanted: list[Range]) -> list[Range]:
        present = shard.present()
        return requests(
            wanted,
            present,
            gap_bytes=self._sizes.gap_bytes,
            spare_bytes=int(self._sizes.spare_share * total(subtract(wanted, present))),
            most_bytes=self._sizes.request_bytes,
        )

    def run(self) -> None:
        """Returns when all is there. Raises ModelError, or NoRanges of a server."""
        self._check_room()
        for shard in self._shards:
            shard.open()
        pool = ThreadPoolExecutor(self._sizes.num_connections, "fetch")
        work = [pool.submit(self._work) for _ in range(self._sizes.num_connections)]
        try:
            for done in as_completed(work):
                done.result()
        finally:
            # After an error the others may be waiting for a server: nobody waits for them.
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_room(self) -> None:
        for folder in {shard.path.parent for shard in self._shards}:
            free = shutil.disk_usage(folder).free
            if free < self.num_missing:
                raise ModelError(
                    f"{folder} has {free / 1e9:.1f} GB free, {self.num_missing / 1e9:.1f} GB are "
                    "to be fetched: make room, or choose another --cache-dir."
                )

    def _work(self) -> None:
        try:
            while job := self._next():
                with job.shard.claim(job.asked) as mine:
                    if mine:
                        self._get(job)
                if not mine:
                    # Whoever has it may end without it, so it stays to be done.
                    self._jobs.append(job)
                    self._sleep(_ELSEWHERE_SECONDS)
        except _Stopped:
            return

    def _next(self) -> _Job | None:
        try:
            return self._jobs.popleft()
        except IndexError:
            return None

    def _get(self, job: _Job) -> None:
        """Fetches what is not there by then: another process may have been at it."""
        missing = subtract([job.asked], job.shard.present())
        self._advance(total([job.asked]) - total(missing))
        for part in missing:
            pieces = job.shard.remote.read(*part, sleep=self._sleep)
            job.shard.fill(part, pieces, self._sizes.commit_bytes, self._advance)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _advance(self, num_bytes: int) -> None:
        """Bytes of gaps count for nothing: a bar must not go beyond its end."""
        with self._lock:
            self._done = min(self._total, self._done + num_bytes)
            done = self._done
        self._progress(done, self._total)
        if self._stop.is_set():
            raise _Stopped
