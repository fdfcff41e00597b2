"""Reads answers in which marks stand around thoughts and calls."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from serve.front.text.calls.json_values import read_json_calls
from serve.front.text.calls.parts import (
    CallEnd,
    CallHeader,
    CallPart,
    CallReader,
    CallText,
    Part,
    PulledReader,
    Text,
    Thought,
    Tools,
    overlap,
)
from serve.front.text.dialects.interface import AnswerReader, CallFormat, ReasoningFormat

# An answer may have this many texts that begin like calls but are none. After that, the rest is
# read as text, because each such text would be read twice.
_MAX_FAILURES = 16

_logger = logging.getLogger(__name__)


class PlainReader:
    """Reads an answer without marks."""

    call_length: int | None = None

    def feed(self, delta: str) -> Iterator[Part]:
        if delta:
            yield Text(delta)

    def finish(self, is_whole: bool = True) -> Iterator[Part]:  # noqa: ARG002
        return iter(())


class NamedCallReader(PlainReader):
    """The whole answer is the arguments of one call, which a grammar enforces."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_open = False

    def feed(self, delta: str) -> Iterator[Part]:
        if not delta:
            return
        if not self._is_open:
            self._is_open = True
            yield CallHeader(self._name)
        yield CallText(delta)

    def finish(self, is_whole: bool = True) -> Iterator[Part]:
        if self._is_open and is_whole:
            yield CallEnd()


class ListedCallsReader(PlainReader):
    """A JSON list of {"name", "parameters"}, enforced by a grammar. Other text ends the list."""

    def __init__(self) -> None:
        self._calls = PulledReader(read_json_calls)
        self._failed = False

    def feed(self, delta: str) -> Iterator[Part]:
        yield from self._read(self._calls.feed(delta))

    def finish(self, is_whole: bool = True) -> Iterator[Part]:
        yield from self._read(self._calls.finish(is_whole))

    def _read(self, parts: Iterator[CallPart]) -> Iterator[Part]:
        if self._failed:
            return
        try:
            yield from parts
        except (ValueError, RecursionError) as error:
            self._failed = True
            _logger.info("event=tool_call_not_understood error=%s", type(error).__name__)


@dataclass(slots=True)
class _OpenCall:
    """A call that is being read: the mark it began with, and its text until its name is known."""

    reader: CallReader
    mark: str
    text: str = ""
    has_begun: bool = False
    has_failed: bool = False


class MarkedReader:
    """Splits an answer at marks; `inner` reads the content, which includes unreadable calls."""

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        is_thinking: bool,
        inner: AnswerReader,
        tools: Tools = (),
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._inner = inner
        self._tools = list(tools)
        self._is_thinking = is_thinking and reasoning is not None
        self._call: _OpenCall | None = None
        self._text = ""
        self._blanks = ""
        self._has_called = False
        self._num_failures = 0
        self._unmarked = getattr(calls, "unmarked", "")

    @property
    def call_length(self) -> int | None:
        """The characters so far of a call that mlx-lm's parser will read, in a helper process."""
        if self._call:
            return getattr(self._call.reader, "num_characters", None)
        return None

    def feed(self, delta: str) -> Iterator[Part]:
        self._text += delta
        if self._unmarked and not self._is_thinking:
            if not self._text.strip():
                return
            self._open_unmarked_call()
        while (found := self._first_mark()) is not None:
            start, mark = found
            before = self._text[:start]
            self._text = self._text[start + len(mark) :]
            if self._call is not None:
                yield from self._end_call(before, mark)
            elif self._is_thinking:
                yield from self._parts_of(before)
                self._is_thinking = False
            else:
                yield from self._parts_of(before)
                yield from self._open(mark)
        held = max((overlap(self._text, mark) for mark in self._marks()), default=0)
        end = len(self._text) - held
        given = self._text[:end]
        self._text = self._text[end:]
        was_calling = self._call is not None
        yield from self._parts_of(given)
        if was_calling and self._call is None:  # The text was not a call, and may contain marks.
            yield from self.feed("")

    def finish(self, is_whole: bool = True) -> Iterator[Part]:
        """Yields the parts that were held back. A call may be complete without its end mark."""
        text = self._text
        self._text = ""
        if self._call is not None:
            yield from self._end_call(text, "", is_whole)
            if self._text:
                yield from self.finish(is_whole)
                return
        else:
            yield from self._parts_of(text)
        if not self._has_called:
            yield from self._inner.feed(self._blanks)
            self._blanks = ""
        yield from self._inner.finish(is_whole)

    def _marks(self) -> Iterator[str]:
        """Yields the marks that may come next."""
        if self._call is not None:
            if self._calls and self._calls.end:
                yield self._calls.end
        elif self._is_thinking:
            assert self._reasoning
            yield self._reasoning.end
        else:
            if self._calls and self._num_failures < _MAX_FAILURES:
                yield self._calls.start
            if self._reasoning:
                yield self._reasoning.start

    def _first_mark(self) -> tuple[int, str] | None:
        found = [(self._text.find(mark), mark) for mark in self._marks()]
        return min((each for each in found if each[0] >= 0), default=None)

    def _open_unmarked_call(self) -> None:
        """Begins a call without a mark: some models write none, and put no text before the call."""
        if self._calls and self._text.lstrip()[0] in self._unmarked:
            self._call = _OpenCall(self._calls.reader(self._tools), "")
        self._unmarked = ""

    def _open(self, mark: str) -> Iterator[Part]:
        if self._calls and mark == self._calls.start:
            self._call = _OpenCall(self._calls.reader(self._tools), mark)
        else:
            self._is_thinking = True
        return iter(())

    def _parts_of(self, text: str) -> Iterator[Part]:
        if not text:
            return
        if self._call is not None:
            yield from self._call_parts(text)
        elif self._is_thinking:
            yield Thought(text)
        else:
            text = self._blanks + text
            shown = text.rstrip() if self._calls else text
            self._blanks = text[len(shown) :]
            yield from self._inner.feed(shown)

    def _call_parts(self, text: str) -> Iterator[Part]:
        call = self._call
        assert call is not None
        if call.has_failed:
            return
        if not call.has_begun:
            call.text += text
        try:
            yield from self._counted(call, call.reader.feed(text))
        except (ValueError, RecursionError) as error:
            yield from self._failed(call, error, "")

    def _end_call(self, text: str, mark: str, is_whole: bool = True) -> Iterator[Part]:
        call = self._call
        assert call is not None
        if not call.has_begun:
            call.text += text
        try:
            if not call.has_failed:
                yield from self._counted(call, call.reader.feed(text))
                yield from self._counted(call, call.reader.finish(is_whole))
            if not call.has_begun:
                raise ValueError("no call")
        except (ValueError, RecursionError) as error:
            yield from self._failed(call, error, mark)
        self._call = None

    def _counted(self, call: _OpenCall, parts: Iterator[CallPart]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, CallHeader):
                call.has_begun = self._has_called = True
                call.text = ""
                self._blanks = ""
            yield part

    def _failed(self, call: _OpenCall, error: Exception, mark: str) -> Iterator[Part]:
        """Treats text from the start mark on as content, unless a part of the call was yielded."""
        _logger.info("event=tool_call_not_understood error=%s", type(error).__name__)
        call.has_failed = True
        if call.has_begun:
            return
        self._call = None
        self._num_failures += 1
        yield from self._parts_of(call.mark)
        # The rest may contain marks: it is read again, after the start mark.
        self._text = call.text + mark + self._text
        call.text = ""
