"""The Responses writer: items from deltas, and events as OpenAI's own types have them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from serve.core.errors import EngineError, RequestError
from serve.front.api.openai import parse
from serve.front.api.responses.body import ResponsesBody, output_messages
from serve.front.api.responses.offer import OfferedTools
from serve.front.api.writers.responses import ResponsesWriter
from serve.front.http.replies import named_event
from serve.front.output.deltas import CallBegin, CallText, Text, Thought, Update
from serve.front.text.tokens import Tokenizer
from tests.front.api.writers.updates import ORDER, begin, call, end, scored, update

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def writer(tokenizer: Tokenizer | None = None, **fields: Any) -> ResponsesWriter:
    body = parse(ResponsesBody, {"model": "m", "input": "hi", **fields})
    return ResponsesWriter(body.plan(), tokenizer)


def events_of(writer: ResponsesWriter, *updates: Update) -> Iterator[Any]:
    """Each event as it is at that moment, checked by OpenAI's own types."""

    def events() -> Iterator[Any]:
        yield from writer.begin()
        for each in updates:
            yield from writer.feed(each)
        yield from writer.finish()

    for event in events():
        sent = json.loads(named_event(event).partition(b"data: ")[2])
        yield EVENT.validate_python(sent)


def test_the_responses_writer_sends_events_in_order() -> None:
    whole = writer()
    events = list(events_of(whole, *ORDER))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *["function_call_arguments.delta"] * 2),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [e.output_index for e in events if e.type == "response.output_item.done"] == [0, 1, 2, 3]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.status for item in added] == ["in_progress"] * 4
    reply = Response.model_validate(whole.whole())
    assert reply.output_text == "ab"
    assert [item.type for item in reply.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert reply.output[2].arguments == '{"x":1}'  # type: ignore[union-attr]
    assert reply.usage
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (7, 5)
    assert reply.usage.output_tokens_details.reasoning_tokens == 2
    assert (reply.usage.total_tokens, reply.usage.input_tokens_details.cached_tokens) == (12, 3)
    assert events[0].response.output == []
    (message,) = output_messages(whole.response["output"], OfferedTools({}))
    assert (message["content"], message["reasoning_content"]) == ("ab", "Hm")
    assert [each["id"] for each in message["tool_calls"]] == ["call_add", "call_sub"]


def test_the_responses_writer_returns_the_request_with_its_defaults() -> None:
    whole = writer(metadata={"a": "b"}, temperature=0.5, user="u", cache_salt="s", stream=True)
    reply = whole.whole()
    assert (reply["metadata"], reply["temperature"], reply["user"]) == ({"a": "b"}, 0.5, "u")
    assert (reply["store"], reply["tools"], reply["top_p"]) == (True, [], 1.0)
    assert not {"cache_salt", "stream", "input"} & reply.keys()


@pytest.mark.parametrize("deltas", [(Text("a"),), (CallBegin("c", "f"), CallText('{"x'))])
def test_the_responses_writer_reports_an_answer_that_was_cut_off(deltas: Any) -> None:
    *_, last = events_of(writer(), begin(*deltas), end("length"))
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].status == "incomplete"


@pytest.mark.parametrize(("reason", "status"), [("length", "incomplete"), ("stop", "completed")])
def test_the_responses_writer_gives_an_empty_answer_one_item(reason: Any, status: str) -> None:
    """Clients read the first item, also of an answer that was cut before its call had a name."""
    *_, last = events_of(writer(), begin(), end(reason))
    (item,) = last.response.output
    assert (last.response.status, item.type, item.status) == (status, "message", status)
    assert last.response.output_text == ""


def test_a_complete_call_stays_complete_in_an_answer_that_is_cut_off_later() -> None:
    *_, last = events_of(writer(), begin(*call("add", "{}")), end("length"))
    assert last.response.status == "incomplete"
    assert last.response.output[0].status == "completed"


@pytest.mark.parametrize("name", ["add", "own"])
def test_a_call_that_a_stop_string_cuts_off_is_reported_as_incomplete(name: str) -> None:
    cut = begin(CallBegin("c", name), CallText('{"inp'))
    *_, last = events_of(writer(tools=[{"type": "custom", "name": "own"}]), cut, end("stop", "X"))
    (item,) = last.response.output
    assert (last.type, item.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason is None
    assert getattr(item, "input", "") == ""


def test_the_responses_writer_ends_a_call_as_soon_as_it_is_complete() -> None:
    whole = writer()
    types = [event["type"] for event in whole.feed(begin(*call("add", "{}")))]
    assert types[-1] == "response.output_item.done"
    assert [event["type"] for event in whole.feed(update())] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(RequestError("Too complex."), "invalid_prompt"), (EngineError("/a/path"), "server_error")],
)
def test_the_responses_writer_reports_a_failure_as_a_failed_response(error: Any, code: str) -> None:
    failed = EVENT.validate_python(writer().failed(error))
    assert failed.type == "response.failed"
    assert failed.response.error.code == code
    assert "/a/path" not in failed.response.error.message


def test_the_responses_writer_adds_reasoning_that_can_be_sent_back() -> None:
    whole = writer(include=["reasoning.encrypted_content"], store=False)
    list(events_of(whole, begin(Thought("Hm")), update(Thought("m")), update(Text("a")), end()))
    thought, _ = whole.response["output"]
    back = {"type": "reasoning", "id": "r", "summary": []}
    back["encrypted_content"] = thought["encrypted_content"]
    (message,) = output_messages([back], OfferedTools({}))
    assert message["reasoning_content"] == "Hmm"
    plain = writer()
    list(events_of(plain, begin(Thought("Hm")), end()))
    assert "encrypted_content" not in plain.response["output"][0]


def test_the_responses_writer_returns_logprobs_only_for_texts(tokenizer: Tokenizer) -> None:
    whole = writer(tokenizer, top_logprobs=1)
    list(events_of(whole, *scored([begin(Thought("Hm")), update(Text("a")), update(), end()])))
    scores = whole.response["output"][1]["content"][0]["logprobs"]
    assert [score["token"] for score in scores] == [tokenizer.token_text(1)]
