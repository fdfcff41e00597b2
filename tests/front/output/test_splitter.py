"""The splitter: the parts of an answer's text that the request wants."""

from dataclasses import replace

import pytest

from serve.core.helper_messages import ParsedCall
from serve.front.output.deltas import CallBegin, CallEnd, CallText, Text, Thought
from serve.front.output.splitter import Part, Splitter, Splitting
from serve.front.text.dialects.interface import Dialect
from serve.front.text.dialects.mlx_lm import ParsedCalls
from serve.front.text.dialects.qwen import QWEN

BOTH = Splitting(reads_marks=True, finds_calls=True)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
LISTED = '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]'


def split(rules: Splitting, text: str, is_whole: bool = True) -> list[Part]:
    splitter = Splitter(rules, QWEN)
    return [*splitter.feed(text), *splitter.finish(is_whole)]


def kinds(parts: list[Part]) -> list[type]:
    return [type(part) for part in parts]


def test_splitter_passes_on_a_plain_answer_unchanged() -> None:
    assert not Splitting().searches(QWEN)
    assert split(Splitting(), CALL) == [Text(CALL)]


def test_splitter_hides_thoughts_that_the_request_does_not_want() -> None:
    text = f"<think>Hm</think>a {CALL}"
    whole = [CallBegin, CallText, CallEnd]
    assert kinds(split(BOTH, text)) == [Thought, Text, *whole]
    assert kinds(split(replace(BOTH, shows_thoughts=False), text)) == [Text, *whole]


@pytest.mark.parametrize(
    ("rules", "text"),
    [(BOTH, CALL + CALL), (Splitting(forces_calls=True), LISTED)],
)
def test_splitter_drops_calls_after_the_first_call_unless_parallel_calls_are_allowed(
    rules: Splitting, text: str
) -> None:
    single = replace(rules, is_parallel=False)
    assert kinds(split(rules, text)) == [CallBegin, CallText, CallEnd] * 2
    assert kinds(split(single, text)) == [CallBegin, CallText, CallEnd]


def test_splitter_ends_a_forced_call_only_if_it_is_complete() -> None:
    rules = Splitting(forced_tool="f")
    assert rules.searches
    begin, text, end = split(rules, "{}")
    assert isinstance(begin, CallBegin)
    assert (begin.name, text, end) == ("f", CallText("{}"), CallEnd())
    assert kinds(split(rules, "{", is_whole=False)) == [CallBegin, CallText]


def test_splitter_finds_a_forced_call_after_reasoning() -> None:
    rules = Splitting(reads_marks=True, is_thinking=True, forced_tool="f")
    assert kinds(split(rules, "Hm</think>{}")) == [Thought, CallBegin, CallText, CallEnd]


def one_call(_text: str, _tools: object) -> list[ParsedCall]:
    return [ParsedCall("f", "{}")]


def test_splitter_gives_the_length_of_a_call_that_must_be_parsed() -> None:
    slow = Dialect("slow", ParsedCalls("<tool_call>", "</tool_call>", one_call))
    splitter = Splitter(BOTH, slow)
    assert list(splitter.feed(CALL[:20])) == []
    assert splitter.call_length == 9
    assert len(list(splitter.feed(CALL[20:]))) == 3
    assert splitter.call_length is None
    assert splitter.num_calls == 1
