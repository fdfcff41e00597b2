"""Kimi K2: a section of calls, each with an id such as functions.NAME:0 and JSON arguments."""

from collections.abc import Generator
from dataclasses import dataclass

from serve.front.text.calls.json_calls import parameters_of, tool_name
from serve.front.text.calls.json_values import stream_arguments
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    CallHeader,
    CallPart,
    CallReader,
    PulledReader,
    TextBuffer,
    Tools,
)
from serve.front.text.dialects.interface import Dialect, Messages, ReasoningFormat

_BEGIN = "<|tool_call_begin|>"
_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_NAMESPACE = "functions."


@dataclass(frozen=True, slots=True)
class KimiCalls:
    start: str = "<|tool_calls_section_begin|>"
    end: str = "<|tool_calls_section_end|>"

    def reader(self, _tools: Tools, /) -> CallReader:
        return PulledReader(_read)

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(
            f"{lark.mark(f'{_NAMESPACE}{tool_name(tool)}:')} /[0-9]+/ BLANK "
            f"{lark.mark(_ARGUMENTS)} {lark.json(parameters_of(tool))}"
            for tool in tools
        )
        call = lark.rule(f"{lark.mark(_BEGIN)} BLANK {calls} BLANK {lark.mark(_END)}")
        return f"{lark.calls(call)} BLANK {lark.mark(self.end)}"


def _read(source: TextBuffer) -> Generator[CallPart | None, None, None]:
    is_first = True
    while (yield from source.skip_blanks()):
        if not is_first or source.text[0] == "<":  # The first call may lack its mark.
            yield from source.first_of(_BEGIN)
        begun = yield from source.name_until(":")
        source.named = CallHeader(begun.removeprefix(_NAMESPACE))
        rest = yield from source.name_until(_ARGUMENTS)
        id = f"{begun}:{rest}"
        name, _, number = id.rpartition(":")
        if not number.isdecimal():
            raise ValueError(f"{id[:80]!r} is not the id of a call")
        yield CallHeader(name.removeprefix(_NAMESPACE), id)
        is_first = False
        yield from stream_arguments(source)
        if not (yield from source.first_of(_END)):
            return


def _with_own_ids(messages: Messages, _tools: Tools) -> Messages:
    """Replaces the ids of calls with Kimi's own: the name of the function, and a number."""
    ids: dict[str, str] = {}
    written: Messages = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            id = ids.setdefault(call["id"], f"functions.{name}:{len(ids)}")
            calls.append({**call, "id": id})
        if calls:
            message = {**message, "tool_calls": calls}
        if message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        written.append(message)
    return written


KIMI_K2 = Dialect(
    "kimi_k2",
    KimiCalls(),
    ReasoningFormat("<think>", "</think>", switch="thinking"),
    end_tokens=("<|im_end|>",),
    other_marks=(_BEGIN, _END, _ARGUMENTS),
    prepare=_with_own_ids,
)
