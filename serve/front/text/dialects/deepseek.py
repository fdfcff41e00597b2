"""DeepSeek: V3 and V3.1 mark each call; V3.2 and V4 write arguments between marks ("DSML")."""

import json
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve.front.text.calls.argument_marks import NameMarks, read_calls, read_whole_value
from serve.front.text.calls.json_calls import parameters_of, tool_name
from serve.front.text.calls.json_values import stream_arguments
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    CallHeader,
    CallPart,
    CallReader,
    CallText,
    PulledReader,
    TextBuffer,
    Tools,
)
from serve.front.text.calls.value_rules import ValueRules, marked_name, parameters_grammar
from serve.front.text.calls.values import Declared, stream_text
from serve.front.text.dialects.generic import with_system
from serve.front.text.dialects.interface import Dialect, Messages, ReasoningFormat

_BEGIN = "<｜tool▁call▁begin｜>"
_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_FENCE = "```json"
_FENCE_END = "```"

# The text (model card, MIT) that describes tools to V3.1, whose template has none.
_V31_CALL = "tool_call_name<｜tool▁sep｜>tool_call_arguments"
_V3_CALL = "function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```"
_SHOWN_TOOLS = """\
## Tools
You have access to the following tools:
{tools}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>\
{{additional_tool_calls}}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
"""


@dataclass(frozen=True, slots=True)
class SectionCalls:
    """`NAME<sep>{...}` of V3.1, and `function<sep>NAME` with fenced JSON of V3."""

    start: str = _SECTION
    end: str = _SECTION_END
    is_fenced: bool = False

    def reader(self, _tools: Tools, /) -> CallReader:
        return PulledReader(_read_section)

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(self._call(tool, lark) for tool in tools)
        return f"{lark.calls(calls)} BLANK {lark.mark(self.end)}"

    def _call(self, tool: dict[str, Any], lark: Lark) -> str:
        arguments = lark.json(parameters_of(tool))
        if self.is_fenced:
            head = lark.mark(f"{_BEGIN}function{_SEPARATOR}{tool_name(tool)}\n{_FENCE}\n")
            return lark.rule(f"{head} {arguments} {lark.mark(f'{chr(10)}{_FENCE_END}{_END}')}")
        head = lark.mark(f"{_BEGIN}{tool_name(tool)}{_SEPARATOR}")
        return lark.rule(f"{head} {arguments} {lark.mark(_END)}")


def _read_section(source: TextBuffer) -> Generator[CallPart | None, None, None]:
    while (yield from source.first_of(_BEGIN)):
        name = yield from source.name_until(_SEPARATOR)
        is_fenced = name == "function"
        if is_fenced:
            name = yield from source.name_until("\n")
            source.named = CallHeader(name)
            yield from source.first_of(_FENCE)
        yield CallHeader(name)
        yield from stream_arguments(source)
        if is_fenced:
            yield from source.first_of(_FENCE_END)
        if not (yield from source.first_of(_END)):
            return


def _with_tools(call: str, messages: Messages, tools: Tools) -> Messages:
    """Describes the tools in the system's message, where V3 and V3.1 expect them."""
    if not tools:
        return messages
    functions = [tool.get("function") or tool for tool in tools]
    described = "\n".join(
        f"\n### {each['name']}\nDescription: {each.get('description') or ''}\n\n"
        f"Parameters: {json.dumps(parameters_of(each), ensure_ascii=False)}"
        for each in functions
    )
    return with_system(messages, _SHOWN_TOOLS.format(tools=described, call=call))


def _prepare_v3(messages: Messages, tools: Tools) -> Messages:
    """Returns the messages with calls in their text: some templates of V3 and R1 leave them out."""
    written = [
        {**_without_calls(each), "content": f"{each.get('content') or ''}{_section(each)}"}
        if each.get("tool_calls")
        else each
        for each in messages
    ]
    return _with_tools(_V3_CALL, written, tools)


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _section(message: dict[str, Any]) -> str:
    calls = []
    for call in message["tool_calls"]:
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        fenced = f"{_FENCE}\n{arguments}\n{_FENCE_END}"
        calls.append(f"{_BEGIN}function{_SEPARATOR}{name}\n{fenced}{_END}")
    return f"{_SECTION}{''.join(calls)}{_SECTION_END}"


@dataclass(frozen=True, slots=True)
class Dsml:
    """Calls between DSML's marks. A parameter's attribute `string` tells text from JSON."""

    section: str

    @property
    def start(self) -> str:
        return f"<｜DSML｜{self.section}>"

    @property
    def end(self) -> str:
        return f"</｜DSML｜{self.section}>"

    def reader(self, tools: Tools) -> CallReader:
        marks = NameMarks(_INVOKE, '">', _PARAMETER, '"', _INVOKE_END)
        return PulledReader(partial(read_calls, marks, partial(_dsml_value, Declared(tools))))

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(self._call(tool, lark) for tool in tools)
        return f"{lark.calls(calls)} BLANK {lark.mark(self.end)}"

    def _call(self, tool: dict[str, Any], lark: Lark) -> str:
        head = lark.mark(f'{_INVOKE}{tool_name(tool)}">')
        values = ValueRules(lark, parameters_of(tool), "", _PARAMETER_END)
        arguments = parameters_grammar(
            parameters_of(tool), lark, partial(_dsml_argument, lark, values)
        )
        return lark.rule(f"{head} {arguments} BLANK {lark.mark(_INVOKE_END)}")


_INVOKE = '<｜DSML｜invoke name="'
_INVOKE_END = "</｜DSML｜invoke>"
_PARAMETER = '<｜DSML｜parameter name="'
_PARAMETER_END = "</｜DSML｜parameter>"


def _dsml_argument(lark: Lark, values: ValueRules, name: str | None, schema: Any) -> str:
    forms = []
    for is_text, rule in values.alternatives(schema):
        flag = "true" if is_text else "false"
        head = marked_name(lark, _PARAMETER, name, f'" string="{flag}">')
        forms.append(lark.rule(f"BLANK {head} {rule}"))
    return lark.choice(dict.fromkeys(forms))


def _dsml_value(
    declared: Declared, source: TextBuffer, function: str, key: str
) -> Generator[CallText | None, None, bool]:
    attributes = yield from source.until(">", 80)
    types = declared.types(function, key)
    is_text = types == frozenset({"string"})
    if "string" in attributes:
        is_text = "true" in attributes
    if is_text:
        return (yield from stream_text(source, _PARAMETER_END, strips_newline=False))
    return (yield from read_whole_value(source, types, _PARAMETER_END))


_OTHER_MARKS = (_BEGIN, _END, _SEPARATOR)

DEEPSEEK_V3 = Dialect(
    "deepseek_v3",
    SectionCalls(is_fenced=True),
    ReasoningFormat("<think>", "</think>"),
    other_marks=_OTHER_MARKS,
    prepare=_prepare_v3,
    shows_tools=False,
)
DEEPSEEK_V31 = Dialect(
    "deepseek_v31",
    SectionCalls(),
    ReasoningFormat("<think>", "</think>", switch="thinking"),
    other_marks=_OTHER_MARKS,
    prepare=partial(_with_tools, _V31_CALL),
    shows_tools=False,
)
DEEPSEEK_V32 = Dialect(
    "deepseek_v32",
    Dsml("function_calls"),
    ReasoningFormat("<think>", "</think>", switch="enable_thinking"),
    other_marks=("｜DSML｜",),
)
DEEPSEEK_V4 = Dialect(
    "deepseek_v4",
    Dsml("tool_calls"),
    ReasoningFormat(
        "<think>",
        "</think>",
        switch="enable_thinking",
        effort="reasoning_effort",
        efforts=("high", "max"),
    ),
    other_marks=("｜DSML｜",),
)
