"""What would change an answer and is not supported is refused, by the name of its field and for a
reason that docs/api gives."""

from typing import Any

import pytest

from tests.compatibility.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    USER,
    Server,
    is_documented,
    tool,
)

WEATHER = tool("weather", city={"type": "string"})
NOT_SUPPORTED = "Chats and completions refuse these parameters unless their value has no effect."
NO_MEDIA = "Images, audio, video and files are refused."


def said(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": content, **others}]}


def blocks(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
# Path, fields, the field that the error names, and the reason in docs/api.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, said("user", [IMAGE]), "messages[1].content", NO_MEDIA),
    *(
        (CHAT, said("user", [{"type": kind}]), "messages[1].content", NO_MEDIA)
        for kind in ("input_audio", "file", "video_url")
    ),
    (CHAT, said("assistant", "a", audio={"id": "1"}), "messages[1].audio", NO_MEDIA),
    *(
        (CHAT, {name: value}, name, NOT_SUPPORTED)
        for name, value in {
            "audio": {"voice": "x"},
            "best_of": 2,
            "chat_template": "x",
            "detokenize": False,
            "documents": [{}],
            "echo": True,
            "kv_transfer_params": {"a": 1},
            "length_penalty": 2,
            "logits_processors": ["x"],
            "logprob_token_ids": [1],
            "mm_processor_kwargs": {"a": 1},
            "modalities": ["text", "audio"],
            "moderation": {},
            "priority": 5,
            "prompt_embeds": "x",
            "repetition_detection": {},
            "spaces_between_special_tokens": False,
            "suffix": "x",
            "truncation_side": "right",
            "use_beam_search": True,
            "vllm_xargs": {"a": 1},
            "web_search_options": {},
        }.items()
    ),
    *(
        (COMPLETIONS, {name: value}, name, NOT_SUPPORTED)
        for name, value in {
            "suffix": "x",
            "use_beam_search": True,
            "prompt_embeds": "x",
            "functions": [{"name": "f"}],
            "reasoning_effort": "low",
            "thinking_token_budget": 5,
        }.items()
    ),
    (CHAT, {"n": 0}, "n", "1 (default) to 128 choices"),
    (CHAT, {"n": 129}, "n", "1 (default) to 128 choices"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "Completions also accept 0 with `echo`"),
    (CHAT, {"max_tokens": -2}, "max_tokens", "from 1. With -1, or more than fits into the context"),
    (CHAT, {"temperature": 9}, "temperature", "0 to 2; default"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs `logprobs`"),
    (
        CHAT,
        {"thinking_token_budget": -5},
        "thinking_token_budget",
        "from 0: the maximum number of reasoning tokens",
    ),
    (
        CHAT,
        {"reasoning_effort": "some"},
        "reasoning_effort",
        "`none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`",
    ),
    (CHAT, {"messages": []}, "messages", "at least one; see"),
    (
        CHAT,
        {"response_format": {"type": "yaml"}},
        "response_format",
        "`text`, `json_object`, `json_schema` with `json_schema.schema`, or a",
    ),
    (
        CHAT,
        {"tools": [tool("a b")]},
        "tools[0].function.name",
        "names have up to 128 letters, digits, or `. _ : / -`",
    ),
    (CHAT, {"tools": [tool(f"t{n}") for n in range(1025)]}, "tools", "up to 1,024 functions"),
    (
        CHAT,
        {"tools": [WEATHER], "functions": [{"name": "f"}]},
        "functions",
        "OpenAI's older form of `tools`",
    ),
    (
        CHAT,
        {"tools": [WEATHER], "tool_choice": tool("other")},
        "tool_choice",
        "a function by name",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "a function by name"),
    *(
        (path, {"structured_outputs": {name: ""}}, "structured_outputs", "Empty grammars and")
        for path in (CHAT, COMPLETIONS, RESPONSES)
        for name in ("grammar", "regex")
    ),
    *(
        (CHAT, {name: ""}, name, "Empty grammars and empty regular expressions get 400")
        for name in ("grammar", "regex", "guided_grammar", "guided_regex", "ebnf")
    ),
    (CHAT, {"grammar": "root ::= ("}, "grammar", "is read as GBNF and translated to Lark"),
    (RESPONSES, {"conversation": "c"}, "conversation", "`conversation` and `prompt`"),
    (RESPONSES, {"prompt": {"id": "p"}}, "prompt", "`conversation` and `prompt`"),
    (RESPONSES, {"unknown": 1}, "unknown", "and unknown fields at the top level"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0]",
        "no images or files",
    ),
    (
        RESPONSES,
        {"tool_choice": {"type": "web_search"}},
        "tool_choice",
        "a `tool_choice` that demands a tool which is not offered",
    ),
    (
        RESPONSES,
        {"previous_response_id": "resp_nothing"},
        "previous_response_id",
        "400 `previous_response_not_found` if it is not stored",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param", "reason"), REFUSED, ids=lambda v: str(v)[:50])
def test_unsupported_fields_are_refused_with_their_names(
    server: Server, path: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    named, message = server.refusal(path, fields)
    assert named.startswith(param), (named, message)
    assert is_documented(reason)
    if reason == NOT_SUPPORTED:
        assert is_documented(f"`{param}`")


# Anthropic's errors name the field in their message.
OF_MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"unknown": 1}, "unknown", "an unknown field at the top level"),
    ({"max_tokens": 0}, "max_tokens", "Anthropic: 0 fills the cache"),
    ({"container": "c"}, "container", "images, PDF files, a `container`"),
    (
        blocks({"type": "image", "source": {"type": "base64", "data": "AAAA"}}),
        "messages[0].content[0]",
        "images, PDF files, a `container`",
    ),
    (
        blocks({"type": "document", "source": {"type": "base64", "data": "AAAA"}}),
        "messages[0].content[0]",
        "images, PDF files, a `container`",
    ),
    (
        {
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "web_search",
        "A `tool_choice` that demands one gets 400",
    ),
    ({"tools": [{"type": "nothing_1", "name": "x"}]}, "tools[0]", "a tool of an unknown type"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        "thinking",
        "`enabled` with `budget_tokens` from 0",
    ),
]


@pytest.mark.parametrize(("fields", "word", "reason"), OF_MESSAGES, ids=lambda v: str(v)[:50])
def test_unsupported_fields_of_messages_are_refused_with_their_names(
    server: Server, fields: dict[str, Any], word: str, reason: str
) -> None:
    _, message = server.refusal(MESSAGES, fields)
    assert word in message
    assert is_documented(reason)
