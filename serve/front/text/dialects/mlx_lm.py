"""Formats that mlx-lm can parse and that have no file of their own here.

Its parsers want a whole call, and some take quadratic time: they run in processes that can be
stopped.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from serve.front.text.call_parser import MAX_CHARACTERS, CallParser
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import CallBegin, CallEnd, CallPart, CallReader, CallText
from serve.front.text.dialects.interface import Dialect, Reasoning, Tools
from serve.front.text.tool_formats import tool_format


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """A format whose calls `parse` reads as ToolFormat.parse does."""

    start: str
    end: str
    parse: Callable[..., Any]

    def reader(self, tools: Tools, /) -> CallReader:
        return _WholeReader(self.parse, tools)

    def grammar(self, _tools: Tools, _lark: Lark, /) -> str | None:
        return None


class _WholeReader:
    """Collects the text of a call and has it parsed at its end."""

    def __init__(self, parse: Callable[..., Any], tools: Tools) -> None:
        self._parse, self._tools = parse, list(tools)
        self._pieces: list[str] = []
        self.num_characters = 0

    def feed(self, text: str) -> Iterator[CallPart]:
        self.num_characters += len(text)
        if self.num_characters > MAX_CHARACTERS:
            raise ValueError(
                f"a call of {self.num_characters} characters, of which only "
                f"{MAX_CHARACTERS} are allowed"
            )
        self._pieces.append(text)
        return iter(())

    def finish(self) -> Iterator[CallPart]:
        try:
            calls = called(self._parse("".join(self._pieces), self._tools))
        # A parser of mlx-lm may raise anything, since it reads what a model wrote.
        except Exception as error:
            raise ValueError(f"{error!r:.200}") from error
        for name, arguments, id in calls:
            yield CallBegin(name, id)
            yield CallText(arguments)
            yield CallEnd()


def called(parsed: Any) -> list[tuple[str, str, str | None]]:
    """The name, the arguments as JSON text, and the id if the model wrote one, for each call that a
    parser of mlx-lm returned. Raises ValueError if it is not a call or has no JSON form."""
    calls = parsed if isinstance(parsed, list) and parsed else [parsed]
    return [_parts_of(call) for call in calls]


def _parts_of(call: Any) -> tuple[str, str, str | None]:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        raise ValueError("a call without a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    id = call["id"] if isinstance(call.get("id"), str) else None
    (name + arguments + (id or "")).encode()  # A lone surrogate is a ValueError.
    return name, arguments, id


def mlx_lm_dialect(name: str, reasoning: Reasoning | None) -> Dialect:
    """The dialect of one of mlx-lm's parsers. Raises UsageError if there is none of this name."""
    format = tool_format(name)
    return Dialect(name, ParsedCalls(format.start, format.end, CallParser(name)), reasoning)
