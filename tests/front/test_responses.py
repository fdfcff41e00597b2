"""Responses: bodies as chats, items from chunks, and the store that forgets."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from serve.core.errors import EngineError, NotFoundError, RequestError
from serve.front.api.openai import parse
from serve.front.api.responses import ResponsesBody, Store, as_messages, response
from serve.front.api.responses_events import ResponsesWriter
from serve.front.http.replies import named_event

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def body(**fields: Any) -> ResponsesBody:
    return parse(ResponsesBody, {"model": "m", "input": "hi", **fields})


def chat_messages(**fields: Any) -> list[dict[str, Any]]:
    asked = body(**fields)
    chat = asked.as_chat(asked.messages())
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_text_and_instructions() -> None:
    assert chat_messages(instructions="Be short.") == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]


def test_items_become_the_messages_of_a_chat() -> None:
    """What an assistant thought, said and called is one message, as templates have it."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [think("Add.")]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    user, assistant, tool = chat_messages(input=items)
    assert user == {"role": "user", "content": "1 + 2?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("So:", "Add.")
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "3"}


def think(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}


def test_parameters_reach_the_chat() -> None:
    schema = {"type": "object"}
    format = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    chat = body(
        text={"format": format},
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        stream=True,
    ).as_chat([{"role": "user", "content": "hi"}])
    assert chat.response_format
    assert chat.response_format.json_schema
    assert chat.response_format.json_schema.schema_ == schema
    assert chat.tools
    assert chat.tools[0].function.name == "add"
    assert chat.tool_choice.function.name == "add"  # type: ignore[union-attr]
    assert (chat.most_tokens, chat.temperature, chat.top_p) == (7, 0.5, 0.25)
    assert (chat.stream, chat.parallel_tool_calls) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"n" * 65: ""}}, "metadata"),
        ({"metadata": {"n": "v" * 513}}, "metadata"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": False}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"store": "yes"}, "store"),
        ({"invented": 1}, "invented"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format"),
    ],
)
def test_everything_else_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as told:
        body(**fields)
    assert (told.value.param or "").startswith(param)


# --- events


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def call(name: str | None, arguments: str) -> dict[str, Any]:
    named = {"id": f"call_{name}", "type": "function"} if name else {}
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"tool_calls": [{"index": 0, **named, "function": function}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}


def told(telling: ResponsesWriter, *chunks: dict[str, Any]) -> Iterator[Any]:
    """Each event as it is at that moment, checked by OpenAI's own types."""

    def events() -> Iterator[Any]:
        yield from telling.begin()
        for each in chunks:
            yield from telling.feed(each)
        yield from telling.finish()

    for event in events():
        sent = json.loads(named_event(event).partition(b"data: ")[2])
        yield EVENT.validate_python(sent)


def test_the_order_of_events() -> None:
    telling = ResponsesWriter(response(body()))
    chunks = [
        chunk(reasoning_content="Hm"),
        chunk(content="a"),
        chunk(content="b"),
        chunk(**call("add", '{"x"')),
        chunk(**call(None, ":1}")),
        chunk(**call("sub", "{}")),
        chunk(finish_reason="tool_calls"),
        USAGE,
    ]
    events = list(told(telling, *chunks))
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
    whole = Response.model_validate(telling.response)
    assert whole.output_text == "ab"
    assert [item.type for item in whole.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert whole.output[2].arguments == '{"x":1}'  # type: ignore[union-attr]
    assert whole.usage
    assert (whole.usage.input_tokens, whole.usage.total_tokens) == (3, 5)
    assert events[0].response.output == []
    assert as_messages(telling.response["output"])[0]["content"] == "ab"


def test_an_answer_that_was_cut() -> None:
    telling = ResponsesWriter(response(body()))
    *_, last = told(telling, chunk(content="a"), chunk(finish_reason="length"))
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("error", "code"),
    [(RequestError("Too complex."), "invalid_prompt"), (EngineError("/a/path"), "server_error")],
)
def test_an_error_is_a_failed_response(error: Any, code: str) -> None:
    failed = EVENT.validate_python(ResponsesWriter(response(body())).failed(error))
    assert failed.type == "response.failed"
    assert failed.response.error.code == code
    assert "/a/path" not in failed.response.error.message


# --- the store


def put(store: Store, id: str, size: int = 0) -> None:
    store.put({"id": id}, json.dumps([{"role": "user", "content": "x" * size}]).encode())


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    store = Store(most=2)
    put(store, "a")
    put(store, "b")
    store.get("a")
    put(store, "c")
    assert store.get("a")[0] == b'{"id":"a"}'
    with pytest.raises(NotFoundError):
        store.get("b")
    with pytest.raises(RequestError) as told:
        store.before("b")
    assert (told.value.http_status, told.value.param) == (400, "previous_response_id")


def test_bytes_are_bounded() -> None:
    store = Store(most_bytes=1000)
    for number in range(9):
        put(store, str(number), 300)
    assert store.get("8")
    with pytest.raises(NotFoundError):
        store.get("5")
    put(store, "huge", 2000)
    with pytest.raises(NotFoundError):
        store.get("huge")
    put(store, "small")
    assert store.before("small")


def test_deleted_is_gone_and_counts_no_more() -> None:
    store = Store(most_bytes=1000)
    for number in range(20):
        put(store, str(number), 300)
        store.delete(str(number))
    with pytest.raises(NotFoundError):
        store.delete("1")
    put(store, "a", 400)
    put(store, "b", 400)
    assert store.get("a")
    assert store.get("b")
