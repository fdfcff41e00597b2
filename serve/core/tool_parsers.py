"""Which formats of tool calls the installed mlx-lm can parse, found without importing it."""

import importlib.util
from functools import cache
from pathlib import Path


@cache
def tool_parsers() -> tuple[str, ...]:
    """The names of its parsers, sorted; none where mlx-lm is not installed."""
    root = mlx_lm_folder()
    files = (root / "tool_parsers").glob("*.py") if root else ()
    return tuple(sorted(file.stem for file in files if file.stem != "__init__"))


def mlx_lm_folder() -> Path | None:
    spec = importlib.util.find_spec("mlx_lm")
    return Path(spec.origin).parent if spec and spec.origin else None
