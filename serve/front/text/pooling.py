"""Finds out from a model's files how it pools hidden states into embeddings."""

import json
from pathlib import Path
from typing import Any, Literal

from serve.core.errors import ModelError

PoolingKind = Literal["mean", "last", "cls"]

_START_WITH = "start the server with --pooling mean, last or cls"
# Embeddings always have the norm 1.
_HARMLESS_MODULES = ("Transformer", "Normalize")
_FLAGS: dict[str, PoolingKind] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_NAMES: dict[str, PoolingKind] = {
    "mean": "mean",
    "last": "last",
    "lasttoken": "last",
    "last_token": "last",
    "cls": "cls",
}
_FIELDS = ("pooling_mode", "pooling", "emb_pooler")


def pooling_of(folder: Path) -> PoolingKind:
    """Returns the pooling of the model in a folder; the last token's if its files name none. Raises
    ModelError unless it is one of the three kinds."""
    modules = folder / "modules.json"
    if not modules.exists():
        config = _read(folder / "config.json") if (folder / "config.json").exists() else {}
        return _by_name(config) or "last"
    found: PoolingKind | None = None
    for module in _read(modules):
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            found = _of_module(folder, f"{module.get('path', '')}/config.json".lstrip("/"))
        elif name not in _HARMLESS_MODULES:
            raise ModelError(
                f"modules.json has a module {name}, which cannot be computed here: to leave it "
                f"out, {_START_WITH}."
            )
    return found or "last"


def _of_module(folder: Path, name: str) -> PoolingKind:
    if not (folder / name).exists():
        raise ModelError(f"{name} is missing, so the pooling is unknown: {_START_WITH}.")
    config = _read(folder / name)
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(flags) == 1 and flags[0] in _FLAGS:
        return _FLAGS[flags[0]]
    kind = None if flags else _by_name(config)
    if kind is None:
        raise ModelError(f"{name} asks for a pooling that is not supported: {_START_WITH}.")
    return kind


def _by_name(config: dict[str, Any]) -> PoolingKind | None:
    names = (config.get(field) for field in _FIELDS)
    return next((_NAMES[name] for name in names if isinstance(name, str) and name in _NAMES), None)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read ({error}): {_START_WITH}.") from error
