"""Answers taken apart, whatever pieces they come in, and the grammar of calls that must come."""

import inspect
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLTokenizer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve.core.errors import RequestError
from serve.core.tool_parsers import tool_parsers
from serve.front.api.anthropic.body import MessagesBody
from serve.front.api.messages import ChatMessage
from serve.front.api.openai import ChatBody, parse
from serve.front.api.request import ToolUse
from serve.front.api.responses.body import ResponsesBody
from serve.front.api.tools import NamedTool, Tool, grammar_of_call
from serve.front.output import deltas
from serve.front.output.splitter import Splitter, Splitting, new_call_id
from serve.front.text.calls.parts import CallEnd, CallHeader, CallText, Text, Thought
from serve.front.text.dialects.detect import NAMED
from serve.front.text.dialects.interface import AnswerReader, Dialect
from serve.front.text.dialects.marked import (
    ListedCallsReader,
    MarkedReader,
    NamedCallReader,
    PlainReader,
)
from serve.front.text.dialects.mlx_lm import ParsedCalls
from serve.front.text.dialects.qwen import QWEN
from serve.front.text.grammars import GrammarChecker
from serve.front.text.tokens import Tokenizer
from serve.front.text.tool_formats import ToolFormat, parsed_calls, tool_format
from tests.front.api.test_structured import MODEL, accepts, tokenizer

__all__ = ["tokenizer"]

READER = Tokenizer(Path(MODEL))
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    Tool.model_validate(
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    ),
    Tool.model_validate({"type": "function", "function": {"name": "time"}}),
]


def marked(
    dialect: Dialect = QWEN,
    is_thinking: bool = False,
    inner: AnswerReader | None = None,
    finds_calls: bool = True,
) -> MarkedReader:
    calls = dialect.calls if finds_calls else None
    return MarkedReader(calls, dialect.reasoning, is_thinking, inner or PlainReader())


def taken_apart(
    parser: AnswerReader, texts: list[str], ends: bool = True
) -> list[tuple[str, str | None, str]]:
    """Neighbouring deltas of a kind as one. Each call is closed before anything else comes, but
    for the last one if it does not end."""
    parts = [part for text in texts for part in parser.feed(text)]
    parts += parser.finish()
    joined: list[tuple[str, str | None, str]] = []
    open_call: str | None = None
    for part in parts:
        match part:
            case CallHeader(name):
                assert open_call is None
                open_call = name
                joined.append(("call", name, ""))
            case CallEnd():
                assert open_call is not None
                open_call = None
            case Text(text) | Thought(text) | CallText(text):
                kind = {Text: "content", Thought: "reasoning", CallText: "call"}[type(part)]
                assert (kind == "call") == (open_call is not None)
                if not joined or joined[-1][0] != kind:
                    joined.append((kind, None, ""))
                joined[-1] = (*joined[-1][:2], joined[-1][2] + text)
    assert (open_call is None) == ends
    return joined


def cut(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randint(0, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
# What Python's reader of JSON takes, and no reply can carry.
UNTOLD = ['{"city": "\\ud800"}', '{"days": 1e999}', '{"days": NaN}', '{"days": [-Infinity]}']
NO_CALL = '<tool_call>{"name": "\\udc00", "arguments": {}}</tool_call>'
CALLED = ("call", "weather", '{"city": "Rome"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Just text, a < b.", [("content", None, "Just text, a < b.")]),
        ("trailing blanks \n", [("content", None, "trailing blanks \n")]),
        (CALL, [CALLED]),
        (f"\n\n{CALL}\n{CALL}\n", [CALLED, CALLED]),
        (f"Let me look.\n{CALL}", [("content", None, "Let me look."), CALLED]),
        (f"<think>Hm.</think>\n\n{CALL}", [("reasoning", None, "Hm."), CALLED]),
        ("<think>no end", [("reasoning", None, "no end")]),
        (
            "<tool_call>{not json}</tool_call>",
            [("content", None, "<tool_call>{not json}</tool_call>")],
        ),
        (
            '<tool_call>{"no": "name"}</tool_call>!',
            [("content", None, '<tool_call>{"no": "name"}</tool_call>!')],
        ),
        (NO_CALL, [("content", None, NO_CALL)]),
        *(
            (
                f'<tool_call>{{"name": "weather", "arguments": {each}}}</tool_call>',
                [("call", "weather", each)],
            )
            for each in UNTOLD
        ),
        (CALL.removesuffix("</tool_call>"), [CALLED]),
        (CALL[:20], [("content", None, CALL[:20])]),
        ("half a mark <tool_c", [("content", None, "half a mark <tool_c")]),
    ],
)
def test_marks_are_found_however_the_text_is_cut_into_pieces(
    text: str, expected: list[tuple[str, str | None, str]]
) -> None:
    chance = random.Random(5)
    for pieces in ([text], list(text), *(cut(text, chance) for _ in range(60))):
        assert taken_apart(marked(), pieces) == expected


def test_reasoning_can_begin_in_the_prompt() -> None:
    deltas = ["I think", "</thi", "nk>so"]
    expected = [("reasoning", None, "I think"), ("content", None, "so")]
    assert taken_apart(marked(is_thinking=True), deltas) == expected


def test_a_call_is_kept_as_text_if_no_tools_were_given() -> None:
    assert taken_apart(marked(finds_calls=False), [CALL]) == [("content", None, CALL)]


def test_text_is_passed_on_as_soon_as_it_cannot_begin_a_mark() -> None:
    parser = marked()
    assert list(parser.feed("a <tool")) == [Text("a")]
    assert list(parser.feed("box")) == [Text(" <toolbox")]


def test_a_call_without_an_end_mark_ends_with_the_answer() -> None:
    text = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'
    assert taken_apart(marked(NAMED["mistral"]), list(text)) == [CALLED]


def test_the_whole_text_of_a_forced_call_is_its_arguments() -> None:
    deltas = ['{"city"', "", ': "Rome"}']
    assert list(NamedCallReader("weather").feed("")) == []
    assert taken_apart(NamedCallReader("weather"), deltas) == [CALLED]


def test_a_forced_call_can_come_after_reasoning() -> None:
    text = 'Hm.</think>\n{"city": "Rome"}'
    expected = [("reasoning", None, "Hm."), ("call", "weather", '\n{"city": "Rome"}')]
    parser = marked(QWEN, True, NamedCallReader("weather"), finds_calls=False)
    assert taken_apart(parser, list(text)) == expected


def test_calls_in_a_list_are_returned_one_by_one() -> None:
    text = (
        '[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "time", "parameters": {}}]'
    )
    expected = [CALLED, ("call", "time", "{}")]
    chance = random.Random(6)
    for pieces in ([text], list(text), *(cut(text, chance) for _ in range(60))):
        assert taken_apart(ListedCallsReader(), pieces) == expected


@pytest.mark.parametrize("arguments", UNTOLD)
def test_a_call_in_a_list_keeps_numbers_that_python_cannot_represent(arguments: str) -> None:
    """A grammar lets \\ud800 and 1e999 through: both are JSON."""
    call = f'{{"name": "weather", "parameters": {arguments}}}'
    time_ = '{"name": "time", "parameters": {}}'
    expected = [("call", "weather", arguments), ("call", "time", "{}")]
    assert taken_apart(ListedCallsReader(), list(f"[{call}, {time_}]")) == expected


# --- what mlx-lm knows


def test_every_parser_of_mlx_lm_has_a_tool_format() -> None:
    names = tool_parsers()
    assert {"json_tools", "mistral", "qwen3_coder", "laguna"} <= set(names)
    for name in names:
        assert isinstance(tool_format(name), ToolFormat)
        assert tool_format(name).start


def test_the_tool_format_of_a_model_is_found() -> None:
    assert READER.dialect.calls == QWEN.calls
    assert READER.dialect.reasoning is None


def test_reading_tool_formats_does_not_import_mlx() -> None:
    """mlx_lm's package would bring it."""
    code = (
        "import sys; from serve.front.text.tool_formats import tool_format, mlx_lm_module; "
        "mlx_lm_module('tokenizer_utils'); tool_format('laguna'); "
        "assert not {'mlx', 'mlx.core', 'mlx_lm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- calls that must come


def test_forced_calls_have_a_grammar(tokenizer) -> None:  # noqa: ANN001, F811
    any_call = grammar_of_call(TOOLS, "required", is_parallel=True)
    one_call = grammar_of_call(TOOLS, "required", is_parallel=False)
    rome = {"name": "weather", "parameters": {"city": "Rome"}}
    time_ = {"name": "time", "parameters": {}}
    assert accepts(tokenizer, any_call, json.dumps([rome, time_]))
    assert accepts(tokenizer, one_call, json.dumps([rome]))
    for wrong in (
        [rome, time_],
        [],
        [{"name": "other", "parameters": {}}],
        [{**rome, "parameters": {}}],
    ):
        assert not accepts(tokenizer, one_call, json.dumps(wrong))
    choice = NamedTool.model_validate({"type": "function", "function": {"name": "weather"}})
    named = grammar_of_call(TOOLS, choice, is_parallel=True)
    assert accepts(tokenizer, named, '{"city": "Rome"}')
    assert not accepts(tokenizer, named, "{}")


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str
    near: list["Place"] = []


class Journey(BaseModel):
    model_config = ConfigDict(extra="forbid")
    start: Place
    days: int


class Place2(Place):
    country: Literal["IT", "FR"]


class Stay(BaseModel):
    model_config = ConfigDict(extra="forbid", title="Journey")
    start: Annotated[Place2, Field(title="Place")]


def nested_tools() -> list[dict[str, Any]]:
    """As pydantic writes them, with a $defs of their own that are called the same."""
    schemas = [kind.model_json_schema() for kind in (Journey, Stay)]
    assert "$defs" in json.dumps(schemas[0])
    schemas[1] = json.loads(json.dumps(schemas[1]).replace("Place2", "Place"))
    # Two that claim to be the same document, which they are not.
    return [
        {"name": f"t{n}", "schema": {"$id": "https://example.org/tool", **schema}}
        for n, schema in enumerate(schemas)
    ]


RIGHT = [
    [("t0", {"start": {"city": "Rome", "near": [{"city": "Ostia"}]}, "days": 3})],
    [("t1", {"start": {"city": "Rome", "country": "IT"}})],
    [
        ("t1", {"start": {"city": "Nice", "country": "FR"}}),
        ("t0", {"start": {"city": "A"}, "days": 1}),
    ],
]
WRONG = [
    [("t0", {"start": {"city": "Rome", "country": "IT"}, "days": 3})],
    [("t0", {"start": {"city": 5}, "days": 3})],
    [("t1", {"start": {"city": "Rome"}})],
]


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_forced_calls_follow_schemas_that_refer_to_themselves(
    tokenizer: LLTokenizer,  # noqa: F811
    api: str,
) -> None:
    """`#/$defs/...` refers to the tool's own schema, wherever that is put."""
    said: list[ChatMessage] = [{"role": "user", "content": "hi"}]
    named = [(tool["name"], tool["schema"]) for tool in nested_tools()]
    if api == "chat":
        tools = [{"name": name, "parameters": schema} for name, schema in named]
        functions = [{"type": "function", "function": tool} for tool in tools]
        fields = {"messages": said, "tools": functions, "tool_choice": "required"}
        body = parse(ChatBody, {"model": "m", **fields}).request(READER)
    elif api == "responses":
        tools = [{"type": "function", "name": n, "parameters": schema} for n, schema in named]
        fields = {"input": "hi", "tools": tools, "tool_choice": "required"}
        body = parse(ResponsesBody, {"model": "m", **fields}).request(said, READER)
    else:
        tools = [{"name": name, "input_schema": schema} for name, schema in named]
        fields = {"messages": said, "tools": tools, "tool_choice": {"type": "any"}}
        read = parse(MessagesBody, {"model": "m", "max_tokens": 9, **fields})
        body = read.request(READER)
    assert body.grammar_param == "tool_choice"
    grammar = body.samplings[0].grammar
    GrammarChecker(MODEL).check(grammar, "tool_choice")
    for calls, is_right in [*((c, True) for c in RIGHT), *((c, False) for c in WRONG)]:
        text = json.dumps([{"name": name, "parameters": given} for name, given in calls])
        assert accepts(tokenizer, grammar, text) == is_right, text


def test_calls_that_are_not_forced_have_no_grammar() -> None:
    assert grammar_of_call(TOOLS, "auto", True) is None
    assert grammar_of_call([], "none", True) is None
    for tools, choice in (
        ([], "required"),
        (TOOLS, {"type": "function", "function": {"name": "x"}}),
    ):
        choice = choice if isinstance(choice, str) else NamedTool.model_validate(choice)
        with pytest.raises(RequestError) as caught:
            grammar_of_call(tools, choice, True)
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["", "a b", "a" * 129, "ü", "a\n"])
def test_tool_names_with_invalid_characters_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        Tool.model_validate({"type": "function", "function": {"name": name}})


# --- what parsers are given, and give


FORECAST = {
    "type": "object",
    "properties": {
        "days": {"type": "integer"},
        "warm": {"type": "boolean"},
        "code": {"type": "string"},
    },
}
DECLARED = [
    {"type": "function", "function": {"name": "forecast", "parameters": FORECAST}},
    {"type": "function", "function": {"name": "bare"}},
]
FIELDS = {"days": "3", "warm": "true", "code": "12"}
WRITTEN = {
    "qwen3_coder": "<tool_call><function=forecast>"
    + "".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in FIELDS.items())
    + "</function></tool_call>",
    "glm47": "<tool_call>forecast"
    + "".join(
        f"<arg_key>{name}</arg_key><arg_value>{value}</arg_value>" for name, value in FIELDS.items()
    )
    + "</tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="forecast">'
    + "".join(f'<parameter name="{name}">{value}</parameter>' for name, value in FIELDS.items())
    + "</invoke></minimax:tool_call>",
}


def parser_of(dialect: Dialect, tools: Any = None) -> AnswerReader:
    declared = [Tool.model_validate(tool) for tool in tools or DECLARED]
    splitting = ToolUse(declared).splitting(is_thinking=False, shows_thoughts=True)
    return splitting.reader(dialect)


@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_have_the_types_of_their_schema(name: str) -> None:
    """Where a model writes them without quotes, only the schema tells 12 from "12"."""
    parser = parser_of(NAMED[name])
    ((kind, called, arguments),) = taken_apart(parser, list(WRITTEN[name]))
    assert (kind, called) == ("call", "forecast")
    assert json.loads(arguments) == {"days": 3, "warm": True, "code": "12"}


@pytest.mark.parametrize("name", tool_parsers())
def test_every_parser_of_mlx_lm_accepts_the_list_of_tools(name: str) -> None:
    inspect.signature(tool_format(name).parse).bind("text", [])


def test_tools_with_invalid_schemas_do_not_prevent_parsing() -> None:
    odd = [{"type": "function", "function": {"name": "forecast", "parameters": {"properties": 5}}}]
    parser = parser_of(NAMED["qwen3_coder"], odd)
    (piece,) = taken_apart(parser, [WRITTEN["qwen3_coder"]])
    assert piece == ("call", "forecast", '{"days": "3", "warm": "true", "code": "12"}')


def test_the_id_that_the_model_wrote_for_a_call_is_kept() -> None:
    """Kimi K2 finds its own calls by it in what comes back."""
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bare:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    use = ToolUse([Tool.model_validate(tool) for tool in DECLARED])
    splitting = use.splitting(is_thinking=False, shows_thoughts=True)
    splitter = Splitter(splitting, NAMED["kimi_k2"])
    parts = [*splitter.feed(text), *splitter.finish(True)]
    assert parts == [deltas.CallBegin("functions.bare:0", "bare"), CallText("{}"), CallEnd()]
    splitter = Splitter(Splitting(reads_marks=True, finds_calls=True), QWEN)
    first, *_ = splitter.feed(CALL.replace("{", '{"id": 5, ', 1))
    assert isinstance(first, deltas.CallBegin)
    assert re.fullmatch("[a-zA-Z0-9]{9}", first.id), "it is no text, so there is a new one"


def test_new_call_ids_have_nine_letters_and_digits_as_mistral_requires() -> None:
    """Mistral's want nine letters and digits."""
    ids = {new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids)


def test_a_forced_call_that_was_cut_off_is_incomplete() -> None:
    parser = NamedCallReader("weather")
    assert [type(part) for part in parser.feed('{"city"')] == [CallHeader, CallText]
    assert list(parser.finish(is_whole=False)) == []


def test_text_in_which_a_parser_finds_no_call_is_kept_as_text() -> None:
    dialect = Dialect("c", ParsedCalls("<c>", "</c>", lambda text, tools: parsed_calls([])))
    assert taken_apart(marked(dialect), ["a <c>b</c>"]) == [("content", None, "a <c>b</c>")]


@pytest.mark.parametrize("opening", ['{"a":', "["])
def test_a_call_in_a_list_that_is_nested_too_deeply_is_incomplete(opening: str) -> None:
    """JSON's readers recurse: this was a RecursionError, and HTTP 500."""
    text = '[{"name": "weather", "parameters": {"x": ' + opening * 1500
    for pieces in ([text], list(text)):
        found = taken_apart(ListedCallsReader(), pieces, ends=False)
        assert found[0][:2] == ("call", "weather")
        assert found[0][2].count(opening) <= 200


def test_strings_of_a_call_in_a_list_can_contain_brackets_and_quotes() -> None:
    arguments = {"city": 'a "quoted" } ] \\" { [ \\', "list": [[1, {"b": "}"}]]}
    text = json.dumps([{"name": "weather", "parameters": arguments}] * 3)
    expected = [("call", "weather", json.dumps(arguments))] * 3
    chance = random.Random(7)
    for pieces in ([text], list(text), *(cut(text, chance) for _ in range(60))):
        assert taken_apart(ListedCallsReader(), pieces) == expected
