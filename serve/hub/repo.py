"""One commit of a model on the hub: its files, and those that are fetched whole.

Names, sizes, etags, tokens and the hub's own cache are huggingface_hub's business;
here is only which of the files are wanted. Code (.py) and pickles never are.
"""

import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

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
from serve.hub.access import FAILURES, explain, is_refusal, patiently

INDEX = "model.safetensors.index.json"
_LIBRARY = "mlx-brigade"
_SMALL = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".jsonl"})
_COMMIT = re.compile(r"[0-9a-f]{40}")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a repository is read as: the file that shows it to be that, and a pattern of the
    names of its weights."""

    what: str
    config: str
    weights: str


MODEL = Kind("a language model", "config.json", r"model.*\.safetensors")
ADAPTER = Kind("an adapter", "adapter_config.json", r"(adapters|adapter_model)\.safetensors")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """etag is the sha256 of a large file, the git hash of a small one. Fetching a part
    of a file cannot check it; a file that changes is told by it."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """complete is False for what the hub's cache holds of a commit: there may be more."""

    repo: str
    commit: str
    files: dict[str, RepoFile]
    complete: bool = True

    @classmethod
    def load(cls, path: Path) -> "Snapshot | None":
        """What save has written; None if there is nothing to be read."""
        try:
            fields = json.loads(path.read_text())
            files = {file["name"]: RepoFile(**file) for file in fields["files"]}
            return cls(fields["repo"], fields["commit"], files)
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def save(self, path: Path) -> None:
        files = [asdict(file) for file in self.files.values()]
        fields = {"repo": self.repo, "commit": self.commit, "files": files}
        write_whole(path, json.dumps(fields, indent=1).encode())

    def small_files(self, kind: Kind) -> list[str]:
        """Of an adapter only its config: what else is there belongs to its model."""
        if kind is ADAPTER:
            return [kind.config]
        return [name for name in self.files if Path(name).suffix in _SMALL]

    def weight_files(self, kind: Kind, index: Path | None) -> list[str]:
        """The safetensors files; index is the local path of a model's index.

        Raises ModelError if there are none, or if the index names one that is not there.
        """
        if index is None:
            names = sorted(n for n in self.files if re.fullmatch(kind.weights, n))
        else:
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ModelError(f"{INDEX} of {self.repo} has no weight_map.")
            names = sorted({str(shard) for shard in shards.values()})
        for name in names:
            if name not in self.files:
                here = "" if self.complete else " in the cache, and the hub cannot be asked"
                raise ModelError(f"{self.repo} has no {name}{here}; its {INDEX} names it.")
        if names:
            return names
        refuse_pickles(self.repo, self.files)
        raise ModelError(f"{self.repo} has no safetensors of {kind.what}.")


def default_cache() -> Path:
    return Path(constants.HF_HOME) / "brigade"


def resolve(repo: str, revision: str | None, cache: Path, kind: Kind = MODEL) -> Snapshot:
    """The files of the commit that a branch, tag or commit (None: main) stands for.

    When the hub cannot be asked, what it last said. Raises ModelError.
    """
    ref = cache / folder_name(repo) / "refs" / quote(revision or "main", safe="")
    failure: ModelError | None = None
    if not constants.HF_HUB_OFFLINE:
        try:
            snapshot = patiently(repo, lambda: _ask(repo, revision), most_tries=4)
        except ModelError as error:
            if is_refusal(error.__cause__):
                raise
            failure = error
        else:
            write_whole(ref, snapshot.commit.encode())
            return snapshot
    known = _remembered(repo, revision, cache, ref) or _cached_by_hub(repo, revision, kind)
    if known is None:
        raise failure or ModelError(
            f"{repo} is not in the cache and HF_HUB_OFFLINE is set: unset it to fetch {kind.what}."
        )
    _logger.warning("event=hub_not_asked repo=%s commit=%s", repo, known.commit)
    return known


def _ask(repo: str, revision: str | None) -> Snapshot:
    api = HfApi(library_name=_LIBRARY, library_version=__version__)
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"{constants.ENDPOINT} does not answer as a hub does when asked for {repo}: {error}"
        ) from error
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise ModelError(f"{constants.ENDPOINT} did not tell the commit of {repo}.")
    files: dict[str, RepoFile] = {}
    for sibling in info.siblings or ():
        name, lfs = sibling.rfilename, sibling.lfs
        # Names become paths: those in folders are not needed, so none may lead elsewhere.
        if "/" in name or "\\" in name or name.startswith("."):
            continue
        etag = lfs.sha256 if lfs else sibling.blob_id
        if sibling.size is None or etag is None:
            if not name.endswith((".safetensors", *_SMALL)):
                continue
            files[name] = describe(repo, commit, name)
        else:
            files[name] = RepoFile(name, sibling.size, etag)
    return Snapshot(repo, commit, files)


def describe(repo: str, commit: str, name: str) -> RepoFile:
    """One file as the hub's headers tell it, where the listing does not."""
    metadata = get_hf_file_metadata(hf_hub_url(repo, name, revision=commit))
    if metadata.size is None or metadata.etag is None:
        raise ModelError(f"{constants.ENDPOINT} does not tell size and etag of {repo}/{name}.")
    return RepoFile(name, metadata.size, metadata.etag)


def _remembered(repo: str, revision: str | None, cache: Path, ref: Path) -> Snapshot | None:
    commit = revision or ""
    if not _COMMIT.fullmatch(commit):
        commit = ref.read_text() if ref.is_file() else ""
    if not _COMMIT.fullmatch(commit):
        return None
    return Snapshot.load(cache / folder_name(repo) / commit / ".brigade" / "snapshot.json")


def _cached_by_hub(repo: str, revision: str | None, kind: Kind) -> Snapshot | None:
    """A snapshot in the hub's own cache, which may lack files."""
    try:
        config = try_to_load_from_cache(repo, kind.config, revision=revision)
    except FAILURES as error:
        raise explain(error, repo) from error
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    files = {
        path.name: RepoFile(path.name, path.stat().st_size, path.resolve().name)
        for path in folder.iterdir()
        if path.is_file()
    }
    return Snapshot(repo, folder.name, files, complete=False)


def cached_whole(snapshot: Snapshot, name: str) -> Path | None:
    """Where the hub's own cache has a file of this commit."""
    path = try_to_load_from_cache(snapshot.repo, name, revision=snapshot.commit)
    if not isinstance(path, str) or Path(path).stat().st_size != snapshot.files[name].size:
        return None
    return Path(path)


def fetch_whole(snapshot: Snapshot, name: str) -> Path:
    """A whole file, in the hub's own cache. Raises ModelError."""
    return Path(
        patiently(
            snapshot.repo,
            lambda: hf_hub_download(
                snapshot.repo,
                name,
                revision=snapshot.commit,
                library_name=_LIBRARY,
                library_version=__version__,
            ),
        )
    )


def folder_name(repo: str) -> str:
    return "models--" + repo.replace("/", "--")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that nobody sees a part of it. Raises ModelError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}.") from error
