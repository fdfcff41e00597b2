"""An answer's text taken apart while it comes: thoughts, content and calls of tools.

Pure: what comes out does not depend on how the text was cut into deltas, but for how it
is cut into pieces itself.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from serve.front.api.openai import ChatBody
from serve.front.api.tools import NamedTool, Tool, called
from serve.front.output.stop_strings import overlap
from serve.front.text.formats import Format

Kind = Literal["content", "reasoning", "call"]

MAX_DEPTH = 200  # of the JSON of a call; bodies of requests have the same limit
# A backslash stands alone at the end of a text only.
_JSON_MARKS = re.compile(r'["{}\[\]]|\\.?', re.DOTALL)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a kind. Of a call, name is given once, with the id if the model wrote one, and
    text adds up to its arguments."""

    kind: Kind
    text: str
    name: str | None = None
    id: str | None = None


class Plain:
    """An answer without marks. finish gives what was held back."""

    kind: Kind = "content"  # of what comes next

    def feed(self, delta: str) -> Iterator[Piece]:
        if delta:
            yield Piece("content", delta)

    def finish(self) -> Iterator[Piece]:
        return iter(())


class NamedCall(Plain):
    """All of the answer is the arguments of one call, as a grammar has seen to."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, delta: str) -> Iterator[Piece]:
        if delta:
            yield Piece("call", delta, self._name)
            self._name = None


class ListedCalls(Plain):
    """The answer is a JSON list of {"name", "parameters"}, as a grammar has seen to. A call that
    is nested more deeply than MAX_DEPTH is content, and so is what comes after it."""

    def __init__(self) -> None:
        self._text = ""
        self._num_scanned = 0
        self._start = 0  # of the object that is open
        self._depth = 0
        self._is_in_string = False
        self._is_too_deep = False

    def feed(self, delta: str) -> Iterator[Piece]:
        self._text += delta
        while not self._is_too_deep and (end := self._end_of_call()) is not None:
            text = self._text[self._start : end]
            self._text, self._num_scanned = self._text[end:], 0
            yield _listed_call(text)
        if self._is_too_deep and self._text:
            text, self._text = self._text, ""
            yield Piece("content", text)

    def _end_of_call(self) -> int | None:
        """Looks at each character once, so that a long call takes linear time."""
        for found in _JSON_MARKS.finditer(self._text, self._num_scanned):
            mark = found[0]
            if mark == "\\":  # What it escapes has not come.
                self._num_scanned = found.start()
                return None
            if mark == '"':
                self._is_in_string = not self._is_in_string
            elif self._is_in_string or len(mark) > 1:
                continue
            elif mark in "{[" and (self._depth or mark == "{"):
                self._start = self._start if self._depth else found.start()
                self._depth += 1
                self._is_too_deep = self._depth > MAX_DEPTH
            elif mark in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return found.end()
            if self._is_too_deep:
                break
        self._num_scanned = len(self._text)
        return None


def _listed_call(text: str) -> Piece:
    try:
        ((name, arguments, _),) = called(json.loads(text))
    # Such as a number that is no float. It stays what it is.
    except (ValueError, RecursionError):
        return Piece("content", text)
    return Piece("call", arguments, name)


class Marked(Plain):
    """Text with the marks of a model's format, and what content there is for inner. A call
    that its parser does not understand stays content. Blanks between calls count for nothing.
    declared are the request's tools, whose schemas tell a parser what is a number.
    """

    def __init__(
        self, format: Format, is_thinking: bool, inner: Plain, declared: Sequence[Tool] = ()
    ) -> None:
        self._tools, self._thoughts, self._inner = format.tools, format.thoughts, inner
        self._declared = declared
        self.kind = "reasoning" if is_thinking else "content"
        self._text = ""
        self._num_searched = 0
        self._blanks = ""
        self._has_called = False

    def feed(self, delta: str) -> Iterator[Piece]:
        self._text += delta
        while (found := self._first_mark()) is not None:
            start, mark, kind = found
            before, self._text = self._text[:start], self._text[start + len(mark) :]
            self._num_searched = 0
            yield from self._give(before, mark)
            self.kind = kind
        if self.kind != "call":
            held = max((overlap(self._text, mark) for mark, _ in self._marks()), default=0)
            end = len(self._text) - held
            given, self._text = self._text[:end], self._text[end:]
            self._num_searched = 0
            yield from self._give(given)

    def finish(self) -> Iterator[Piece]:
        """A call without its end may be whole all the same."""
        text, self._text = self._text, ""
        yield from self._give(text)
        if not self._has_called:
            yield from self._inner.feed(self._blanks)

    def _marks(self) -> Iterator[tuple[str, Kind]]:
        """Those that may come here, and the kind of what follows."""
        if self.kind == "content":
            if self._tools:
                yield self._tools.start, "call"
            if self._thoughts:
                yield self._thoughts[0], "reasoning"
        elif self.kind == "reasoning" and self._thoughts:
            yield self._thoughts[1], "content"
        elif self._tools and self._tools.end:
            yield self._tools.end, "content"

    def _first_mark(self) -> tuple[int, str, Kind] | None:
        """Looks at what came since the last time, because a call may become long."""
        found = []
        for mark, kind in self._marks():
            begin = max(0, self._num_searched - len(mark) + 1)
            found.append((self._text.find(mark, begin), mark, kind))
        self._num_searched = len(self._text)
        return min((each for each in found if each[0] >= 0), default=None)

    def _give(self, text: str, mark: str = "") -> Iterator[Piece]:
        """mark is the one that ends it."""
        if self.kind == "call":
            yield from self._calls(text, mark)
        elif self.kind == "reasoning":
            if text:
                yield Piece("reasoning", text)
        else:
            yield from self._content(text)

    def _content(self, text: str) -> Iterator[Piece]:
        text = self._blanks + text
        shown = text.rstrip() if self._tools else text
        self._blanks = text[len(shown) :]
        yield from self._inner.feed(shown)

    def _calls(self, text: str, mark: str) -> Iterator[Piece]:
        assert self._tools is not None
        try:
            declared = [tool.model_dump() for tool in self._declared]
            calls = called(self._tools.parse(text, declared))
        # A parser of mlx-lm reads what a model has written: it may raise anything.
        except Exception as error:
            _logger.info("event=tool_call_not_understood error=%r", f"{error!r:.200}")
            yield from self._content(self._tools.start + text + mark)
            return
        self._blanks, self._has_called = "", True
        for name, arguments, id in calls:
            yield Piece("call", arguments, name, id)


def parser_of(body: ChatBody, format: Format, is_thinking: bool) -> Plain:
    """For one answer to a request."""
    choice = body.tool_choice or "auto"
    inner = Plain()
    if isinstance(choice, NamedTool):
        inner = NamedCall(choice.function.name)
    elif choice == "required":
        inner = ListedCalls()
    tools = format.tools if body.tools and choice == "auto" else None
    if not tools and not format.thoughts:
        return inner
    return Marked(Format(tools, format.thoughts), is_thinking, inner, body.tools or ())
