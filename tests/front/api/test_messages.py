"""Messages: how they reach the template, and which place a refusal names."""

from typing import Any

import pytest
from pydantic import ValidationError

from serve.front.api.messages import plain_messages, template_message
from tests.front.api.test_openai import CALL, USER, chat, refusal


def messages(*given: Any) -> list[dict[str, Any]]:
    said = chat(messages=list(given)).messages
    return [template_message(message) for message in plain_messages(said)]


def test_messages_of_every_role_reach_the_template() -> None:
    assert messages(
        {"role": "developer", "content": "d", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "four", "annotations": [], "audio": None},
    ) == [
        {"role": "system", "content": "d", "name": "n"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
            ],
        },
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "four"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": "", "content": "x"}, "messages[1].role"),
        ({"role": "x" * 65, "content": "x"}, "messages[1].role"),
        ({"role": 5, "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1]"),
        ({"role": "tool", "contents": "x"}, "messages[1]"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {}}, "messages[1].content"),
        ({"role": "user", "content": [[]]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "refusal"}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content"),
        ({"role": "assistant"}, "messages[1]"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages[1].audio"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0]"),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(message: Any, param: str) -> None:
    error = refusal(messages=[USER, message])
    assert error.param == param


def test_images_are_refused_with_a_clear_error() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}
    error = refusal(messages=[{"role": "user", "content": [{"type": "text", "text": ""}, image]}])
    assert "part 1 has type 'image_url'" in str(error)
    assert "text only" in str(error)


@pytest.mark.parametrize("arguments", ["{", "5", "[1]", "NaN", "I do not know"])
def test_arguments_that_are_not_a_json_object_are_wrapped_in_an_object(arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    (message,) = messages({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": arguments}


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}', ' {"x":1}\n'])
def test_arguments_can_be_an_object_or_its_text(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = messages({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


# What libraries and other servers put into the messages that they send back.
ECHOED: list[tuple[str, Any]] = [
    ("parsed", {"a": 1}),
    ("provider_specific_fields", {"refusal": None}),
    ("reasoning_details", [{"type": "reasoning.text", "text": "t"}]),
    ("thinking_blocks", [{"type": "thinking", "thinking": "t", "signature": "s"}]),
    ("prefix", False),
    ("citations", ["http://127.0.0.1"]),
    ("id", "msg_1"),
    ("timestamp", 1.5),
    ("metadata", {"a": "b"}),
    ("status", "success"),
    ("artifact", {"a": 1}),
    ("cache_control", {"type": "ephemeral"}),
    ("phase", "final_answer"),
    ("encrypted_content", "gAAA"),
    ("annotations", [{"type": "url_citation"}]),
    ("refusal", "no"),
    ("extra_field", "0"),
]


@pytest.mark.parametrize(("name", "value"), ECHOED)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_fields_that_clients_send_back_do_not_change_the_prompt(
    role: str, name: str, value: Any
) -> None:
    plain = {"role": role, "content": "x", "tool_call_id": "1"}
    for given in (value, None):
        assert messages({**plain, name: given}) == messages(plain)
    part = {"type": "text", "text": "x"}
    assert messages({**plain, "content": [{**part, name: value}]}) == messages(plain)
    call = {name: value, **CALL, "index": 0}
    function = {**CALL["function"], "parsed_arguments": {"x": 1}, "returns": None}
    called = {"role": "assistant", "tool_calls": [{**call, "function": function}]}
    assert messages(called) == messages({"role": "assistant", "tool_calls": [CALL]})


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "function", "critic"])
@pytest.mark.parametrize("content", [None, []])
def test_empty_content_is_read_as_empty_text(role: str, content: Any) -> None:
    (message,) = messages({"role": role, "content": content})
    assert message["content"] == ""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (["hi", {"text": "you"}], "hi\nyou"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_parts_of_text_with_other_names_are_read(content: Any, text: str) -> None:
    (message,) = messages({"role": "user", "content": content})
    assert message["content"] == text


@pytest.mark.parametrize(
    "said",
    [
        {"content": "a", "reasoning": "t"},
        {"content": "a", "reasoning_content": "t", "reasoning": "t"},
        {"content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, "a"]},
    ],
)
def test_reasoning_of_earlier_answers_is_read_from_every_field_name(said: Any) -> None:
    (message,) = messages({"role": "assistant", **said})
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "t"}


def test_fields_of_the_older_form_of_calls_are_read() -> None:
    call, result = messages(
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "f", "content": "4"},
    )
    (called,) = call["tool_calls"]
    assert called["function"] == {"name": "f", "arguments": {"x": 1}}
    assert len(called["id"]) == 9
    assert called["id"].isalnum()
    expected = {"role": "tool", "name": "f", "content": "4", "tool_call_id": called["id"]}
    assert result == expected


def test_a_call_of_a_custom_tool_reaches_the_template_with_its_input() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    (message,) = messages({"role": "assistant", "tool_calls": [call]})
    function = message["tool_calls"][0]["function"]
    assert function == {"name": "sh", "arguments": {"input": "ls"}}


def test_messages_of_other_roles_reach_the_template() -> None:
    assert messages({"role": "critic", "content": "x"}) == [{"role": "critic", "content": "x"}]


def test_unknown_fields_of_parts_reach_a_template_that_reads_them() -> None:
    part = {"type": "text", "text": "hi", "source_lang_code": "cs"}
    (message,) = plain_messages(chat(messages=[{"role": "user", "content": [part]}]).messages)
    assert template_message(message, "source_lang_code".__eq__)["content"] == [part]
    assert template_message(message, "other".__eq__)["content"] == "hi"


def test_many_wrong_messages_give_only_one_error() -> None:
    error = refusal(messages=[{}] * 50_000)
    assert error.param == "messages[0].role"
    assert isinstance(error.__cause__, ValidationError)
    assert error.__cause__.error_count() == 1
