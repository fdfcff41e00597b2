"""Tools for models without a format of their own: a text describes the tools, and marked JSON in
ordinary text is a call. Calls and results of the history are written in the same way."""

import json
from typing import Any

from serve.front.text.calls.json_calls import JsonCalls, parameters_of
from serve.front.text.calls.parts import Tools
from serve.front.text.dialects.interface import Dialect, Messages

GENERIC_CALLS = JsonCalls("<tool_call>", "</tool_call>")

_TEXT = """\
# Tools

You may call one or more functions to help with the user's query. These functions are available,
each with the JSON schema of its parameters:

<tools>
{tools}
</tools>

To call a function, write one JSON object with its name and its arguments between <tool_call> and \
</tool_call>, and then wait for the result:

<tool_call>
{{"name": "function_name", "arguments": {{"parameter": "value"}}}}
</tool_call>

Call a function only when it is needed; otherwise answer in plain text."""

_RESULT = "<tool_response>"
_RESULT_END = "</tool_response>"


def prepare(messages: Messages, tools: Tools) -> Messages:
    """Returns the messages as plain text: tools in the system's, calls in the assistant's, results
    in the user's. Users' messages in a row are joined, as many templates demand."""
    prepared: Messages = []
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        plain = _result(message) if is_result else _without_calls(message)
        is_beside_result = was_result or is_result
        if plain.get("role") == "user" and is_beside_result and _ends_with_user(prepared):
            last = prepared[-1]
            prepared[-1] = {**last, "content": f"{_content(last)}\n{_content(plain)}"}
        else:
            prepared.append(plain)
        was_result = is_result
    if tools:
        return with_system(prepared, describe(tools))
    return prepared


def prepare_if_tools(messages: Messages, tools: Tools) -> Messages:
    """Prepares messages if there are tools. Otherwise the template itself can show calls."""
    if tools:
        return prepare(messages, tools)
    return messages


def _ends_with_user(messages: Messages) -> bool:
    return bool(messages) and messages[-1].get("role") == "user"


def _content(message: dict[str, Any]) -> str:
    return str(message.get("content") or "")


def _result(message: dict[str, Any]) -> dict[str, Any]:
    content = f"{_RESULT}\n{_content(message)}\n{_RESULT_END}"
    return {"role": "user", "content": content}


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its calls in its text, as the model writes them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        function = call["function"]
        fields = {"name": function["name"], "arguments": function["arguments"]}
        body = json.dumps(fields, ensure_ascii=False)
        texts.append(f"{GENERIC_CALLS.start}\n{body}\n{GENERIC_CALLS.end}")
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(texts)}


def describe(tools: Tools) -> str:
    """Returns the text that explains to a model which tools it has and how to call one."""
    lines: list[str] = []
    for tool in tools:
        function = tool.get("function") or tool
        shown = {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": parameters_of(function),
        }
        lines.append(json.dumps(shown, ensure_ascii=False))
    return _TEXT.format(tools="\n".join(lines))


def with_system(messages: Messages, text: str, *, keeps_empty: bool = False) -> Messages:
    """Adds text to the system's message, or as a new one. keeps_empty keeps a blank line first."""
    if messages and messages[0].get("role") == "system":
        first, *rest = messages
    else:
        first = {"role": "system", "content": ""}
        rest = messages
    joined = f"{_content(first)}\n\n{text}"
    if not keeps_empty:
        joined = joined.lstrip("\n")
    return [{**first, "content": joined}, *rest]


def without_system(messages: Messages) -> Messages:
    """Moves system messages into the user's first, for templates without the role system."""
    texts = [_content(message) for message in messages if message.get("role") == "system"]
    others = [message for message in messages if message.get("role") != "system"]
    text = "\n\n".join(filter(None, texts))
    if not text:
        return others
    for index, message in enumerate(others):
        if message.get("role") == "user":
            joined = {**message, "content": f"{text}\n\n{_content(message)}"}
            return [*others[:index], joined, *others[index + 1 :]]
    return [{"role": "user", "content": text}, *others]


GENERIC = Dialect("generic", GENERIC_CALLS, prepare=prepare, shows_tools=False)
