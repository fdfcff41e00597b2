"""A partial folder of a model or adapter on the hub, which holds only what one rank needs.

Small files are links into the hub's own cache, and so are weight files that are complete there. Any
other weight file is sparse, with its full length and real header, so that MLX can open it. Bytes
that have not been fetched read as zeros, so `fetch` must come before any evaluation.
"""

import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.utils import WeakFileLock

from serve.core.checkpoint import TensorRange, header_bytes, parse_header, read_header
from serve.core.errors import ModelError
from serve.core.folder import full_sync
from serve.hub.access import FAILURES, NoNeighbour, patiently
from serve.hub.digests import DigestStore, FilePiece
from serve.hub.fetch import STANDARD, STAT_BLOCK_BYTES, Fetch, Progress, Shard, Sizes
from serve.hub.journal import Journal
from serve.hub.neighbours import NeighbourCaches, Wanted
from serve.hub.parts import TensorPart
from serve.hub.ranges import Range
from serve.hub.remote import RemoteFile
from serve.hub.repo import download, resolve
from serve.hub.snapshot import (
    INDEX,
    MODEL,
    STATE_FOLDER,
    RepoFile,
    RepoKind,
    Snapshot,
    cache_folder,
    cached_whole,
    folder_name,
    is_published,
    saved_snapshot,
    write_whole,
)

_NUM_HEADER_CONNECTIONS = 8
_HOLE_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


class FetchOrder(NamedTuple):
    """The names of tensors to fetch before all others, and of those to fetch after them. Neighbours
    may fetch the latter, too: what a neighbour has begun with by then is taken from it."""

    first: Set[str] = frozenset()
    later: Set[str] = frozenset()


class PartialModel:
    """A folder that can be filled tensor by tensor. tensors covers all weight files."""

    def __init__(
        self,
        folder: Path,
        snapshot: Snapshot,
        remotes: list[RemoteFile],
        sizes: Sizes,
    ) -> None:
        self.folder = folder
        self.snapshot = snapshot
        self._sizes = sizes
        self._shards: dict[str, Shard] = {}
        self.tensors: dict[str, TensorRange] = {}
        for remote in remotes:
            name = remote.file.name
            path = folder / name
            if not path.is_symlink():
                self._shards[name] = Shard(folder, remote)
            self.tensors |= read_header(path)

    def fetch(
        self,
        names: Iterable[str],
        progress: Progress,
        parts: Iterable[TensorPart] = (),
        order: FetchOrder | None = None,
    ) -> int:
        """Fetches the missing bytes of these tensors and parts of tensors; returns the number of
        bytes received.

        Raises ModelError. Bytes that have arrived by then are kept, and are not fetched again.
        """
        names = set(names)
        order = order or FetchOrder()
        first = self._wanted(names & order.first)
        wanted = self._wanted(names - order.first - order.later)
        later = self._wanted(names & order.later)
        for part in parts:
            shard = self._shards.get(part.tensor.file.name)
            if shard:
                wanted.setdefault(shard, []).extend(part.pieces())
        before = self._received()
        before_neighbours = self.neighbour_bytes
        now = [*first.items(), *wanted.items()]
        Fetch(now, later.items(), self._sizes, progress).run()
        fetched = self._received() - before
        if fetched:
            from_neighbours = self.neighbour_bytes - before_neighbours
            _logger.info(
                "event=weights_fetched repo=%s hub_bytes=%d neighbour_bytes=%d",
                self.snapshot.repo,
                fetched - from_neighbours,
                from_neighbours,
            )
        return fetched

    @property
    def neighbour_bytes(self) -> int:
        """Returns how many of all bytes that were received came from neighbours."""
        return sum(shard.remote.num_neighbour_bytes for shard in self._shards.values())

    def _wanted(self, names: Iterable[str]) -> dict[Shard, list[Range]]:
        wanted: dict[Shard, list[Range]] = {}
        for name in names:
            place = self.tensors[name]
            shard = self._shards.get(place.file.name)
            if shard:
                wanted.setdefault(shard, []).append((place.start, place.end))
        return wanted

    def _received(self) -> int:
        return sum(shard.remote.num_bytes for shard in self._shards.values())


def pin(
    repo: str,
    revision: str | None,
    cache: Path | None,
    kind: RepoKind = MODEL,
) -> PartialModel:
    """Opens the commit to which a revision points now. Only rank 0 calls this, and sends the commit
    to the other ranks. Raises ModelError."""
    neighbours = NeighbourCaches.of_environment()
    snapshot = resolve(repo, revision, cache_folder(cache), kind, neighbours)
    return open_partial(repo, snapshot.commit, cache, snapshot, kind=kind, neighbours=neighbours)


def open_partial(
    repo: str,
    commit: str,
    cache: Path | None,
    snapshot: Snapshot | None = None,
    sizes: Sizes = STANDARD,
    kind: RepoKind = MODEL,
    neighbours: NeighbourCaches | None = None,
) -> PartialModel:
    """Opens the folder of this commit in the cache (None: under HF_HOME), or makes it. Passing a
    snapshot that was just resolved saves a request. Raises ModelError."""
    neighbours = neighbours or NeighbourCaches.of_environment()
    cache = cache_folder(cache)
    folder = cache / folder_name(repo) / commit
    state = folder / STATE_FOLDER
    saved = saved_snapshot(folder)
    try:
        state.mkdir(parents=True, exist_ok=True)
        # The first process makes the folder; the others wait until it is there.
        with WeakFileLock(state / "lock"):
            known = Snapshot.load(saved)
            if known is None:
                known = snapshot or resolve(repo, commit, cache, kind, neighbours)
                if known.commit != commit:
                    raise ModelError(f"The hub returned {known.commit} for {repo} at {commit}.")
                if known.complete:
                    known.save(saved)
            remotes = _make(folder, known, kind, neighbours)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made: {error.strerror or error}.") from error
    return PartialModel(folder, known, remotes, sizes)


def _make(
    folder: Path,
    snapshot: Snapshot,
    kind: RepoKind,
    neighbours: NeighbourCaches,
) -> list[RemoteFile]:
    """Makes the small files and the sparse weight files. Returns the remote weight files; reading
    from them fails if a file has changed since its header was read."""
    if kind.config not in snapshot.files:
        raise ModelError(
            f"{snapshot.repo} has no {kind.config}: is this {kind.label}?", code="missing_file"
        )
    index = folder / INDEX if kind is MODEL and INDEX in snapshot.files else None
    # The index first: a model that cannot be used is refused before more is fetched.
    for name in sorted(snapshot.small_files(kind), key=lambda name: name != INDEX):
        path = folder / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            _make_small_file(path, snapshot, name, neighbours)
        if name == INDEX:
            snapshot.weight_files(kind, index)
    remotes: list[RemoteFile] = []
    for name in snapshot.weight_files(kind, index):
        file = snapshot.files[name]
        remotes.append(RemoteFile(snapshot.repo, snapshot.commit, file, neighbours))
    if is_published(snapshot.repo):
        _check_unchanged(folder, snapshot)
    _check_holes(folder, snapshot, [remote.file for remote in remotes])
    make = functools.partial(_make_weight_file, folder, snapshot)
    with ThreadPoolExecutor(_NUM_HEADER_CONNECTIONS, "header") as pool:
        list(pool.map(make, remotes))  # list() raises the first error.
    return remotes


def _make_small_file(
    path: Path, snapshot: Snapshot, name: str, neighbours: NeighbourCaches
) -> None:
    wanted = Wanted(snapshot.repo, snapshot.commit, snapshot.files[name])

    def get() -> bytes:
        data = neighbours.whole(wanted)
        if data is None:
            raise NoNeighbour(f"no neighbour gives {name}")
        return data

    cached = cached_whole(snapshot, name)
    if cached:
        link(path, cached)
    elif is_published(snapshot.repo):
        write_whole(path, patiently(snapshot.repo, get))
    elif data := neighbours.whole(wanted):
        write_whole(path, data)
    else:
        fetch = functools.partial(_fetch_small_file, path, snapshot, name, neighbours)
        patiently(snapshot.repo, fetch)


def _fetch_small_file(
    path: Path, snapshot: Snapshot, name: str, neighbours: NeighbourCaches
) -> None:
    """Fetches a file from the hub, through a neighbour if this machine cannot ask it. Raises
    FAILURES and ModelError."""
    failure = neighbours.why_no_hub
    if not failure:
        try:
            link(path, download(snapshot, name))
        except FAILURES as error:
            if not neighbours.note_failure(error):
                raise
            failure = error
        else:
            return
    data = neighbours.whole_of_hub(Wanted(snapshot.repo, snapshot.commit, snapshot.files[name]))
    if data is None:
        raise failure
    write_whole(path, data)


def _check_unchanged(folder: Path, snapshot: Snapshot) -> None:
    """Raises ModelError if the folder to which links lead is not as it was when it was published:
    other machines may have taken some of its bytes."""
    store = DigestStore.of(folder.parent.parent)
    for file in snapshot.files.values():
        path = folder / file.name
        if path.is_symlink() and path.exists():
            found = store.digests(path.resolve())
            if found is None or found.whole != file.etag:
                raise ModelError(
                    f"{path.resolve()} has changed since the start: run `brigade up` again.",
                    code="changed_file",
                )


def _check_holes(folder: Path, snapshot: Snapshot, files: list[RepoFile]) -> None:
    """Raises ModelError if the disk has no room for whole files, and no holes in files either: it
    would be filled up with zeros."""
    needed = 0
    for file in files:
        if not (folder / file.name).exists() and cached_whole(snapshot, file.name) is None:
            needed += file.size
    free = shutil.disk_usage(folder).free
    if needed > free and not _has_holes(folder):
        raise ModelError(
            f"The file system of {folder} has no sparse files, so {snapshot.repo} needs "
            f"{needed / 1e9:.1f} GB there, but {free / 1e9:.1f} GB are free: choose a --cache-dir "
            "on a file system that has them, such as APFS."
        )


def _has_holes(folder: Path) -> bool:
    with tempfile.TemporaryFile(dir=folder) as probe:
        os.ftruncate(probe.fileno(), _HOLE_BYTES)
        return os.fstat(probe.fileno()).st_blocks * STAT_BLOCK_BYTES < _HOLE_BYTES // 2


def _make_weight_file(folder: Path, snapshot: Snapshot, remote: RemoteFile) -> None:
    name = remote.file.name
    size = remote.file.size
    path = folder / name
    if path.exists() and path.stat().st_size == size:
        return
    whole = cached_whole(snapshot, name)
    if whole:
        link(path, whole)
        return
    header = _read_header(remote, path)
    journal = Journal.of(folder, remote.file)
    journal.path.unlink(missing_ok=True)
    sparse = path.with_name(name + ".new")
    with sparse.open("wb") as stream:
        stream.write(header)
        stream.flush()
        os.ftruncate(stream.fileno(), size)
        full_sync(stream.fileno())
    journal.add(FilePiece(0, len(header), hashlib.sha256(header).hexdigest()))
    sparse.replace(path)


def _read_header(remote: RemoteFile, path: Path) -> bytes:
    size = remote.file.size
    prefix_bytes = min(8, size)
    prefix = b"".join(remote.read(0, prefix_bytes))
    end = 8 + header_bytes(prefix, path)
    if end > size:
        raise ModelError(
            f"{path.name} of {remote.repo} is cut short: {size} of {end} bytes.", code="cut_short"
        )
    text = b"".join(remote.read(8, end))
    parse_header(text, path, size)
    return prefix + text


def link(path: Path, target: Path) -> None:
    link = path.with_name(path.name + ".new")
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    link.replace(path)
