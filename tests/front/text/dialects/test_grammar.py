"""With tool_choice auto the grammar begins at the mark: what is accepted is what can be read."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.front.text.dialects.detect import NAMED
from serve.front.text.dialects.grammar import tool_grammar
from serve.front.text.dialects.harmony import HARMONY
from serve.front.text.dialects.interface import Dialect, ReasoningFormat
from serve.front.text.dialects.mlx_lm import ParsedCalls
from serve.front.text.grammars import of_choice, of_grammar, of_schema
from tests.cluster.random_tools import random_parameters
from tests.front.text.dialects.answers import TOOLS, Json, calls_in, every_way
from tests.front.text.dialects.test_families import ARGUMENTS, FAMILIES, families
from tests.front.text.drawing import drawn, longest_white_space

MODEL = Path(__file__).resolve().parents[4] / "examples" / "tiny-chat"


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def added() -> dict[str, int]:
    saved = json.loads((MODEL / "tokenizer.json").read_text())
    return {token["content"]: token["id"] for token in saved["added_tokens"]}


def accepts(tokenizer: LLTokenizer, grammar: str, pieces: list[str | int]) -> bool:
    """A number is the token of this id."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for piece in pieces:
        tokens += [piece] if isinstance(piece, int) else tokenizer.tokenize_str(piece)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(name: str, added: dict[str, int], tools: list[Json] = TOOLS) -> str:
    return text_of(FAMILIES[name][0], tools, added)


def text_of(dialect: Dialect, tools: list[Json], added: dict[str, int], **options: Any) -> str:
    grammar = tool_grammar(dialect, tools, added.get, added, **options)
    assert grammar is not None
    return grammar.text


@families
def test_plain_text_is_not_restricted_by_a_tool_grammar(
    name: str, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    grammar = grammar_of(name, added)
    for text in ("", "Hello", "a < b, {x}\n<tool", "{", "[1, 2]", '{"city": "Rome"}'):
        assert accepts(tokenizer, grammar, [text]), text


@families
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_calls_that_follow_their_schema_are_accepted(
    name: str, arguments: Json, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    if name == "gemma4":
        arguments = {key: value for key, value in arguments.items() if value != []}
    text = f"{dialect.calls.start}{write('write', arguments)}{dialect.calls.end}"
    grammar = grammar_of(name, added)
    assert accepts(tokenizer, grammar, ["Look: ", text] if name != "llama" else [text])
    # As tokens of the vocabulary where the marks are some.
    pieces: list[str | int] = []
    rest = text
    for mark in (dialect.calls.start, dialect.calls.end):
        if mark in added and mark:
            before, _, rest = rest.partition(mark)
            pieces += [before, added[mark]]
    assert accepts(tokenizer, grammar, [*pieces, rest])


WRONG: list[Json] = [
    {},
    {"path": "a", "count": "many"},
    {"path": "a", "mode": "sideways"},
    {"path": "a", "lines": [1, "x"]},
    {"path": "a", "invented": "b"},
]


@families
@pytest.mark.parametrize("arguments", WRONG, ids=range(len(WRONG)))
def test_calls_that_break_their_schema_are_rejected(
    name: str, arguments: Json, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    if name == "minimax_m3" and "lines" in arguments:
        return  # Values with tags inside follow no schema.
    text = f"{dialect.calls.start}{write('write', arguments)}{dialect.calls.end}"
    assert not accepts(tokenizer, grammar_of(name, added), [text])
    other = f"{dialect.calls.start}{write('unknown', {})}{dialect.calls.end}"
    assert not accepts(tokenizer, grammar_of(name, added), [other])


@families
def test_tools_without_parameters_are_called_without_arguments(
    name: str, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    tools = [{"type": "function", "function": {"name": "now"}}]
    right, wrong = (
        f"{dialect.calls.start}{write('now', each)}{dialect.calls.end}" for each in ({}, {"a": 1})
    )
    grammar = grammar_of(name, added, tools)
    assert accepts(tokenizer, grammar, [right])
    assert not accepts(tokenizer, grammar, [wrong])


PERSON = of_schema(
    {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
)
CONTENTS = {
    "schema": (PERSON, '{"age": 3}', '{"age": "3"}'),
    "choice": (of_choice(["yes", "no"]), "yes", "perhaps"),
    "lark": (of_grammar('start: "a" B\nB: "b"+', "grammar"), "abb", "a"),
}


@families
@pytest.mark.parametrize("content", CONTENTS)
def test_an_answer_with_tools_and_a_format_consists_of_calls_or_follows_the_format(
    name: str, content: str, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    grammar, right, wrong = CONTENTS[content]
    both = text_of(dialect, TOOLS, added, content=grammar)
    call = f"{dialect.calls.start}{write('write', {'path': 'a'})}{dialect.calls.end}"
    assert accepts(tokenizer, both, [right])
    assert accepts(tokenizer, both, [call])
    assert not accepts(tokenizer, both, [wrong])
    assert not accepts(tokenizer, both, ["Hello"])
    assert not accepts(tokenizer, both, [call.replace("write", "read")])


@families
def test_an_answer_ends_after_its_first_call_if_calls_may_not_be_parallel(
    name: str, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    call = f"{dialect.calls.start}{write('write', {'path': 'a'})}{dialect.calls.end}"
    single = text_of(dialect, TOOLS, added, is_parallel=False)
    assert accepts(tokenizer, single, [call])
    assert accepts(tokenizer, single, ["Hello"])
    if dialect.calls.end:
        assert not accepts(tokenizer, single, [call + call])
        assert accepts(tokenizer, grammar_of(name, added), [call + call])


@families
def test_forced_calls_are_written_in_the_format_of_the_dialect(
    name: str, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    """Models were trained on their marks: without them a forced call is worse than a free one."""
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    forced = text_of(dialect, TOOLS, added, is_forced=True)
    single = text_of(dialect, TOOLS, added, is_forced=True, is_parallel=False)
    call = f"{dialect.calls.start}{write('write', {'path': 'a'})}{dialect.calls.end}"
    for grammar in (forced, single):
        assert accepts(tokenizer, grammar, [call])
        assert accepts(tokenizer, grammar, ["\n" + call])
        for wrong in ("", "Hello", f"Look: {call}", call.replace("write", "read")):
            assert not accepts(tokenizer, grammar, [wrong]), wrong
    if dialect.calls.end:
        assert accepts(tokenizer, forced, [call + "\n" + call])
        assert not accepts(tokenizer, single, [call + "\n" + call])


# Without strings, which have blanks of their own.
NUMBERS: Json = {
    "type": "object",
    "properties": {
        "one": {"type": "integer"},
        "two": {"type": "array", "items": {"type": "boolean"}},
        "three": {"type": "object", "properties": {"a": {"type": "null"}}},
    },
    "required": ["one", "two", "three"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "minimax_m3"] + ["harmony"])
def test_forced_calls_contain_little_white_space(
    name: str, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    dialect = HARMONY if name == "harmony" else FAMILIES[name][0]
    tools = [{"type": "function", "function": {"name": "f", "parameters": NUMBERS}}]
    grammar = text_of(replace(dialect, reasoning=None), tools, added, is_forced=True)
    rng = random.Random(9)
    texts = [drawn(tokenizer, grammar, rng) for _ in range(12)]
    runs = map(longest_white_space, texts)
    assert 1 <= max(runs) <= 17


TWO_IN_A_SECTION = {
    "kimi_k2": (
        "<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
        '{"path": "a"}<|tool_call_end|>'
    ),
    "deepseek_v31": '<｜tool▁call▁begin｜>write<｜tool▁sep｜>{"path": "a"}<｜tool▁call▁end｜>',
    "nemotron": '{"name": "write", "arguments": {"path": "a"}}',
}


@pytest.mark.parametrize("name", TWO_IN_A_SECTION)
def test_a_section_has_only_one_call_if_calls_may_not_be_parallel(
    name: str, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    calls = FAMILIES[name][0].calls
    assert calls is not None
    call = TWO_IN_A_SECTION[name]
    one, two = (f"[{call}]", f"[{call}, {call}]") if name == "nemotron" else (call, call + call)
    single = text_of(FAMILIES[name][0], TOOLS, added, is_parallel=False)
    assert accepts(tokenizer, single, [f"{calls.start}{one}{calls.end}"])
    assert not accepts(tokenizer, single, [f"{calls.start}{two}{calls.end}"])
    assert accepts(tokenizer, grammar_of(name, added), [f"{calls.start}{two}{calls.end}"])


def test_a_forced_call_can_follow_reasoning(tokenizer: LLTokenizer, added: dict[str, int]) -> None:
    """Where the marks of reasoning are tokens, a model that thinks does so before a forced call."""
    start, end = added["<tool_call>"], added["</tool_call>"]
    dialect = Dialect(
        "thinks", NAMED["nemotron"].calls, ReasoningFormat("<tool_call>", "</tool_call>")
    )
    grammar = text_of(dialect, TOOLS, added, is_forced=True)
    call = '<TOOLCALL>[{"name": "write", "arguments": {"path": "a"}}]</TOOLCALL>'
    assert accepts(tokenizer, grammar, [call])
    assert accepts(tokenizer, grammar, [start, "hm", end, "\n" + call])
    assert not accepts(tokenizer, grammar, [start, "hm", end])


def test_a_call_can_be_forced_in_harmony(tokenizer: LLTokenizer, added: dict[str, int]) -> None:
    grammar = text_of(HARMONY, TOOLS, added, is_forced=True)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"path": "a"}'
    assert accepts(tokenizer, grammar, [call])
    assert accepts(tokenizer, grammar, [thought + call])
    assert not accepts(tokenizer, grammar, ["<|channel|>final<|message|>Hello"])
    assert not accepts(tokenizer, grammar, [call.replace("write", "read")])


def test_tool_grammar_lists_the_keywords_that_it_does_not_enforce(added: dict[str, int]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=b)"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = tool_grammar(NAMED["nemotron"], tools, added.get, added)
    assert grammar is not None
    assert grammar.left_out == ("pattern",)


def test_calls_beside_a_format_are_allowed_even_without_a_grammar_for_calls(
    tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    dialect = Dialect("parsed", ParsedCalls("<call>", "</call>", json.loads))
    assert tool_grammar(dialect, TOOLS, added.get, added) is None
    grammar = text_of(dialect, TOOLS, added, content=PERSON)
    assert accepts(tokenizer, grammar, ["<call>whatever</call>"])
    assert accepts(tokenizer, grammar, ['{"age": 3}'])
    assert not accepts(tokenizer, grammar, ["Hello"])


def test_the_format_is_enforced_in_the_final_message_of_harmony(
    tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    grammar = text_of(HARMONY, TOOLS, added, content=PERSON)
    final, call = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.write"
    assert accepts(tokenizer, grammar, [f'{final}{{"age": 3}}'])
    assert accepts(tokenizer, grammar, [f'{call} <|constrain|>json<|message|>{{"path": "a"}}'])
    assert not accepts(tokenizer, grammar, [f"{final}Hello"])


def random_answer(tokenizer: LLTokenizer, grammar: str, start: str, rng: random.Random) -> str:
    """Tokens drawn at random among those that may follow the start, preferring short answers."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(start)
    assert matcher.consume_tokens(tokens)
    ends = [
        token
        for text in ('"', "}", "]", "<", ">", "\n", "|")
        for token in tokenizer.tokenize_str(text)
    ]
    for _ in range(3000):
        forced = matcher.compute_ff_tokens()
        if forced:
            assert matcher.consume_tokens(forced)
            tokens += forced
            continue
        if matcher.is_accepting():
            break
        allowed = [id for id, bias in enumerate(matcher.compute_logit_bias()) if bias]
        closing = [id for id in ends if id in allowed]
        token = rng.choice(closing if closing and rng.random() < 0.7 else allowed)
        assert matcher.consume_token(token)
        tokens.append(token)
    return tokenizer.decode_str(tokens)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "minimax_m3"])
def test_random_answers_under_the_grammar_are_calls_that_follow_their_schemas(
    name: str, tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    dialect, _, _ = FAMILIES[name]
    assert dialect.calls is not None
    rng = random.Random(7)
    num_whole = 0
    for _ in range(14):
        schema = random_parameters(rng)
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        grammar = grammar_of(name, added, tools)
        answer = random_answer(tokenizer, grammar, dialect.calls.start, rng)
        if not answer.rstrip().endswith(dialect.calls.end):
            continue
        for called, arguments in calls_in(every_way(dialect, answer, tools=tools)):
            num_whole += 1
            assert called == "f"
            jsonschema.validate(arguments, schema)
    assert num_whole >= 7


def test_reasoning_in_harmony_is_followed_by_calls_or_an_answer(
    tokenizer: LLTokenizer, added: dict[str, int]
) -> None:
    grammar = text_of(HARMONY, TOOLS, added)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
    assert accepts(tokenizer, grammar, [f"{thought}<|channel|>final<|message|>Hello"])
    assert accepts(tokenizer, grammar, [thought + call + '{"path": "a"}'])
    assert accepts(tokenizer, grammar, [call + '{"path": "a"}'])
    assert not accepts(tokenizer, grammar, [thought + call + '{"path": 1}'])
    assert not accepts(tokenizer, grammar, [thought + call.replace("write", "read") + "{}"])
