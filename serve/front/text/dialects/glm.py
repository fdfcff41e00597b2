"""GLM-4.5 to GLM-5: the name of a call, then pairs of keys and values between marks."""

import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve.front.text.calls.argument_marks import read_value
from serve.front.text.calls.json_calls import parameters_of, tool_name
from serve.front.text.calls.json_values import json_string, read_json_calls
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    MAX_NAME,
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
from serve.front.text.calls.values import Declared
from serve.front.text.dialects.interface import Dialect, ReasoningFormat

_NAME = re.compile(r"[\w.:/-]+")
_ENDED_NAME = re.compile(rf"{_NAME.pattern}(?=[\s<])")  # a complete name in a cut text
_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"


@dataclass(frozen=True, slots=True)
class GlmCalls:
    start: str = "<tool_call>"
    end: str = "</tool_call>"

    def reader(self, tools: Tools) -> CallReader:
        return PulledReader(partial(_read, Declared(tools)))

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(_call_grammar(tool, lark) for tool in tools)
        return f"BLANK {calls} BLANK {lark.mark(self.end)}"


def _call_grammar(tool: dict[str, Any], lark: Lark) -> str:
    values = ValueRules(lark, parameters_of(tool), "", _VALUE_END, tool_name(tool))

    def argument(name: str | None, schema: Any) -> str:
        key = f"BLANK {marked_name(lark, _KEY, name, _KEY_END)} BLANK {lark.mark(_VALUE)}"
        return f"{key} {values.rule_of(schema)}"

    return lark.rule(
        f"{lark.mark(tool_name(tool))} {parameters_grammar(parameters_of(tool), lark, argument)}"
    )


def _read(declared: Declared, source: TextBuffer) -> Generator[CallPart | None, None, None]:
    if not (yield from source.skip_blanks()):
        raise ValueError("an empty call")
    if source.text[0] == "{":  # Some answers contain JSON instead.
        yield from read_json_calls(source)
        return
    name, has_arguments = yield from _name(source)
    yield CallHeader(name)
    yield CallText("{")
    is_first = True
    while has_arguments:
        key = (yield from source.until(_KEY_END)).strip()
        yield CallText(f"{'' if is_first else ', '}{json_string(key)}: ")
        if not (yield from source.first_of(_VALUE)):
            return
        types = declared.types(name, key)
        if not (yield from read_value(source, types, _VALUE_END, undeclared_is_text=False)):
            return
        is_first = False
        has_arguments = bool((yield from source.first_of(_KEY)))
    if not source.is_cut:
        yield CallText("}")
        yield CallEnd()


def _name(source: TextBuffer) -> Generator[None, None, tuple[str, bool]]:
    """Reads the name, up to a line end or key, and whether arguments follow."""
    while _KEY not in source.text and not source.is_ended:
        if len(source.text) > MAX_NAME:
            raise ValueError("a name that does not end")
        yield None
    name, key, source.text = source.text.partition(_KEY)
    if source.is_cut and not key:
        ended = _ENDED_NAME.match(name)
        name = ended[0] if ended else ""
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a name")
    return name, bool(key)


GLM = Dialect(
    "glm",
    GlmCalls(),
    ReasoningFormat("<think>", "</think>", switch="enable_thinking"),
    other_marks=(_KEY, _KEY_END, _VALUE, _VALUE_END),
)
