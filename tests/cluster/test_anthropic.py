"""/v1/messages over two real ranks, with the official client, whose types check every event."""

import json
from typing import Any

import anthropic
import pytest

from tests.cluster.servers import Server
from tests.cluster.test_structured import SCHEMA, WEATHER
from tests.front.test_app import wait_until

ASKED: list[Any] = [{"role": "user", "content": "Say the alphabet."}]
WEATHER_TOOL: Any = {
    "name": WEATHER["function"]["name"],
    "input_schema": WEATHER["function"]["parameters"],
}


def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def message(server: Server, messages: list[Any] = ASKED, **fields: Any) -> Any:
    """Greedy; what the client has no name for goes in extra_body."""
    extra = {"temperature": 0, **fields.pop("extra_body", {})}
    fields = {"model": "tiny-chat", "max_tokens": 60, "extra_body": extra, **fields}
    with client(server) as ai:
        reply = ai.messages.create(messages=messages, **fields)
        return list(reply) if fields.get("stream") else reply


def test_a_message_has_the_same_text_and_usage_as_a_chat(server: Server) -> None:
    system = "Be kind and patient. " * 20
    messages: Any = [{"role": "system", "content": system}, *ASKED]
    chat = server.client().chat.completions.create(
        model="tiny-chat", messages=messages, temperature=0, max_tokens=60
    )
    whole = message(server, system=[{"type": "text", "text": system}])
    assert [block.text for block in whole.content] == [chat.choices[0].message.content]
    assert whole.stop_reason == "end_turn"
    assert chat.usage
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.cache_read_input_tokens > 0, "the chat had the same prompt"
    assert usage.output_tokens == chat.usage.completion_tokens
    counted = client(server).messages.count_tokens(model="tiny-chat", messages=ASKED, system=system)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_pieces_of_a_streamed_message_add_up_to_the_whole_reply(server: Server) -> None:
    whole = message(server, max_tokens=10)
    assert whole.stop_reason == "max_tokens"
    start, *events, delta, stop = message(server, max_tokens=10, stream=True)
    assert (start.type, delta.type, stop.type) == ("message_start", "message_delta", "message_stop")
    assert {event.index for event in events} == {0}
    pieces = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(pieces) == whole.content[0].text
    assert delta.delta.stop_reason == "max_tokens"
    assert delta.usage.output_tokens == whole.usage.output_tokens == 10
    assert start.message.usage.input_tokens == delta.usage.input_tokens


def test_a_value_of_max_tokens_above_the_context_changes_nothing(server: Server) -> None:
    assert message(server, max_tokens=10**6).content == message(server).content


def test_a_prefilled_answer_is_continued_until_a_stop_sequence(server: Server) -> None:
    text = message(server).content[0].text
    begun = [*ASKED, {"role": "assistant", "content": text[:11]}]
    after = message(server, begun, stop_sequences=[text[20:24]])
    assert text[:11] + after.content[0].text == text[:20]
    assert (after.stop_reason, after.stop_sequence) == ("stop_sequence", text[20:24])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_called_and_its_result_is_answered(
    server: Server, choice: Any, stream: bool
) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    asked = [{"role": "user", "content": "How is the weather?"}]
    fields: Any = {"tools": [WEATHER_TOOL], "tool_choice": choice, "max_tokens": 120}
    if stream:
        with (
            client(server) as ai,
            ai.messages.stream(model="tiny-chat", messages=asked, **fields) as events,
        ):
            whole = events.get_final_message()
    else:
        whole = message(server, asked, **fields)
    (call,) = whole.content
    assert (call.type, call.name) == ("tool_use", "weather")
    assert call.input.keys() == {"city", "days"}
    assert whole.stop_reason == "tool_use" or whole.usage.output_tokens == fields["max_tokens"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    turns = [
        *asked,
        {
            "role": "assistant",
            "content": [call.model_dump(include={"type", "id", "name", "input"})],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    assert message(server, turns, tools=[WEATHER_TOOL], max_tokens=5, tool_choice={"type": "none"})


def test_the_text_of_a_message_follows_its_schema(server: Server) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    reply = message(server, max_tokens=600, output_config={"format": format})
    assert json.loads(reply.content[0].text).keys() == {"colour", "sizes"}


def test_bad_requests_get_an_http_error_even_if_they_ask_for_a_stream(server: Server) -> None:
    wrong: list[Any] = [
        {"max_tokens": 0},
        {"extra_body": {"n": 2}},
        {"extra_body": {"temperature": "hot"}},
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        {"tools": [{"type": "teleport_2030", "name": "t"}]},
        {"tool_choice": {"type": "any"}},
        {"tools": [WEATHER_TOOL], "tool_choice": {"type": "tool", "name": "absent"}},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    ]
    for fields in wrong:
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as caught:
                message(server, **{"stream": stream, **fields})
            assert caught.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        message(server, model="absent")
    assert server.get("/admin/pipeline")["num_running"] == 0


def test_a_client_that_disconnects_frees_its_rows(server: Server) -> None:
    """Sampled at random without an end, the answer would go on for long."""
    body = {"model": "tiny-chat", "messages": ASKED, "max_tokens": 400}
    with client(server) as ai:
        stream = ai.messages.create(**body, stream=True, extra_body={"temperature": 2})  # type: ignore[call-overload]
        assert next(iter(stream)).type == "message_start"
        stream.close()
    wait_until(lambda: server.get("/admin/pipeline")["num_running"] == 0)
    assert message(server).content
