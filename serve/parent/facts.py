"""What must be the same on all ranks, as each rank sees it on its own host."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serve.core.errors import DisagreementError

_PACKAGES = ("mlx-brigade", "mlx", "mlx-lm")
_FILES = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)
MISSING = "-"  # in the place of a version or a digest


def versions() -> dict[str, str]:
    return {package: _version(package) for package in _PACKAGES}


def files(folder: Path, weights_digest: str) -> dict[str, str]:
    """Digests of the small files, and of the places of all tensors."""
    return {name: _digest(folder / name) for name in _FILES} | {"weights": weights_digest}


def compare(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Raises DisagreementError, which says who has what, if ranks differ."""
    names = dict.fromkeys(name for own in facts.values() for name in own)
    rows = {name: {rank: own.get(name, MISSING) for rank, own in facts.items()} for name in names}
    different = {name: row for name, row in rows.items() if len(set(row.values())) > 1}
    if different:
        raise DisagreementError(different)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return MISSING
