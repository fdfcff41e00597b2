"""MiniMax: M2 writes arguments between marks; M3 puts a mark before every tag, and tags nest."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

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
)
from serve.front.text.calls.value_rules import ValueRules, parameters_grammar
from serve.front.text.calls.values import Declared, is_text, to_json
from serve.front.text.dialects.argument_marks import ArgumentMarks, read_value
from serve.front.text.dialects.interface import Dialect, Reasoning, Tools
from serve.front.text.dialects.json_calls import parameters_of, tool_name

M2_CALLS = ArgumentMarks(
    start="<minimax:tool_call>",
    end="</minimax:tool_call>",
    function='<invoke name="',
    function_end="</invoke>",
    parameter='<parameter name="',
    parameter_end="</parameter>",
    named='">',
)

_M = "]<]minimax[>["
_INVOKE, _INVOKE_END = f'{_M}<invoke name="', f"{_M}</invoke>"
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class M3Calls:
    start: str = f"{_M}<tool_call>"
    end: str = f"{_M}</tool_call>"

    def reader(self, tools: Tools) -> CallReader:
        return PulledReader(partial(_read, Declared(tools)))

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(_call_grammar(tool, lark) for tool in tools)
        return f"{lark.calls(calls)} BLANK {lark.mark(self.end)}"


def _call_grammar(tool: dict[str, Any], lark: Lark) -> str:
    begin = lark.mark(f'{_INVOKE}{tool_name(tool)}">')
    arguments = parameters_grammar(parameters_of(tool), lark, partial(_argument, lark, tool))
    return lark.rule(f"{begin} {arguments} BLANK {lark.mark(_INVOKE_END)}")


def _argument(lark: Lark, tool: dict[str, Any], name: str | None, schema: Any) -> str:
    if name is None:  # The end tag repeats the name, which no grammar can hold.
        lark.left_out.add("additionalProperties")
        return (
            f"BLANK {lark.mark(f'{_M}<')} {lark.until(f'{_M}</')} /[^<>]{{1,64}}/ {lark.mark('>')}"
        )
    begin, end = lark.mark(f"{_M}<{name}>"), f"{_M}</{name}>"
    types = Declared([tool]).types(tool_name(tool), name) or frozenset()
    if types & {"object", "array"}:  # Tags nest there: any text.
        lark.left_out.add("properties")
        return f"BLANK {begin} {lark.until(end)}"
    values = ValueRules(lark, parameters_of(tool), "", end, tool_name(tool))
    return f"BLANK {begin} {values.of(schema)}"


def _read(declared: Declared, source: Source) -> Generator[CallPart | None, None, None]:
    num_calls = 0
    while (yield from source.first_of(_INVOKE)):
        name = yield from source.name_until('">')
        yield CallBegin(name)
        yield CallText("{")
        num_calls += 1
        separator = ""
        while True:
            mark = yield from source.first_of(_INVOKE_END, f"{_M}<")
            if mark != f"{_M}<":
                break
            key = yield from source.name_until(">")
            yield CallText(f"{separator}{json_string(key)}: ")
            separator = ", "
            types, end = declared.types(name, key), f"{_M}</{key}>"
            if is_text(types, when_undeclared=False):
                is_whole = yield from read_value(source, types, end)
            else:
                is_whole = yield from _nested(source, types, end)
            if not is_whole:
                return
        if not mark:
            return
        yield CallText("}")
        yield CallEnd()
    if not num_calls:
        raise ValueError("no call")


def _nested(
    source: Source, types: frozenset[str] | None, end: str
) -> Generator[CallText | None, None, bool]:
    """A value that is not text: tags inside are the keys of an object, or `item`s of a list."""
    try:
        text = yield from source.until(end)
    except ValueError:
        return False
    if f"{_M}<" in text:
        yield CallText(_nested_json(text, 0))
    else:
        yield CallText(to_json(text, types))
    return True


def _nested_json(text: str, depth: int) -> str:
    if f"{_M}<" not in text or depth > _MAX_DEPTH:
        return to_json(text, None)
    pairs = []
    rest = text
    while (begin := rest.find(f"{_M}<")) >= 0:
        key, _, rest = rest[begin + len(_M) + 1 :].partition(">")
        value, _, rest = rest.partition(f"{_M}</{key}>")
        pairs.append((key, _nested_json(value, depth + 1)))
    if all(key == "item" for key, _ in pairs):
        return "[" + ", ".join(value for _, value in pairs) + "]"
    return "{" + ", ".join(f"{json_string(key)}: {value}" for key, value in pairs) + "}"


MINIMAX_M2 = Dialect("minimax_m2", M2_CALLS, Reasoning("<think>", "</think>"))
MINIMAX_M3 = Dialect(
    "minimax_m3",
    M3Calls(),
    Reasoning("<mm:think>", "</mm:think>", switch="thinking_mode", states=("disabled", "enabled")),
    other_marks=(_M,),
)
