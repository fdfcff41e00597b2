"""Bodies: what is honoured, what is refused, and that the refusal names the field."""

import json
from typing import Any

import pytest

from serve.core.errors import RequestError
from serve.front.openai import MOST_STOPS, ChatBody, parse_chat

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def parse(**fields: Any) -> ChatBody:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        parse(**fields).template_messages()
    return raised.value


def test_everything_supported_arrives() -> None:
    body = parse(
        max_completion_tokens=5,
        temperature=0,
        top_p=0.5,
        seed=-(1 << 63),
        stop="x",
        stream=True,
        stream_options={"include_usage": True},
        chat_template_kwargs={"a": [1]},
        user="u",
        metadata={"k": "v"},
    )
    assert (body.most_tokens, body.temperature, body.top_p) == (5, 0, 0.5)
    assert (body.seed, body.stop, body.stream) == (-(1 << 63), ("x",), True)
    assert body.include_usage
    assert body.chat_template_kwargs == {"a": [1]}


def test_null_is_absent() -> None:
    names = set(ChatBody.model_fields) - {"model", "messages"}
    body = parse(**dict.fromkeys(names))
    assert (body.most_tokens, body.temperature, body.seed, body.stop) == (None, None, None, ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", -1),
        ("seed", 1 << 63),
        ("seed", 1.0),
        ("seed", "1"),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1, 2]),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", ["a"] * (MOST_STOPS + 1)),
        ("stop", "x" * 2000),
        ("stream", 1),
        ("stream", "true"),
        ("model", None),
        ("model", 5),
        ("messages", []),
        ("messages", {}),
        ("messages", "hi"),
        ("messages", None),
        ("user", 5),
        ("metadata", []),
        ("chat_template_kwargs", []),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert name in str(error)
    assert error.http_status == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("logprobs", True),
        ("top_logprobs", 1),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"1": 5}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("top_k", 5),
        ("min_p", 0.1),
        ("best_of", 2),
        ("echo", True),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("ignore_eos", True),
        ("ignore_eos", 1),
        ("store", True),
        ("service_tier", "flex"),
        ("min_tokens", 1),
        ("functions", [{}]),
        ("structured_outputs", {}),
        ("reasoning_effort", "high"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("tools", []),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("parallel_tool_calls", True),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("response_format", {"type": "text"}),
        ("logit_bias", {}),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("top_k", -1),
        ("top_k", 0),
        ("min_p", 0),
        ("modalities", ["text"]),
        ("ignore_eos", False),
        ("store", False),
        ("service_tier", "auto"),
        ("audio", None),
    ],
)
def test_what_changes_nothing_is_accepted(name: str, value: Any) -> None:
    parse(**{name: value})


def test_an_unknown_field_is_refused_by_name() -> None:
    error = refusal(temprature=1)
    assert error.param == "temprature"
    assert "Unknown" in str(error)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError, match="'messages' is missing"):
        parse_chat(b'{"model": "m"}')


def test_limits_that_differ_are_refused() -> None:
    assert "differ" in str(refusal(max_tokens=1, max_completion_tokens=2))
    assert parse(max_tokens=2, max_completion_tokens=2).most_tokens == 2


def test_stream_options_need_a_stream() -> None:
    assert "stream=true" in str(refusal(stream_options={"include_usage": True}))
    assert refusal(stream=True, stream_options={"other": 1}).param == "stream_options.other"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"[]",
        b"5",
        b"null",
        b'{"model": ',
        b"{} {}",
        b"\xff\xfe{}",
        b'{"a": NaN}',
        b'{"temperature": Infinity}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "m", "temperature": 1e999, "messages": [{"role": "user", "content": ""}]}',
        b'{"model": "m", "max_tokens": 1e3, "messages": [{"role": "user", "content": ""}]}',
    ],
)
def test_a_body_that_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        parse_chat(data)
    assert len(str(raised.value)) < 300


def test_a_long_wrong_name_makes_no_long_error() -> None:
    error = refusal(**{"x" * 100_000: 1})
    assert len(str(error)) < 400
    assert len(str(error.param)) < 200
