"""Calls whose arguments stand between marks one by one, as Qwen-Coder and MiniMax write them."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from serve.front.text.calls.json_calls import parameters_of, tool_name
from serve.front.text.calls.json_values import json_string
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    CallEnd,
    CallHeader,
    CallPart,
    CallReader,
    CallText,
    PulledReader,
    TextBuffer,
    Tools,
)
from serve.front.text.calls.value_rules import ValueRules, marked_name, parameters_grammar
from serve.front.text.calls.values import Declared, is_text, stream_text, to_json

# Reads an argument's value, given the names of its function and parameter. Returns whether the
# value was complete.
ReadValue = Callable[[TextBuffer, str, str], Generator[CallText | None, None, bool]]


class NameMarks(NamedTuple):
    """The marks around the names of functions and parameters, and at the end of a function."""

    function: str
    named: str
    parameter: str
    key_end: str
    function_end: str


@dataclass(frozen=True, slots=True)
class ArgumentMarks:
    """The marks of a format. Names end with `named`; if `lines`, each value has its own lines."""

    start: str
    end: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    named: str
    lines: bool = False

    def reader(self, tools: Tools) -> CallReader:
        names = NameMarks(self.function, self.named, self.parameter, self.named, self.function_end)
        return PulledReader(partial(read_calls, names, partial(self._value, Declared(tools))))

    def _value(
        self, declared: Declared, source: TextBuffer, function: str, key: str
    ) -> Generator[CallText | None, None, bool]:
        types = declared.types(function, key)
        return read_value(source, types, self.parameter_end, self.lines)

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(self._call_grammar(tool, lark) for tool in tools)
        return f"{lark.calls(calls)} BLANK {lark.mark(self.end)}"

    def _call_grammar(self, tool: dict[str, Any], lark: Lark) -> str:
        begin = lark.mark(self.function + tool_name(tool) + self.named)
        line = "\n" if self.lines else ""
        values = ValueRules(lark, parameters_of(tool), line, self.parameter_end, tool_name(tool))

        def argument(name: str | None, schema: Any) -> str:
            head = marked_name(lark, self.parameter, name, self.named)
            return f"BLANK {head} {values.rule_of(schema)}"

        arguments = parameters_grammar(parameters_of(tool), lark, argument)
        return lark.rule(f"{begin} {arguments} BLANK {lark.mark(self.function_end)}")


def read_calls(
    marks: NameMarks, read: ReadValue, source: TextBuffer
) -> Generator[CallPart | None, None, None]:
    """Reads calls with these marks. `read` reads the value of each argument."""
    while (yield from source.first_of(marks.function)):
        name = (yield from source.name_until(marks.named)).strip("\"'")
        yield CallHeader(name)
        yield CallText("{")
        separator = ""
        # The end mark comes first, because the other mark may be its beginning.
        while mark := (yield from source.first_of(marks.function_end, marks.parameter)):
            if mark == marks.function_end:
                break
            key = (yield from source.name_until(marks.key_end)).strip("\"'")
            yield CallText(f"{separator}{json_string(key)}: ")
            separator = ", "
            if not (yield from read(source, name, key)):
                return
        if not mark:
            return  # Cut off: the arguments stay open.
        yield CallText("}")
        yield CallEnd()


def read_value(
    source: TextBuffer,
    types: frozenset[str] | None,
    end: str,
    lines: bool = False,
    undeclared_is_text: bool = True,
) -> Generator[CallText | None, None, bool]:
    """Reads a value as JSON: text piece by piece, other values whole. Returns whether it ended."""
    if is_text(types, when_undeclared=undeclared_is_text):
        return (yield from stream_text(source, end, strips_newline=lines))
    return (yield from read_whole_value(source, types, end, lines))


def read_whole_value(
    source: TextBuffer, types: frozenset[str] | None, end: str, lines: bool = False
) -> Generator[CallText | None, None, bool]:
    """Reads a value as JSON when it is complete. Returns whether it ended."""
    try:
        value = yield from source.until(end)
    except ValueError:
        return False
    if types is not None and "string" in types and lines:
        value = value.removeprefix("\n").removesuffix("\n")
    yield CallText(to_json(value, types))
    return True
