"""The Messages writer: blocks from deltas, and events as Anthropic's own types have them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from serve.core.errors import EngineError
from serve.front.api.writers.messages import MessagesWriter
from serve.front.http.replies import named_event
from serve.front.output.deltas import CallBegin, CallText, Text, Update
from tests.front.api.writers.updates import ORDER, begin, call, end, update

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def writer() -> MessagesWriter:
    return MessagesWriter("tiny", "request-1")


def events_of(writer: MessagesWriter, *updates: Update) -> Iterator[Any]:
    """Each event as it is at that moment, checked by Anthropic's own types."""

    def events() -> Iterator[Any]:
        yield from writer.begin()
        for each in updates:
            yield from writer.feed(each)
        yield from writer.finish()

    for event in events():
        name, data, *_ = named_event(event).decode().split("\n")
        sent = json.loads(data.removeprefix("data: "))
        assert name == f"event: {sent['type']}"
        yield EVENT.validate_python(sent)


def test_the_messages_writer_sends_events_in_order() -> None:
    whole = writer()
    events = list(events_of(whole, *ORDER))
    assert [event.type for event in events] == [
        "message_start",
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2, 3]
    first = events[0].message
    assert (first.content, first.stop_reason, first.role) == ([], None, "assistant")
    assert first.usage.output_tokens == 1
    started = [event.content_block for event in events if event.type == "content_block_start"]
    assert [block.type for block in started] == ["thinking", "text", "tool_use", "tool_use"]
    assert (started[0].thinking, started[1].text, started[2].input) == ("", "", {})
    message = Message.model_validate(whole.whole())
    thought, said, *calls = message.content
    assert (thought.thinking, said.text) == ("Hm", "ab")  # type: ignore[union-attr]
    assert thought.signature  # type: ignore[union-attr]
    assert [block.input for block in calls] == [{"x": 1}, {}]  # type: ignore[union-attr]
    assert [block.id for block in calls] == ["call_add", "call_sub"]  # type: ignore[union-attr]


def test_the_messages_writer_counts_cached_and_reasoning_tokens_separately() -> None:
    whole = writer()
    *_, delta, _ = events_of(whole, begin(Text("a")), end())
    for counted in (delta.usage, Message.model_validate(whole.whole()).usage):
        assert (counted.input_tokens, counted.cache_read_input_tokens) == (4, 3)
        assert counted.output_tokens == 5
        assert counted.output_tokens_details.thinking_tokens == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([end()], ("end_turn", None)),
        ([end("length")], ("max_tokens", None)),
        ([end(stop="END")], ("stop_sequence", "END")),
        ([end(stop=5)], ("end_turn", None)),
        ([update(*call("add", "{}")), end("tool_calls")], ("tool_use", None)),
        ([update(*call("add", "{}")), end("tool_calls", "END")], ("stop_sequence", "END")),
        ([update(CallBegin("a", "add"), CallText("{")), end("length")], ("max_tokens", None)),
    ],
)
def test_the_messages_writer_says_why_a_message_ends(last: list[Update], reason: Any) -> None:
    *_, delta, stop = events_of(writer(), begin(Text("a")), *last)
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == reason
    assert stop.type == "message_stop"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"x": [1, 2]}', {"x": [1, 2]}),
        ("", {}),
        ('{"x": [1, 2', {"INVALID_JSON": '{"x": [1, 2'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("x = 1", {"INVALID_JSON": "x = 1"}),
        ('{"x": NaN}', {"INVALID_JSON": '{"x": NaN}'}),
        ('"\\ud800"', {"INVALID_JSON": '"\\ud800"'}),
    ],
)
def test_the_messages_writer_wraps_arguments_that_are_not_an_object(
    arguments: str, wanted: Any
) -> None:
    whole = writer()
    list(events_of(whole, begin(*call("add", arguments)), end("tool_calls")))
    assert whole.whole()["content"][0]["input"] == wanted


@pytest.mark.parametrize("arguments", ["", '{"x"', '{"x": 1', '{"x": 1}'])
@pytest.mark.parametrize(("reason", "stop"), [("length", None), ("stop", "X")])
def test_the_messages_writer_shows_that_a_call_was_cut_off(
    arguments: str, reason: Any, stop: Any
) -> None:
    """The part that could be read would look like all of the input."""
    whole = writer()
    cut = [CallBegin("a", "add"), *([CallText(arguments)] if arguments else [])]
    events = list(events_of(whole, begin(*cut), end(reason, stop)))
    deltas = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == arguments
    assert whole.whole()["content"][0]["input"] == {"INVALID_JSON": arguments}
    assert whole.whole()["stop_reason"] in ("max_tokens", "stop_sequence")


def test_the_messages_writer_reports_a_failure_in_the_form_of_anthropic() -> None:
    error = writer().failed(EngineError("/a/path"))
    assert ErrorResponse.model_validate(error).error.type == "overloaded_error"
    assert error["request_id"] == "request-1"
    assert "/a/path" not in json.dumps(error)
