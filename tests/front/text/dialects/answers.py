"""Shared by the tests of dialects: an answer read in pieces, and calls as plain values."""

import json
import random
from typing import Any

from serve.front.text.calls.parts import CallEnd, CallHeader, CallText, Part, Text, Thought
from serve.front.text.dialects.harmony import HarmonyReader
from serve.front.text.dialects.interface import AnswerReader, Dialect
from serve.front.text.dialects.marked import MarkedReader, PlainReader

Json = dict[str, Any]

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "boolean"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "options": {"type": "object", "properties": {"mode": {"type": "string"}}},
        "mode": {"enum": ["fast", "slow"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["path"],
}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
TEXTS = [
    "Rome",
    "",
    'say "hi" \\ back',
    "def f():\n    return {'a': [1]}\n",
    "naïve 日本語 🙂",
    "<b>not</b> a mark </",
    "}{][",
    "12",
    "true",
]
ARGUMENTS: list[Json] = [
    {"path": "a.py"},
    *({"path": "a.py", "text": text} for text in TEXTS),
    {"path": "a", "count": 3, "ratio": 0.5, "deep": True},
    {"path": "a", "count": -7, "ratio": 2, "deep": False, "lines": [1, 2, 3]},
    {"path": "a", "lines": [], "options": {"mode": 'x "y"'}, "mode": "fast"},
    {"path": "x y", "options": {}, "note": "later"},
]


def reader_of(dialect: Dialect, tools: list[Json] = TOOLS, thinks: bool = False) -> AnswerReader:
    if dialect.has_messages:
        return HarmonyReader(PlainReader())
    return MarkedReader(dialect.calls, dialect.reasoning, thinks, PlainReader(), tools)


def read(reader: AnswerReader, pieces: list[str]) -> list[Part]:
    """The parts, joined where they continue each other."""
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.feed(piece)
    return joined([*parts, *reader.finish()])


def joined(parts: list[Part]) -> list[Part]:
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, CallHeader | CallEnd) or type(last) is not type(part):
            found.append(part)
        else:
            assert isinstance(last, Text | Thought | CallText)
            found[-1] = type(part)(last.text + part.text)
    return found


def cut(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.choice((1, 1, 2, 3, 8))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def every_way(
    dialect: Dialect, text: str, thinks: bool = False, tools: list[Json] = TOOLS
) -> list[Part]:
    """The parts of the text, which must not depend on how it was cut."""
    whole = read(reader_of(dialect, tools, thinks), [text])
    for seed in range(3):
        pieces = cut(text, random.Random(seed))
        assert read(reader_of(dialect, tools, thinks), pieces) == whole, pieces
    assert read(reader_of(dialect, tools, thinks), list(text)) == whole
    return whole


def calls_in(parts: list[Part]) -> list[tuple[str, Any]]:
    """The names and parsed arguments. Every call must have arguments that are JSON."""
    calls: list[tuple[str, Any]] = []
    for index, part in enumerate(parts):
        if isinstance(part, CallHeader):
            following = parts[index + 1]
            assert isinstance(following, CallText), following
            calls.append((part.name, json.loads(following.text)))
    return calls
