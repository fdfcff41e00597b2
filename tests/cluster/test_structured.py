"""Grammars and demanded calls over two real ranks, with the official client."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.cluster.servers import Server
from tests.errors import fails
from tests.front.routes.test_cut_calls import ASK, CUT, LIMITS

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}


def ask(server: Server, text: str = "What colour is grass?", **fields: Any) -> Any:
    create = server.client().chat.completions.create
    messages: list[Any] = [{"role": "user", "content": text}]
    return create(model="tiny-chat", messages=messages, **{"max_tokens": 600, **fields})


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema(server: Server, seed: int) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    reply = ask(server, response_format=format, temperature=1, seed=seed)
    assert reply.choices[0].finish_reason == "stop"
    answer = json.loads(reply.choices[0].message.content)
    assert answer.keys() == {"colour", "sizes"}
    assert answer["colour"] in ("red", "green")
    assert len(answer["sizes"]) <= 3
    assert all(size <= 99 for size in answer["sizes"])


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"grammar": 'start: "a" "a"? "b"'}, "aa?b"),
    ],
)
def test_text_follows_the_structured_outputs_of_vllm(
    server: Server, outputs: Any, pattern: str
) -> None:
    extra = {"structured_outputs": outputs}
    chat = ask(server, extra_body=extra, temperature=0, max_tokens=300)
    create = server.client().completions.create
    text = create(model="tiny-chat", prompt="x", max_tokens=300, temperature=0, extra_body=extra)
    assert re.fullmatch(pattern, chat.choices[0].message.content)
    assert re.fullmatch(pattern, text.choices[0].text)


def test_answers_without_a_grammar_do_not_change_beside_an_answer_with_one(server: Server) -> None:
    """Rows with and without a grammar share their steps."""
    plain = ask(server, "Say who you are.", temperature=0).choices[0].message.content

    def one(number: int) -> str:
        if number % 2:
            return ask(server, "Say who you are.", temperature=0).choices[0].message.content
        extra = {"structured_outputs": {"regex": "[0-9]{20}"}}
        return ask(server, extra_body=extra, temperature=0).choices[0].message.content

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(one, range(12)))
    assert set(answers[1::2]) == {plain}
    assert all(re.fullmatch("[0-9]{20}", answer) for answer in answers[::2])


def test_a_schema_with_an_unknown_type_is_refused(server: Server) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nil"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, response_format=format)
    assert caught.value.param == "response_format"
    assert "nil" in str(caught.value)


def test_the_tool_named_in_tool_choice_is_called(server: Server) -> None:
    reply = ask(server, tools=[WEATHER, CLOCK], tool_choice=NAMED, temperature=1, seed=1)
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].message.content is None
    assert (reply.choices[0].finish_reason, call.type) == ("stop", "function")
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"city", "days"}


def test_one_of_the_tools_is_called_if_a_call_is_required(server: Server) -> None:
    fields: Any = {"tools": [WEATHER, CLOCK], "tool_choice": "required"}
    reply = ask(server, **fields, parallel_tool_calls=False, temperature=1, seed=2)
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert call.function.name in ("weather", "clock")
    assert isinstance(json.loads(call.function.arguments), dict)


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


class Journey(BaseModel):
    model_config = ConfigDict(extra="forbid")
    start: Place
    end: Place


def test_the_schema_of_a_required_tool_may_contain_definitions(server: Server) -> None:
    """Its references are to its own $defs, as pydantic writes them."""
    tool: Any = {
        "type": "function",
        "function": {"name": "travel", "parameters": Journey.model_json_schema()},
    }
    reply = ask(server, tools=[tool, CLOCK], tool_choice="required", temperature=1, seed=4)
    calls = [call.function for call in reply.choices[0].message.tool_calls]
    named = ask(server, tools=[tool], tool_choice="required", temperature=1, seed=5)
    calls += [call.function for call in named.choices[0].message.tool_calls]
    travels = [call for call in calls if call.name == "travel"]
    assert travels
    assert all(Journey.model_validate_json(call.arguments) for call in travels)


@pytest.mark.long
def test_a_schema_that_is_slow_to_prepare_delays_no_other_request(server: Server) -> None:
    """Each gets a second of a core and then a 400; other requests are answered meanwhile."""

    def slow(number: int) -> int:
        schema = {"type": "integer", "multipleOf": 9_999_991 - number}
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with fails(openai.BadRequestError, "grammar") as caught:
            ask(server, response_format=format, n=8)
        return caught.value.status_code

    with ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(slow, number) for number in range(4)]
        assert ask(server, temperature=0).choices[0].message.content
        assert [each.result(60) for each in refused] == [400] * 4
    assert len(ask(server, n=8, extra_body={"structured_outputs": {"regex": "a{9}"}}).choices) == 8
    assert "No step came back" not in server.text


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "by name"])
def test_streamed_calls_equal_those_of_a_whole_reply(server: Server, choice: Any) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": choice, "temperature": 1, "seed": 3}
    fields |= {"parallel_tool_calls": False}
    whole = ask(server, **fields).choices[0].message.tool_calls[0]
    deltas = [
        call
        for chunk in ask(server, **fields, stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert [deltas[0].function.name, deltas[0].index] == ["weather", 0]
    assert deltas[0].id.isalnum()
    assert not any(delta.id or delta.function.name for delta in deltas[1:])
    assert len(deltas) > 3, "arguments come as they are written"
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments


def test_tools_and_a_format_can_be_used_together(server: Server) -> None:
    """The model may call a tool or follow the format; a forced tool comes before the format."""
    format: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    fields: Any = {"tools": [WEATHER], "response_format": format, "temperature": 1}
    for seed in range(4):
        message = ask(server, **fields, seed=seed).choices[0].message
        for call in message.tool_calls or ():
            assert json.loads(call.function.arguments).keys() == {"city", "days"}
        if message.content:
            assert json.loads(message.content).keys() == {"colour", "sizes"}
        assert message.tool_calls or message.content
    create = server.client().chat.completions.with_raw_response.create
    messages: Any = [{"role": "user", "content": "Hello"}]
    raw = create(model="tiny-chat", messages=messages, tool_choice=NAMED, max_tokens=200, **fields)
    assert raw.headers["x-ignored-fields"] == "response_format"
    assert raw.parse().choices[0].message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", NAMED], ids=["auto", "by name"])
def test_keywords_that_no_grammar_enforces_are_named_in_the_reply(
    server: Server, choice: Any, stream: bool
) -> None:
    rule: Any = {"not": {"required": ["city"]}, "uniqueItems": True}
    function = {**WEATHER["function"], "parameters": {**WEATHER["function"]["parameters"], **rule}}
    create = server.client().chat.completions.with_raw_response.create
    messages: Any = [{"role": "user", "content": "Hello"}]
    tools: Any = [{"type": "function", "function": function}]
    fields: Any = {"tool_choice": choice, "stream": stream, "max_tokens": 50}
    raw = create(model="tiny-chat", messages=messages, tools=tools, **fields)
    assert raw.headers["x-not-enforced"] == "not, uniqueItems"
    raw = create(model="tiny-chat", messages=messages, tools=[WEATHER], **fields)
    assert "x-not-enforced" not in raw.headers


def test_the_model_may_answer_although_tools_are_offered(server: Server) -> None:
    reply = ask(server, "What is the capital of France?", tools=[WEATHER], temperature=0)
    assert reply.choices[0].message.content
    assert reply.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK] * 1025}, "tools"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"regex": "a"}},
            "response_format",
        ),
        ({"extra_body": {"grammar": "root ::= ("}}, "grammar"),
        ({"extra_body": {"grammar": "start: ("}}, "grammar"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
    ],
)
def test_invalid_tools_and_grammars_are_refused_with_the_name_of_their_field(
    server: Server, fields: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **fields)
    assert caught.value.param == param


def explosive_grammar(num_rules: int = 40) -> str:
    """Texts of some dozen words can be parsed in more ways than llguidance is willing to try."""
    rules = [
        f"s{i}: s{i} s{(i + 1) % num_rules} | s{(i + 2) % num_rules} s{i} | WORD"
        for i in range(num_rules)
    ]
    return "\n".join(["start: s0", *rules, "WORD: /[a-z]+ /"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_midway_ends_only_its_own_request(
    server: Server, stream: bool
) -> None:
    extra = {"structured_outputs": {"grammar": explosive_grammar()}}

    def exploding() -> Any:
        reply = ask(server, temperature=1, seed=1, max_tokens=400, extra_body=extra, stream=stream)
        return list(reply) if stream else reply

    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(ask, server, "Say the alphabet.", temperature=0)
        with fails(openai.APIError, "grammar") as caught:
            exploding()
    assert caught.value.type == "invalid_request_error"
    if not stream:
        assert isinstance(caught.value, openai.BadRequestError)
    assert other.result().choices[0].message.content.startswith("a, b, c")
    assert server.get("/admin/pipeline")["num_running"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_forced_call_cut_off_by_the_limit_is_never_reported_as_complete(
    server: Server, api: str, is_stream: bool
) -> None:
    def ask_for(limit: int) -> Any:
        return ASK[api](server.url, is_stream=is_stream, is_forced=True, max_tokens=limit)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask_for, LIMITS))
    assert [seen.text for seen in answers] == [""] * len(LIMITS)
    assert {seen.reason for seen in answers} == {CUT[api]}
    calls = [call for seen in answers for call in seen.calls]
    assert len(calls) > len(LIMITS) // 2
    assert not any(is_complete for _, is_complete in calls)
