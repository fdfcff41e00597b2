"""Formats that mlx-lm can parse and that have no file of their own here.

The parsers want a whole call, and some take quadratic time: they run in processes that can be
stopped.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from serve.core.helper_messages import ParsedCall
from serve.front.text.call_parser import CallParser
from serve.front.text.calls.json_calls import tool_name
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import CallEnd, CallHeader, CallPart, CallReader, CallText, Tools
from serve.front.text.dialects.interface import Dialect, ReasoningFormat
from serve.front.text.tool_formats import tool_format

MAX_CHARACTERS = 256 << 10  # the longest call that is read
# Returns the calls in the text between two marks. Raises ValueError if the text cannot be read.
Parse = Callable[[str, Tools], Iterable[ParsedCall]]


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """A format whose calls are parsed when they are whole."""

    start: str
    end: str
    parse: Parse

    def reader(self, tools: Tools, /) -> CallReader:
        return _WholeReader(self.parse, tools)

    def grammar(self, _tools: Tools, _lark: Lark, /) -> str | None:
        return None


class _WholeReader:
    """Collects the text of a call and has it parsed at its end."""

    def __init__(self, parse: Parse, tools: Tools) -> None:
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

    def finish(self, is_whole: bool = True) -> Iterator[CallPart]:
        text = "".join(self._pieces)
        if not is_whole:
            yield CallHeader(self._name_in(text))
            return
        for call in self._parse(text, self._tools):
            yield CallHeader(call.name, call.id)
            yield CallText(call.arguments)
            yield CallEnd()

    def _name_in(self, text: str) -> str:
        """Returns the first declared tool in a call that was cut off. Raises ValueError."""
        names = "|".join(re.escape(tool_name(tool)) for tool in self._tools)
        found = re.search(rf"(?<![\w.-])({names})(?=[^\w.-])", text) if names else None
        if found is None:
            raise ValueError("a call that was cut off before its name was known")
        return found[1]


def mlx_lm_dialect(name: str, reasoning: ReasoningFormat | None) -> Dialect:
    """Returns the dialect of one of mlx-lm's parsers, by its name. Raises UsageError."""
    format = tool_format(name)
    return Dialect(name, ParsedCalls(format.start, format.end, CallParser(name)), reasoning)
