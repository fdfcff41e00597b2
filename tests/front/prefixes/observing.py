"""What tests observe of a prefix cache on disk."""

from serve.front.prefixes.disk import DiskPrefixes


def is_busy(disk: DiskPrefixes) -> bool:
    """Whether something is being read or written, or is about to be."""
    return bool(disk.num_reading_tokens or disk.to_json()["num_unwritten_files"])
