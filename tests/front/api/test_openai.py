"""Bodies: what is honoured, what is refused, and that the refusal names the field."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import completion_create_params as of_text
from openai.types.chat import completion_create_params as of_chat
from pydantic import ValidationError

from serve.core.errors import RequestError
from serve.front.api.anthropic.body import MessagesBody
from serve.front.api.fields import HARMLESS, NEUTRAL
from serve.front.api.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    parse,
)
from serve.front.api.request import DEFAULT_MODEL
from serve.front.api.responses.body import ResponsesBody
from serve.front.api.sampling import MAX_LOGPROBS, MAX_STOPS, SamplingBody
from serve.front.http.body import MAX_FIELDS, Body, json_object
from serve.front.output.answer import UsageInStream
from tests.errors import fails

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def chat(**fields: Any) -> ChatBody:
    return read(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def read(data: bytes) -> ChatBody:
    return parse(ChatBody, json_object(data))


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        chat(**fields)
    return raised.value


def test_supported_fields_of_a_chat_are_parsed() -> None:
    body = chat(
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
    assert (body.max_answer_tokens, body.temperature, body.top_p) == (5, 0, 0.5)
    assert (body.seed, body.stop, body.stream) == (-(1 << 63), ("x",), True)
    assert body.usage_in_stream is UsageInStream.LAST
    assert body.chat_template_kwargs == {"a": [1]}


def test_fields_that_are_null_get_their_default() -> None:
    names = set(ChatBody.model_fields) - {"model", "messages"}
    body = chat(**dict.fromkeys(names))
    assert (body.max_answer_tokens, body.temperature, body.seed, body.stop) == (
        None,
        None,
        None,
        (),
    )


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
        ("max_completion_tokens", -2),
        ("max_completion_tokens", 0),
        ("seed", 1 << 63),
        ("seed", 1.0),
        ("seed", "1"),
        ("stop", [""]),
        ("stop", [1, 2]),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", ["a"] * (MAX_STOPS + 1)),
        ("stop", "x" * 2000),
        ("stream", 1),
        ("stream", "true"),
        ("model", 5),
        ("messages", []),
        ("messages", {}),
        ("messages", "hi"),
        ("messages", None),
        ("chat_template_kwargs", []),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert name in str(error)
    assert error.http_status == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("logprob_token_ids", [1]),
        ("spaces_between_special_tokens", False),
        ("chat_template", "{{ 1 }}"),
        ("return_prompt_text", True),
        ("stream_interval", 5),
        ("guided_decoding_backend", "xgrammar"),
        ("moderation", {"model": "omni"}),
    ],
)
def test_unsupported_fields_are_refused_with_their_names(name: str, value: Any) -> None:
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
        ("stop", ""),
        ("user", 5),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_values_that_have_no_effect_are_accepted(name: str, value: Any) -> None:
    chat(**{name: value})


def test_an_unknown_field_is_ignored_and_recorded() -> None:
    ignored = chat(**{"temprature\n": 1, "x" * 9999: 2, "temperature": 0}).ignored_fields
    assert ignored == ("temprature\n", "x" * 120)


NUMBERS = [math.nan, math.inf, -math.inf, -1e308, 1e308, 2**63, -(2**63) - 1, 10**40, "1", True]
OTHERS = [[], {}, [[]], "x", 1.5, -7]
WRONG: dict[str, list[Any]] = {
    "response_format": ["json", {}, {"type": "yaml"}, {"type": "json_schema"}, []],
    "structured_outputs": ["a", {}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"xml": "a"}],
    "temperature": [-0.1, 2.1, *NUMBERS, *OTHERS[:4]],
    "top_p": [0, 1.01, *NUMBERS, *OTHERS[:4]],
    "top_k": [-2, 2**31, *NUMBERS, *OTHERS],
    "min_p": [-0.1, 1.01, *NUMBERS, *OTHERS[:4]],
    "presence_penalty": [-2.1, 2.1, *NUMBERS, *OTHERS[:4]],
    "frequency_penalty": [-2.1, 2.1, *NUMBERS, *OTHERS[:4]],
    "repetition_penalty": [0, -1, 0.001, 101, *NUMBERS, *OTHERS[:4]],
    "logit_bias": [
        *([], "x", 5, {"a": 1}, {"-1": 1}, {"1.5": 1}, {"١": 1}, {"": 1}, {"1": 101}, {"1": "2"}),
        *({"1": True}, {"1": None}, {"1": math.inf}, {"1": 10**400}, {"9" * 5000: 1}),
        {str(id): 1 for id in range(2000)},
    ],
    "allowed_token_ids": [[], 5, "x", {}, [1.5], ["1"], [True], [-1], [2**31], [10**40], [None]],
    "stop_token_ids": [5, "x", {}, [1.5], ["1"], [True], [-1], [2**31], [10**40], [None]],
    "bad_words": [5, "x", {}, [""], [1], [None], ["x" * 2000], ["x"] * 1000],
    "seed": [1 << 63, -(1 << 63) - 1, 1.0, "1", math.nan, [], True],
    "n": [0, -1, 129, *NUMBERS, *OTHERS],
    "min_tokens": [-1, *NUMBERS, *OTHERS],
    "stop": [[""], [1], {}, 5, ["x"] * 100, ["x" * 2000], [None], [["x"]]],
    "include_stop_str_in_output": [0, 1, "true", [], 1.0],
    "ignore_eos": [0, 1, "true", [], 1.0],
    "skip_special_tokens": [0, 1, "true", [], 1.0],
    "json_schema": ["", 5, []],
    "regex": ["", " ", 5, {}],
    "grammar": ["", "\n", 5, {}],
    "ebnf": ["", 5, {}],
    "guided_json": ["", 5, []],
    "guided_regex": ["", 5, {}],
    "guided_choice": [[], "a", [1]],
    "guided_grammar": ["", 5, {}],
}


def test_every_sampling_field_is_tested_with_wrong_values() -> None:
    assert set(WRONG) == set(SamplingBody.model_fields)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_value_is_refused_with_the_name_of_its_field(name: str, kind: Any) -> None:
    given = {"messages": [USER]} if kind is ChatBody else {"prompt": "a"}
    for value in WRONG[name]:
        with pytest.raises(RequestError) as caught:
            parse(kind, {"model": "m", **given, name: value})
        assert (caught.value.param or "").startswith(name), value
        assert len(str(caught.value)) < 400
    parse(kind, {"model": "m", **given, name: None})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": "true"}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_wrong_fields_of_a_chat_are_refused_with_their_names(
    fields: dict[str, Any], param: str
) -> None:
    assert refusal(**fields).param == param


def test_the_error_for_a_missing_field_names_it() -> None:
    with fails(RequestError, "missing_required_parameter", match="'messages'"):
        read(b'{"model": "m"}')


def test_max_completion_tokens_is_preferred_to_max_tokens() -> None:
    assert chat(max_tokens=1, max_completion_tokens=2).max_answer_tokens == 2
    assert chat(max_tokens=2).max_answer_tokens == 2
    assert chat(max_tokens=2, max_completion_tokens=-1).max_answer_tokens == -1


def test_a_number_of_logprobs_of_minus_one_means_the_maximum() -> None:
    body = chat(logprobs=True, top_logprobs=-1, prompt_logprobs=-1)
    assert (body.top_logprobs, body.prompt_logprobs) == (MAX_LOGPROBS, MAX_LOGPROBS)


def test_a_chat_without_a_model_uses_the_default_model() -> None:
    for given in ({}, {"model": None}):
        assert parse(ChatBody, {"messages": [USER], **given}).model == DEFAULT_MODEL


@pytest.mark.parametrize("name", sorted(HARMLESS))
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize("value", ["auto", "x", 5, True, [], {"a": [1]}])
def test_harmless_fields_accept_any_value_and_change_nothing(
    kind: Any, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if name in kind.model_fields:
        pytest.skip("it is a field of this body")
    given = {"messages": [USER]} if kind is ChatBody else {"prompt": "a"}
    assert parse(kind, {**given, name: value}) == parse(kind, given)
    assert not caplog.records


def test_stream_options_decide_which_chunks_contain_usage() -> None:
    for stream in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = chat(stream=stream, stream_options=options)
        assert body.usage_in_stream is UsageInStream.EACH
    alone = chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert alone.usage_in_stream is UsageInStream.NONE
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
        b'{"model": "m", "messages": [{"role": "user", "content": ""}], "top_k": 1e999}',
        b'{"model": "m", "messages": [{"role": "user", "content": ""}], "logit_bias": {"1":1e999}}',
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
def test_malformed_bodies_are_refused_with_a_short_error(data: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        read(data)
    assert len(str(raised.value)) < 300


def test_a_very_long_wrong_name_does_not_make_the_error_long() -> None:
    error = refusal(structured_outputs={"x" * 100_000: 1})
    assert len(str(error)) < 400
    assert len(str(error.param)) < 200


@pytest.mark.parametrize(("given", "body"), [(of_chat, ChatBody), (of_text, CompletionBody)])
def test_every_parameter_of_the_official_client_is_known(given: Any, body: type[ChatBody]) -> None:
    """Otherwise it would be ignored silently."""
    fields = {*given.CompletionCreateParamsBase.__annotations__, "stream"}
    assert len(fields) > 15
    assert not fields - body.model_fields.keys() - NEUTRAL.keys() - HARMLESS


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_a_null_field_has_the_same_effect_as_a_missing_field(body: type[Body], caplog: Any) -> None:
    good: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [USER], "prompt": "hi"}
    good = {name: good[name] for name in good if name in body.model_fields} | (
        {"input": "hi"} if body is ResponsesBody else {}
    )
    names = ("reasoning", "conversation", "container", "stream_options", "nobody", "max_tool_calls")
    nothing = dict.fromkeys({*names, *body.model_fields} - good.keys())
    assert parse(body, {**good, **nothing}) == parse(body, good)
    assert not caplog.records


def test_a_prompt_cannot_be_truncated_to_no_tokens() -> None:
    assert refusal(truncate_prompt_tokens=0).param == "truncate_prompt_tokens"


# --- bodies with a million faults


BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody, TokenizeChatBody, DetokenizeBody)


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields all lists in a schema of pydantic's, except those that only clients see."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        schema = [part for name, part in schema.items() if name != "json_schema_input_schema"]
    if isinstance(schema, list | tuple):
        for each in schema:
            yield from lists(each)


@pytest.mark.parametrize("body", BODIES)
def test_reading_every_list_stops_at_its_first_error(body: Any) -> None:
    """Otherwise eight megabytes of them would make gigabytes of errors, of which one is shown."""
    found = list(lists(body.__pydantic_core_schema__))
    assert found
    for each in found:
        of_anything = each.get("items_schema", {}).get("type") in (None, "any")
        of_ids = body is CompletionBody and each["items_schema"]["type"] == "int"
        assert each.get("fail_fast") or of_anything or of_ids, each


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", ["messages", "input", "tools", "prompt", "tokens", "system"])
def test_many_wrong_items_give_only_one_error(body: Any, name: str) -> None:
    if name not in body.model_fields:
        pytest.skip("it has no such field")
    given = {"model": "m", "messages": [USER], "input": "a", "prompt": "a", "max_tokens": 1}
    given = {name: value for name, value in given.items() if name in body.model_fields}
    with pytest.raises(ValidationError) as caught:
        body.model_validate({**given, name: [{"type": []}] * 100_000})
    assert caught.value.error_count() <= 3, "those of the first"


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_reported_as_empty(body: bytes) -> None:
    with fails(RequestError, "invalid_value", match="The body is empty"):
        json_object(body)


def test_an_object_with_very_many_fields_is_refused() -> None:
    fields = {f"f{n}": n for n in range(MAX_FIELDS + 1)}
    for content in (fields, {"model": "m", "messages": [{**USER, **fields}]}):
        with fails(RequestError, "invalid_value", match="4096"):
            json_object(json.dumps(content).encode())
    del fields["f0"]
    assert json_object(json.dumps(fields).encode()) == fields
