"""Configs of `serve` for tests, which may also change the constants."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from serve.core.config import ServeConfig
from serve.core.constants import Constants

_CONSTANTS = {field.name for field in fields(Constants)}


def changed(config: ServeConfig, **settings: Any) -> ServeConfig:
    """A config with other values of flags and constants."""
    constants = {name: settings.pop(name) for name in _CONSTANTS & settings.keys()}
    return replace(config, constants=replace(config.constants, **constants), **settings)


def serve_config(**settings: Any) -> ServeConfig:
    return changed(ServeConfig(model=settings.pop("model", Path("."))), **settings)
