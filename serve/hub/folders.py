"""Publishes a folder that only this machine has: all ranks can then read it like a repository."""

import hashlib
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub.utils import WeakFileLock

from serve.core.checkpoint import is_folder, not_a_folder
from serve.core.errors import ModelError
from serve.hub.digests import DigestStore
from serve.hub.journal import Journal
from serve.hub.partial import link
from serve.hub.snapshot import (
    FOLDER_OWNER,
    STATE_FOLDER,
    RepoFile,
    Snapshot,
    cache_folder,
    folder_name,
    is_offered,
    saved_snapshot,
)

_NUM_READ_AT_ONCE = 4

_logger = logging.getLogger(__name__)


def publish(folder: Path, cache: Path | None = None) -> tuple[str, str]:
    """Makes an entry in Brigade's cache (None: under HF_HOME) whose files are links to the
    folder's, and returns its repository and commit: the values of --model and --revision on all
    ranks. The commit is a digest of the files. Raises ModelError."""
    if not is_folder(folder):
        raise ModelError(not_a_folder(folder), code="no_folder")
    cache = cache_folder(cache)
    repo = f"{FOLDER_OWNER}/{_name(folder)}"
    try:
        files = _digested(folder, DigestStore.of(cache))
        commit = _commit(files)
        place = cache / folder_name(repo) / commit
        state = place / STATE_FOLDER
        state.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(state / "lock"):
            for file in files.values():
                _link_to(folder / file.name, place, file)
            Snapshot(repo, commit, files).save(saved_snapshot(place))
    except OSError as error:
        raise ModelError(f"{folder} cannot be published: {error.strerror or error}.") from error
    return repo, commit


def _name(folder: Path) -> str:
    """Returns a folder's name as the hub would allow it for a repository."""
    name = re.sub(r"[^\w.]+", "-", folder.resolve().name, flags=re.ASCII)
    return re.sub(r"\.{2,}", ".", name).strip("-._").removesuffix(".git")[:80] or "model"


def _digested(folder: Path, store: DigestStore) -> dict[str, RepoFile]:
    names: list[str] = []
    for path in sorted((*folder.iterdir(), *folder.glob("*_Pooling/config.json"))):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and is_offered(name):
            names.append(name)

    def digested(name: str) -> RepoFile:
        path = (folder / name).resolve()
        found = store.digests(path)
        if found is None:
            raise ModelError(f"{path} changes while it is read: try again.", code="changed_file")
        return RepoFile(name, found.size, found.whole)

    _logger.info("event=checking_folder path=%s files=%d", folder, len(names))
    with ThreadPoolExecutor(_NUM_READ_AT_ONCE, "digests") as pool:
        return {file.name: file for file in pool.map(digested, names)}


def _commit(files: dict[str, RepoFile]) -> str:
    lines = [f"{file.name} {file.size} {file.etag}\n" for file in files.values()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]


def _link_to(target: Path, place: Path, file: RepoFile) -> None:
    path = place / file.name
    path.parent.mkdir(exist_ok=True)
    target = target.resolve()
    if path.is_symlink() and path.readlink() == target:
        return
    link(path, target)
    Journal.of(place, file).path.unlink(missing_ok=True)
