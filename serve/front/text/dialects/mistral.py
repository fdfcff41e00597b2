"""Mistral and Devstral: calls behind a mark, to the end of the answer."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from serve.front.text.calls.json_calls import call_schema, parameters_of, tool_name
from serve.front.text.calls.json_values import read_json_calls, stream_arguments
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    MAX_NAME,
    CallHeader,
    CallPart,
    CallReader,
    PulledReader,
    TextBuffer,
    Tools,
)
from serve.front.text.dialects.interface import Dialect, ReasoningFormat

_START = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_ID = "[CALL_ID]"


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """`[TOOL_CALLS]NAME[ARGS]{...}` for each call; older (is_list) `[TOOL_CALLS][{...}]`."""

    is_list: bool = False
    start: str = _START
    end: str = ""

    def reader(self, _tools: Tools, /) -> CallReader:
        return PulledReader(_read)

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        if self.is_list:
            calls = [call_schema(number, tool, "arguments") for number, tool in enumerate(tools)]
            for each in calls:  # Some templates of Mistral add ids.
                each["properties"]["id"] = {"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"}
            schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
            if not lark.is_parallel:
                schema["maxItems"] = 1
            return f"BLANK {lark.json(schema)} BLANK"
        named = lark.choice(
            f"{lark.mark(tool_name(tool))} {lark.rule(self._id(lark))} {lark.mark(_ARGUMENTS)} "
            f"BLANK {lark.json(parameters_of(tool))}"
            for tool in tools
        )
        call = lark.rule(f"BLANK {named} BLANK")
        if lark.is_parallel:
            return f"{call} ( {lark.mark(_START)} {call} )*"
        return call

    def _id(self, lark: Lark) -> str:
        return f"( {lark.mark(_ID)} /[a-zA-Z0-9]{{1,32}}/ )?"


def _read(source: TextBuffer) -> Generator[CallPart | None, None, None]:
    if not (yield from source.skip_blanks()):
        raise ValueError("no call")
    if source.text[0] in "[{":
        yield from read_json_calls(source)
        return
    while (yield from source.skip_blanks()):
        name, id = yield from _head(source)
        yield CallHeader(name, id)
        yield from stream_arguments(source)
        while (yield from source.skip_blanks()):
            if not source.text.startswith(_START[: len(source.text)]):
                break
            if source.text.startswith(_START):
                source.consume(len(_START))
                break
            if source.is_ended:
                return
            yield None


def _head(source: TextBuffer) -> Generator[None, None, tuple[str, str | None]]:
    """Reads the name and the id of a call; the arguments may follow without their mark."""
    while _ARGUMENTS not in source.text and "{" not in source.text:
        if source.is_cut and "[" in source.text:  # A mark after the name was cut off.
            source.text = source.text.partition("[")[0] + _ARGUMENTS
            break
        if source.is_ended or len(source.text) > MAX_NAME:
            raise ValueError("no arguments")
        yield None
    is_marked = _ARGUMENTS in source.text.partition("{")[0]
    end = source.text.find(_ARGUMENTS if is_marked else "{")
    name, _, id = source.consume(end).strip().partition(_ID)
    source.consume(len(_ARGUMENTS) if is_marked else 0)
    if not name or any(character in name for character in "<>[]{}\n "):
        raise ValueError(f"{name[:80]!r} is not a name")
    return name, id or None


MISTRAL = Dialect(
    "mistral",
    MistralCalls(),
    ReasoningFormat("[THINK]", "[/THINK]", effort="reasoning_effort", efforts=("none", "high")),
    other_marks=(_ARGUMENTS, _ID),
)
MISTRAL_LIST = Dialect("mistral_list", MistralCalls(is_list=True))
