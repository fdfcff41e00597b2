"""Invalid parts of a tool's schema are left out, without harm to the request and other tools."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.core.errors import RequestError
from serve.front.api.openai import ChatBody, parse
from serve.front.text.calls.values import Declared
from serve.front.text.dialects.detect import NAMED
from serve.front.text.dialects.grammar import tool_grammar
from serve.front.text.grammars import of_tool_schema
from serve.front.text.sound_schemas import sound, sound_tools
from tests.errors import fails
from tests.front.api.test_structured import MODEL

CHANGED: list[tuple[str, Any, Any]] = [
    ("type", "any", None),
    ("type", None, None),
    ("type", ["String", "dict"], ["string"]),
    ("type", "OBJECT", "object"),
    ("enum", None, None),
    ("enum", [], None),
    ("minLength", 3.0, 3),
    ("maxLength", "12", None),
    ("maxItems", True, None),
    ("maximum", 1e300, None),
    ("exclusiveMinimum", "0", None),
    ("pattern", "(", None),
    ("items", None, None),
    ("required", True, None),
    ("required", ["a", None], ["a"]),
    ("properties", {"a": "string"}, {"a": {}}),
    ("anyOf", [], None),
    ("additionalProperties", None, None),
    ("$ref", "#/$defs/Nowhere", None),
    ("$ref", "https://example.org/schema", None),
    ("$ref", "#nowhere", None),
    ("$ref", "#/$defs/List<A>", "#/$defs/List%3CA%3E"),
    ("$ref", "#/$defs/a%2Fb", "#/$defs/a%2Fb"),
    ("$ref", "#/allOf/0", "#/allOf/0"),
    ("multipleOf", 0, None),
    ("multipleOf", 0.5, 0.5),
    ("$schema", "mine", None),
    ("$id", 5, None),
]
# The reference is to a part of the parameter's own document.
WITH_ID = {
    "$id": "https://example.org/address",
    "properties": {"street": {"$ref": "#/$defs/Line"}},
    "$defs": {"Line": {"type": "string"}},
}
KEPT: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "urn:x",
    "type": ["object", "null"],
    "properties": {
        "a": {"type": "string", "pattern": "^\\p{L}+(?<n>x)?$", "format": "email", "title": 3},
        "b": {"$ref": "#/$defs/B"},
        "c": {"type": "array", "items": [{"type": "null"}], "prefixItems": [True]},
        "d": {"type": "number", "minimum": 0, "exclusiveMaximum": True, "nullable": True},
        "required": {"enum": [None]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^x": {"const": None}},
    "$defs": {"B": {"not": {"maxLength": 3}}},
}
MALFORMED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "str", "required": True, "maxLength": None},
        "days": {"type": "array", "items": None, "minItems": "1", "enum": None},
        "unit": {"type": {"type": "string"}, "$ref": 3},
    },
    "required": [{}],
}


@pytest.mark.parametrize(("name", "value", "expected"), CHANGED)
def test_invalid_keywords_of_a_schema_are_left_out(name: str, value: Any, expected: Any) -> None:
    definitions = {"List<A>": {"type": "string"}, "a/b": {}}
    schema = {"properties": {"x": {"title": "X", name: value}}, "allOf": [{}], "$defs": definitions}
    found = sound(schema)["properties"]["x"]
    assert found == {"title": "X"} | ({} if expected is None else {name: expected})
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    is_same = value == expected and value is not None
    assert sound_tools(tools)[1] == (set() if is_same else {name})


def test_valid_schemas_are_not_changed() -> None:
    assert sound(KEPT) == KEPT
    assert sound_tools([{"name": "f", "parameters": KEPT}])[1] == set()


def chat(*parameters: Any, **fields: Any) -> ChatBody:
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": each}}
        for number, each in enumerate(parameters)
    ]
    return parse(
        ChatBody, {"messages": [{"role": "user", "content": "hi"}], "tools": tools} | fields
    )


@pytest.mark.parametrize("name", NAMED)
def test_a_tool_grammar_can_be_made_of_a_malformed_schema(name: str) -> None:
    tokenizer = LLTokenizer(str(MODEL / "tokenizer.json"))
    tools = chat(MALFORMED, KEPT).tool_use.declared
    for is_forced in (False, True):
        grammar = tool_grammar(NAMED[name], tools, lambda _: None, is_forced=is_forced)
        assert grammar is not None
        assert {"required", "maxLength", "enum", "$ref"} <= set(grammar.left_out)
        matcher = LLMatcher(tokenizer, grammar.text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()


def test_a_grammar_of_forced_calls_can_be_made_of_a_malformed_schema() -> None:
    grammar = chat(MALFORMED, tool_choice="required").tool_use.grammar()
    assert grammar is not None
    tokenizer = LLTokenizer(str(MODEL / "tokenizer.json"))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()


def test_a_strict_tool_with_an_invalid_schema_is_refused() -> None:
    function = {"name": "f", "strict": True, "parameters": MALFORMED}
    body = chat(tools=[{"type": "function", "function": function}])
    with fails(RequestError, "unsupported_schema", match=r"tools\[0\]") as caught:
        body.tool_use.grammar()
    assert caught.value.param == "tools[0]"


VALUES: list[Any] = [None, True, -1, 2.5, 1e30, "", "(", [], ["x", None], {}, {"a": 1}, [{}]]
KEYWORDS = [name for name, _, _ in CHANGED] + ["format", "minItems", "const", "oneOf", "allOf"]


def anything(rng: random.Random, depth: int = 2) -> Any:
    if depth and rng.random() < 0.5:
        names = rng.sample(KEYWORDS, 3)
        return {name: anything(rng, depth - 1) for name in names} | {
            "properties": {"a": VALUES[-2]}
        }
    return rng.choice(VALUES)


def test_grammars_and_readers_accept_tools_with_any_schema() -> None:
    rng = random.Random(1)
    written = "<function=f0><parameter=a>1</parameter></function>"
    for _ in range(300):
        parameters = {name: anything(rng) for name in rng.sample(KEYWORDS, 4)}
        parameters["properties"] = {"a": anything(rng), "b": anything(rng)}
        tools = chat(parameters).tool_use.declared
        for dialect in NAMED.values():
            tool_grammar(dialect, tools, lambda _: None)
        Declared(tools).types("f0", "a")
        calls = NAMED["qwen3_coder"].calls
        assert calls is not None
        reader = calls.reader(tools)
        parts = [*reader.feed(written), *reader.finish()]
        assert json.loads("".join(getattr(part, "text", "") for part in parts)).keys() == {"a"}


def test_references_below_an_id_still_work_in_corrected_schemas() -> None:
    parameters = {"type": "object", "properties": {"home": WITH_ID}}
    (tool,), changed = sound_tools([{"name": "f", "parameters": parameters}])
    assert not changed
    tokenizer = LLTokenizer(str(MODEL / "tokenizer.json"))
    matcher = LLMatcher(tokenizer, of_tool_schema(tool["parameters"]), log_level=0)
    for street, is_right in (('"a"', True), ("1", False)):
        matcher.reset()
        tokens = tokenizer.tokenize_str(f'{{"home": {{"street": {street}}}}}')
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is is_right
