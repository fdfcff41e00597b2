"""Facts that must be equal on all ranks: versions of packages and digests of the model's files."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serve.core.errors import DisagreementError

BRIGADE = "mlx-brigade"
VERSIONS = (BRIGADE, "mlx", "mlx-lm")
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)
MISSING = "-"  # instead of a version or a digest


def versions() -> dict[str, str]:
    return {package: _version(package) for package in VERSIONS}


def files(folder: Path, weights_digest: str) -> dict[str, str]:
    """Returns the digests of a model folder's small files, and weights_digest, which covers the
    places of all tensors."""
    facts = {name: _digest(folder / name) for name in _FILES}
    facts["weights"] = weights_digest
    return facts


def stamp(folder: Path) -> str:
    """Returns a digest of the names, sizes and times of a model folder's weights and config."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        try:
            status = path.stat()
        except OSError:
            continue
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def compare(facts: Mapping[int, Mapping[str, str]]) -> DisagreementError | None:
    """Compares the facts of all ranks. Returns an error that names different facts, or None."""
    names: dict[str, None] = {}  # A dict keeps the order, which a set does not.
    for own in facts.values():
        names.update(dict.fromkeys(own))
    different: dict[str, dict[int, str]] = {}
    for name in names:
        row = {rank: own.get(name, MISSING) for rank, own in facts.items()}
        if len(set(row.values())) > 1:
            different[name] = row
    return DisagreementError(different) if different else None


def has_package(name: str) -> bool:
    return _version(name) != MISSING


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _digest(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError:
        return MISSING
    return hashlib.sha256(content).hexdigest()[:16]
