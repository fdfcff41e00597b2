"""The messages about wrong bodies, which are never in pydantic's words."""

import json
import random
import re
from typing import Any, get_args

import pytest
from pydantic_core import core_schema

from serve.core.errors import RequestError
from serve.front.api import wording
from serve.front.api.anthropic.body import CountBody, MessagesBody
from serve.front.api.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
    parse,
)
from serve.front.api.responses.body import ResponsesBody
from serve.front.routes.adapters import ChangeBody, LoadBody, UnloadBody

USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
ASSISTANT = {"role": "assistant", "content": "a", "tool_calls": [CALL], "annotations": []}
# Good bodies, of which each value is replaced in turn.
GOOD: list[tuple[Any, dict[str, Any]]] = [
    (
        ChatBody,
        {
            "model": "m",
            "messages": [USER, ASSISTANT, {"role": "tool", "content": "1", "tool_call_id": "a"}],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": SCHEMA,
            "structured_outputs": {"choice": ["a"]},
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["a"],
            "logit_bias": {"1": 1},
            "allowed_token_ids": [1],
            "stop_token_ids": [1],
            "bad_words": ["a"],
            "temperature": 1,
            "top_p": 0.5,
            "top_k": 1,
            "min_p": 0.5,
            "presence_penalty": 1,
            "repetition_penalty": 1,
            "n": 1,
            "seed": 1,
            "max_tokens": 5,
            "min_tokens": 1,
            "logprobs": True,
            "top_logprobs": 1,
            "truncate_prompt_tokens": 5,
            "chat_template_kwargs": {},
            "metadata": {},
            "user": "u",
        },
    ),
    (CompletionBody, {"model": "m", "prompt": ["a"], "max_tokens": 1, "logprobs": 1, "echo": True}),
    (
        ResponsesBody,
        {
            "model": "m",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "text", "text": "a"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "1"},
                {"type": "reasoning", "summary": [], "content": []},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
            "metadata": {"a": "b"},
            "include": [],
            "background": False,
            "top_logprobs": 0,
            "truncation": "disabled",
            "max_output_tokens": 5,
        },
    ),
    (
        MessagesBody,
        {
            "model": "m",
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "citations": []}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": "b"},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}],
                },
            ],
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "adaptive"},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "metadata": {"user_id": "a"},
            "stop_sequences": ["a"],
            "service_tier": "auto",
        },
    ),
    (CountBody, {"model": "m", "messages": [USER]}),
    (TokenizeBody, {"prompt": "a", "add_special_tokens": True}),
    (TokenizeChatBody, {"messages": [USER], "return_token_strs": True}),
    (DetokenizeBody, {"tokens": [1]}),
    (LoadBody, {"lora_name": "a", "lora_path": "b", "load_inplace": True}),
    (UnloadBody, {"lora_name": "a", "lora_int_id": 1}),
    (ChangeBody, {"lora_name": "a", "pin": True, "default": True, "preload": True}),
]
PRIVATE = "a private prompt of somebody, which is longer than a word"
WRONG: list[Any] = [
    *(None, True, 0, -1, 5, 1.5, -0.5, 1e300, 10**400, 1 << 63, "", "x", PRIVATE, "x" * 5000),
    *([], [1], ["x"], [{}], [None], ["x"] * 2000, [[]], {}, {"a": 1}, {"type": "x"}),
    *({"role": "x"}, {"type": 5}, {"role": {}}, {str(n): "v" for n in range(2000)}),
    *({"name": "a b"}, {"type": "function"}, {"x" * 500: "y"}, [{"type": "text"}], [{"type": []}]),
]
PYDANTIC = re.compile(
    r"Input|should|valid |validation|Field required|Extra|Value error|Unable|Instance|discrimin|"
    r"pydantic|\bdict|\bint\b|\bbool\b|\bNone\b|\bTrue\b|\bFalse\b|List|Dictionary|literal|\btag\b"
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all values in a body, those that hold others too."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for step, each in inner:
            found += places(each, (*path, step))
    return found


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = json.loads(json.dumps(body))
    part = body
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    return body


def refusal(kind: Any, body: dict[str, Any]) -> RequestError | None:
    try:
        parse(kind, body)
    except RequestError as error:
        return error
    return None


def check(error: RequestError, given: Any) -> None:
    message = str(error)
    assert not PYDANTIC.search(message), (message, given)
    assert "has a value that is not allowed" not in message, given
    assert len(message) < 500, given
    assert "private prompt" not in message.replace(PRIVATE[:40], ""), given
    assert message.endswith("."), message


@pytest.mark.parametrize(("kind", "good"), GOOD, ids=lambda each: getattr(each, "__name__", ""))
def test_errors_about_wrong_bodies_are_never_in_the_words_of_pydantic(
    kind: Any, good: dict[str, Any]
) -> None:
    fits = {name: value for name, value in good.items() if name != "structured_outputs"}
    assert refusal(kind, fits) is None
    num_refused = 0
    for path in places(good):
        for value in WRONG:
            error = refusal(kind, changed(good, path, value))
            if error is not None:
                num_refused += 1
                check(error, (path, value))
    assert num_refused > len(places(good)) * 5


@pytest.mark.parametrize(("kind", "good"), GOOD, ids=lambda each: getattr(each, "__name__", ""))
def test_errors_about_bodies_with_two_faults_are_never_in_the_words_of_pydantic(
    kind: Any, good: dict[str, Any]
) -> None:
    chance = random.Random(5)
    for _ in range(300):
        body = good
        for _ in range(2):
            body = changed(body, chance.choice(places(body)), chance.choice(WRONG[:-1]))
        if error := refusal(kind, body):
            check(error, body)


def kinds_of_schema(schema: Any) -> set[str]:
    """The types of pydantic's schemas of which a body is made."""
    found = set()
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            found.add(schema["type"])
        schema = [part for name, part in schema.items() if name != "json_schema_input_schema"]
    if isinstance(schema, list | tuple):
        for each in schema:
            found |= kinds_of_schema(each)
    return found


def test_every_kind_of_field_has_words_for_its_errors() -> None:
    """A new kind of field in a body must come with words for its errors."""
    used = set().union(*(kinds_of_schema(kind.__pydantic_core_schema__) for kind, _ in GOOD))
    used &= set(get_args(core_schema.CoreSchemaType))
    known = {
        *("model", "model-fields", "str", "int", "float", "bool", "list", "tuple", "dict"),
        *("literal", "none", "nullable", "union", "tagged-union", "default", "any", "definitions"),
        *("definition-ref", "function-before", "function-after"),
    }
    assert used <= known
    every = set(get_args(core_schema.ErrorType))
    assert {*wording._WANTED, *wording._LIMITS, *wording._LENGTHS, *wording._FIXED_WORDS} <= every


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ChatBody, {"max_tokens": 0}, "max_tokens must be at least 1, not 0."),
        (ChatBody, {"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5."),
        (ChatBody, {"temperature": 9}, "temperature must be at most 2, not 9."),
        (ChatBody, {"temperature": "hot"}, "temperature must be a number, not a string."),
        (ChatBody, {"messages": []}, "messages must not be empty."),
        (ChatBody, {"messages": "hello"}, "messages must be a list, not a string."),
        (ChatBody, {"stream": 1}, "stream must be true or false, not 1."),
        (ChatBody, {"n": 129}, "n must be at most 128, not 129."),
        (
            ChatBody,
            {"response_format": {"type": "json_schema"}},
            "response_format has the type json_schema, which needs json_schema or schema, and no "
            "other field.",
        ),
        (
            ChatBody,
            {"tools": [{**TOOL, "function": {"name": "a b"}}]},
            'tools[0].function.name must be 1 to 128 letters, digits, or . _ : / -, not "a b".',
        ),
        (ChatBody, {"tool_choice": {"type": "function"}}, "'tool_choice.function' is missing."),
        (
            ChatBody,
            {"tool_choice": "some"},
            'tool_choice must be "none", "auto", "required" or "any", or an object, not "some".',
        ),
        (
            ChatBody,
            {"messages": [{"role": 5, "content": "a"}]},
            "messages[0].role must be a string, not 5.",
        ),
        (ResponsesBody, {"background": 1}, "background must be true or false, not 1."),
        (ResponsesBody, {"input": 5}, "input must be a string or a list."),
        (MessagesBody, {"max_tokens": None}, "The field 'max_tokens' is missing."),
    ],
)
def test_each_error_names_the_field_and_its_type_and_the_given_value(
    kind: Any, fields: dict[str, Any], message: str
) -> None:
    good = dict(next(body for each, body in GOOD if each is kind))
    good.pop("structured_outputs", None)
    error = refusal(kind, {**good, **fields})
    assert message in str(error)
