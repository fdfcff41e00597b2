"""Objects are closed by default, and what a composition or a key says otherwise is kept."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.core.errors import RequestError
from serve.front.text.calls.lark import Lark
from serve.front.text.grammars import of_schema, of_tool_schema
from serve.front.text.schemas import (
    closed,
    closed_text,
    inexpressible_keyword,
    schema_of,
    without_inexpressible_patterns,
)
from tests.errors import fails
from tests.front.api.test_structured import MODEL, accepts
from tests.front.text.drawing import drawn, longest_white_space

A = {"a": {"type": "integer"}}
B = {"b": {"type": "integer"}}
OBJECT = {"type": "object"}
CLOSED = {"additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(MODEL / "tokenizer.json"))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {}},
        {**OBJECT, "properties": A, "required": ["a"]},
        {**OBJECT, "properties": A, "anyOf": [{"required": ["a"]}, {"required": []}]},
        {**OBJECT, "properties": A, "description": "of a tool", "title": "A"},
        {**OBJECT, "properties": {"allOf": {"type": "integer"}, "$ref": {"type": "string"}}},
    ],
)
def test_closed_schemas_forbid_unknown_keys(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert closed(schema) == {**schema, **CLOSED}
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {},
        OBJECT,
        {**OBJECT, "properties": A, "additionalProperties": True},
        {**OBJECT, "properties": A, "additionalProperties": {"type": "string"}},
        {**OBJECT, "properties": A, "unevaluatedProperties": False},
        {**OBJECT, "properties": A, "patternProperties": {"^x": {}}},
        {**OBJECT, "properties": A, "propertyNames": {"pattern": "^.$"}},
        {**OBJECT, "properties": A, "required": ["z"]},
        {**OBJECT, "properties": A, "minProperties": 2},
        {**OBJECT, "properties": A, "allOf": [{"properties": B}]},
        {**OBJECT, "properties": A, "anyOf": [{"properties": B}, {"required": ["a"]}]},
        {**OBJECT, "properties": A, "if": {"properties": A}, "then": {"properties": B}},
        {"allOf": [{"properties": A}, {"properties": B}]},
        {"not": {"properties": A}},
        {"$ref": "#/$defs/a", "properties": B, "$defs": {"a": {"properties": A}}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"properties": B}], "$defs": {"a": {"properties": A}}},
        {"const": {"properties": A}, "enum": [{"properties": A}], "default": {"properties": A}},
        # Found nowhere in the schema: it may be any part of it.
        {"allOf": [{"$ref": "urn:x"}, {"properties": B}], "properties": A},
    ],
)
def test_schemas_that_allow_unknown_keys_are_not_closed(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"prefixItems": [inner]},
        lambda inner: {"anyOf": [inner, {"type": "null"}]},
        lambda inner: {"oneOf": [inner]},
        lambda inner: {"allOf": [inner]},
        lambda inner: {"$ref": "#/$defs/x", "$defs": {"x": inner}},
        lambda inner: {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": inner}},
        lambda inner: {"definitions": {"x": inner}},
        lambda inner: {"additionalProperties": inner},
        lambda inner: {"items": {"$id": "urn:tool:1", **inner}},
    ],
)
def test_schemas_inside_of_other_schemas_are_closed(around: Any) -> None:
    assert closed(around({"properties": A})) == around({"properties": A, **CLOSED})
    nested = around({"properties": {"x": {"properties": A}}, **CLOSED})
    assert closed(nested) == around({"properties": {"x": {"properties": A, **CLOSED}}, **CLOSED})


def test_references_in_a_part_with_an_id_are_resolved_within_that_part() -> None:
    """The schemas of tools are put into one; `#/$defs/...` refers to that of the tool."""
    tool = {"$id": "urn:tool:0", "$defs": {"x": {"properties": A}}, "properties": B}
    tool |= {"allOf": [{"$ref": "#/$defs/x"}]}
    other = {"$id": "urn:tool:1", "$defs": {"x": {"properties": A}}, "properties": B}
    result = closed({"items": {"anyOf": [tool, other]}})["items"]["anyOf"]
    assert result[0] == tool
    assert result[1] == {**other, **CLOSED, "$defs": {"x": {"properties": A, **CLOSED}}}


def test_schemas_that_refer_to_themselves_can_be_closed() -> None:
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/properties/left"}}}
    assert closed(tree) == {**tree, **CLOSED}
    looped = {"properties": A, "allOf": [{"$ref": "#/$defs/a"}]}
    looped["$defs"] = {"a": {"properties": B, "allOf": [{"$ref": "#/$defs/a"}]}}
    assert closed(looped) == looped


@pytest.mark.parametrize("text", ["[1]", "{", "true", '{"items":' * 5000 + "{}" + "}" * 5000])
def test_text_that_is_not_a_schema_is_not_changed(text: str) -> None:
    assert closed_text(text) == text


def test_a_grammar_of_a_schema_allows_no_unknown_keys(tokenizer: LLTokenizer) -> None:
    weather = {"properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}}}
    grammar = of_schema({**OBJECT, **weather, "required": ["city"]})
    assert accepts(tokenizer, grammar, '{"city": "Paris"}')
    assert not accepts(tokenizer, grammar, '{"city": "Paris", "location": "Barcelona"}')
    nothing = of_schema({**OBJECT, "properties": {}})
    assert accepts(tokenizer, nothing, "{}")
    assert not accepts(tokenizer, nothing, '{"a": 1}')
    assert accepts(tokenizer, of_schema(OBJECT), '{"a": 1}')


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(
        ["integer", "boolean", "object", "object", "array"] if depth < 3 else ["null"]
    )
    if kind == "array":
        return {"type": kind, "items": random_schema(rng, depth + 1)}
    if kind != "object":
        return {"type": kind}
    names = rng.sample("abcd", rng.randint(0, 3))
    schema: dict[str, Any] = {
        "type": kind,
        "properties": {name: random_schema(rng, depth + 1) for name in names},
    }
    if rng.random() < 0.2:
        schema["additionalProperties"] = rng.choice([True, {"type": "integer"}])
    return {**schema, "required": rng.sample(names, rng.randint(0, len(names)))}


def test_closed_schemas_can_still_be_satisfied(tokenizer: LLTokenizer) -> None:
    rng = random.Random(3)
    for _ in range(200):
        matcher = LLMatcher(tokenizer, of_schema(random_schema(rng)))
        assert not matcher.is_error(), matcher.get_error()
        assert any(matcher.compute_logit_bias())


PRINTED = {"a": "x  y", "b": [1, {}], "c": {"d": [[], {"e": None}]}}


@pytest.mark.parametrize("grammar_of", [of_schema, of_tool_schema])
def test_a_grammar_of_a_schema_allows_the_white_space_of_json_printers(
    grammar_of: Callable[[dict[str, Any]], str], tokenizer: LLTokenizer
) -> None:
    schema = {**OBJECT, "properties": {"a": {"type": "string"}, "b": {}, "c": OBJECT}}
    for grammar in (grammar_of(OBJECT), grammar_of(schema)):
        for indent in (None, 0, 1, 2, 4):
            assert accepts(tokenizer, grammar, json.dumps(PRINTED, indent=indent)), indent
        assert accepts(tokenizer, grammar, json.dumps(PRINTED, separators=(",", ":")))
        for more in ("  ", "\n\n", " \n", "\t", "\n" + " " * 17):
            assert not accepts(tokenizer, grammar, f'{{{more}"a": "x"}}'), more


def test_random_objects_under_a_grammar_have_little_white_space(tokenizer: LLTokenizer) -> None:
    """A model that is not sure writes blanks as long as it may."""
    rng = random.Random(5)
    texts = [drawn(tokenizer, of_schema({**random_schema(rng), **OBJECT}), rng) for _ in range(200)]
    assert 1 <= max(map(longest_white_space, texts)) <= 17


@pytest.mark.parametrize("param", ["tools", "response_format"])
def test_the_error_for_a_schema_nested_too_deeply_names_its_field(param: str) -> None:
    schema: dict[str, Any] = {}
    for _ in range(180):
        schema = {"items": schema}
    with fails(RequestError, "unsupported_schema") as caught:
        of_schema(schema, param)
    assert caught.value.param == param


INEXPRESSIBLE = [
    {"not": {"required": ["b"]}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"propertyNames": {"pattern": "^a"}},
    {"dependentRequired": {"a": ["b"]}},
    {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    {"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3, "type": "string"}]}}},
    {"properties": {"a": {"type": "string", "format": "of-our-own"}}},
    {"properties": {"a": {"type": "string", "pattern": "^(?!x)y$"}}},
    {"properties": {"a": {"items": {"type": "string", "pattern": r"\bx\b"}, "type": "array"}}},
]


@pytest.mark.parametrize("part", INEXPRESSIBLE)
def test_a_tool_grammar_leaves_out_keywords_that_it_cannot_express(part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {"type": "integer"}}, **part}
    has_pattern = '"pattern": "^(' in json.dumps(schema) or "bx" in json.dumps(schema)
    assert bool(LLMatcher.validate_grammar(of_schema(schema))) == has_pattern
    lark = Lark(lambda text: None)
    lark_text = f"start: {lark.json(schema)}\n{lark.text()}"
    for grammar in (of_tool_schema(schema), LLMatcher.grammar_from_lark(lark_text)):
        assert not LLMatcher.validate_grammar(grammar)


def test_only_patterns_that_cannot_be_expressed_are_removed_from_a_schema() -> None:
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": r"^\d+$"}},
        "const": {"pattern": "(?!x)"},
    }
    assert without_inexpressible_patterns(schema) == schema


@pytest.mark.parametrize("part", INEXPRESSIBLE)
def test_keywords_accepted_only_in_lenient_mode_are_found(
    part: dict[str, Any],
) -> None:
    is_option = "oneOf" in str(part) or "format" in str(part)
    assert (inexpressible_keyword({"type": "object", **part}) is None) == is_option


def test_names_of_properties_are_not_taken_for_keywords() -> None:
    assert inexpressible_keyword({"properties": {"not": {"type": "string"}}}) is None


@pytest.mark.parametrize(
    "grammar",
    [
        "{",
        "{ a client's own }",
        "{}",
        '{"grammars": 1}',
        '{"grammars": [1]}',
        '{"a":' * 100_000,
        "[]",
    ],
)
def test_grammars_that_only_begin_like_json_are_not_taken_for_schemas(grammar: str) -> None:
    assert schema_of(grammar) is None
