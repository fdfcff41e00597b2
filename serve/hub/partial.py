"""A model's or adapter's folder with holes: of a commit on the hub, only what is needed is here.

Small files are links into the hub's own cache. A weight file is a link too if that
cache has it whole; else it is sparse, of the full length and with its real header,
so that MLX can open it, and a journal says which of its tensors are there. What is
read before it was fetched is zeros: `fetch` comes before any evaluation.
"""

import logging
import os
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub.utils import WeakFileLock

from serve.core.checkpoint import TensorRange, header_bytes, parse_header, read_header
from serve.core.errors import ModelError
from serve.hub.fetch import STANDARD, Fetch, Progress, Shard, Sizes
from serve.hub.ranges import Range, subtract
from serve.hub.remote import NoRanges, RemoteFile
from serve.hub.repo import (
    INDEX,
    MODEL,
    Kind,
    Snapshot,
    cached_whole,
    default_cache,
    fetch_whole,
    folder_name,
    resolve,
)

_COPY_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


class PartialModel:
    """tensors are those of all weight files."""

    def __init__(
        self, folder: Path, snapshot: Snapshot, remotes: list[RemoteFile], sizes: Sizes
    ) -> None:
        self.folder, self.snapshot = folder, snapshot
        self._sizes = sizes
        names = [remote.file.name for remote in remotes]
        self._shards = {
            name: Shard(folder / name, _journal(folder, name), remote)
            for name, remote in zip(names, remotes, strict=True)
            if not (folder / name).is_symlink()
        }
        self.tensors: dict[str, TensorRange] = {
            tensor: place for name in names for tensor, place in read_header(folder / name).items()
        }

    def missing_bytes(self, names: Iterable[str]) -> int:
        return sum(
            end - start
            for shard, ranges in self._wanted(names).items()
            for start, end in subtract(ranges, shard.present())
        )

    def fetch(self, names: Iterable[str], progress: Progress) -> int:
        """Makes these tensors be there; returns how many bytes came over the network.

        Raises ModelError. After it, what came before it is there and counts.
        """
        wanted = self._wanted(names)
        before = self._received()
        fetch = Fetch(wanted, self._sizes, progress)
        try:
            fetch.run()
        except NoRanges:
            for shard, ranges in wanted.items():
                self._copy_whole(shard, ranges)
        return self._received() - before

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

    def _copy_whole(self, shard: Shard, wanted: list[Range]) -> None:
        """For a server that has stopped to give ranges. MLX has the sparse file open
        already, so it is filled and not replaced."""
        shard.open()
        for part in subtract(wanted, shard.present()):
            source = _whole(self.snapshot, shard.path.name)
            shard.fill(part, _pieces(source, part), self._sizes.commit_bytes, lambda _: None)


def pin(repo: str, revision: str | None, cache: Path | None, kind: Kind = MODEL) -> PartialModel:
    """The commit that a revision stands for now (None: main), and its folder. Only rank 0
    asks this: others are told the commit, so that all have the same. Raises ModelError."""
    snapshot = resolve(repo, revision, cache or default_cache(), kind)
    return open_partial(repo, snapshot.commit, cache, snapshot, kind=kind)


def open_partial(
    repo: str,
    commit: str,
    cache: Path | None,
    snapshot: Snapshot | None = None,
    sizes: Sizes = STANDARD,
    kind: Kind = MODEL,
) -> PartialModel:
    """The folder of this commit in the cache (None: under HF_HOME), made if it is not
    there. Raises ModelError.

    snapshot spares asking the hub again by whoever has just resolved it.
    """
    cache = cache or default_cache()
    folder = cache / folder_name(repo) / commit
    state = folder / ".brigade"
    try:
        state.mkdir(parents=True, exist_ok=True)
        # One process makes the folder, others find it made.
        with WeakFileLock(state / "lock"):
            saved = state / "snapshot.json"
            known = Snapshot.load(saved)
            if known is None:
                known = snapshot or resolve(repo, commit, cache, kind)
                if known.commit != commit:
                    raise ModelError(f"The hub gave {known.commit} for {repo} at {commit}.")
                if known.complete:
                    known.save(saved)
            remotes = _make(folder, known, kind)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made: {error.strerror or error}.") from error
    return PartialModel(folder, known, remotes, sizes)


def _make(folder: Path, snapshot: Snapshot, kind: Kind) -> list[RemoteFile]:
    """The small files and the places of the weights; returns where the weights come from.
    Who has read a header fetches the rest, and sees if the file is another one by then."""
    if kind.config not in snapshot.files:
        raise ModelError(f"{snapshot.repo} has no {kind.config}: is this {kind.what}?")
    index = folder / INDEX if kind is MODEL and INDEX in snapshot.files else None
    # The index first: a model that cannot be had is refused before more is fetched.
    for name in sorted(snapshot.small_files(kind), key=lambda name: name != INDEX):
        if not (folder / name).exists():
            _link(folder / name, cached_whole(snapshot, name) or fetch_whole(snapshot, name))
        if name == INDEX:
            snapshot.weight_files(kind, index)
    remotes = [
        RemoteFile(snapshot.repo, snapshot.commit, snapshot.files[name])
        for name in snapshot.weight_files(kind, index)
    ]
    with ThreadPoolExecutor(8, "header") as pool:
        list(pool.map(lambda remote: _place(folder, snapshot, remote), remotes))
    return remotes


def _place(folder: Path, snapshot: Snapshot, remote: RemoteFile) -> None:
    """A link to the whole file, or a sparse one with its header."""
    name, size = remote.file.name, remote.file.size
    path = folder / name
    if path.exists() and path.stat().st_size == size:
        return
    whole = cached_whole(snapshot, name)
    try:
        header = b"" if whole else _read_header(remote, path)
    except NoRanges:
        whole = _whole(snapshot, name)
    if whole:
        _link(path, whole)
        return
    _journal(folder, name).unlink(missing_ok=True)
    sparse = path.with_name(name + ".new")
    with sparse.open("wb") as stream:
        stream.write(header)
        stream.truncate(size)
        os.fsync(stream.fileno())
    sparse.replace(path)


def _read_header(remote: RemoteFile, path: Path) -> bytes:
    """The first bytes of a safetensors file, up to its tensors."""
    size = remote.file.size
    prefix = b"".join(remote.read(0, min(8, size)))
    end = 8 + header_bytes(prefix, path)
    if end > size:
        raise ModelError(f"{path.name} of {remote.repo} is cut short: {size} of {end} bytes.")
    text = b"".join(remote.read(8, end))
    parse_header(text, path, size)
    return prefix + text


def _whole(snapshot: Snapshot, name: str) -> Path:
    _logger.warning(
        "event=hub_without_ranges repo=%s file=%s: fetching the whole file", snapshot.repo, name
    )
    return fetch_whole(snapshot, name)


def _pieces(source: Path, part: Range) -> Generator[bytes, None, None]:
    start, end = part
    with source.open("rb") as stream:
        stream.seek(start)
        while start < end and (data := stream.read(min(_COPY_BYTES, end - start))):
            yield data
            start += len(data)


def _link(path: Path, target: Path) -> None:
    link = path.with_name(path.name + ".new")
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    link.replace(path)


def _journal(folder: Path, name: str) -> Path:
    return folder / ".brigade" / f"{name}.journal"
