"""Grammars from requests: what they accept, and what is refused in bounded time."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from serve.core.errors import RequestError
from serve.front.structured import Grammars, ResponseFormat, StructuredOutputs, of_schema

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-chat"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(MODEL / "tokenizer.json"))


def accepts(tokenizer: LLTokenizer, grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({"type": "json_object"}, '{"a": [1, 2]}', "[1]"),
        (
            {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            '{"name": "Ada", "age": 36}',
            '{"name": "Ada"}',
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "any", "strict": True}},
            "[1]",
            "one",
        ),
    ],
)
def test_response_formats(tokenizer: LLTokenizer, body: Any, right: str, wrong: str) -> None:
    grammar = ResponseFormat.model_validate(body).grammar()
    assert accepts(tokenizer, grammar, right)
    assert not accepts(tokenizer, grammar, wrong)


def test_plain_text_has_no_grammar() -> None:
    assert ResponseFormat(type="text").grammar() is None


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({"json": PERSON}, '{"name": "Ada", "age": 36}', '{"age": 36}'),
        ({"json": json.dumps(PERSON)}, '{"name": "Ada", "age": 36}', '{"age": 36}'),
        ({"regex": "a+b"}, "aab", "aa"),
        ({"choice": ["yes", "no", "a.b"]}, "a.b", "acb"),
        ({"grammar": 'start: "x" "y"*'}, "xyy", "yx"),
        ({"json_object": True}, "{}", "1"),
    ],
)
def test_structured_outputs(tokenizer: LLTokenizer, body: Any, right: str, wrong: str) -> None:
    grammar = StructuredOutputs.model_validate(body).grammar()
    assert accepts(tokenizer, grammar, right)
    assert not accepts(tokenizer, grammar, wrong)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"json_object": False},
        {"regex": 5},
        {"unknown": 1},
    ],
)
def test_structured_outputs_are_exactly_one(body: Any) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputs.model_validate(body)


@pytest.mark.parametrize(
    "body", [{"type": "json_schema"}, {"type": "text", "json_schema": {"name": "a"}}, {"type": "x"}]
)
def test_a_response_format_has_what_its_type_needs(body: Any) -> None:
    with pytest.raises(ValidationError):
        ResponseFormat.model_validate(body)


def test_blanks_between_json_are_bounded(tokenizer: LLTokenizer) -> None:
    assert accepts(tokenizer, of_schema(PERSON), '{\n  "name": "Ada",\n  "age": 36\n}')
    assert not accepts(tokenizer, of_schema(PERSON), '{"name":' + " " * 40 + '"Ada", "age": 36}')


HOPELESS: list[tuple[str, Any]] = [
    ("never", {"json": {"not": {}}}),
    ("an unknown type", {"json": {"type": "strin"}}),
    ("a reference to elsewhere", {"json": {"$ref": "http://127.0.0.1:9/schema"}}),
    ("a reference to itself", {"json": {"$ref": "#"}}),
    ("two types at once", {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}),
    ("text that is no JSON", {"json": "{"}),
    ("JSON that is no object", {"json": "true"}),
    ("too deep", {"json": '{"items":' * 400 + "{}" + "}" * 400}),
    ("an open bracket", {"regex": "(((("}),
    ("looking ahead", {"regex": "(?=a)b"}),
    ("a grammar of itself", {"grammar": "start: start"}),
    ("no grammar", {"grammar": "nothing"}),
    ("too long", {"regex": "a" * (300 << 10)}),
]


@pytest.mark.parametrize("body", [body for _, body in HOPELESS], ids=[name for name, _ in HOPELESS])
def test_what_no_answer_can_follow_is_refused_soon(body: Any) -> None:
    def check() -> None:
        grammar = StructuredOutputs.model_validate(body).grammar()
        Grammars(MODEL).check(grammar, "structured_outputs")

    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        check()
    assert caught.value.param == "structured_outputs"
    assert "site-packages" not in str(caught.value)
    assert time.monotonic() - started < 20, "hopeless grammars are found by limits, not by waiting"


def test_what_can_be_followed_is_checked_once() -> None:
    grammars = Grammars(MODEL)
    for n in range(300):
        grammars.check(StructuredOutputs(regex=f"a{{{n + 1}}}").grammar(), "structured_outputs")
    told = grammars.objection.cache_info()
    assert (told.misses, told.currsize) == (300, 256)
    grammars.check(StructuredOutputs(regex="a{300}").grammar(), "structured_outputs")
    assert grammars.objection.cache_info().hits == 1
