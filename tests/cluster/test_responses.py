"""/v1/responses over two real ranks, with the official client, whose types check every event."""

import json
from typing import Any

import openai
import pytest

from tests.cluster.servers import Server
from tests.cluster.test_structured import SCHEMA, WEATHER

TOOLS: list[Any] = [{"type": "function", **WEATHER["function"], "strict": True}]


def respond(server: Server, given: Any = "Say the alphabet.", **fields: Any) -> Any:
    with server.client() as client:
        create = client.responses.create
        reply = create(model="tiny-chat", input=given, **{"temperature": 0, **fields})
        return list(reply) if fields.get("stream") else reply


def test_a_response_has_the_same_text_and_usage_as_a_chat(server: Server) -> None:
    chat = server.client().chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "Say the alphabet."}],
        temperature=0,
    )
    whole = respond(server)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "completed"
    assert chat.usage
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.usage.input_tokens == chat.usage.prompt_tokens


def test_pieces_of_a_streamed_response_add_up_to_the_whole_reply(server: Server) -> None:
    whole = respond(server, max_output_tokens=10)
    assert whole.status == "incomplete"
    events = list(respond(server, max_output_tokens=10, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    with server.client().responses.stream(model="tiny-chat", input="Hi") as stream:
        stream.until_done()
        assert stream.get_final_response().output_text


def test_a_response_continues_an_earlier_response(server: Server) -> None:
    first = respond(server, "Hello!", instructions="Be kind.")
    second = respond(server, previous_response_id=first.id)
    said = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Say the alphabet."},
    ]
    chat = server.client().chat.completions.create(
        model="tiny-chat",
        messages=said,
        temperature=0,
        max_tokens=1,  # type: ignore[arg-type]
    )
    assert chat.usage
    assert second.usage.input_tokens == chat.usage.prompt_tokens, "instructions are not kept"
    third = respond(server, previous_response_id=second.id, stream=True)
    assert list(third)[-1].response.previous_response_id == second.id


def test_a_response_is_stored_until_it_is_deleted_unless_store_is_false(server: Server) -> None:
    client = server.client()
    kept = respond(server, "Hi")
    assert client.responses.retrieve(kept.id) == kept
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError) as caught:
        respond(server, previous_response_id=kept.id)
    assert caught.value.code == "previous_response_not_found"
    passing = respond(server, "Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(passing.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_result_is_answered(server: Server, stream: bool) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"max_output_tokens": 100, "stream": stream}
    reply = respond(server, "How is the weather?", **fields)
    whole = list(reply)[-1].response if stream else reply
    (called, *_) = whole.output
    assert (called.type, called.name) == ("function_call", "weather")
    assert json.loads(called.arguments).keys() == {"city", "days"}
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "noon"}
        for item in whole.output
    ]
    after = respond(server, results, previous_response_id=whole.id, max_output_tokens=5)
    assert after.output_text


def test_the_text_of_a_response_follows_its_schema(server: Server) -> None:
    format: Any = {"type": "json_schema", "name": "thing", "schema": SCHEMA}
    reply = respond(server, text={"format": format}, max_output_tokens=600)
    assert json.loads(reply.output_text).keys() == {"colour", "sizes"}


def test_bad_requests_get_an_http_error_even_if_they_ask_for_a_stream(server: Server) -> None:
    for fields in ({"background": True}, {"max_output_tokens": 0}, {"extra_body": {"no": 1}}):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError):
                respond(server, stream=stream, **fields)
    with pytest.raises(openai.BadRequestError) as caught:
        respond(server, max_output_tokens=0)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(openai.NotFoundError):
        server.client().responses.create(model="absent", input="Hi")
    assert server.get("/admin/pipeline")["num_running"] == 0
