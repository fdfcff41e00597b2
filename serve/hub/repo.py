"""One commit of a repository on the hub: its files, and which of them are needed.

huggingface_hub handles names, sizes, etags, tokens and the hub's own cache. Small files are fetched
whole. Code (.py) and pickles are never fetched.
"""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)

from serve import __version__
from serve.core.checkpoint import read_json, refuse_pickles
from serve.core.errors import ModelError
from serve.hub.access import FAILURES, explain, is_refusal, is_unresolved, patiently

INDEX = "model.safetensors.index.json"
STATE_FOLDER = ".brigade"
LIBRARY = "mlx-brigade"
_SMALL = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".jsonl"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The only file that is needed from a subfolder: the pooling of sentence-transformers.
_POOLING = re.compile(r"[0-9]+_Pooling/config\.json", re.ASCII)

_logger = logging.getLogger(__name__)


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

    def save(self, path: Path) -> None:
        write_whole(path, msgspec.json.encode(self))

    def small_files(self, kind: RepoKind) -> list[str]:
        """Returns the files to fetch whole. An adapter's tokenizer files belong to its model."""
        if kind is ADAPTER:
            return [kind.config]
        return [name for name in self.files if Path(name).suffix in _SMALL]

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


def default_cache() -> Path:
    return Path(constants.HF_HOME) / "brigade"


def resolve(
    repo: str,
    revision: str | None,
    cache: Path,
    kind: RepoKind = MODEL,
) -> Snapshot:
    """Returns the files of the commit to which a branch, tag or commit (None: main) points. If the
    hub cannot be reached, its last answer is used. A host that cannot even resolve the hub's name
    counts as offline, without further tries. Raises ModelError."""
    refs = cache / folder_name(repo) / "refs"
    ref = refs / quote(revision or "main", safe="")
    failure: ModelError | None = None
    if not constants.HF_HUB_OFFLINE:
        try:
            snapshot = patiently(repo, lambda: _list_unless_offline(repo, revision), max_tries=4)
        except ModelError as error:
            if is_refusal(error.__cause__):
                raise
            failure = error
        else:
            write_whole(ref, snapshot.commit.encode())
            return snapshot
    known = _remembered(repo, revision, cache, ref) or _cached_by_hub(repo, revision, kind)
    if known is None and failure is not None:
        raise failure
    if known is None:
        raise ModelError(
            f"{repo} is not in the cache and HF_HUB_OFFLINE is set: unset it to fetch "
            f"{kind.label}.",
            code="hub_offline",
        )
    _logger.warning("event=hub_not_asked repo=%s commit=%s", repo, known.commit)
    return known


def _list_unless_offline(repo: str, revision: str | None) -> Snapshot:
    """Calls _list_files, and raises HubError if the host is offline."""
    try:
        return _list_files(repo, revision)
    except FAILURES as error:
        if is_unresolved(error):
            raise explain(error, repo) from error
        raise


def _list_files(repo: str, revision: str | None) -> Snapshot:
    """Returns the files of a commit, as the hub lists them. Raises ModelError, and FAILURES."""
    api = HfApi(library_name=LIBRARY, library_version=__version__)
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"{constants.ENDPOINT} does not answer like a hub about {repo}: {error}"
        ) from error
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise ModelError(f"{constants.ENDPOINT} did not name the commit of {repo}.")
    files: dict[str, RepoFile] = {}
    for sibling in info.siblings or ():
        name = sibling.rfilename
        if not _is_needed(name):
            continue
        etag = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if sibling.size is not None and etag is not None:
            files[name] = RepoFile(name, sibling.size, etag)
        elif name.endswith((".safetensors", *_SMALL)):
            files[name] = _describe(repo, commit, name)
    return Snapshot(repo, commit, files)


def _is_needed(name: str) -> bool:
    """Whether a file may be needed. Names become paths, so none may lead out of the folder."""
    is_plain = "/" not in name and "\\" not in name and not name.startswith(".")
    return is_plain or _POOLING.fullmatch(name) is not None


def _describe(repo: str, commit: str, name: str) -> RepoFile:
    metadata = get_hf_file_metadata(hf_hub_url(repo, name, revision=commit))
    if metadata.size is None or metadata.etag is None:
        raise ModelError(f"{constants.ENDPOINT} does not give size and etag of {repo}/{name}.")
    return RepoFile(name, metadata.size, metadata.etag)


def _remembered(
    repo: str,
    revision: str | None,
    cache: Path,
    ref: Path,
) -> Snapshot | None:
    """Returns a revision's snapshot in Brigade's cache; ref contains its last known commit."""
    commit = revision or ""
    if not _COMMIT.fullmatch(commit):
        commit = ref.read_text() if ref.is_file() else ""
    if not _COMMIT.fullmatch(commit):
        return None
    folder = cache / folder_name(repo) / commit
    return Snapshot.load(saved_snapshot(folder))


def saved_snapshot(folder: Path) -> Path:
    return folder / STATE_FOLDER / "snapshot.json"


def _cached_by_hub(repo: str, revision: str | None, kind: RepoKind) -> Snapshot | None:
    """Returns a snapshot in the hub's own cache, which may lack files."""
    try:
        config = try_to_load_from_cache(repo, kind.config, revision=revision)
    except FAILURES as error:
        raise explain(error, repo) from error
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    files: dict[str, RepoFile] = {}
    for path in (*folder.iterdir(), *folder.glob("*_Pooling/config.json")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and _is_needed(name):
            # The hub's cache keeps each file under its etag, and links to it.
            etag = path.resolve().name
            files[name] = RepoFile(name, path.stat().st_size, etag)
    return Snapshot(repo, folder.name, files, complete=False)


def cached_whole(snapshot: Snapshot, name: str) -> Path | None:
    """Returns this commit's file in the hub's own cache, or None if it is not there whole."""
    cached = try_to_load_from_cache(snapshot.repo, name, revision=snapshot.commit)
    if not isinstance(cached, str):
        return None
    path = Path(cached)
    return path if path.stat().st_size == snapshot.files[name].size else None


def fetch_whole(snapshot: Snapshot, name: str) -> Path:
    """Fetches a whole file into the hub's own cache, and returns its path. Raises ModelError."""

    def download() -> str:
        return hf_hub_download(
            snapshot.repo,
            name,
            revision=snapshot.commit,
            library_name=LIBRARY,
            library_version=__version__,
        )

    return Path(patiently(snapshot.repo, download))


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
