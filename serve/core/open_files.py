"""The number of files that a process may have open."""

import resource

# MLX opens every file of a model, which may be hundreds, and each connection counts as one more.
NUM_FILES = 10_240


def allow_files(wanted: int = NUM_FILES) -> int:
    """Raises the limit of open files to `wanted`, if the system allows that: macOS starts processes
    with 256. Returns the new limit, or `wanted` if the limit is higher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):  # macOS has a limit of its own below the hard one.
        return soft
    return allowed
