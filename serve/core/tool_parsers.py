"""The formats of tool calls that the installed mlx-lm can parse, found without importing it."""

import importlib.util
from functools import cache
from pathlib import Path

# Formats that only our own readers can read: mlx-lm has no parser for them.
OWN_FORMATS = (
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "generic",
    "harmony",
    "llama",
    "minimax_m3",
    "nemotron",
)


def call_formats() -> tuple[str, ...]:
    """Returns the names of all formats of tool calls that can be read, sorted."""
    return tuple(sorted({*OWN_FORMATS, *tool_parsers()}))


@cache
def tool_parsers() -> tuple[str, ...]:
    """Returns the sorted names of mlx-lm's parsers; none if mlx-lm is not installed."""
    root = mlx_lm_folder()
    if not root:
        return ()
    files = (root / "tool_parsers").glob("*.py")
    names = {file.stem for file in files} - {"__init__"}
    return tuple(sorted(names))


def mlx_lm_folder() -> Path | None:
    spec = importlib.util.find_spec("mlx_lm")
    return Path(spec.origin).parent if spec and spec.origin else None
