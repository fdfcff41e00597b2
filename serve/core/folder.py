"""A temporary folder of one process, which goes with it or soon after it."""

import fcntl
import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_PREFIX = "brigade-own-"
_NEW_SECONDS = 60.0


def own_folder() -> TemporaryDirectory[str]:
    """Whoever makes it cleans it up, and first what was left by processes that were killed."""
    for left in Path(gettempdir()).glob(f"{_PREFIX}*"):
        if not _is_in_use(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    # Held as long as this process lives: the descriptor is closed with it. systemd-tmpfiles
    # leaves what is locked alone, too; macOS does not, so nothing may be needed for days.
    fcntl.flock(os.open(folder.name, os.O_RDONLY), fcntl.LOCK_EX)
    return folder


def _is_in_use(folder: Path) -> bool:
    """Also if it is somebody else's, or so new that its lock may yet come."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - os.fstat(descriptor).st_mtime < _NEW_SECONDS
        finally:
            os.close(descriptor)
    except OSError:
        return True
