"""Calls whose arguments stand between marks one by one, as Qwen-Coder and MiniMax write them."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve.front.text.calls.json_calls import parameters_of, tool_name
from serve.front.text.calls.json_values import json_string
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    CallBegin,
    CallEnd,
    CallPart,
    CallReader,
    CallText,
    PulledReader,
    Source,
    Tools,
)
from serve.front.text.calls.value_rules import ValueRules, named, parameters_grammar
from serve.front.text.calls.values import Declared, is_text, stream_text, to_json

Reading = Generator[CallPart | None, None, None]


@dataclass(frozen=True, slots=True)
class ArgumentMarks:
    """The marks of a format. Names stand before `named`; with lines, values have own lines."""

    start: str
    end: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    named: str
    lines: bool = False

    def reader(self, tools: Tools) -> CallReader:
        return PulledReader(partial(_read, self, Declared(tools)))

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(self._call_grammar(tool, lark) for tool in tools)
        return f"{lark.calls(calls)} BLANK {lark.mark(self.end)}"

    def _call_grammar(self, tool: dict[str, Any], lark: Lark) -> str:
        begin = lark.mark(self.function + tool_name(tool) + self.named)
        line = "\n" if self.lines else ""
        values = ValueRules(lark, parameters_of(tool), line, self.parameter_end, tool_name(tool))

        def argument(name: str | None, schema: Any) -> str:
            return f"BLANK {named(lark, self.parameter, name, self.named)} {values.rule_of(schema)}"

        arguments = parameters_grammar(parameters_of(tool), lark, argument)
        return lark.rule(f"{begin} {arguments} BLANK {lark.mark(self.function_end)}")


def _read(marks: ArgumentMarks, declared: Declared, source: Source) -> Reading:
    while (yield from source.first_of(marks.function)):
        name = (yield from source.name_until(marks.named)).strip("\"'")
        yield CallBegin(name)
        yield CallText("{")
        is_first = True
        while True:
            mark = yield from source.first_of(marks.parameter, marks.function_end)
            if not mark:
                return  # Cut off: the arguments stay open.
            if mark == marks.function_end:
                break
            key = (yield from source.name_until(marks.named)).strip("\"'")
            yield CallText(f"{'' if is_first else ', '}{json_string(key)}: ")
            is_first = False
            types = declared.types(name, key)
            if not (yield from read_value(source, types, marks.parameter_end, marks.lines)):
                return
        yield CallText("}")
        yield CallEnd()


def read_value(
    source: Source,
    types: frozenset[str] | None,
    end: str,
    lines: bool = False,
    undeclared_is_text: bool = True,
) -> Generator[CallText | None, None, bool]:
    """Reads a value's JSON: text as it is written, all else when whole. Returns if it ended."""
    if is_text(types, when_undeclared=undeclared_is_text):
        return (yield from stream_text(source, end, strips_newline=lines))
    try:
        value = yield from source.until(end)
    except ValueError:
        return False
    if types is not None and "string" in types and lines:
        value = value.removeprefix("\n").removesuffix("\n")
    yield CallText(to_json(value, types))
    return True
