"""The bodies of Anthropic's messages as chats."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.core.errors import RequestError
from serve.front.api.anthropic.body import CountBody, MessagesBody
from serve.front.api.opaque import opaque
from serve.front.api.openai import parse
from serve.front.api.request import ChatRequest
from serve.front.api.thinking import Thinking
from serve.front.text import grammars
from serve.hub.model_config import SamplingDefaults
from tests.errors import fails

MESSAGES = "/v1/messages"
HELLO: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hello"}],
}
TOOL = {"name": "add", "input_schema": {"type": "object"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def called(id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "add", "input": arguments}


def result(id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


class Vocabulary:
    """The parts of a tokenizer that a request needs."""

    eos_ids, vocab_size = frozenset({2}), 100
    sampling_defaults = SamplingDefaults()


TOKENIZER: Any = Vocabulary()


def as_chat(**fields: Any) -> ChatRequest:
    body = parse(MessagesBody, {**HELLO, **fields})
    return body.request(TOKENIZER)


def chat_messages(*messages: Any, **fields: Any) -> list[Any]:
    return as_chat(messages=list(messages), **fields).prompt.messages


def test_content_blocks_become_the_messages_of_a_chat() -> None:
    """An assistant's thoughts, texts and calls become one message, as templates expect."""
    thought = {"type": "thinking", "thinking": "Add.", "signature": "any"}
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system, asked, answered, first, second, more = chat_messages(
        user(text("1 + 2?", **cached), text("And 3 + 4?", citations=None)),
        assistant(thought, text("So:"), called("a", x=1, y=2), called("b", x=3, y=4)),
        user(result("a", "3"), result("b", [text("seven"), text("!")], is_error=True), text("Go")),
        system=[text("Be short."), text("Be kind.")],
    )
    assert system == {"role": "system", "content": "Be short.\nBe kind."}
    assert asked == {"role": "user", "content": "1 + 2?\nAnd 3 + 4?"}
    assert (answered["content"], answered["reasoning_content"]) == ("So:", "Add.")
    assert [call["id"] for call in answered["tool_calls"]] == ["a", "b"]
    assert answered["tool_calls"][1]["function"] == {"name": "add", "arguments": '{"x": 3, "y": 4}'}
    assert first == {"role": "tool", "tool_call_id": "a", "content": "3"}
    assert second["content"] == "Error: seven\n!"
    assert more == {"role": "user", "content": "Go"}


def test_consecutive_turns_of_one_role_are_joined() -> None:
    turns = [
        {"role": "system", "content": "Late."},
        user(text("a")),
        {"role": "user", "content": "b"},
    ]
    assert chat_messages(*turns, system="Early.") == [
        {"role": "system", "content": "Early.\nLate."},
        {"role": "user", "content": "a\nb"},
    ]


def test_a_final_text_of_the_assistant_is_continued() -> None:
    chat = as_chat(messages=[user(text("Name?")), {"role": "assistant", "content": "I am"}])
    assert chat.prompt.continues
    assert not chat.prompt.adds_generation_prompt
    assert not as_chat().prompt.continues


@pytest.mark.long
def test_many_blocks_are_read_in_linear_time() -> None:
    """Joining them one by one would copy the text so far each time: minutes for one body."""
    blocks = [text("x" * 10)] * 100_000
    (asked, _, _) = chat_messages(user(*blocks), assistant(*blocks), user(text("?")))
    assert len(asked["content"]) == 1_100_000 - 1


def test_parameters_of_the_body_reach_the_chat() -> None:
    chat = as_chat(
        tools=[{**TOOL, "description": "Adds.", "type": "custom"}],
        tool_choice={"type": "tool", "name": "add"},
        stop_sequences=["END", "STOP"],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        stream=True,
        chat_template_kwargs={"extra": "x"},
    )
    (tool,) = chat.tool_use.tools
    assert (tool.function.name, tool.function.description) == ("add", "Adds.")
    assert chat.tool_use.choice.function.name == "add"  # type: ignore[union-attr]
    assert (chat.max_tokens, chat.stop.strings) == (50, ("END", "STOP"))
    (sampling,) = chat.samplings
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (chat.is_stream, chat.prompt.options) == (True, {"extra": "x"})


def test_a_json_schema_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "default": None}}}
    chat = as_chat(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert chat.samplings[0].grammar == grammars.of_schema(schema)
    assert chat.grammar_param == "output_config.format"


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
    ],
)
def test_each_tool_choice_is_translated_to_that_of_chats(
    choice: Any, wanted: str, parallel: bool
) -> None:
    chat = as_chat(tools=[{"name": "add", "input_schema": {}}], tool_choice=choice)
    assert (chat.tool_use.choice, chat.tool_use.is_parallel) == (wanted, parallel)
    assert chat.tool_use.tools[0].function.parameters == {"type": "object"}


NOTHING: dict[str, Any] = {
    "metadata": {"user_id": "u", "session": 5},
    "service_tier": "standard_only",
    "cache_control": {"type": "persistent", "ttl": "1d"},
    "tools": None,
    "system": None,
    "output_config": {"task_budget": {"type": "tokens", "total": 5}},
    "betas": ["effort-2025-11-24"],
    "inference_geo": "eu",
    "mcp_servers": [],
    "container": None,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "speed": "fast",
    "safeguards": {"any": "thing"},
    "fallbacks": [{"model": "other"}],
}


@pytest.mark.parametrize("name", NOTHING)
def test_harmless_fields_do_not_change_the_chat(name: str) -> None:
    changed, plain = as_chat(**{name: NOTHING[name]}), as_chat()
    same = tuple(replace(each, seed=0) for each in plain.samplings)
    assert replace(changed, samplings=same) == replace(plain, samplings=same)
    assert tuple(replace(each, seed=0) for each in changed.samplings) == same


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, Thinking()),
        ({"thinking": {"type": "adaptive"}}, Thinking(is_wanted=True)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024, "block_binding": {}}},
            Thinking(budget=1024, is_wanted=True),
        ),
        ({"thinking": {"type": "disabled"}}, Thinking(is_wanted=False)),
        ({"output_config": {"effort": "low"}}, Thinking("low")),
        (
            {"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}},
            Thinking("max", is_wanted=False),
        ),
    ],
)
def test_thinking_is_set_by_the_fields_thinking_and_effort(fields: Any, wanted: Thinking) -> None:
    found = as_chat(**fields)
    assert replace(found.thinking, budget_param=wanted.budget_param) == wanted
    is_disabled = fields.get("thinking") == {"type": "disabled"}
    assert found.shows_thoughts is not is_disabled
    if "thinking" in fields:
        assert found.thinking.budget_param == "thinking.budget_tokens"


def test_the_cache_salt_of_the_body_reaches_the_chat() -> None:
    assert as_chat(cache_salt="s").cache_salt == "s"


def test_a_demanded_tool_is_forced_even_if_a_format_is_given() -> None:
    """A format alone is a grammar; with a tool that is demanded, the call wins."""
    format = {"type": "json_schema", "schema": {"type": "object"}, "name": "extra"}
    for field in ({"output_config": {"format": format}}, {"output_format": format}):
        alone = as_chat(**field)
        assert alone.grammar_param == "output_config.format"
        forced = as_chat(**field, tools=[TOOL], tool_choice={"type": "any"})
        plain = as_chat(tools=[TOOL], tool_choice={"type": "any"})
        assert forced.samplings[0].grammar == plain.samplings[0].grammar
        assert forced.samplings[0].grammar != alone.samplings[0].grammar


# --- histories


def test_unknown_fields_in_the_history_are_ignored() -> None:
    """Clients send back what servers and libraries gave them."""
    noise = {"provider_specific_fields": {"a": 1}, "caller": {"type": "direct"}, "phase": "x"}
    turns = [
        {**user(text("1 + 2?", **noise)), "id": "m1", "timestamp": 5},
        {
            **assistant(
                {"type": "thinking", "thinking": "Add.", **noise},
                text("So:", citations=[{"type": "any"}], parsed_output=None),
                {**called("a", x=1), **noise, "cache_control": {"type": "x"}},
            ),
            "stop_reason": "tool_use",
        },
        user(result("a", "3", toolset_name=None, **noise)),
    ]
    plain = [
        user(text("1 + 2?")),
        assistant({"type": "thinking", "thinking": "Add."}, text("So:"), called("a", x=1)),
        user(result("a", "3")),
    ]
    assert chat_messages(*turns) == chat_messages(*plain)


def test_thinking_that_cannot_be_read_is_left_out() -> None:
    asked, answered, _ = chat_messages(
        user(text("Name?")),
        assistant(
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "", "signature": "of another server"},
            text("Ada."),
        ),
        user(text("Again?")),
    )
    assert asked["content"] == "Name?"
    assert answered == {"role": "assistant", "content": "Ada."}


def test_omitted_thinking_is_read_from_its_signature() -> None:
    signature = opaque("Add: 日本")
    thought = {"type": "thinking", "thinking": "", "signature": signature}
    _, answered, _ = chat_messages(
        user(text("1 + 2?")), assistant(thought, called("a")), user(result("a", "3"))
    )
    assert answered["reasoning_content"] == "Add: 日本"


def test_texts_of_mixed_tool_results_are_read_in_order() -> None:
    """The text in a result becomes text, in its order."""
    source = {"type": "text", "data": "Line one.", "media_type": "text/plain"}
    listed = {"type": "content", "content": [text("Part."), text("Other.")]}
    found = {"type": "search_result", "source": "u", "title": "T", "content": [text("Found.")]}
    parts = [
        text("First."),
        {"type": "document", "source": source, "title": "Paper"},
        {"type": "document", "source": listed},
        found,
        {"type": "tool_reference", "tool_name": "add"},
    ]
    *_, answered = chat_messages(
        user(text("?")), assistant(called("a")), user(result("a", parts, is_error=True))
    )
    assert answered["content"].split("\n") == [
        *("Error: First.", "Paper", "Line one.", "Part.", "Other.", "T (u)", "Found."),
        "The tool add is available.",
    ]


def test_results_of_tools_that_anthropic_hosts_are_read() -> None:
    """Of a conversation that began at Anthropic."""
    found = {"type": "web_search_result", "url": "u", "encrypted_content": "secret"}
    _, call, answer, said, _ = chat_messages(
        user(text("News?")),
        assistant(
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
            text("None."),
        ),
        user(text("Thanks.")),
    )
    assert call["tool_calls"][0]["function"]["name"] == "web_search"
    assert json.loads(answer["content"]) == {"type": "web_search_result", "url": "u"}
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "s")
    assert said == {"role": "assistant", "content": "None."}


@pytest.mark.parametrize("nothing", [None, []])
def test_empty_content_is_accepted(nothing: Any) -> None:
    """An answer may be empty, and so may a tool's result."""
    turns = [
        user("a", text("b")),
        {"role": "assistant", "content": nothing},
        {"role": "user", "content": nothing},
        assistant(called("x")),
        user(result("x", nothing)),
    ]
    asked, call, answered = chat_messages(*turns)
    assert asked["content"] == "a\nb"
    assert "tool_calls" in call
    assert answered["content"] == ""


def test_system_messages_meant_for_one_turn_are_left_out_of_later_turns() -> None:
    hint = {"role": "system", "content": "Be quick.", "clear_at": "next_user_message"}
    now = chat_messages(user(text("a")), hint)
    later = chat_messages(user(text("a")), hint, assistant(text("b")), user(text("c")))
    assert [each["content"] for each in now] == ["a", "Be quick."]
    assert [each["content"] for each in later] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "which is not one of system, user, assistant",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0] needs a role"),
        (
            {"messages": [user({"type": "image", "source": {}})]},
            "messages[0].content[0] has the type",
        ),
        ({"messages": [user(called("a"))]}, "which is not one of text, tool_result"),
        (
            {"messages": [assistant(result("a", "b"))]},
            "which is not one of text, thinking, redacted_thinking, tool_use",
        ),
        ({"messages": [user(result("a", [{"type": "image"}]))]}, "messages[0].content[0].content"),
        ({"messages": [user()]}, "messages"),
        ({"messages": [user(text("a")), assistant(called("a"))]}, "messages"),
        ({"messages": [user(text("a")), assistant(text(""))]}, "messages"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "frobnicate_2025", "name": "f"}]}, "tools[0] has an unknown type"),
        ({"tools": [{"type": 5, "name": "f"}]}, "tools[0] has an unknown type"),
        ({"tools": [5]}, "tools[0]"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any", "name": "add"}}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [5]}, "mcp_servers[0]"),
        ({"cache_salt": ""}, "cache_salt"),
        (
            {"messages": [user(result("a", [{"type": "document", "source": {"type": "base64"}}]))]},
            "messages[0].content[0].content[0].source",
        ),
        ({"output_config": {"effort": "lots"}}, "output_config.effort"),
        ({"stream": "yes"}, "stream"),
        ({"n": 2}, "n"),
    ],
)
def test_unsupported_fields_are_refused_with_their_names(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        as_chat(**fields)
    assert named in str(caught.value)
    assert caught.value.http_status == 400


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
kinds = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])
strings = ("text", "id", "tool_use_id", "name", "thinking", "signature")
blocks = st.fixed_dictionaries(
    {"type": kinds},
    optional={
        **{name: st.text(max_size=9) for name in strings},
        "input": st.dictionaries(st.text(max_size=5), anything),
        "content": anything,
        "is_error": st.booleans(),
    },
)
turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.lists(blocks, max_size=3) | st.text(max_size=9) | anything,
    }
)


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.lists(turns, max_size=4),
    st.dictionaries(st.sampled_from(sorted(MessagesBody.model_fields)), anything, max_size=2),
)
def test_every_random_body_is_either_read_or_refused_with_a_request_error(
    messages: Any, fields: Any
) -> None:
    try:
        chat = as_chat(**{"messages": messages, **fields})
    except RequestError:
        return
    assert chat.prompt.continues is (chat.prompt.messages[-1]["role"] == "assistant")


def test_counting_tokens_refuses_fields_that_do_not_concern_the_prompt() -> None:
    with fails(RequestError, "unknown_parameter", match="max_tokens"):
        parse(CountBody, HELLO)
