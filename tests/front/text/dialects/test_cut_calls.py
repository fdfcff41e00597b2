"""A call that is cut off anywhere is never whole, and never text once its name is known."""

import json

import pytest

from serve.front.output.deltas import CallBegin, CallEnd, CallText, Text
from serve.front.output.splitter import Part, Splitter, Splitting
from serve.front.text.dialects.harmony import HARMONY
from serve.front.text.dialects.interface import Dialect
from serve.front.text.dialects.llama import LLAMA
from serve.front.text.dialects.mlx_lm import mlx_lm_dialect
from serve.front.text.dialects.qwen import QWEN
from tests.front.text.dialects.answers import TOOLS, Json
from tests.front.text.dialects.test_families import FAMILIES, json_call

NAME = "write"
LONG = "x" * 300
ARGUMENTS: Json = {"path": "a.py", "count": 123, "lines": [1, 22], "text": LONG}
FREE = Splitting(reads_marks=True, finds_calls=True, declared=tuple(TOOLS))
DEMANDED = Splitting(reads_marks=True, finds_calls=True, declared=tuple(TOOLS), demands_call=True)
# Without a grammar for the dialect's calls, demanded ones are a JSON list.
LISTED = Splitting(reads_marks=True, forces_calls=True, demands_call=True)


def written(name: str) -> tuple[Dialect, str]:
    """The dialect, and a call as its models write it."""
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    return dialect, dialect.calls.start + write(NAME, ARGUMENTS)


CALLS = {
    **{name: written(name) for name in FAMILIES},
    "harmony": (
        HARMONY,
        f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>"
        + json.dumps(ARGUMENTS),
    ),
    "harmony, recipient first": (
        HARMONY,
        f" to=functions.{NAME}<|channel|>commentary<|message|>{json.dumps(ARGUMENTS)}",
    ),
    "llama, without a mark": (LLAMA, json.dumps({"name": NAME, "parameters": ARGUMENTS})),
    "llama, in Python": (LLAMA, f"[{NAME}(path='a.py', text='{LONG}')]"),
    "mlx-lm's": (
        mlx_lm_dialect("pythonic", None),
        f"<|tool_call_start|>[{NAME}(path='a.py', text='{LONG}')]",
    ),
    "arguments as a string": (
        QWEN,
        f"<tool_call>{json.dumps({'name': NAME, 'arguments': json.dumps(ARGUMENTS)})}",
    ),
    "with an id": (
        QWEN,
        f"<tool_call>{json.dumps({'name': NAME, 'id': 'a1', 'arguments': ARGUMENTS})}",
    ),
}
calls = pytest.mark.parametrize("name", CALLS)


def split(rules: Splitting, dialect: Dialect, pieces: list[str]) -> list[Part]:
    """The parts of an answer that is cut off after the pieces."""
    splitter = Splitter(rules, dialect)
    parts: list[Part] = []
    for piece in pieces:
        parts += splitter.feed(piece)
    parts += splitter.finish(is_whole=False)
    assert splitter.has_open_call == any(isinstance(part, CallBegin) for part in parts)
    return parts


def beginnings(text: str) -> list[str]:
    """The text cut off at each character, up to the middle of its long string."""
    return [text[:size] for size in range(1, text.index(LONG) + 20)]


def text_in(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def check_open_call(parts: list[Part]) -> None:
    assert [part.name for part in parts if isinstance(part, CallBegin)] == [NAME]
    assert not any(isinstance(part, CallEnd) for part in parts)
    arguments = "".join(part.text for part in parts if isinstance(part, CallText))
    assert "<" not in arguments, "no mark"
    with pytest.raises(ValueError, match=r"."):
        json.loads(arguments)


@calls
@pytest.mark.parametrize("rules", [FREE, DEMANDED], ids=["free", "demanded"])
def test_a_call_that_is_cut_off_after_its_name_is_incomplete_and_not_text(
    name: str, rules: Splitting
) -> None:
    dialect, text = CALLS[name]
    for begun in beginnings(text):
        for pieces in ([begun], list(begun)):
            parts = split(rules, dialect, pieces)
            if len(begun) > text.index(NAME) + len(NAME):
                check_open_call(parts)
                assert text_in(parts) == ""
            elif rules is DEMANDED:
                assert parts == []
            else:
                assert text_in(parts) in ("", begun), "as the model wrote it"


def test_a_list_of_demanded_calls_that_is_cut_off_is_incomplete() -> None:
    text = f"[{json.dumps({'name': NAME, 'parameters': ARGUMENTS})}"
    for begun in beginnings(text):
        parts = split(LISTED, QWEN, [begun])
        if len(begun) > text.index(NAME) + len(NAME):
            check_open_call(parts)
        else:
            assert parts == []


def test_text_before_a_call_that_is_cut_off_is_kept() -> None:
    text = f"I write.\n<tool_call>{json_call(NAME, ARGUMENTS)}"
    parts = split(FREE, QWEN, [text[:60]])
    assert text_in(parts) == "I write."
    check_open_call(parts)


def test_a_complete_call_before_a_call_that_is_cut_off_stays_complete() -> None:
    whole = f"<tool_call>{json_call('now', {})}</tool_call>"
    parts = split(FREE, QWEN, [f'{whole}\n<tool_call>{{"name": "{NAME}", "ar'])
    kinds = [type(part) for part in parts]
    assert kinds == [CallBegin, CallText, CallEnd, CallBegin]


def test_json_that_only_begins_like_a_call_is_kept_as_text() -> None:
    text = '{"name": "Rome", "size": 3'
    assert text_in(split(FREE, LLAMA, [text])) == text
    assert text_in(split(FREE, LLAMA, ["[link](url"])) == "[link](url"
