"""Requests of other projects' suites and clients that were once refused, or answered wrongly, as
they were sent. Histories, hints, words and addresses have files of their own."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.compatibility.asking import CHAT, MESSAGES, RESPONSES, USER, Asked, Server, text_of

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


class Truth(BaseModel):
    a: bool


FORMAT: dict[str, Any] = Truth.model_json_schema()
ANSWER = '{"a": false}'
PARIS, BARCELONA = '{"city": "Paris"}', '{"city": "Paris", "location": "Barcelona"}'


def tool(path: str, parameters: Any, **others: Any) -> dict[str, Any]:
    """A tool as each API declares it."""
    if path == MESSAGES:
        return {"name": "get_weather", "input_schema": parameters, **others}
    function = {"name": "get_weather", "parameters": parameters, **others}
    return {"type": "function"} | (function if path == RESPONSES else {"function": function})


def question(path: str, **fields: Any) -> dict[str, Any]:
    return {"input" if path == RESPONSES else "messages": [QUESTION], **fields}


def choice(path: str, kind: str) -> dict[str, Any]:
    """tool_choice: auto, required or the name."""
    if path == MESSAGES:
        forced = {"required": {"type": "any"}, "name": {"type": "tool", "name": "get_weather"}}
        return {"tool_choice": forced.get(kind, {"type": kind})}
    named: dict[str, Any] = {"type": "function", "name": "get_weather"}
    if path == CHAT:
        named = {"type": "function", "function": {"name": "get_weather"}}
    return {"tool_choice": named if kind == "name" else kind}


def written(arguments: str) -> str:
    """A call as a model writes it in its own format, forced or not."""
    call = f'{{"name": "get_weather", "arguments": {arguments}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def arguments_of(path: str, asked: Asked) -> list[dict[str, Any]]:
    """The arguments of the calls in a reply."""
    if path == RESPONSES:
        items = [item for item in asked.body["output"] if item["type"] == "function_call"]
        return [json.loads(item["arguments"]) for item in items]
    if path == MESSAGES:
        return [part["input"] for part in asked.body["content"] if part["type"] == "tool_use"]
    calls = asked.body["choices"][0]["message"]["tool_calls"] or []
    return [json.loads(call["function"]["arguments"]) for call in calls]


every_api = pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
every_choice = pytest.mark.parametrize("kind", ["auto", "required", "name"])


# --- schemas without additionalProperties


@every_api
@every_choice
@pytest.mark.parametrize("strict", [None, True])
def test_arguments_of_calls_have_only_keys_of_the_schema(
    server: Server, path: str, kind: str, strict: bool | None
) -> None:
    fields = question(path, tools=[tool(path, PARAMETERS, strict=strict)], **choice(path, kind))
    answers = written(BARCELONA), written(PARIS)
    assert arguments_of(path, server.ask(path, fields, *answers)) == [{"city": "Paris"}]


@every_api
@every_choice
def test_a_tool_without_parameters_is_called_without_arguments(
    server: Server, path: str, kind: str
) -> None:
    fields = question(path, tools=[tool(path, NOTHING)], **choice(path, kind))
    answers = written('{"location": "Barcelona"}'), written("{}")
    assert arguments_of(path, server.ask(path, fields, *answers)) == [{}]


def formatted(path: str) -> dict[str, Any]:
    """The field that demands FORMAT."""
    if path == CHAT:
        schema = {"name": "s", "schema": FORMAT}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    format = {"type": "json_schema", "schema": FORMAT}
    if path == RESPONSES:
        return {"text": {"format": {**format, "name": "s"}}}
    return {"output_config": {"format": format}}


@every_api
def test_formatted_answers_have_only_keys_of_the_schema(server: Server, path: str) -> None:
    asked = server.ask(path, formatted(path), '{"a": false, "b": 1}', ANSWER)
    assert text_of(path, asked.body) == ANSWER


# --- formats with tools


@every_api
def test_a_format_beside_tools_still_allows_a_call(server: Server, path: str) -> None:
    fields = question(path, tools=[tool(path, PARAMETERS)], **formatted(path))
    called = server.ask(path, fields, "Done.", written(PARIS), ANSWER)
    assert arguments_of(path, called) == [{"city": "Paris"}]
    answered = server.ask(path, fields, "Done.", ANSWER)
    assert text_of(path, answered.body) == ANSWER


@every_api
@pytest.mark.parametrize("kind", ["required", "name"])
def test_a_forced_tool_is_called_even_if_a_format_is_asked_for(
    server: Server, path: str, kind: str
) -> None:
    tools = [tool(path, PARAMETERS)]
    fields = question(path, tools=tools, **formatted(path), **choice(path, kind))
    asked = server.ask(path, fields, ANSWER, written(PARIS))
    assert arguments_of(path, asked) == [{"city": "Paris"}]
    assert asked.reply.headers["x-ignored-fields"]


# --- histories that the official client makes


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    url = f"{server.client.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_message_parsed_by_the_client_can_be_sent_back(
    server: Server, client: openai.OpenAI
) -> None:
    server.will_answer(ANSWER)
    messages: list[Any] = [USER]
    reply = client.chat.completions.parse(model="tiny", messages=messages, response_format=Truth)
    message = reply.choices[0].message.model_dump(warnings=False)
    assert message["parsed"] == {"a": False}
    server.will_answer("Done.")
    again: list[Any] = [USER, message, USER]
    answered = client.chat.completions.create(model="tiny", messages=again)
    assert answered.choices[0].message.content == "Done."


def test_a_message_collected_from_a_stream_can_be_sent_back(
    server: Server, client: openai.OpenAI
) -> None:
    server.will_answer(written(PARIS))
    tools: list[Any] = [tool(CHAT, PARAMETERS, strict=True)]
    with client.chat.completions.stream(model="tiny", messages=[QUESTION], tools=tools) as stream:  # type: ignore[list-item]
        stream.until_done()
        message = stream.get_final_completion().choices[0].message.model_dump()
    (call,) = message["tool_calls"]
    assert "index" in call
    assert "parsed_arguments" in call["function"]
    server.will_answer("Done.")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    again: list[Any] = [QUESTION, message, result]
    reply = client.chat.completions.create(model="tiny", messages=again, tools=tools)
    assert reply.choices[0].message.content == "Done."


# --- replies


def test_a_reply_has_null_for_fields_without_a_value(server: Server, client: openai.OpenAI) -> None:
    """vLLM's tests read these names, and the official client knows only what it got."""
    server.will_answer("Done.")
    reply: Any = client.chat.completions.create(model="tiny", messages=[USER])  # type: ignore[list-item]
    message = reply.choices[0].message
    assert (message.reasoning, message.reasoning_content, message.refusal) == (None, None, None)
    assert (reply.prompt_logprobs, reply.prompt_token_ids) == (None, None)
    assert reply.choices[0].token_ids is None
    assert reply.system_fingerprint
    completion: Any = client.completions.create(model="tiny", prompt="hello")
    choice = completion.choices[0]
    assert (choice.prompt_logprobs, choice.prompt_token_ids, choice.token_ids) == (None, None, None)
    model: Any = client.models.list().data[0]
    assert model.root == model.id == "tiny"
    assert model.permission[0]["object"] == "model_permission"


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_gives_its_reasoning_under_two_names(server: Server, stream: bool) -> None:
    asked = server.ask(CHAT, {"stream": stream}, "<think>\nThought.\n</think>\nDone.")
    if stream:
        data = [line[6:] for line in asked.reply.text.splitlines() if line.startswith("data: {")]
        found = [json.loads(each)["choices"][0]["delta"] for each in data]
    else:
        found = [asked.body["choices"][0]["message"]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(each.get(name) or "" for each in found).strip() == "Thought."


def test_a_response_includes_encrypted_reasoning_that_can_be_sent_back(server: Server) -> None:
    fields = {"include": ["reasoning.encrypted_content"], "store": False}
    output = server.ask(RESPONSES, fields, "<think>\nThought.\n</think>\nDone.").body["output"]
    assert output[0]["encrypted_content"]
    items = [USER, {**output[0], "content": None, "summary": []}, output[1], USER]
    assert "Thought." in server.ask(RESPONSES, {"input": items}).prompt


@pytest.mark.parametrize("name", ["seed", "top_k", "min_p", "stop", "chat_template_kwargs"])
def test_a_response_accepts_the_parameters_of_chats(server: Server, name: str) -> None:
    values = {"seed": 7, "top_k": 3, "min_p": 0.1, "stop": ["X"], "chat_template_kwargs": {"a": 1}}
    asked = server.ask(RESPONSES, {name: values[name]}, "DoneX.")
    assert text_of(RESPONSES, asked.body) == ("Done" if name == "stop" else "DoneX.")


# --- calls that are cut, and calls that stream


def test_a_forced_call_cut_off_by_the_limit_is_an_incomplete_item(server: Server) -> None:
    tools = [tool(RESPONSES, PARAMETERS)]
    fields = question(RESPONSES, tools=tools, tool_choice="required", max_output_tokens=55)
    body = server.ask(RESPONSES, fields, written('{"city": "Paris, France"}')).body
    (item,) = body["output"]
    assert (body["status"], item["status"]) == ("incomplete", "incomplete")
    assert (item["type"], item["name"]) == ("function_call", "get_weather")
    assert item["arguments"].startswith('{"city"')


@every_api
@every_choice
def test_a_call_is_streamed_while_it_is_written(server: Server, path: str, kind: str) -> None:
    """Its name comes first, and then its arguments in many pieces."""
    city = "Paris " * 20
    fields = question(path, tools=[tool(path, PARAMETERS)], stream=True, **choice(path, kind))
    asked = server.ask(path, fields, written(json.dumps({"city": city})))
    data = [line[6:] for line in asked.reply.text.splitlines() if line.startswith("data: {")]
    pieces = [piece for each in data for piece in pieces_of(path, json.loads(each))]
    name, *arguments = [piece for piece in pieces if piece]
    assert name == "get_weather"
    assert json.loads("".join(arguments)) == {"city": city}
    assert len(arguments) > 20


def pieces_of(path: str, event: Any) -> Iterator[str]:
    """The names and pieces of arguments that an event has."""
    if path == RESPONSES:
        if event["type"] == "response.output_item.added":
            yield event["item"].get("name", "")
        if event["type"] == "response.function_call_arguments.delta":
            yield event["delta"]
    elif path == MESSAGES:
        if event["type"] == "content_block_start":
            yield event["content_block"].get("name", "")
        if event["type"] == "content_block_delta":
            yield event["delta"].get("partial_json", "")
    else:
        for call in event["choices"][0]["delta"].get("tool_calls") or []:
            yield call["function"].get("name") or ""
            yield call["function"].get("arguments") or ""
