"""Bodies that go out: nothing in them that is not meant for clients."""

import json
from collections.abc import AsyncIterator

import pytest

from serve.core.errors import (
    BrigadeError,
    ClusterError,
    EngineError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve.front import replies


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
