"""MiniMax: M2 writes arguments between marks; M3 puts a mark before every tag, and tags nest."""

import re
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from serve.front.text.calls.argument_marks import ArgumentMarks, NameMarks, read_calls, read_value
from serve.front.text.calls.json_calls import parameters_of, tool_name
from serve.front.text.calls.json_values import json_string
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    CallReader,
    CallText,
    PulledReader,
    TextBuffer,
    Tools,
)
from serve.front.text.calls.value_rules import ValueRules, parameters_grammar
from serve.front.text.calls.values import (
    Declared,
    Json,
    is_text,
    part_schema,
    to_json,
    types_of,
)
from serve.front.text.dialects.interface import Dialect, ReasoningFormat

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
_INVOKE = f'{_M}<invoke name="'
_INVOKE_END = f"{_M}</invoke>"
_MAX_DEPTH = 64
_ANY_TAG = re.compile(re.escape(_M) + r"<(/?)([^<>\n]{1,64})>")


@dataclass(frozen=True, slots=True)
class M3Calls:
    start: str = f"{_M}<tool_call>"
    end: str = f"{_M}</tool_call>"

    def reader(self, tools: Tools) -> CallReader:
        marks = NameMarks(_INVOKE, '">', f"{_M}<", ">", _INVOKE_END)
        return PulledReader(partial(read_calls, marks, partial(_value, Declared(tools))))

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(_call_grammar(tool, lark) for tool in tools)
        return f"{lark.calls(calls)} BLANK {lark.mark(self.end)}"


def _call_grammar(tool: dict[str, Any], lark: Lark) -> str:
    begin = lark.mark(f'{_INVOKE}{tool_name(tool)}">')
    arguments = parameters_grammar(parameters_of(tool), lark, partial(_argument, lark, tool))
    return lark.rule(f"{begin} {arguments} BLANK {lark.mark(_INVOKE_END)}")


def _argument(lark: Lark, tool: dict[str, Any], name: str | None, schema: Any) -> str:
    if name is None:  # The end tag repeats the name, which no grammar can enforce.
        lark.left_out.add("additionalProperties")
        return (
            f"BLANK {lark.mark(f'{_M}<')} {lark.until(f'{_M}</')} /[^<>]{{1,64}}/ {lark.mark('>')}"
        )
    begin = lark.mark(f"{_M}<{name}>")
    end = f"{_M}</{name}>"
    types = Declared([tool]).types(tool_name(tool), name) or frozenset()
    if types & {"object", "array"}:  # Nested tags may be any text.
        lark.left_out.add("properties")
        return f"BLANK {begin} {lark.until(end)}"
    values = ValueRules(lark, parameters_of(tool), "", end, tool_name(tool))
    return f"BLANK {begin} {values.rule_of(schema)}"


def _value(
    declared: Declared, source: TextBuffer, function: str, key: str
) -> Generator[CallText | None, None, bool]:
    types = declared.types(function, key)
    if is_text(types, when_undeclared=False):
        return read_value(source, types, f"{_M}</{key}>")
    document = declared.document(function)
    schema = part_schema(document, document, key)
    return _nested(source, schema, document, key)


@dataclass(slots=True)
class _Tag:
    """A tag and its content: text, or other tags."""

    key: str
    text: str = ""
    inner: "list[_Tag]" = field(default_factory=list)


def _nested(
    source: TextBuffer, schema: Any, document: Json, key: str
) -> Generator[CallText | None, None, bool]:
    """Reads a value that is not text, with tags for an object's keys or a list's `item`s."""
    begin = f"{_M}<{key}>"
    end = f"{_M}</{key}>"
    pieces: list[str] = []
    num_open = 1
    try:
        while num_open:
            piece = yield from source.until(end)
            num_open += piece.count(begin) - 1
            pieces.append(piece)
    except ValueError:
        return False
    yield CallText(_tag_json(_tree(key, end.join(pieces)), schema, document))
    return True


def _tree(key: str, text: str) -> _Tag:
    """Returns the tags in a text. Tags that do not fit together are text."""
    opened = [_Tag(key)]
    last = 0
    for found in _ANY_TAG.finditer(text):
        before = text[last : found.start()]
        last = found.end()
        opened[-1].text += before
        is_end, name = found.groups()
        if not is_end and len(opened) < _MAX_DEPTH:
            tag = _Tag(name)
            opened[-1].inner.append(tag)
            opened.append(tag)
        elif is_end and len(opened) > 1 and name == opened[-1].key:
            opened.pop()
    opened[-1].text += text[last:]
    return opened[0]


def _tag_json(tag: _Tag, schema: Any, document: Json) -> str:
    """Returns the JSON of a tag's value, of the types that the schema allows."""
    types = types_of(schema, document)
    if not tag.inner:
        return to_json(tag.text, types)
    if all(each.key == "item" for each in tag.inner) and (types is None or "array" in types):
        items = part_schema(schema, document, None)
        return _list([_tag_json(each, items, document) for each in tag.inner])
    values: dict[str, list[str]] = {}
    for each in tag.inner:
        value = _tag_json(each, part_schema(schema, document, each.key), document)
        values.setdefault(each.key, []).append(value)
    pairs = [
        f"{json_string(key)}: {found[0] if len(found) == 1 else _list(found)}"
        for key, found in values.items()
    ]
    return "{" + ", ".join(pairs) + "}"


def _list(values: list[str]) -> str:
    return "[" + ", ".join(values) + "]"


MINIMAX_M2 = Dialect("minimax_m2", M2_CALLS, ReasoningFormat("<think>", "</think>"))
MINIMAX_M3 = Dialect(
    "minimax_m3",
    M3Calls(),
    ReasoningFormat(
        "<mm:think>", "</mm:think>", switch="thinking_mode", states=("disabled", "enabled")
    ),
    other_marks=(_M,),
)
