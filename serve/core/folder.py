"""Temporary folders, each owned by one process, folders of caches, and writes that survive a crash.

A temporary folder is removed when its process ends, or by the next process that starts.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

_PREFIX = "brigade-own-"
_UNLOCKED_PREFIX = "brigade-new-"
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # set on macOS only
_TOOL_SECONDS = 10.0
_UNLOCKED_SECONDS = 60.0  # far more than it takes to lock a folder that was just made


class OwnFolder:
    """A folder that is locked as long as this process lives: the system releases the lock. The
    folder is locked before it gets its final name, so an unlocked folder with such a name has no
    owner. systemd-tmpfiles does not remove locked folders. macOS does, so files that are
    needed for days must be touched."""

    def __init__(self) -> None:
        unlocked = tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX)
        descriptor = os.open(unlocked, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        parent, name = os.path.split(unlocked)
        self.name = os.path.join(parent, name.replace(_UNLOCKED_PREFIX, _PREFIX, 1))
        os.rename(unlocked, self.name)
        self.cleanup = weakref.finalize(self, _remove, self.name, descriptor)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *error: object) -> None:
        self.cleanup()


def own_folder() -> OwnFolder:
    """Makes a new folder, and first removes those of processes that were killed."""
    folder = Path(tempfile.gettempdir())
    for left in folder.glob(f"{_PREFIX}*"):
        _remove_without_owner(left, 0.0)
    for left in folder.glob(f"{_UNLOCKED_PREFIX}*"):
        _remove_without_owner(left, _UNLOCKED_SECONDS)
    return OwnFolder()


def make_cache_folder(folder: Path, mode: int = 0o777) -> None:
    """Makes a folder for files that can be fetched or computed again, if it is not there yet. On
    macOS, Spotlight and Time Machine are asked to leave them out. Raises OSError."""
    if folder.is_dir():
        return  # It may also hold files that need a backup.
    folder.mkdir(mode, parents=True, exist_ok=True)
    tmutil = shutil.which("tmutil")
    if tmutil is None:
        return
    with suppress(OSError, subprocess.SubprocessError):
        (folder / ".metadata_never_index").touch()
        # With close_fds, Python would fork, which takes long in a process with much memory.
        subprocess.run(
            [tmutil, "addexclusion", str(folder)],
            capture_output=True,
            close_fds=False,
            timeout=_TOOL_SECONDS,
        )


def sync(path: Path) -> None:
    """Waits until a file's contents or a folder's entries are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        full_sync(descriptor)
    finally:
        os.close(descriptor)


def full_sync(descriptor: int) -> None:
    """Waits until what was written to a file is on the disk itself. On macOS, fsync only hands it
    to the disk, which loses its cache when the power fails. Raises OSError."""
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
        except OSError:  # Network file systems know only fsync.
            os.fsync(descriptor)
    else:
        os.fsync(descriptor)


def _remove_without_owner(folder: Path, min_age_seconds: float) -> None:
    """Removes a folder that nobody has locked, under its lock, so that only one process does it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # The folder belongs to another user, or is gone.
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < min_age_seconds:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # The folder's owner lives.
    finally:
        os.close(descriptor)


def _remove(name: str, descriptor: int) -> None:
    shutil.rmtree(name, ignore_errors=True)
    os.close(descriptor)
