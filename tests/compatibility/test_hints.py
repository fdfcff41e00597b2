"""Hints: fields that clients of other servers send. Those that cannot change an answer change
nothing, and the others have their effect."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from serve.core.types import Sampling
from tests.compatibility.asking import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Asked,
    Server,
    name_of,
    text_of,
    tool,
)

HARMLESS: dict[str, list[Any]] = {
    "client_metadata": [{"a": 1}],
    "inference_geo": ["eu"],
    "metadata": [{"a": "b"}, []],
    "prediction": [{"type": "content", "content": "x"}],
    "prompt_cache_key": ["k"],
    "prompt_cache_options": [{"ttl": 5}],
    "prompt_cache_retention": ["in_memory", "24h"],
    "request_id": ["r"],
    "safety_identifier": ["s"],
    "service_tier": ["auto", "default", "flex", "priority", "scale"],
    "session_id": ["s"],
    "store": [True, False],
    "user": ["u", 5],
    "verbosity": ["low", "medium", "high"],
}
CHAT_ONLY: list[dict[str, Any]] = [
    {"include_reasoning": True},
    {"modalities": ["text"]},
    {"stream_options": {"include_usage": True}},
    {"chat_template_kwargs": {"any": 1}},
    {"tool_choice": "none"},
    {"parallel_tool_calls": True},
]
OF_RESPONSES: list[dict[str, Any]] = [
    {"client_metadata": {"a": 1}},
    {"context_management": [{"type": "compaction", "compact_threshold": 9}]},
    *({"include": [value]} for value in ("web_search_call.action.sources", "some.other")),
    {"max_tool_calls": 5},
    {"metadata": {"a": "b"}},
    {"prompt_cache_key": "k"},
    {"prompt_cache_options": {"ttl": 5}},
    {"prompt_cache_retention": "24h"},
    {"reasoning": {}},
    {"reasoning": {"effort": None, "summary": "auto"}},
    {"request_id": "r"},
    {"return_progress": True},
    {"safety_identifier": "s"},
    {"service_tier": "priority"},
    {"session_id": "s"},
    {"timings_per_token": True},
    {"store": False},
    {"stream_options": {"include_obfuscation": False}},
    {"text": {"verbosity": "low"}},
    {"truncation": "auto"},
    {"truncation": "disabled"},
    {"user": 5},
]
OF_MESSAGES: list[dict[str, Any]] = [
    {"betas": ["context-management-2025-06-27"]},
    {"billing_policy": {}},
    {"cache_control": {"type": "ephemeral"}},
    {"container": None},
    {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"diagnostics": {}},
    {"inference_geo": "eu"},
    {"mcp_servers": []},
    {"metadata": {"user_id": "u"}},
    {"output_config": {"task_budget": {"type": "tokens", "total": 5}}},
    {"service_tier": "auto"},
    {"speed": "fast"},
    {"thinking": {"type": "adaptive", "display": "summarized"}},
    {"thinking": {"type": "adaptive", "display": "omitted"}},
    {"system": [{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}]},
]
HINTS: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {name: value}) for name, values in HARMLESS.items() for value in values),
    *((COMPLETIONS, {name: values[0]}) for name, values in HARMLESS.items()),
    *((CHAT, fields) for fields in CHAT_ONLY),
    *((RESPONSES, fields) for fields in OF_RESPONSES),
    *((MESSAGES, fields) for fields in OF_MESSAGES),
]


@pytest.mark.parametrize(("path", "fields"), HINTS, ids=name_of)
def test_fields_that_are_hints_change_no_answer(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    asked, plain = server.ask(path, fields), server.plain(path, {})
    assert without_random(asked.sampling) == without_random(plain.sampling)
    assert asked.prompt.replace("<|im_start|>system\n<|im_end|>\n", "") == plain.prompt
    assert text_of(path, asked.body) == ANSWER
    assert "x-ignored-fields" not in asked.reply.headers


def without_random(sampling: Sampling) -> tuple[Any, ...]:
    """The fields that a request decides: a seed that it does not give is random."""
    names = ("temperature", "top_p", "top_k", "min_p", "grammar", "reasoning", "logprobs")
    return tuple(getattr(sampling, name) for name in names)


# --- hints of tools

WEATHER = tool("weather", city={"type": "string"})
FLAT = {"name": "weather", "parameters": WEATHER["function"]["parameters"]}
SCHEMA = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
TOOL_HINTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        (CHAT, WEATHER, {**WEATHER, name: value})
        for name, value in {
            "cache_control": {"type": "ephemeral"},
            "defer_loading": False,
            "eager_input_streaming": True,
            "extra": 1,
        }.items()
    ),
    (CHAT, WEATHER, {**WEATHER, "function": {**WEATHER["function"], "returns": {}}}),
    *(
        (RESPONSES, {**FLAT, "type": "function"}, {**FLAT, "type": "function", name: value})
        for name, value in {"defer_loading": False, "extra": 1, "output_schema": {}}.items()
    ),
    *(
        (MESSAGES, SCHEMA, {**SCHEMA, name: value})
        for name, value in {
            "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True,
            "defer_loading": False,
            "allowed_callers": ["direct"],
            "input_examples": [{"city": "Oslo"}],
            "type": "custom",
        }.items()
    ),
]


@pytest.mark.parametrize(("path", "plain", "given"), TOOL_HINTS, ids=name_of)
def test_hints_in_tools_change_no_prompt(
    server: Server, path: str, plain: dict[str, Any], given: dict[str, Any]
) -> None:
    asked = server.ask(path, {"tools": [given]})
    assert asked.prompt == server.plain(path, {"tools": [plain]}).prompt
    assert "weather" in asked.prompt
    assert text_of(path, asked.body) == ANSWER


# --- hints that do something

EFFORTS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24576}
EFFORTS_WITHOUT_LIMIT = "xhigh", "max"


def effort(path: str, value: str) -> dict[str, Any]:
    """The field in which an API takes an effort."""
    if path == CHAT:
        return {"reasoning_effort": value}
    name = "reasoning" if path == RESPONSES else "output_config"
    return {name: {"effort": value}}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("value", [*EFFORTS, *EFFORTS_WITHOUT_LIMIT])
def test_reasoning_effort_sets_a_budget_of_tokens(server: Server, path: str, value: str) -> None:
    """The template of this model knows no effort."""
    reasoning = server.ask(path, effort(path, value)).sampling.reasoning
    assert reasoning is not None
    assert reasoning.budget == EFFORTS.get(value)


Check = Callable[[Asked], bool]


def budget_is(num_tokens: int) -> Check:
    def check(asked: Asked) -> bool:
        reasoning = asked.sampling.reasoning
        return reasoning is not None and reasoning.budget == num_tokens

    return check


EFFECTS: list[tuple[str, dict[str, Any], Check]] = [
    (CHAT, {"thinking_token_budget": 7}, budget_is(7)),
    (CHAT, {"enable_thinking": False}, budget_is(0)),
    (RESPONSES, {"thinking_token_budget": 7}, budget_is(7)),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 7}}, budget_is(7)),
    (MESSAGES, {"thinking": {"type": "disabled"}}, budget_is(0)),
    (CHAT, {"max_tokens": 2}, lambda asked: asked.body["usage"]["completion_tokens"] == 2),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, lambda asked: asked.sampling.logprobs == 20),
    (CHAT, {"prompt_logprobs": -1}, lambda asked: asked.sampling.prompt_logprobs == 20),
    (COMPLETIONS, {"logprobs": -1}, lambda asked: asked.sampling.logprobs == 20),
    (
        RESPONSES,
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        lambda asked: len(first_part(asked)["logprobs"][0]["top_logprobs"]) == 2,
    ),
    (
        CHAT,
        {"some_new_field": 1},
        lambda asked: asked.reply.headers["x-ignored-fields"] == "some_new_field",
    ),
]


def first_part(asked: Asked) -> Any:
    return asked.body["output"][0]["content"][0]


@pytest.mark.parametrize(("path", "fields", "check"), EFFECTS, ids=name_of)
def test_fields_that_change_an_answer_have_their_effect(
    server: Server, path: str, fields: dict[str, Any], check: Check
) -> None:
    assert check(server.ask(path, fields))


def test_a_truncation_of_auto_leaves_out_the_oldest_items(server: Server) -> None:
    long = [
        {"role": "user", "content": f"number {number} " + "word " * 20_000} for number in range(5)
    ]
    asked = server.ask(RESPONSES, {"input": long, "truncation": "auto"})
    assert "number 4" in asked.prompt
    assert "number 0" not in asked.prompt


def test_the_field_return_progress_adds_progress_of_the_prefill_to_a_stream(server: Server) -> None:
    asked = server.ask(CHAT, {"stream": True, "return_progress": True})
    lines = [line[6:] for line in asked.reply.text.splitlines() if line.startswith("data: {")]
    first, second, *others = (json.loads(line) for line in lines)
    for chunk, num_processed in ((first, 0), (second, 7)):
        progress = chunk["prompt_progress"]
        assert progress.pop("time_ms") >= 0
        # As the played engine has it.
        assert progress == {"total": 7, "cache": 0, "processed": num_processed}
        assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert not any("prompt_progress" in chunk for chunk in others)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in others)
    assert text == ANSWER
    whole = server.ask(CHAT, {"return_progress": True})
    assert text_of(CHAT, whole.body) == ANSWER
