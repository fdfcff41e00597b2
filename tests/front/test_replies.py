"""Bodies that go out: nothing in them that is not meant for clients."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.errors import (
    BrigadeError,
    ClusterError,
    EngineError,
    GivenUpError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve.front.http import replies


def test_a_requests_fault_is_told_in_full() -> None:
    error = NotFoundError("No model x.", param="model", code="model_not_found")
    assert replies.error_object(error) == {
        "error": {
            "message": "No model x.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


@pytest.mark.parametrize("kind", [ClusterError, EngineError, ModelError, BrigadeError])
def test_a_fault_of_ours_names_no_path_or_address(kind: type[BrigadeError]) -> None:
    told = json.dumps(replies.error_object(kind("/home/a/model on 10.0.0.7:31 broke")))
    assert "/home" not in told
    assert "10.0.0.7" not in told
    assert "broke" in told or "mistake" in told


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (OverloadedError("full"), "1"),
        (UnavailableError("loading"), "2"),
        (EngineError("broke"), "2"),
        (RequestError("wrong"), None),
    ],
)
def test_whoever_may_try_again_is_told_when(error: BrigadeError, seconds: str | None) -> None:
    assert replies.error_headers(error).get("retry-after") == seconds


def test_a_status_error_keeps_its_own_headers() -> None:
    error = replies.StatusError(405, "no", {"allow": "GET"})
    assert error.http_status == 405
    assert replies.error_headers(error) == {"allow": "GET"}


def test_an_event_is_one_line() -> None:
    event = replies.server_sent({"text": "a\nb\r\u2028 ü"})
    assert event == 'data: {"text":"a\\nb\\r\u2028 ü"}\n\n'.encode()


async def stream(*chunks: replies.Json) -> AsyncIterator[replies.Json]:
    for chunk in chunks:
        yield {"id": "1", "object": "chat.completion.chunk", **chunk}


def part(index: int, delta: replies.Json, reason: str | None = None) -> replies.Json:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {"choices": [choice], "usage": None}


@pytest.mark.anyio
async def test_folding_keeps_role_text_end_and_usage() -> None:
    chunks = [part(0, {"role": "assistant", "content": ""}), part(0, {"content": "a"})]
    chunks += [part(0, {"content": "b"}), part(0, {}, "length")]
    reply = await replies.fold(stream(*chunks, {"choices": [], "usage": replies.usage(2, 3)}))
    assert reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab"},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert reply["usage"] == replies.usage(2, 3)


@pytest.mark.anyio
async def test_folding_puts_lists_together_and_choices_in_order() -> None:
    chunks = [part(1, {"content": "x"}, "stop"), part(0, {"content": "a"})]
    chunks[1]["choices"][0]["logprobs"] = {"content": [1]}
    chunks.append(part(0, {"content": "b"}, "length"))
    chunks[2]["choices"][0]["logprobs"] = {"content": [2, 3]}
    reply = await replies.fold(stream(*chunks))
    assert [c["index"] for c in reply["choices"]] == [0, 1]
    assert reply["choices"][0]["logprobs"] == {"content": [1, 2, 3]}
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][1]["logprobs"] is None


@pytest.mark.anyio
async def test_a_token_that_is_called_index_is_a_token() -> None:
    """The likeliest tokens of a completion are told by their text, which may be anything."""
    tops = [{"index": -0.1, "x": -2.0}, {"a": -0.5}]
    chunks = [
        {"choices": [{"index": 0, "text": "t", "logprobs": {"top_logprobs": [top]}}]}
        for top in tops
    ]
    reply = await replies.fold(stream(*chunks))
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == tops


@pytest.mark.anyio
async def test_folding_puts_the_pieces_of_a_call_together_and_keeps_no_chunk() -> None:
    ids = [1, 2]
    named = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    other = {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "1"}}
    pieces = [{"index": 0, "function": {"arguments": text}} for text in ('{"x"', ":1}")]
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"tool_calls": [call]} for call in (named, *pieces, other)]
    chunks = [part(0, delta) for delta in deltas]
    chunks[0]["choices"][0]["token_ids"] = ids
    chunks[1]["choices"][0]["token_ids"] = [3]
    (choice,) = (await replies.fold(stream(*chunks)))["choices"]
    assert choice["message"]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "1"}},
    ]
    assert choice["message"]["content"] is None
    assert choice["token_ids"] == [1, 2, 3]
    assert ids == [1, 2], "it may be the prompt's own list"


@pytest.mark.anyio
async def test_folding_takes_as_long_for_each_chunk() -> None:
    marks = []

    async def chunks() -> AsyncIterator[replies.Json]:
        for n in range(120_001):
            if n % 20_000 == 0:
                marks.append(time.process_time())
            choice = {"index": 0, "text": "a" * 4, "logprobs": {"tokens": ["aaaa"]}}
            yield {"object": "text_completion", "choices": [choice | {"token_ids": [n]}]}

    reply = await replies.fold(chunks())
    assert len(reply["choices"][0]["text"]) == 4 * 120_001
    first, *_, last = [end - start for start, end in zip(marks, marks[1:], strict=False)]
    assert last < 5 * first, marks


LEAVES = st.sampled_from([None, True, 0, -1.5, "", "text", 'ü"\\\n\u2028', [], {}, [1, {"a": []}]])
LONG = st.builds(lambda each, count: [each] * count, LEAVES, st.integers(0, 200))
VALUES = LEAVES | LONG | st.lists(LONG, max_size=3) | st.dictionaries(st.text(), LONG, max_size=3)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_encode_in_slices_gives_what_encode_gives(body: dict[str, Any]) -> None:
    assert replies.encode_in_slices(body) == replies.encode(body)


def test_error_of_a_request_that_is_given_up_tells_its_client_why() -> None:
    error = replies.error_object(GivenUpError("It ended them."))["error"]
    assert (error["message"], error["code"]) == (
        "It ended them.",
        "request_given_up",
    )
