"""Asks the hub for paired machines that may not (HF_HUB_OFFLINE), or have no way to it.

Failures are reported at once: the other machine decides whether to try again.
"""

import time
from functools import lru_cache

from huggingface_hub import constants

from serve.core.errors import ModelError
from serve.hub.access import HubError, is_unresolved, patiently, wait_before_retry
from serve.hub.neighbours import NeighbourCaches
from serve.hub.remote import RemoteFile
from serve.hub.repo import download, list_files
from serve.hub.snapshot import Snapshot, is_commit, is_offered

MAX_TRIES = 2  # The second one is for an address that has expired, or a connection that was cut.
_MAX_SLEEP_SECONDS = 1.0
_NUM_COMMITS = 16
_NUM_FILES = 1024
_WEIGHTS = ".safetensors"


class NoHubError(Exception):
    """This machine may not ask the hub, or has no way to it."""


def sleep_briefly(seconds: float) -> None:
    """Sleeps before another try. Raises HubError instead of a long sleep: the other machine has to
    wait then."""
    if seconds > _MAX_SLEEP_SECONDS:
        raise HubError(f"{constants.ENDPOINT} asks to wait for {seconds:.0f} seconds")
    time.sleep(seconds)


def requested_wait(error: ModelError) -> float | None:
    """Returns the wait that the hub asked for, in the answer that this error explains."""
    reason = error.__cause__ or error.__context__
    return wait_before_retry(reason) if isinstance(reason, Exception) else None


class HubGateway:
    """What the hub gives to this machine's token. It is thread-safe. It remembers the addresses of
    files, and the files of commits, which never change."""

    def __init__(self) -> None:
        self._may_ask = not constants.HF_HUB_OFFLINE
        self._snapshot_of_commit = lru_cache(_NUM_COMMITS)(self._list)
        self._part_of = lru_cache(_NUM_FILES)(self._find)

    def snapshot(self, repo: str, revision: str) -> Snapshot:
        """Returns the files of a commit, branch or tag. Raises ModelError and NoHubError."""
        if is_commit(revision):
            return self._snapshot_of_commit(repo, revision)
        return self._list(repo, revision)

    def small_file(self, repo: str, commit: str, name: str) -> bytes:
        """Returns a file that is not of weights. Raises ModelError and NoHubError."""
        snapshot = self._snapshot_with(repo, commit, name)
        if name.endswith(_WEIGHTS):
            raise ModelError(f"{name} is fetched in parts.", code="malformed")
        return patiently(repo, lambda: download(snapshot, name), max_tries=1).read_bytes()

    def weight_file(self, repo: str, commit: str, name: str) -> RemoteFile:
        """Returns a file to read parts of. Raises ModelError and NoHubError."""
        return self._part_of(repo, commit, name)

    def forget_files(self) -> None:
        """Forgets the addresses of files, and what the answers from there were like."""
        self._part_of.cache_clear()

    def _find(self, repo: str, commit: str, name: str) -> RemoteFile:
        file = self._snapshot_with(repo, commit, name).files[name]
        return RemoteFile(repo, commit, file, NeighbourCaches(()))

    def _snapshot_with(self, repo: str, commit: str, name: str) -> Snapshot:
        if is_commit(commit) and is_offered(name):
            snapshot = self._snapshot_of_commit(repo, commit)
            if name in snapshot.files:
                return snapshot
        raise ModelError(f"{repo} has no {name} that may be fetched.", code="missing_file")

    def _list(self, repo: str, revision: str) -> Snapshot:
        if not self._may_ask:
            raise NoHubError
        try:
            return list_files(repo, revision, max_tries=1)
        except ModelError as error:
            if is_unresolved(error):
                raise NoHubError from error
            raise
