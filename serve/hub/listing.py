"""What machines tell each other of a commit: its files, as the hub lists them, and held ranges."""

import msgspec

from serve.hub.digests import can_verify, is_git_hash
from serve.hub.ranges import Range
from serve.hub.snapshot import RepoFile, Snapshot, is_commit, is_offered


class LfsInfo(msgspec.Struct, frozen=True, rename="camel"):
    """The hub's entry for a file that git does not store itself."""

    sha256: str
    size: int
    pointer_size: int = 0


class Sibling(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The hub's entry for one file."""

    rfilename: str
    size: int
    blob_id: str | None = None
    lfs: LfsInfo | None = None


class FileListing(msgspec.Struct, frozen=True):
    """The hub's answer about a model. The hub does not send `complete`."""

    id: str
    sha: str
    siblings: list[Sibling]
    complete: bool = True

    @classmethod
    def of(cls, snapshot: Snapshot) -> "FileListing":
        siblings = [_sibling(file) for file in snapshot.files.values() if can_verify(file.etag)]
        return cls(snapshot.repo, snapshot.commit, siblings, snapshot.complete)

    def snapshot(self) -> Snapshot | None:
        """Returns the files that this machine may take, or None if the answer names no commit."""
        files: dict[str, RepoFile] = {}
        for sibling in self.siblings:
            name = sibling.rfilename
            etag = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
            if is_offered(name) and etag and can_verify(etag) and sibling.size >= 0:
                files[name] = RepoFile(name, sibling.size, etag)
        return Snapshot(self.id, self.sha, files, self.complete) if is_commit(self.sha) else None


class HeldRanges(msgspec.Struct, frozen=True):
    """The bytes of a file that a machine can give, and those that it is fetching."""

    etag: str
    ranges: list[Range]
    coming: list[Range] = []


class HubRefusal(msgspec.Struct, frozen=True):
    """Why the hub gave nothing to a machine that asked it for another one."""

    reason: str
    code: str


def to_json(message: FileListing | HeldRanges | HubRefusal) -> bytes:
    return msgspec.json.encode(message)


def _sibling(file: RepoFile) -> Sibling:
    if is_git_hash(file.etag):
        return Sibling(file.name, file.size, file.etag)
    return Sibling(file.name, file.size, lfs=LfsInfo(file.etag, file.size))
