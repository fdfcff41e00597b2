"""The messages of a chat: in OpenAI's form, in the form of all APIs, and in templates' form."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from serve.front.http.body import Tolerant, refuse

MAX_ROLE_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a message. text contains a line for each part, as vLLM joins them. parts is
    empty unless a part contains further fields, which some templates read."""

    text: str
    thought: str = ""
    parts: tuple[dict[str, Any], ...] = ()


def _read_content(content: Any) -> Content | None:
    if content is None:
        return None
    if isinstance(content, str):
        return Content(content)
    if not isinstance(content, list):
        refuse("must be a string or a list of text parts")
    texts: list[str] = []
    thoughts: list[str] = []
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        kind, text = _read_part(index, part)
        if kind == "thought":
            thoughts.append(text)
            continue
        texts.append(text)
        others = part if isinstance(part, dict) else {}
        parts.append({**others, "type": "text", "text": text})
    has_more = any(part.keys() > {"type", "text"} for part in parts)
    return Content(
        text="\n".join(texts),
        thought="\n".join(thoughts),
        parts=tuple(parts) if has_more else (),
    )


def _read_part(index: int, part: Any) -> tuple[Literal["text", "thought"], str]:
    """Returns the kind of a message's part, and its text."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        refuse(f'part {index} is not an object such as {{"type": "text", "text": "..."}}')
    if kind not in _FIELDS_OF_PARTS:
        refuse(f"part {index} has type {kind[:40]!r}: this model reads text only")
    field = _FIELDS_OF_PARTS[kind]
    text = part.get(field)
    if kind in _THOUGHTS:
        thought = _read_content(text)
        return "thought", thought.text if thought else ""
    if not isinstance(text, str):
        refuse(f"part {index} needs {field!r} with a string")
    return "text", text


# The field with the text, by the type of a part.
_FIELDS_OF_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "reasoning": "text",
}
_THOUGHTS = ("thinking", "reasoning")

PartsInput = list[str | dict[str, Any]]  # as a client gives them
_READ_CONTENT = BeforeValidator(_read_content, json_schema_input_type=str | PartsInput | None)
AnyContent = Annotated[Any, _READ_CONTENT]


def _arguments_as_text(arguments: Any) -> Any:
    if arguments is None:
        return ""
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


ArgumentsInput = str | dict[str, Any] | None  # as a client gives them
_AS_TEXT = BeforeValidator(_arguments_as_text, json_schema_input_type=ArgumentsInput)
Arguments = Annotated[str, _AS_TEXT]


class CalledFunction(Tolerant):
    name: str
    arguments: Arguments = ""


class CalledTool(Tolerant):
    name: str
    input: str


class ToolCall(Tolerant):
    """A call of a function, or of a custom tool, whose input is text."""

    id: str | None = None
    function: CalledFunction | None = None
    custom: CalledTool | None = None

    @model_validator(mode="after")
    def _calls_something(self) -> "ToolCall":
        if self.function is None and self.custom is None:
            refuse("a call needs a function")
        return self


class RequestMessage(Tolerant):
    """A message of any role. The role function and function_call are OpenAI's older names."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARACTERS)]
    content: AnyContent = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    audio: None = None

    @model_validator(mode="after")
    def _says_something(self) -> "RequestMessage":
        is_assistant = self.role == "assistant"
        enough = _FIELDS_OF_ASSISTANT if is_assistant else {"content"}
        if not enough & self.model_fields_set:
            what = "content or tool_calls" if is_assistant else "content"
            refuse(f"a message of the role {self.role[:40]!r} needs {what}")
        return self

    @property
    def thought(self) -> str | None:
        """The reasoning, from whichever field contains it."""
        if self.reasoning_content is not None:
            return self.reasoning_content
        if isinstance(self.reasoning, str):
            return self.reasoning
        if self.content is None:
            return None
        return self.content.thought or None


# An assistant's message needs at least one of these fields.
_FIELDS_OF_ASSISTANT = {
    "content",
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
}

# --- the form that all APIs share


class FunctionPart(TypedDict):
    """The name and the arguments of a call. The arguments are JSON as text."""

    name: str
    arguments: str


class CallPart(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionPart


class ChatMessage(TypedDict):
    """A message of OpenAI's chat without empty fields; parts only if they are more than text."""

    role: str
    content: NotRequired[str]
    parts: NotRequired[list[dict[str, Any]]]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallPart]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True, slots=True)
class AssistantPart:
    """A part of an assistant's message. One of the fields is set."""

    text: str | None = None
    thought: str | None = None
    call: CallPart | None = None


def called(id: str, name: str, arguments: str) -> AssistantPart:
    """Returns a call of a function. arguments are JSON as text."""
    function: FunctionPart = {"name": name, "arguments": arguments}
    return AssistantPart(call={"id": id, "type": "function", "function": function})


def plain_messages(given: Iterable[RequestMessage]) -> list[ChatMessage]:
    """Returns OpenAI's messages without empty fields, and with tools in place of functions."""
    messages: list[ChatMessage] = []
    last_id = ""
    for number, message in enumerate(given):
        plain: ChatMessage = {"role": message.role}
        if message.content is not None:
            plain["content"] = message.content.text
            if message.content.parts:
                plain["parts"] = list(message.content.parts)
        if message.name is not None:
            plain["name"] = message.name
        if message.role == "assistant":
            last_id = _add_thoughts_and_calls(plain, message, number) or last_id
        else:
            plain.setdefault("content", "")
        if message.role in ("tool", "function"):
            plain["role"] = "tool"
            plain["tool_call_id"] = message.tool_call_id or last_id
        messages.append(plain)
    return messages


def _add_thoughts_and_calls(plain: ChatMessage, message: RequestMessage, number: int) -> str:
    """Adds the fields of an assistant's message. Returns the id of its last call, or ""."""
    if message.thought is not None:
        plain["reasoning_content"] = message.thought
    given = message.tool_calls or []
    if message.function_call is not None and not given:
        given = [ToolCall(function=message.function_call)]
    calls = [_plain_call(call, number, index) for index, call in enumerate(given)]
    if calls:
        plain["tool_calls"] = calls
        return calls[-1]["id"]
    plain.setdefault("content", "")
    return ""


def _plain_call(call: ToolCall, number: int, index: int) -> CallPart:
    """Returns a call of the history. A call without an id gets an id of nine letters and digits,
    the only form that some templates accept, which depends only on the call's place."""
    function: FunctionPart
    if call.function is not None:
        function = {"name": call.function.name, "arguments": call.function.arguments}
    else:
        assert call.custom is not None
        arguments = json.dumps({"input": call.custom.input})
        function = {"name": call.custom.name, "arguments": arguments}
    id = call.id or f"c{number % 100_000:05}{index % 1000:03}"
    return {"id": id, "type": "function", "function": function}


def joined_parts(given: Iterable[ChatMessage | AssistantPart]) -> Iterator[ChatMessage]:
    """Joins an assistant's thoughts, texts and calls that follow each other to one message."""
    parts: list[AssistantPart] = []
    for each in given:
        if isinstance(each, AssistantPart):
            parts.append(each)
            continue
        if parts:
            yield _assistant_message(parts)
            parts = []
        yield each
    if parts:
        yield _assistant_message(parts)


def _assistant_message(parts: list[AssistantPart]) -> ChatMessage:
    texts = [part.text for part in parts if part.text is not None]
    thoughts = [part.thought for part in parts if part.thought is not None]
    calls = [part.call for part in parts if part.call is not None]
    message: ChatMessage = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def template_message(
    message: ChatMessage, reads: Callable[[str], bool] = lambda _: False
) -> dict[str, Any]:
    """Converts a message for chat templates: developer becomes system, and arguments an object. A
    template that reads further fields of parts gets the parts."""
    fields: dict[str, Any] = {**message}
    parts = fields.pop("parts", [])
    names = {name for part in parts for name in part}
    if any(map(reads, names - {"type", "text"})):
        fields["content"] = parts
    if message["role"] == "developer":
        fields["role"] = "system"
    if "tool_calls" in message:
        fields["tool_calls"] = [_template_call(call) for call in message["tool_calls"]]
    return fields


def _template_call(call: CallPart) -> dict[str, Any]:
    function = call["function"]
    arguments = arguments_object(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_object(text: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object."""
    if not text.strip():
        return {}
    try:
        arguments = from_json(text, allow_inf_nan=False)
        json.dumps(arguments, allow_nan=False)  # `from_json` reads 1e999 as inf.
    except ValueError:
        return invalid_arguments(text)
    return arguments if isinstance(arguments, dict) else invalid_arguments(text)


def invalid_arguments(text: str) -> dict[str, Any]:
    """Wraps text that is not a JSON object, or was cut off, in an object, as Anthropic advises."""
    return {"INVALID_JSON": text}
