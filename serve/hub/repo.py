"""Finds a commit of a repository, and fetches its small files whole.

huggingface_hub handles names, sizes, etags, tokens and the hub's own cache.
"""

import logging
from pathlib import Path

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
)

from serve import __version__
from serve.core.errors import ModelError
from serve.hub.access import FAILURES, HubError, explain, is_refusal, is_unresolved, patiently
from serve.hub.neighbours import NeighbourCaches
from serve.hub.snapshot import (
    MODEL,
    SMALL,
    RepoFile,
    RepoKind,
    Snapshot,
    cached_by_hub,
    is_commit,
    is_needed,
    is_published,
    ref_file,
    remembered,
    write_whole,
)

LIBRARY = "mlx-brigade"

_logger = logging.getLogger(__name__)


def resolve(
    repo: str,
    revision: str | None,
    cache: Path,
    kind: RepoKind = MODEL,
    neighbours: NeighbourCaches | None = None,
) -> Snapshot:
    """Returns the files of the commit to which a branch, tag or commit (None: main) points. The hub
    is not asked about a commit that the cache or a neighbour knows. If it cannot be reached, the
    last answer that they know is used. A host that cannot even resolve the hub's name counts as
    offline, without further tries. Raises ModelError."""
    neighbours = neighbours or NeighbourCaches.of_environment()
    if is_commit(revision):
        known = remembered(repo, revision, cache) or neighbours.snapshot(repo, revision)
        if known and known.complete:
            return known
    failure: ModelError | None = None
    if not constants.HF_HUB_OFFLINE and not is_published(repo):
        try:
            snapshot = list_files(repo, revision, max_tries=4)
        except ModelError as error:
            if is_refusal(error.__cause__):
                raise
            failure = error
            neighbours.note_failure(error)
        else:
            write_whole(ref_file(cache, repo, revision), snapshot.commit.encode())
            return snapshot
    last = remembered(repo, revision, cache)
    if last is None:
        last = _without_hub(repo, revision, kind, neighbours)
    if not (last and last.complete) and not is_published(repo):
        last = _through_neighbours(repo, revision, last, neighbours)
        if last and last.complete:
            write_whole(ref_file(cache, repo, revision), last.commit.encode())
            return last
    if last is None:
        raise failure or _unknown(repo, kind)
    _logger.warning("event=hub_not_asked repo=%s commit=%s", repo, last.commit)
    return last


def _without_hub(
    repo: str,
    revision: str | None,
    kind: RepoKind,
    neighbours: NeighbourCaches,
) -> Snapshot | None:
    """Returns what the hub's own cache and the neighbours know together."""
    here = cached_by_hub(repo, revision, kind)
    there = neighbours.snapshot(repo, here.commit if here else revision)
    return here.merged(there) if here else there


def _through_neighbours(
    repo: str,
    revision: str | None,
    known: Snapshot | None,
    neighbours: NeighbourCaches,
) -> Snapshot | None:
    """Asks the hub through a neighbour that may ask it. Returns what is known already if none may.
    Raises ModelError if nothing is known and the hub gives nothing."""
    commit = known.commit if known else revision

    def ask() -> Snapshot | None:
        return neighbours.snapshot_of_hub(repo, commit)

    try:
        return patiently(repo, ask, max_tries=1 if known else 4) or known
    except ModelError:
        if known is None:
            raise
        return known


def _unknown(repo: str, kind: RepoKind) -> ModelError:
    if is_published(repo):
        return HubError(
            f"No paired machine that can be reached offers {repo} at this revision: start "
            "`brigade up` on the machine that has the folder."
        )
    return ModelError(
        f"{repo} is not in the cache and HF_HUB_OFFLINE is set: unset it, here or on a paired "
        f"machine, to fetch {kind.label}.",
        code="hub_offline",
    )


def list_files(repo: str, revision: str | None, max_tries: int) -> Snapshot:
    """Returns the files of a commit, as the hub lists them. Raises ModelError."""
    return patiently(repo, lambda: _list_unless_offline(repo, revision), max_tries)


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
    if not is_commit(commit):
        raise ModelError(f"{constants.ENDPOINT} did not name the commit of {repo}.")
    files: dict[str, RepoFile] = {}
    for sibling in info.siblings or ():
        name = sibling.rfilename
        if not is_needed(name):
            continue
        etag = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if sibling.size is not None and etag is not None:
            files[name] = RepoFile(name, sibling.size, etag)
        elif name.endswith((".safetensors", *SMALL)):
            files[name] = _describe(repo, commit, name)
    return Snapshot(repo, commit, files)


def _describe(repo: str, commit: str, name: str) -> RepoFile:
    metadata = get_hf_file_metadata(hf_hub_url(repo, name, revision=commit))
    if metadata.size is None or metadata.etag is None:
        raise ModelError(f"{constants.ENDPOINT} does not give size and etag of {repo}/{name}.")
    return RepoFile(name, metadata.size, metadata.etag)


def download(snapshot: Snapshot, name: str) -> Path:
    """Fetches a whole file into the hub's own cache, and returns its path. Raises FAILURES."""
    path = hf_hub_download(
        snapshot.repo,
        name,
        revision=snapshot.commit,
        library_name=LIBRARY,
        library_version=__version__,
    )
    return Path(path)
