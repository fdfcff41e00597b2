"""Histories that clients send back: what libraries and other servers put into them changes nothing
of the prompt, or arrives in it."""

from typing import Any

import pytest

from tests.compatibility.asking import ANSWER, CHAT, MESSAGES, RESPONSES, USER, Server, text_of

CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "f", "arguments": '{"x": 1}'},
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "four"}
PART = {"type": "text", "text": "hello"}

# Name -> value of fields without an effect, in the messages of every role, and in their parts.
OF_MESSAGES: dict[str, Any] = {
    "reasoning_details": [{"type": "reasoning.text", "text": "t"}],
    "thinking_blocks": [{"type": "thinking", "thinking": "t", "signature": "s"}],
    "provider_specific_fields": {"refusal": None},
    "parsed": {"a": 1},
    "prefix": False,
    "citations": ["http://127.0.0.1"],
    "annotations": [{"type": "url_citation", "url_citation": {"url": "http://127.0.0.1"}}],
    "id": "msg_1",
    "timestamp": 1700000000.5,
    "metadata": {"a": "b"},
    "status": "success",
    "artifact": {"a": 1},
    "refusal": None,
    "audio": None,
    "function_call": None,
    "cache_control": {"type": "ephemeral"},
    "phase": "final_answer",
    "encrypted_content": "gAAA",
    "extra_field": "0",
}
OF_CALLS: dict[str, Any] = {
    "index": 0,
    "extra_content": {"google": {"thought_signature": "s"}},
    "cache_control": {"type": "ephemeral"},
    "provider_specific_fields": {},
    "id": None,
    "type": None,
}
OF_FUNCTIONS: dict[str, Any] = {"parsed_arguments": {"x": 1}, "returns": None, "output": None}


def called(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def changed(**fields: Any) -> list[dict[str, Any]]:
    """The call, with these fields of its function."""
    return [USER, called({**CALL, "function": {**CALL["function"], **fields}}), RESULT]


PLAIN = [USER, called(CALL), RESULT]
SAID = [USER, {"role": "assistant", "content": "hello"}, USER]
# Name -> messages, and others of which the model gets the same prompt.
SAME: dict[str, tuple[list[Any], list[Any]]] = {
    **{
        f"assistant.{name}": ([USER, {**SAID[1], name: value}, USER], SAID)
        for name, value in OF_MESSAGES.items()
    },
    **{
        f"tool.{name}": ([USER, called(CALL), {**RESULT, name: value}], PLAIN)
        for name, value in OF_MESSAGES.items()
    },
    **{f"user.{name}": ([{**USER, name: value}], [USER]) for name, value in OF_MESSAGES.items()},
    **{
        f"part.{name}": ([{"role": "user", "content": [{**PART, name: value}]}], [USER])
        for name, value in OF_MESSAGES.items()
    },
    **{
        f"call.{name}": ([USER, called({**CALL, name: value}), RESULT], PLAIN)
        for name, value in OF_CALLS.items()
    },
    **{
        f"function.{name}": (changed(**{name: value}), PLAIN)
        for name, value in OF_FUNCTIONS.items()
    },
    "call without a type": ([USER, called({"function": CALL["function"]}), RESULT], PLAIN),
    "arguments as an object": (changed(arguments={"x": 1}), PLAIN),
    "empty arguments": (changed(arguments=""), changed(arguments="{}")),
    "arguments null": (changed(arguments=None), changed(arguments="{}")),
    "no tool_call_id": ([USER, called(CALL), {"role": "tool", "content": "four"}], PLAIN),
    "name of a result": ([USER, called(CALL), {**RESULT, "name": "f"}], PLAIN),
    "string as a part": ([{"role": "user", "content": ["hello"]}], [USER]),
    "part without a type": ([{"role": "user", "content": [{"text": "hello"}]}], [USER]),
    "part input_text": (
        [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        [USER],
    ),
    "part output_text": (
        [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}, USER],
        SAID,
    ),
    "part refusal": (
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "hello"}]}, USER],
        SAID,
    ),
    "unread field of a part": (
        [{"role": "user", "content": [{**PART, "source_lang_code": "cs"}]}],
        [USER],
    ),
    "function_call": (
        [
            USER,
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "name": "f", "content": "four"},
        ],
        PLAIN,
    ),
    "reasoning null": ([USER, {**SAID[1], "reasoning": None}, USER], SAID),
    "reasoning_content null": ([USER, {**SAID[1], "reasoning_content": None}, USER], SAID),
    "developer": (
        [{"role": "developer", "content": "s"}, USER],
        [{"role": "system", "content": "s"}, USER],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_equivalent_histories_of_chats_give_the_same_prompt(server: Server, name: str) -> None:
    given, plain = SAME[name]
    asked = server.ask(CHAT, {"messages": given})
    assert asked.prompt == server.plain(CHAT, {"messages": plain}).prompt
    assert text_of(CHAT, asked.body) == ANSWER


def begin(role: str, text: str = "") -> str:
    return f"<|im_start|>{role}\n{text}"


# Name -> messages before the question, and the text that the model gets of them.
SEEN: dict[str, tuple[list[Any], str]] = {
    **{
        f"{role} null": ([{"role": role, "content": None}], begin(role, "<|im_end|>"))
        for role in ("user", "tool", "assistant", "system")
    },
    **{
        f"{role} []": ([{"role": role, "content": []}], begin(role, "<|im_end|>"))
        for role in ("user", "tool", "assistant", "system")
    },
    "function null": ([{"role": "function", "content": None}], begin("tool", "<|im_end|>")),
    "custom role": ([{"role": "my-custom-role", "content": "x"}], begin("my-custom-role", "x")),
    "reasoning": (
        [{"role": "assistant", "content": "a", "reasoning": "Thought."}],
        "<think>\nThought.\n</think>\na",
    ),
    "reasoning_content": (
        [{"role": "assistant", "content": "a", "reasoning_content": "Thought."}],
        "<think>\nThought.\n</think>\na",
    ),
    "part thinking": (
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Thought.", "signature": "s"},
                    {"type": "text", "text": "a"},
                ],
            }
        ],
        "<think>\nThought.\n</think>\na",
    ),
    **{
        f"arguments {arguments}": (changed(arguments=arguments), "INVALID_JSON")
        for arguments in ("{", "5", "null", "[1]", "not JSON")
    },
    "custom call": (
        [
            USER,
            called({"id": "1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}),
        ],
        '"arguments": {"input": "ls"}',
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_text_in_histories_of_chats_reaches_the_model(server: Server, name: str) -> None:
    given, text = SEEN[name]
    assert text in server.ask(CHAT, {"messages": [*given, USER]}).prompt


# --- Responses


def items(**fields: Any) -> list[Any]:
    """A call and its result, with these fields in the call."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'}
    result = {"type": "function_call_output", "call_id": "1", "output": "four"}
    return [USER, {**call, **fields}, result]


def message(**fields: Any) -> list[Any]:
    part = {"type": "output_text", "text": "hello", "annotations": []}
    return [USER, {"type": "message", "role": "assistant", "content": [part], **fields}, USER]


# Items that contain no result, so that there is nothing of them to show to a model.
WITHOUT_RESULT: list[dict[str, Any]] = [
    {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
    {"type": "image_generation_call", "result": None},
    {"type": "mcp_list_tools", "server_label": "s", "tools": []},
]
SAME_ITEMS: dict[str, tuple[list[Any], list[Any]]] = {
    **{
        f"message.{name}": (message(**{name: value}), SAID)
        for name, value in {
            **{name: OF_MESSAGES[name] for name in ("id", "status", "phase", "encrypted_content")},
            **{name: OF_MESSAGES[name] for name in ("metadata", "cache_control", "extra_field")},
        }.items()
    },
    **{
        f"function_call.{name}": (items(**{name: value}), items())
        for name, value in {
            "id": "fc_1",
            "status": "completed",
            "namespace": None,
            "caller": None,
            "parsed_arguments": {"x": 1},
            "extra_field": "0",
        }.items()
    },
    "output as parts": (
        [*items()[:2], {**items()[2], "output": [{"type": "input_text", "text": "four"}]}],
        items(),
    ),
    "output with a status": ([*items()[:2], {**items()[2], "status": "completed"}], items()),
    "part input_text": (
        [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        [USER],
    ),
    "part refusal": (message(content=[{"type": "refusal", "refusal": "hello"}]), SAID),
    "part with logprobs": (
        message(content=[{"type": "output_text", "text": "hello", "logprobs": []}]),
        SAID,
    ),
    "reasoning without text": ([USER, {"type": "reasoning", "summary": []}], [USER]),
    "reasoning of another server": (
        [USER, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA", "content": None}],
        [USER],
    ),
    **{
        item["type"]: ([USER, {**item, "id": "1", "status": "completed"}], [USER])
        for item in WITHOUT_RESULT
    },
}


# Name -> items, and the text that the model gets of them.
SEEN_ITEMS: dict[str, tuple[list[Any], str]] = {
    "reasoning with a summary": (
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Thought."}]},
            {"role": "assistant", "content": "a"},
        ],
        "<think>\nThought.\n</think>\na",
    ),
    "reasoning with content": (
        [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Thought."}],
            },
            {"role": "assistant", "content": "a"},
        ],
        "<think>\nThought.\n</think>\na",
    ),
    "custom_tool_call": (
        [{"type": "custom_tool_call", "call_id": "1", "name": "sh", "input": "ls"}],
        '"arguments": {"input": "ls"}',
    ),
    "custom_tool_call_output": (
        [
            {"type": "custom_tool_call", "call_id": "1", "name": "sh", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "four"},
        ],
        begin("tool", "four"),
    ),
    "local_shell_call": (
        [
            {
                "type": "local_shell_call",
                "id": "1",
                "call_id": "1",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            }
        ],
        '"local_shell"',
    ),
    "arguments that are no JSON": (items(arguments="{"), "INVALID_JSON"),
}


@pytest.mark.parametrize("name", SEEN_ITEMS)
def test_text_in_histories_of_responses_reaches_the_model(server: Server, name: str) -> None:
    given, text = SEEN_ITEMS[name]
    assert text in server.ask(RESPONSES, {"input": [*given, USER]}).prompt


# --- Messages


def turns(*blocks: Any) -> list[Any]:
    """A turn of the assistant with these blocks, between two of the user."""
    return [USER, {"role": "assistant", "content": list(blocks)}, USER]


USE = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
USED = {"type": "tool_result", "tool_use_id": "1", "content": "four"}


def results(*blocks: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [*blocks]}]


SAME_TURNS: dict[str, tuple[list[Any], list[Any]]] = {
    **{
        f"turn.{name}": ([USER, {**SAID[1], name: OF_MESSAGES[name]}, USER], SAID)
        for name in ("id", "timestamp", "metadata", "status", "phase", "extra_field")
    },
    **{
        f"text.{name}": (turns({**PART, name: value}), SAID)
        for name, value in {
            **{name: OF_MESSAGES[name] for name in ("cache_control", "id", "timestamp")},
            "citations": [{"type": "char_location", "cited_text": "t"}],
        }.items()
    },
    **{
        f"tool_use.{name}": (turns({**USE, name: value}), turns(USE))
        for name, value in {
            "cache_control": {"type": "ephemeral"},
            "caller": {"type": "direct"},
            "provider_specific_fields": None,
        }.items()
    },
    "tool_result.cache_control": (
        results({**USED, "cache_control": {"type": "ephemeral"}}),
        results(USED),
    ),
    "tool_result of parts": (
        results({**USED, "content": [{"type": "text", "text": "four"}]}),
        results(USED),
    ),
    "redacted_thinking": (turns({"type": "redacted_thinking", "data": "x"}, PART), SAID),
    "thinking of another server": (
        turns({"type": "thinking", "thinking": "", "signature": "gAAA"}, PART),
        SAID,
    ),
}


SAME_HISTORIES = [
    *((RESPONSES, "input", name) for name in SAME_ITEMS),
    *((MESSAGES, "messages", name) for name in SAME_TURNS),
]


@pytest.mark.parametrize(("path", "field", "name"), SAME_HISTORIES)
def test_equivalent_histories_of_responses_and_messages_give_the_same_prompt(
    server: Server, path: str, field: str, name: str
) -> None:
    given, plain = (SAME_ITEMS if path == RESPONSES else SAME_TURNS)[name]
    asked = server.ask(path, {field: given})
    assert asked.prompt == server.plain(path, {field: plain}).prompt
    assert text_of(path, asked.body) == ANSWER


# Name -> turns before the question, and the text that the model gets of them.
SEEN_TURNS: dict[str, tuple[list[Any], str]] = {
    "thinking without a signature": (
        turns({"type": "thinking", "thinking": "Thought."}, PART),
        "<think>\nThought.\n</think>\nhello",
    ),
    "thinking": (
        turns({"type": "thinking", "thinking": "Thought.", "signature": "s"}, PART),
        "<think>\nThought.\n</think>\nhello",
    ),
    "empty result": (results({"type": "tool_result", "tool_use_id": "1"}), begin("tool")),
    "result []": (results({**USED, "content": []}), begin("tool")),
    "is_error": (results({**USED, "is_error": True}), "Error: four"),
    "server_tool_use": (
        turns(
            {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "q"}},
            {
                "type": "web_search_tool_result",
                "tool_use_id": "1",
                "content": [{"type": "web_search_result", "title": "A title", "url": "u"}],
            },
        ),
        "A title",
    ),
    "turn of the system": ([USER, {"role": "system", "content": "Be brief."}], "Be brief."),
}


@pytest.mark.parametrize("name", SEEN_TURNS)
def test_text_in_histories_of_messages_reaches_the_model(server: Server, name: str) -> None:
    given, text = SEEN_TURNS[name]
    assert text in server.ask(MESSAGES, {"messages": given}).prompt


@pytest.mark.parametrize("name", SAME_TURNS)
def test_equivalent_histories_of_messages_have_equal_token_counts(
    server: Server, name: str
) -> None:
    """count_tokens takes the same histories."""
    given, plain = SAME_TURNS[name]
    counts = [
        server.post(f"{MESSAGES}/count_tokens", {"messages": each}) for each in (given, plain)
    ]
    assert counts[0].status_code == 200
    assert counts[0].json() == counts[1].json()
