"""Loads mlx-lm's parsers of tool calls, file by file.

Importing the whole package would bring MLX into this process. The parsers do not need MLX.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from serve.core.errors import UsageError
from serve.core.helper_messages import ParsedCall
from serve.core.tool_parsers import mlx_lm_folder, tool_parsers

_PRIVATE = "brigade_mlx_lm_"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call between start and end ("": the answer's end). `parse` takes the text of a call and
    OpenAI's tools, and returns {"name", "arguments"} or a list. `parse` may raise anything."""

    start: str
    end: str
    parse: Callable[..., Any]


def tool_format(name: str) -> ToolFormat:
    """Returns the format of this name, whose parser runs in this process. Raises UsageError."""
    if name not in tool_parsers():
        known = ", ".join(tool_parsers())
        raise UsageError(f"--tool-call-parser {name} is not known: give one of {known}.")
    mlx_lm_module("tool_parsers")  # Some parsers import others from the package.
    parser = mlx_lm_module(f"tool_parsers.{name}")
    return ToolFormat(parser.tool_call_start, parser.tool_call_end, parser.parse_tool_call)


def parsed_calls(parsed: Any) -> tuple[ParsedCall, ...]:
    """Returns a ToolFormat's calls. Raises ValueError if they have another form."""
    calls = parsed if isinstance(parsed, list) and parsed else [parsed]
    return tuple(map(_parsed_call, calls))


def _parsed_call(call: Any) -> ParsedCall:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        raise ValueError("a call without a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    id = call["id"] if isinstance(call.get("id"), str) else None
    (name + arguments + (id or "")).encode()  # A lone surrogate is a ValueError.
    return ParsedCall(name, arguments, id)


@cache
def mlx_lm_module(name: str) -> ModuleType:
    """Returns a file or folder of mlx-lm, loaded under a private name."""
    root = mlx_lm_folder()
    assert root is not None
    path = root.joinpath(*name.split("."))
    folder = [str(path)] if path.is_dir() else None
    file = path / "__init__.py" if folder else path.with_suffix(".py")
    spec = importlib.util.spec_from_file_location(
        _PRIVATE + name, file, submodule_search_locations=folder
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
