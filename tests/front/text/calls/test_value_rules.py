"""Arguments that stand as text between marks follow their schema too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.front.text.calls.value_rules import searching
from serve.front.text.calls.values import Declared, part_schema
from serve.front.text.dialects.grammar import tool_grammar
from serve.front.text.grammars import of_grammar
from tests.front.text.dialects.test_families import FAMILIES

MODEL = Path(__file__).resolve().parents[4] / "examples" / "tiny-chat"
_SAVED = json.loads((MODEL / "tokenizer.json").read_text())
_ADDED = {token["content"]: token["id"] for token in _SAVED["added_tokens"]}
MARKED = ["qwen3_coder", "glm", "minimax_m2", "minimax_m3", "deepseek_v32", "gemma4"]
marked = pytest.mark.parametrize("name", MARKED)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(MODEL / "tokenizer.json"))


class Tool:
    """A tool with these parameters in a dialect."""

    def __init__(self, name: str, tokenizer: LLTokenizer, parameters: Any) -> None:
        self._dialect, self._write, _ = FAMILIES[name]
        self._tokenizer = tokenizer
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        grammar = tool_grammar(self._dialect, tools, _ADDED.get, _ADDED)
        assert grammar is not None
        self.left_out = grammar.left_out
        self._grammar = grammar.text

    def takes(self, arguments: Any) -> bool:
        calls = self._dialect.calls
        assert calls is not None
        text = f"{calls.start}{self._write('f', arguments)}{calls.end}"
        matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self._tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
        },
        "default": {"type": "array", "items": {"$ref": "#/properties/point"}},
    },
    "required": ["default"],
}


@marked
def test_rules_for_values_follow_references_to_other_parameters(
    name: str, tokenizer: LLTokenizer
) -> None:
    tool = Tool(name, tokenizer, REFERRING)
    assert tool.takes({"default": [{"x": 1}]})
    if name != "minimax_m3":
        assert not tool.takes({"default": [{"x": "1"}]})


@marked
@pytest.mark.timeout(20)
def test_rules_for_values_stay_few_if_branches_repeat(name: str, tokenizer: LLTokenizer) -> None:
    branches = [{"$ref": "#/$defs/A", f"x-{number}": 1} for number in range(24)]
    definitions = {"A": {"anyOf": [{"type": "boolean"}, *branches]}}
    parameters = {"type": "object", "properties": {"a": branches[0]}, "$defs": definitions}
    tool = Tool(name, tokenizer, {**parameters, "required": ["a"]})
    assert tool.takes({"a": True})
    declared = Declared([{"name": "f", "parameters": parameters}])
    assert declared.types("f", "a") == {"boolean"}
    assert part_schema(branches[0], parameters, "b") == {}


@marked
@pytest.mark.timeout(20)
def test_rules_for_many_optional_parameters_stay_short(name: str, tokenizer: LLTokenizer) -> None:
    properties = {f"p{number}": {"type": "boolean"} for number in range(30)}
    tool = Tool(name, tokenizer, {"type": "object", "properties": properties})
    assert tool.takes({"p3": True, "p17": False})


COLOURS = {"Colour": {"enum": ["red", "dark blue"]}}
NULL_OR_COLOUR = {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]}


@marked
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "a\nbc"], ["a", "abcde"]),
        ({"type": "string", "pattern": "^[a-z]+/[0-9]$"}, ["ab/1"], ["ab", "xab/1 "]),
        ({"type": "string", "pattern": "[0-9]"}, ["a1b"], ["ab"]),
        ({"$ref": "#/$defs/Colour"}, ["red", "dark blue"], ["blue"]),
        (NULL_OR_COLOUR, ["red"], ["blue", "nothing"]),
        ({"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"}, ["red"], ["blue"]),
        ({"enum": ["celsius", 3]}, ["celsius", 3], ["kelvin", 4]),
        ({"type": ["integer", "string"], "maxLength": 3}, ["abc", 1234], ["abcd"]),
        ({"const": "a b"}, ["a b"], ["a"]),
    ],
)
def test_rules_for_values_enforce_the_schema_of_a_text(
    name: str, tokenizer: LLTokenizer, schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    if name == "gemma4" and "pattern" in schema:
        wrong = [each for each in wrong if not each.endswith(" ")]
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = Tool(name, tokenizer, {**parameters, "$defs": COLOURS})
    assert tool.left_out == ()
    for value in right:
        assert tool.takes({"a": value}), value
    for value in wrong:
        assert not tool.takes({"a": value}), value


@marked
def test_rules_for_values_list_the_keywords_that_they_do_not_enforce(
    name: str, tokenizer: LLTokenizer
) -> None:
    text = {"type": "string", "format": "date", "pattern": "a^"}
    tool = Tool(name, tokenizer, {"type": "object", "properties": {"a": text}})
    assert tool.left_out == ("format", "pattern")
    assert tool.takes({"a": "any"})


@marked
def test_rules_for_values_allow_unknown_keys_if_the_schema_allows_them(
    name: str, tokenizer: LLTokenizer
) -> None:
    """Otherwise, a tool with open parameters could only be called without any."""
    words = {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}
    for parameters in (words, {"type": "object"}):
        tool = Tool(name, tokenizer, parameters)
        assert tool.takes({})
        assert tool.takes({"one": "a", "two": "b"})
    closed = Tool(name, tokenizer, {"type": "object", "properties": {}})
    assert closed.takes({})
    assert not closed.takes({"one": "a"})


@marked
def test_rules_for_values_follow_a_reference_for_all_parameters(
    name: str, tokenizer: LLTokenizer
) -> None:
    """zod writes `{"$ref": "#/definitions/Args", "definitions": ...}`."""
    inner = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    parameters = {"$ref": "#/definitions/Args", "definitions": {"Args": inner}}
    tool = Tool(name, tokenizer, parameters)
    assert tool.takes({"n": 5})
    assert not tool.takes({"n": "five"})
    assert not tool.takes({})


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^a+$", ["aa"], ["ba", "ab"]),
        ("b", ["abc", "b"], ["ac"]),
        ("^a|b", None, None),
        ("a|b", ["xa", "bx"], ["x"]),
        ("^(a|b)$", ["a", "b"], ["ab"]),
        ("[$^|]", ["a$"], ["a"]),
        (r"\^\$$", ["a^$"], ["^"]),
        (r"a\\$", ["xa\\"], ["a"]),
        ("a^b", None, None),
        ("(?=a)b", None, None),
        ("a/b", ["a/b"], ["ab"]),
    ],
)
def test_a_pattern_is_turned_into_a_pattern_that_matches_whole_texts(
    pattern: str, right: Any, wrong: Any
) -> None:
    found = searching(pattern)
    assert (found is None) == (right is None)
    for text in right or ():
        assert re.search(pattern, text)
        assert re.fullmatch(found or "", text)
    for text in wrong or ():
        assert not re.search(pattern, text)
        assert not re.fullmatch(found or "", text)


PATCH = """\
start: begin hunk+ end
begin: "*** Begin Patch" LF
hunk: "*** Add File: " /(.+)/ LF add+
add: "+" /(.*)/ LF
end: "*** End Patch" LF?
%import common.LF
"""
INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "apply_patch", "parameters": INPUT}},
    {"type": "function", "function": {"name": "say", "parameters": INPUT}},
]


@pytest.mark.parametrize(
    ("name", "is_held"),
    [("qwen3_coder", True), ("glm", True), ("minimax_m2", False), ("nemotron", False)],
)
@pytest.mark.parametrize("is_forced", [False, True])
def test_tool_grammar_enforces_the_grammar_of_a_custom_tools_input(
    name: str, is_held: bool, is_forced: bool, tokenizer: LLTokenizer
) -> None:
    """Codex has patches written as such a tool. Where the end mark is a token or stands on a line
    of its own, a grammar sees where the input ends."""
    dialect, write, _ = FAMILIES[name]
    calls = dialect.calls
    assert calls is not None
    # GLM's marks of values are tokens; here other tokens take their place.
    ids = {**_ADDED, "</arg_value>": _ADDED["</tool_call>"]} if name == "glm" else _ADDED
    inputs = {"apply_patch": of_grammar(PATCH, "tools")}
    made = tool_grammar(dialect, TOOLS, ids.get, ids, is_forced=is_forced, inputs=inputs)
    assert made is not None
    assert made.enforced_inputs == (("apply_patch",) if is_held else ())

    def takes(tool: str, text: str) -> bool:
        written = f"{calls.start}{write(tool, {'input': text})}{calls.end}"
        matcher = LLMatcher(tokenizer, made.text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens: list[int] = []
        *heads, rest = written.split("</arg_value>")
        for head in heads:
            tokens += [*tokenizer.tokenize_str(head), ids["</arg_value>"]]
        tokens += tokenizer.tokenize_str(rest)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    patch = "*** Begin Patch\n*** Add File: a.txt\n+one < two\n+\n*** End Patch"
    assert takes("apply_patch", patch)
    assert takes("apply_patch", "Hello") == (not is_held)
    assert takes("apply_patch", patch.replace("+", "-")) == (not is_held)
    assert takes("say", "Hello")
