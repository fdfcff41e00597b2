"""What tests observe of a prefix cache on disk."""

from typing import Any

from serve.front.parts.disk.part import DiskPrefixes


def state(disk: DiskPrefixes) -> dict[str, Any]:
    """What /admin/pipeline shows of it."""
    fields: dict[str, Any] = disk.to_json()["prefix_cache"]["disk"]
    return fields


def is_busy(disk: DiskPrefixes) -> bool:
    """Whether something is being read or written, or is about to be."""
    return bool(disk.num_tokens or state(disk)["num_unwritten_files"])


def is_writing(disk: DiskPrefixes) -> bool:
    """Whether a file is being written."""
    return disk._cache is not None and disk._cache._writing is not None
