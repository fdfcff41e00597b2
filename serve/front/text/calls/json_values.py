"""JSON that comes in pieces: where a value ends, and calls written as JSON objects."""

import json
import re
from collections.abc import Collection, Generator
from typing import Any

from serve.front.text.calls.parts import CallEnd, CallHeader, CallPart, CallText, TextBuffer

MAX_DEPTH = 200  # the same limit as for requests' bodies, in which calls come back
_MARKS = re.compile(r'["{}\[\]]|\\.?', re.DOTALL)
_END_OF_SCALAR = re.compile(r"[,}\]\s]")
_ARGUMENTS = ("arguments", "parameters")


def json_string(text: str) -> str:
    """Returns the JSON string that stands for a text."""
    return json.dumps(text, ensure_ascii=False)


class JsonValue:
    """Finds the end of one JSON value in one pass. Raises ValueError beyond MAX_DEPTH."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaping = False
        self._is_scalar: bool | None = None  # None before the first character

    def end(self, text: str) -> int | None:
        """Returns the length of the text that belongs to the value; None if it has not ended."""
        if not text:
            return None
        if self._is_scalar is None:
            self._is_scalar = text[0] not in '"{['
        if self._is_scalar:
            found = _END_OF_SCALAR.search(text)
            return found.start() if found else None
        begin = 1 if self._is_escaping else 0
        self._is_escaping = False
        for found in _MARKS.finditer(text, begin):
            mark = found[0]
            if mark[0] == "\\":
                self._is_escaping = self._is_in_string and len(mark) == 1
            elif mark == '"':
                self._is_in_string = not self._is_in_string
                if not self._is_in_string and not self._depth:
                    return found.end()
            elif self._is_in_string:
                continue
            elif mark in "{[":
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    raise ValueError(f"JSON that is nested more deeply than {MAX_DEPTH}")
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return found.end()
        return None


def stream_arguments(source: TextBuffer) -> Generator[CallPart | None, None, bool]:
    """Reads the next JSON value as it is written. Returns whether it was whole."""
    if not (yield from source.skip_blanks()):
        return False
    value = JsonValue()
    while (end := value.end(source.text)) is None:
        if text := source.consume(len(source.text)):
            yield CallText(text)
        if source.is_ended:
            return False
        yield None
    if end:
        yield CallText(source.consume(end))
    yield CallEnd()
    return True


def whole_value(source: TextBuffer) -> Generator[None, None, str]:
    """Reads the JSON text of the next value. Raises ValueError if it is incomplete."""
    if not (yield from source.skip_blanks()):
        raise ValueError("a value is missing")
    value, num_read = JsonValue(), 0
    while (end := value.end(source.text[num_read:])) is None:
        if source.is_ended:
            raise ValueError("an incomplete value")
        num_read = len(source.text)
        yield None
    return source.consume(num_read + end)


def read_json_calls(
    source: TextBuffer, names: Collection[str] = ()
) -> Generator[CallPart | None, None, None]:
    """Reads calls such as `{"name": ..., "arguments": {...}}`, or a list of them; "parameters"
    means the same, and "id" is optional. If `names` are given, only these tools can be called,
    because other JSON may contain a name, too. Arguments are yielded as they are written."""
    num_calls = 0
    while (yield from source.skip_blanks()):
        mark = source.consume(1)
        if mark == "{":
            yield from _read_call(source, names)
            num_calls += 1
        elif mark not in "[],;":
            if num_calls:
                return  # The rest is prose.
            raise ValueError("no JSON object")
    if not num_calls:
        raise ValueError("no call")


def _read_call(
    source: TextBuffer, names: Collection[str]
) -> Generator[CallPart | None, None, None]:
    name: str | None = None
    id: str | None = None
    waiting: str | None = None  # arguments that came before the name
    has_arguments = False
    while (yield from _next_key(source)):
        key = json.loads((yield from whole_value(source)))
        if not (yield from source.skip_blanks()) or source.consume(1) != ":":
            raise ValueError("a colon is missing")
        if key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if not (yield from source.skip_blanks()):
                break
            if name is None:
                waiting = yield from whole_value(source)
            else:
                yield CallHeader(name, id)
                yield from _arguments(source)
            continue
        value = json.loads((yield from whole_value(source)))
        if key == "name":
            name = _checked_name(value, names)
            source.named = CallHeader(name, id)
        elif key == "id" and isinstance(value, str):
            id = value
        if name is not None and waiting is not None:
            yield CallHeader(name, id)
            yield CallText(_unquoted(waiting))
            yield CallEnd()
            waiting = None
    if name is None:
        raise ValueError("a call without a name")
    if not has_arguments and not source.is_cut:
        if names:
            raise ValueError("no arguments")
        yield CallHeader(name, id)
        yield CallText("{}")
        yield CallEnd()


def _next_key(source: TextBuffer) -> Generator[None, None, bool]:
    """Whether the object continues with a key."""
    while (yield from source.skip_blanks()):
        if source.text[0] == '"':
            return True
        mark = source.consume(1)
        if mark == "}":
            return False
        if mark != ",":
            raise ValueError("a key is missing")
    return False


def _arguments(source: TextBuffer) -> Generator[CallPart | None, None, None]:
    """Reads the arguments, which some models write as a string that contains JSON."""
    if source.text[0] == '"':
        yield CallText(_unquoted((yield from whole_value(source))))
        yield CallEnd()
    else:
        yield from stream_arguments(source)


def _unquoted(value: str) -> str:
    return str(json.loads(value)) if value.startswith('"') else value


def _checked_name(value: Any, names: Collection[str]) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a call without a name")
    if names and value not in names:
        raise ValueError(f"{value[:80]!r} is not a declared tool")
    value.encode()  # A lone surrogate is a ValueError.
    return value
