"""How a model writes thoughts and calls of tools: what mlx-lm knows about it.

mlx-lm's files are loaded one by one, because importing the package would bring MLX into
this process. They need none of it.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

from serve.core.errors import UsageError
from serve.core.tool_parsers import mlx_lm_folder, tool_parsers
from serve.front.output.call_parser import CallParser

_PRIVATE = "brigade_mlx_lm_"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call stands between start and end, an empty end being that of the answer. parse takes
    it with the tools that were declared, as OpenAI's JSON; it gives {"name", "arguments"}, or
    several of them, and raises whatever it likes."""

    start: str
    end: str
    parse: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Format:
    """thoughts are the marks around them; None where a model has no such thing."""

    tools: ToolFormat | None = None
    thoughts: tuple[str, str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        tools = (self.tools.start, self.tools.end) if self.tools else ()
        return (*tools, *(self.thoughts or ()))


def format_of(tokenizer: Any, tool_parser: str | None = None) -> Format:
    """Of a tokenizer of transformers, by its template and vocabulary. tool_parser is a name
    among mlx-lm's, instead of the one that it finds itself. Raises UsageError.

    How mlx-lm finds it is private there, and still better than a list of our own.
    """
    utils = _module("tokenizer_utils")
    name = tool_parser or utils._infer_tool_parser(tokenizer)
    start, end, *_ = utils._infer_thinking(tokenizer)
    tools = tool_format(name) if name else None
    if name and tools:
        tools = replace(tools, parse=CallParser(name))
    return Format(tools, (start, end) if start else None)


def tool_format(name: str) -> ToolFormat:
    """Its parser runs in this process. Raises UsageError."""
    if name not in tool_parsers():
        known = ", ".join(tool_parsers())
        raise UsageError(f"--tool-parser {name} is not known: give one of {known}.")
    _module("tool_parsers")  # Some take parts of others from their package.
    parser = _module(f"tool_parsers.{name}")
    return ToolFormat(parser.tool_call_start, parser.tool_call_end, parser.parse_tool_call)


@cache
def _module(name: str) -> ModuleType:
    """A file or folder of mlx-lm under a name of its own."""
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
