"""Splits the text of an answer into deltas, as the request demands. A splitter knows no tokens."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Any

from serve.front.output.deltas import CallBegin, CallEnd, CallText, Text, Thought
from serve.front.text.calls import parts
from serve.front.text.dialects.harmony import HarmonyReader
from serve.front.text.dialects.interface import AnswerReader, Dialect
from serve.front.text.dialects.marked import (
    ListedCallsReader,
    MarkedReader,
    NamedCallReader,
    PlainReader,
)

Part = Text | Thought | CallBegin | CallText | CallEnd


@dataclass(frozen=True, slots=True)
class Splitting:
    """How the text of answers is split. Without reads_marks, as in completions, only JSON that a
    grammar enforces is a call: of forced_tool, or of any tool if forces_calls. finds_calls: the
    model may call tools. is_thinking: the prompt ends in an open thought. `declared` are the
    request's tools as JSON. demands_call: the answer must be a call; names_tool: the request names
    its tool. Calls after the first one are dropped unless is_parallel."""

    reads_marks: bool = False
    finds_calls: bool = False
    is_thinking: bool = False
    declared: tuple[dict[str, Any], ...] = ()
    forced_tool: str | None = None
    forces_calls: bool = False
    demands_call: bool = False
    names_tool: bool = False
    is_parallel: bool = True
    shows_thoughts: bool = True

    def searches(self, dialect: Dialect) -> bool:
        """Whether answers in the model's dialect are searched for calls or thoughts."""
        return type(self.reader(dialect)) is not PlainReader

    def reader(self, dialect: Dialect) -> AnswerReader:
        """Returns a reader for one answer in the model's dialect."""
        inner = self._reader_of_content()
        if not self.reads_marks:
            return inner
        if dialect.has_messages:
            return HarmonyReader(inner)
        calls = dialect.calls if self.finds_calls else None
        if calls is None and dialect.reasoning is None:
            return inner
        return MarkedReader(calls, dialect.reasoning, self.is_thinking, inner, self.declared)

    def _reader_of_content(self) -> AnswerReader:
        if self.forced_tool is not None:
            return NamedCallReader(self.forced_tool)
        return ListedCallsReader() if self.forces_calls else PlainReader()


class Splitter:
    """Splits one answer. num_calls counts all calls; has_open_call: the last is incomplete."""

    def __init__(self, rules: Splitting, dialect: Dialect) -> None:
        self._rules = rules
        self._reader = rules.reader(dialect)
        self.num_calls = 0
        self.has_open_call = False

    @property
    def call_length(self) -> int | None:
        """The length of the call that is held until it can be parsed; None outside a call."""
        return self._reader.call_length

    def feed(self, text: str) -> Iterator[Part]:
        """Yields the deltas of more text."""
        return self._shown(self._reader.feed(text))

    def finish(self, is_whole: bool) -> Iterator[Part]:
        """Yields the deltas that were held back. is_whole: the answer was not cut off. A demanded
        call that is cut off before its name yields nothing."""
        for part in self._shown(self._reader.finish(is_whole)):
            is_cut_call = self._rules.demands_call and not is_whole and isinstance(part, Text)
            if not is_cut_call:
                yield part

    def _shown(self, read: Iterator[parts.Part]) -> Iterator[Part]:
        for part in read:
            if isinstance(part, Thought) and not self._rules.shows_thoughts:
                continue
            if isinstance(part, parts.CallHeader):
                self.num_calls += 1
                self.has_open_call = True
            elif isinstance(part, CallEnd):
                self.has_open_call = False
            is_call = not isinstance(part, Text | Thought)
            if is_call and self.num_calls > 1 and not self._rules.is_parallel:
                continue
            if isinstance(part, parts.CallHeader):
                yield CallBegin(part.id or new_call_id(), part.name)
            else:
                yield part


def new_call_id() -> str:
    """Returns an id of nine letters and digits: Mistral's templates accept no other ids."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))
