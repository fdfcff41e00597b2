"""gpt-oss: an answer is messages with headers that name a channel and, for calls, a recipient."""

import re
from collections.abc import Iterator
from typing import Any

from serve.front.text.calls.json_calls import parameters_of, tool_name
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    CallEnd,
    CallHeader,
    CallText,
    Part,
    Thought,
    Tools,
    overlap,
)
from serve.front.text.dialects.interface import (
    AnswerReader,
    Dialect,
    Messages,
    ReasoningFormat,
)

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_END = "<|end|>"
_CALL = "<|call|>"
_RETURN = "<|return|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = (_END, _CALL, _RETURN, _START)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ENDED_RECIPIENT = re.compile(rf"{_RECIPIENT.pattern}[\s<]")  # a recipient before the cut
_NAMESPACE = "functions."


class HarmonyReader:
    """Reads messages: those of the channel analysis are reasoning, and those with a recipient are
    calls. All others, even without a header, are content, which inner reads."""

    call_length: int | None = None

    def __init__(self, inner: AnswerReader) -> None:
        self._inner = inner
        self._text = ""
        self._is_header = True
        self._channel = "final"
        self._is_call = False

    def feed(self, delta: str) -> Iterator[Part]:
        self._text += delta
        while (found := self._next_mark()) is not None:
            place, mark = found
            text = self._consume(place)
            self._consume(len(mark))
            if self._is_header:
                yield from self._read_header(text)
            else:
                yield from self._parts_of(text)
                if self._is_call:
                    yield CallEnd()
            self._is_header = not self._is_header
        if not self._is_header:
            held = max(overlap(self._text, mark) for mark in _ENDS)
            text = self._consume(len(self._text) - held)
            yield from self._parts_of(text)

    def finish(self, is_whole: bool = True) -> Iterator[Part]:
        """Yields the parts that were held back. The token that ends a call also ends the answer. If
        a call is cut off, the start of a mark at its end is dropped."""
        text = self._consume(len(self._text))
        if self._is_header:
            yield from self._end_header(text, is_whole)
        elif is_whole or not self._is_call:
            yield from self._parts_of(text)
            if self._is_call:
                yield CallEnd()
        yield from self._inner.finish(is_whole)

    def _consume(self, size: int) -> str:
        consumed = self._text[:size]
        self._text = self._text[size:]
        return consumed

    def _next_mark(self) -> tuple[int, str] | None:
        """Returns the position of the mark that ends the header or the message, and the mark."""
        marks = (_MESSAGE,) if self._is_header else _ENDS
        places = [(self._text.find(mark), mark) for mark in marks]
        found = [(place, mark) for place, mark in places if place >= 0]
        return min(found, default=None)

    def _read_header(self, header: str) -> Iterator[Part]:
        """Reads a header: `<|start|>assistant to=functions.f<|channel|>commentary
        <|constrain|>json`, with the recipient in either part."""
        before, _, channel = header.rpartition(_CHANNEL)
        words = channel.replace(_CONSTRAIN, " ").split()
        self._channel = words[0] if words else "final"
        recipient = _RECIPIENT.search(f"{before} {channel}")
        name = recipient[1] if recipient else ""
        self._is_call = bool(name) and name != "assistant"
        if self._is_call:
            yield CallHeader(name.removeprefix(_NAMESPACE))

    def _end_header(self, text: str, is_whole: bool) -> Iterator[Part]:
        """Reads a header without a message: it was cut off, or is content."""
        if not is_whole and _ENDED_RECIPIENT.search(text):
            yield from self._read_header(text)
        elif _is_content(text):
            self._channel = "final"
            self._is_call = False
            yield from self._parts_of(text)

    def _parts_of(self, text: str) -> Iterator[Part]:
        if not text:
            return
        if self._is_call:
            yield CallText(text)
        elif self._channel == "analysis":
            yield Thought(text)
        else:
            yield from self._inner.feed(text)


def _is_content(text: str) -> bool:
    """Whether a text is content without a header, and not a header that was cut off."""
    is_header = _CHANNEL in text or _START in text
    return not is_header and bool(text.strip())


def harmony_grammar(tools: Tools, lark: Lark, final: str | None = "TEXT") -> str:
    """Returns the start rule's body: thoughts, then a call or, with `final`, a final message."""
    again = f"{lark.until(_END)} {lark.mark(_START)} {lark.mark('assistant')}"
    thought = lark.rule(f"{lark.mark(f'{_CHANNEL}analysis{_MESSAGE}')} {again}")
    preamble = lark.rule(f"{lark.mark(f'{_CHANNEL}commentary{_MESSAGE}')} {again}")
    constrained = f"( {lark.mark(_CONSTRAIN)} )? ( {lark.mark('json')} )?"
    endings = []
    if final is not None:
        head = f"{lark.mark(f'{_CHANNEL}final')} BLANK {constrained} {lark.mark(_MESSAGE)}"
        endings.append(lark.rule(f"{head} {final}"))
    for tool in tools:
        name = f" to={_NAMESPACE}{tool_name(tool)}"
        body = f"BLANK {constrained} {lark.mark(_MESSAGE)} {lark.json(parameters_of(tool))}"
        endings.append(lark.rule(f"{lark.mark(f'{_CHANNEL}commentary{name}')} {body}"))
        endings.append(lark.rule(f"{lark.mark(f'{name}{_CHANNEL}commentary')} {body}"))
    return f"( {thought} | {preamble} )* {lark.choice(endings)}"


def _with_thoughts(messages: Messages, _tools: Tools) -> Messages:
    """Names a message's reasoning `thinking`, as gpt-oss does, unless it has content and calls."""
    return list(map(_with_thought, messages))


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    thought = message.get("reasoning_content")
    has_both = message.get("content") and message.get("tool_calls")
    if not thought or has_both:
        return message
    return {**message, "thinking": thought}


HARMONY = Dialect(
    "harmony",
    reasoning=ReasoningFormat(
        f"{_CHANNEL}analysis{_MESSAGE}",
        _END,
        effort="reasoning_effort",
        efforts=("low", "medium", "high"),
    ),
    end_tokens=(_RETURN, _CALL),
    other_marks=(_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN, _CONSTRAIN),
    prepare=_with_thoughts,
    has_messages=True,
)
