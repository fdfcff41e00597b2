"""Fetches byte ranges of remote files into sparse files, in place.

A fetch uses several connections, and several processes can share one folder without fetching the
same bytes twice.
"""

import hashlib
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve.core.errors import ModelError
from serve.core.folder import full_sync
from serve.hub.claims import Claims
from serve.hub.digests import BLOCK_BYTES, FilePiece
from serve.hub.journal import Journal
from serve.hub.ranges import Range, requests, subtract, total
from serve.hub.remote import RemoteFile

Progress = Callable[[int, int], None]
"""A function called with the bytes done and the total, from any thread."""

STAT_BLOCK_BYTES = 512  # the unit of st_blocks, on all systems
_CLAIMED_ELSEWHERE_SECONDS = 0.05
_COMING_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of requests, and of pieces after which a connection waits for the disk. A kill
    loses at most sync_bytes for each connection."""

    request_bytes: int = 64 << 20
    sync_bytes: int = BLOCK_BYTES
    num_connections: int = 8


STANDARD = Sizes()


class Shard:
    """A sparse file that is being filled. The file already has its full length."""

    def __init__(self, folder: Path, remote: RemoteFile) -> None:
        self.path = folder / remote.file.name
        self.remote = remote
        self._journal = Journal.of(folder, remote.file)
        self.claims = Claims(self._journal.claims_path)
        self._lock = threading.Lock()
        self._data = -1

    def present(self) -> list[Range]:
        with self._lock:
            return list(self._journal.present())

    def reserved_bytes(self) -> int:
        """Returns the room that missing bytes take already: all of it where files have no holes."""
        taken = self.path.stat().st_blocks * STAT_BLOCK_BYTES
        return max(0, taken - total(self.present()))

    def open(self) -> None:
        """Opens the files, before any claim or write."""
        if self._data < 0:
            self._data = os.open(self.path, os.O_WRONLY)
            weakref.finalize(self, os.close, self._data)
            self.claims.open()

    def fill(
        self,
        wanted: Range,
        pieces: Generator[bytes, None, None],
        sync_bytes: int,
        advance: Callable[[int], None],
    ) -> None:
        """Writes pieces to the range, up to the first failure. `advance` gets the pieces' sizes.
        The journal's pieces end at multiples of sync_bytes."""
        position = wanted[0]
        synced = position
        digest = hashlib.sha256()
        try:
            with closing(pieces):
                for data in pieces:
                    rest = memoryview(data)
                    while rest:
                        part = rest[: sync_bytes - position % sync_bytes]
                        rest = rest[len(part) :]
                        self._write(part, position)
                        digest.update(part)
                        position += len(part)
                        if position % sync_bytes == 0:
                            self._sync(FilePiece(synced, position, digest.hexdigest()))
                            synced = position
                            digest = hashlib.sha256()
                    advance(len(data))
        finally:
            if position > synced:
                self._sync(FilePiece(synced, position, digest.hexdigest()))

    def _write(self, rest: memoryview, position: int) -> None:
        with self._explained():
            while rest:
                written = os.pwrite(self._data, rest, position)
                rest = rest[written:]
                position += written

    def _sync(self, piece: FilePiece) -> None:
        with self._explained():
            full_sync(self._data)
            self._journal.add(piece)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(f"{self.path} cannot be written: {error.strerror}.") from error


_Job = tuple[Shard, Range]


class _Stopped(Exception):
    """Ends a thread because another thread has failed."""


class Fetch:
    """One fetch of all the ranges that one rank wants, in this order, and then of those in `later`,
    which neighbours may fetch, too. The rank waits for what a neighbour is already fetching."""

    def __init__(
        self,
        wanted: Iterable[tuple[Shard, list[Range]]],
        later: Iterable[tuple[Shard, list[Range]]],
        sizes: Sizes,
        progress: Progress,
    ) -> None:
        self._sizes = sizes
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._total = 0
        self._first = self._missing(wanted)
        self._later = self._missing(later)
        jobs = [*self._first, *self._later]
        self._shards = {shard for shard, _ in jobs}
        self.num_missing = total(requested for _, requested in jobs)
        self._done = self._total - self.num_missing

    def _missing(self, wanted: Iterable[tuple[Shard, list[Range]]]) -> deque[_Job]:
        jobs: deque[_Job] = deque()
        for shard, ranges in wanted:
            self._total += total(ranges)
            requested = requests(ranges, shard.present(), self._sizes.request_bytes)
            jobs.extend((shard, each) for each in requested)
        return jobs

    def run(self) -> None:
        """Fetches all missing bytes, and writes them to the disk. Raises ModelError."""
        self._check_room()
        for shard in self._shards:
            shard.open()
        self._run(self._first, waits=False)
        self._run(self._later, waits=True)

    def _run(self, jobs: deque[_Job], *, waits: bool) -> None:
        num_threads = min(self._sizes.num_connections, len(jobs))
        if not num_threads:
            return
        pool = ThreadPoolExecutor(num_threads, "fetch")
        work = [pool.submit(self._work, jobs, waits) for _ in range(num_threads)]
        try:
            for each in as_completed(work):
                each.result()
        except BaseException:
            # The other threads may still wait for a server: do not wait for them.
            self._stop.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_room(self) -> None:
        folders = {shard.path.parent for shard in self._shards}
        reserved = sum(shard.reserved_bytes() for shard in self._shards)
        for folder in folders:
            free = shutil.disk_usage(folder).free + reserved
            if free < self.num_missing:
                free_gb = f"{free / 1e9:.1f} GB"
                missing_gb = f"{self.num_missing / 1e9:.1f} GB"
                raise ModelError(
                    f"{folder} has {free_gb} free, but {missing_gb} are missing: make room, or "
                    "choose another --cache-dir."
                )

    def _work(self, jobs: deque[_Job], waits: bool) -> None:
        try:
            while jobs:
                try:
                    job = jobs.popleft()
                except IndexError:
                    return  # Another thread has taken the last one.
                shard, requested = job
                if waits and shard.remote.is_coming(*requested):
                    jobs.append(job)
                    self._sleep(_COMING_SECONDS)
                    continue
                with shard.claims.claim(requested) as is_mine:
                    if is_mine:
                        self._get(shard, requested)
                if not is_mine:
                    # The process that has claimed this job may end before it has fetched the bytes.
                    jobs.append(job)
                    self._sleep(_CLAIMED_ELSEWHERE_SECONDS)
        except _Stopped:
            return

    def _get(self, shard: Shard, requested: Range) -> None:
        """Fetches the missing part of a job: another process may have fetched some of it."""
        missing = subtract([requested], shard.present())
        self._advance(total([requested]) - total(missing))
        for part in missing:
            pieces = shard.remote.read(*part, sleep=self._sleep)
            shard.fill(part, pieces, self._sizes.sync_bytes, self._advance)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _advance(self, num_bytes: int) -> None:
        with self._lock:  # Also around the call: progress must never go back.
            self._done += num_bytes
            self._progress(self._done, self._total)
        if self._stop.is_set():
            raise _Stopped
