"""The parts of an answer: text, thoughts, and calls whose name comes before their arguments.

Readers turn the text of an answer into parts while it is generated. Cutting the text into other
pieces changes only where the parts are cut.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Sequence[dict[str, Any]]  # declarations of tools, as in OpenAI's requests


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The start of a call: its name, and its id if the model wrote one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallText:
    """A piece of the arguments' JSON of the call that began last."""

    text: str


MAX_NAME = 512  # the most characters in the name of a function or parameter


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of the open call. A call that was cut off has no such part."""


CallPart = CallHeader | CallText | CallEnd
Part = Text | Thought | CallPart


class CallReader(Protocol):
    """Reads the text between the marks of a call, or of a section of calls."""

    def feed(self, text: str) -> Iterator[CallPart]:
        """Yields the parts that are certain. Raises ValueError if the text is not a call."""

    def finish(self, is_whole: bool = True) -> Iterator[CallPart]:
        """Yields the parts that were held back. Unless is_whole, the answer was cut off, and an
        open call stays open. Raises ValueError if the text is not a call."""


class TextBuffer:
    """Text that arrives in pieces; `text` is the part that was not consumed. A reading function
    yields None to get more text. A call in `named` is yielded even if it is cut off."""

    def __init__(self) -> None:
        self.text = ""
        self.is_ended = False
        self.is_cut = False
        self.named: CallHeader | None = None

    def consume(self, size: int) -> str:
        consumed, self.text = self.text[:size], self.text[size:]
        return consumed

    def skip_blanks(self) -> Generator[None, None, bool]:
        """Skips blanks, and returns whether more text follows them."""
        while not (text := self.text.lstrip()):
            self.text = ""
            if self.is_ended:
                return False
            yield None
        self.text = text
        return True

    def name_until(self, mark: str) -> Generator[None, None, str]:
        """Reads a name and the mark after it. Raises ValueError without a mark, or a name."""
        try:
            name = (yield from self.until(mark, MAX_NAME)).strip()
        except ValueError:
            begun = overlap(self.text, mark)
            if not self.is_cut or not begun:
                raise
            name = self.text[:-begun].strip()
            self.text = ""
        if not name or any(character in name for character in "<>{}\n"):
            raise ValueError(f"{name[:80]!r} is not a name")
        return name

    def until(self, mark: str, limit: int | None = None) -> Generator[None, None, str]:
        """Reads the text before the mark, and the mark. Raises ValueError beyond the limit."""
        begin = 0
        while (found := self.text.find(mark, begin)) < 0:
            if self.is_ended or (limit is not None and len(self.text) > limit):
                raise ValueError(f"{mark!r} is missing")
            begin = max(0, len(self.text) - len(mark) + 1)
            yield None
        before = self.consume(found)
        self.consume(len(mark))
        return before

    def first_of(self, *marks: str) -> Generator[None, None, str]:
        """Skips blanks. Consumes and returns the mark that follows; if several match, the first in
        `marks`. Returns an empty string if the text ends. Raises ValueError if something else
        follows."""
        while (yield from self.skip_blanks()):
            follows = next(
                (mark for mark in marks if mark.startswith(self.text[: len(mark)])), None
            )
            if follows is None:
                raise ValueError(f"{marks[0]!r} is missing")
            if len(self.text) >= len(follows):
                return self.consume(len(follows))
            if self.is_ended:
                raise ValueError(f"{marks[0]!r} is missing")
            yield None
        return ""


ReadingFunction = Callable[[TextBuffer], Iterator[CallPart | None]]


class PulledReader:
    """A CallReader made of a function that reads from a TextBuffer."""

    def __init__(self, read: ReadingFunction) -> None:
        self._source = TextBuffer()
        self._parts = read(self._source)

    def feed(self, text: str) -> Iterator[CallPart]:
        self._source.text += text
        yield from self._run()

    def finish(self, is_whole: bool = True) -> Iterator[CallPart]:
        source = self._source
        source.is_ended = True
        source.is_cut = not is_whole
        try:
            yield from self._run()
        except ValueError:
            if is_whole or source.named is None:
                raise
        if source.is_cut and source.named is not None:
            yield source.named

    def _run(self) -> Iterator[CallPart]:
        for part in self._parts:
            if part is None:
                return
            if isinstance(part, CallHeader):
                self._source.named = None
            yield part


def overlap(text: str, mark: str) -> int:
    """Returns the length of the longest proper prefix of mark that text ends with."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
