"""Bodies of responses as chats."""

from typing import Any

import pytest

from serve.core.errors import RequestError
from serve.front.api.openai import parse
from serve.front.api.request import ChatRequest
from serve.front.api.responses.body import ResponsesBody
from serve.front.api.responses.items import messages_of
from serve.front.text import grammars
from serve.front.text.tokens import Tokenizer

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def custom(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "write", **fields}


def body(**fields: Any) -> ResponsesBody:
    return parse(ResponsesBody, {"model": "m", "input": "hi", **fields})


def request(tokenizer: Tokenizer, **fields: Any) -> ChatRequest:
    asked = body(**fields)
    return asked.request(messages_of(asked.input, asked.offer), tokenizer)


def test_instructions_become_a_system_message(tokenizer: Tokenizer) -> None:
    assert request(tokenizer, instructions="Be short.").prompt.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]


def test_input_items_become_the_messages_of_a_chat(tokenizer: Tokenizer) -> None:
    """An assistant's thoughts, texts and calls become one message, as templates expect."""
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
    user, assistant, tool = request(tokenizer, input=items).prompt.messages
    assert user == {"role": "user", "content": "1 + 2?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("So:", "Add.")
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "3"}


def think(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}


def test_parameters_of_the_body_reach_the_chat(tokenizer: Tokenizer) -> None:
    chat = request(
        tokenizer,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        stream=True,
        cache_salt="s",
    )
    (sampling,) = chat.samplings
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.25)
    assert sampling.grammar == grammars.of_schema(TOOL["parameters"])
    (tool,) = chat.tool_use.tools
    assert (tool.function.name, tool.function.strict) == ("add", True)
    assert chat.tool_use.choice.function.name == "add"  # type: ignore[union-attr]
    assert not chat.tool_use.is_parallel
    assert chat.max_tokens == 7
    assert (chat.is_stream, chat.cache_salt) == (True, "s")


@pytest.mark.parametrize("schema", [{"type": "object", "default": None}, None])
def test_a_text_format_becomes_a_grammar(tokenizer: Tokenizer, schema: Any) -> None:
    """null in a schema is a value, not an absent field."""
    format = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    chat = request(tokenizer, text={"format": format})
    assert chat.samplings[0].grammar == grammars.of_schema(schema or {})
    assert chat.grammar_param == "response_format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"conversation": "c"}, "conversation"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"n" * 65: ""}}, "metadata"),
        ({"metadata": {"n": "v" * 513}}, "metadata"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "newest"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"tools": [{"type": "invented"}]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [custom(format={"type": "grammar"})]}, "tools[0].format"),
        ({"tools": [custom(format={"type": "yaml"})]}, "tools[0].format"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"text": {"verbosity": "huge"}}, "text.verbosity"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0]"),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "input[0].input"),
        ({"top_logprobs": False}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"store": "yes"}, "store"),
        ({"invented": 1}, "invented"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format"),
    ],
)
def test_unsupported_fields_are_refused_with_their_names(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        body(**fields)
    assert (caught.value.param or "").startswith(param)


def test_reasoning_effort_and_budget_reach_the_chat(tokenizer: Tokenizer) -> None:
    chat = request(tokenizer, reasoning={"effort": "low"}, thinking_token_budget=9)
    assert (chat.thinking.effort, chat.thinking.budget) == ("low", 9)
    assert request(tokenizer, reasoning={"summary": "auto"}).thinking.effort is None


def test_the_schema_of_the_body_allows_unknown_fields_in_its_parts() -> None:
    """Unknown fields of these parts are ignored, so the description must allow them."""
    schemas = ResponsesBody.model_json_schema()["$defs"]
    for name in ("ReasoningOptions", "TextOptions", "FunctionTool", "MessageItem"):
        assert schemas[name]["additionalProperties"] is True, name
