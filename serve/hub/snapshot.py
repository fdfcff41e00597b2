"""One commit of a repository: its files, which of them are needed, and what this machine's caches
know of it.

There are two caches: Brigade's own holds partial files, the hub's holds whole ones. Code (.py) and
pickles are never fetched, nor given to others.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec
from huggingface_hub import constants, try_to_load_from_cache

from serve.core.checkpoint import read_json, refuse_pickles
from serve.core.errors import ModelError
from serve.core.folder import make_cache_folder
from serve.hub.access import FAILURES, explain

INDEX = "model.safetensors.index.json"
STATE_FOLDER = ".brigade"
FOLDER_OWNER = "folder"
SMALL = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".jsonl"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The only file that is needed from a subfolder: the pooling of sentence-transformers.
_POOLING = re.compile(r"[0-9]+_Pooling/config\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepoKind:
    """The kind of a repository: a model or an adapter. config names the file that every repository
    of this kind contains, weights is a pattern for the names of the weight files."""

    label: str
    config: str
    weights: str


MODEL = RepoKind("a language model", "config.json", r"model.*\.safetensors")
ADAPTER = RepoKind("an adapter", "adapter_config.json", r"(adapters|adapter_model)\.safetensors")


class RepoFile(msgspec.Struct, frozen=True):
    """One file of a commit. etag is the sha256 of a large file and the git hash of a small one. An
    etag cannot verify a part of the file, but a new etag shows that the file has changed."""

    name: str
    size: int
    etag: str


class Snapshot(msgspec.Struct, frozen=True):
    """The files of one commit. `complete` is False if the list comes from the hub's own cache: the
    commit may contain more files."""

    repo: str
    commit: str
    files: dict[str, RepoFile]
    complete: bool = True

    @classmethod
    def load(cls, path: Path) -> "Snapshot | None":
        """Reads a snapshot that save has written; None if it is missing or unreadable."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError, msgspec.DecodeError):
            return None

    def merged(self, other: "Snapshot | None") -> "Snapshot":
        """Returns all files that two lists of the same commit contain."""
        if other is None or self.complete:
            return self
        files = other.files if other.complete else other.files | self.files
        return msgspec.structs.replace(self, files=files, complete=other.complete)

    def save(self, path: Path) -> None:
        write_whole(path, msgspec.json.encode(self))

    def small_files(self, kind: RepoKind) -> list[str]:
        """Returns the files to fetch whole. An adapter's tokenizer files belong to its model."""
        if kind is ADAPTER:
            return [kind.config]
        return [name for name in self.files if Path(name).suffix in SMALL]

    def weight_files(self, kind: RepoKind, index: Path | None) -> list[str]:
        """Returns the safetensors files; index is the local path of a model's index. Raises
        ModelError if there are none, or if one is missing."""
        if index is None:
            names = sorted(name for name in self.files if re.fullmatch(kind.weights, name))
        else:
            names = self._names_in(index)
        for name in names:
            if name not in self.files:
                raise ModelError(
                    f"{self.repo} has no {name}{self._where}; its {INDEX} names it.",
                    code="missing_file",
                )
        if not names:
            refuse_pickles(self.repo, self.files)
            raise ModelError(
                f"{self.repo} has no safetensors of {kind.label}{self._where}.", code="missing_file"
            )
        return names

    @property
    def _where(self) -> str:
        """Returns where a file is missing, for errors: the hub itself may contain it."""
        if self.complete:
            return ""
        if constants.HF_HUB_OFFLINE:
            return " in the cache, and HF_HUB_OFFLINE is set"
        return " in the cache, and the hub cannot be reached"

    def _names_in(self, index: Path) -> list[str]:
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{INDEX} of {self.repo} has no weight_map.", code="wrong_format")
        return sorted({str(shard) for shard in shards.values()})


def is_needed(name: str) -> bool:
    """Whether a file may be needed. Names become paths, so none may lead out of the folder."""
    is_plain = "/" not in name and "\\" not in name and not name.startswith(".")
    return is_plain or _POOLING.fullmatch(name) is not None


def is_offered(name: str) -> bool:
    """Whether a file may be given to another machine."""
    return is_needed(name) and name.endswith((".safetensors", *SMALL))


def is_commit(revision: str | None) -> bool:
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def ref_file(cache: Path, repo: str, revision: str | None) -> Path:
    """Returns the file that contains the last known commit of a branch or tag (None: main)."""
    return cache / folder_name(repo) / "refs" / quote(revision or "main", safe="")


def remembered(repo: str, revision: str | None, cache: Path) -> Snapshot | None:
    """Returns a revision's snapshot in Brigade's cache."""
    commit = revision
    if not is_commit(commit):
        ref = ref_file(cache, repo, revision)
        commit = ref.read_text() if ref.is_file() else ""
    if not is_commit(commit):
        return None
    known = Snapshot.load(saved_snapshot(cache / folder_name(repo) / str(commit)))
    return known if known and known.repo == repo else None


def saved_snapshot(folder: Path) -> Path:
    return folder / STATE_FOLDER / "snapshot.json"


def cached_by_hub(
    repo: str,
    revision: str | None,
    kind: RepoKind,
    hub_cache: Path | None = None,
) -> Snapshot | None:
    """Returns a snapshot in the hub's own cache (None: the default one), which may lack files."""
    try:
        config = try_to_load_from_cache(repo, kind.config, hub_cache, revision)
    except FAILURES as error:
        raise explain(error, repo) from error
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    files: dict[str, RepoFile] = {}
    for path in (*folder.iterdir(), *folder.glob("*_Pooling/config.json")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and is_needed(name):
            # The hub's cache keeps each file under its etag, and links to it.
            etag = path.resolve().name
            files[name] = RepoFile(name, path.stat().st_size, etag)
    return Snapshot(repo, folder.name, files, complete=False)


def cached_whole(snapshot: Snapshot, name: str, hub_cache: Path | None = None) -> Path | None:
    """Returns this commit's file in the hub's own cache, or None if it is not there whole."""
    cached = try_to_load_from_cache(snapshot.repo, name, hub_cache, snapshot.commit)
    if not isinstance(cached, str):
        return None
    path = Path(cached)
    return path if path.stat().st_size == snapshot.files[name].size else None


def is_published(repo: str) -> bool:
    """Whether a repository is a folder of one of the machines, of which the hub knows nothing."""
    return repo.startswith(f"{FOLDER_OWNER}/")


def default_cache() -> Path:
    return Path(constants.HF_HOME) / "brigade"


def cache_folder(cache: Path | None) -> Path:
    """Makes Brigade's cache (None: under HF_HOME), if it is not there yet. Raises ModelError."""
    folder = cache or default_cache()
    try:
        make_cache_folder(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made: {error.strerror or error}.") from error
    return folder


def folder_name(repo: str) -> str:
    return "models--" + repo.replace("/", "--")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically: no reader sees a part of it. Raises ModelError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}.") from error
