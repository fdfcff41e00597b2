"""The bodies of replies contain nothing that is not meant for clients."""

import json
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


def test_an_error_caused_by_a_request_is_reported_in_full() -> None:
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
def test_an_internal_error_contains_no_path_and_no_address(kind: type[BrigadeError]) -> None:
    text = json.dumps(replies.error_object(kind("/home/a/model on 10.0.0.7:31 broke")))
    assert "/home" not in text
    assert "10.0.0.7" not in text
    assert "its log" in text or "try again" in text


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (OverloadedError("full"), "1"),
        (UnavailableError("loading"), "2"),
        (EngineError("broke"), "2"),
        (RequestError("wrong"), None),
    ],
)
def test_errors_that_can_be_retried_say_after_how_many_seconds(
    error: BrigadeError, seconds: str | None
) -> None:
    assert replies.error_headers(error).get("retry-after") == seconds


def test_an_error_with_a_status_keeps_its_own_headers() -> None:
    error = replies.StatusError(405, "no", {"allow": "GET"})
    assert error.http_status == 405
    assert replies.error_headers(error) == {"allow": "GET"}


def test_a_server_sent_event_is_a_single_line() -> None:
    event = replies.server_sent({"text": "a\nb\r\u2028 ü"})
    assert event == 'data: {"text":"a\\nb\\r\u2028 ü"}\n\n'.encode()


LEAVES = st.sampled_from([None, True, 0, -1.5, "", "text", 'ü"\\\n\u2028', [], {}, [1, {"a": []}]])
LONG = st.builds(lambda each, count: [each] * count, LEAVES, st.integers(0, 200))
VALUES = LEAVES | LONG | st.lists(LONG, max_size=3) | st.dictionaries(st.text(), LONG, max_size=3)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_encoding_in_slices_gives_the_same_bytes_as_encoding_at_once(body: dict[str, Any]) -> None:
    assert replies.encode_in_slices(body) == replies.encode(body)


def test_the_error_of_a_request_that_is_given_up_tells_its_client_why() -> None:
    error = replies.error_object(GivenUpError("It ended them."))["error"]
    assert (error["message"], error["code"]) == (
        "It ended them.",
        "request_given_up",
    )
