"""The items of a response's input, and their conversion to messages of a chat."""

import json
import secrets
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, TypeAdapter, WithJsonSchema

from serve.core.errors import RequestError
from serve.front.api.messages import AssistantPart, ChatMessage, called, joined_parts
from serve.front.api.opaque import opened
from serve.front.api.responses.offer import Json, OfferedTools, ToolDeclaration
from serve.front.http.body import Tolerant, refuse

# --- texts


class TextPart(Tolerant):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(Tolerant):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def as_parts(content: Any) -> Any:
    """Returns content as a list of parts. A text becomes one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return listed(content)


def listed(given: Any) -> Any:
    """Refuses anything but a list."""
    if not isinstance(given, list):
        refuse("must be a string or a list")
    return given


Part = Annotated[TextPart | RefusalPart, Discriminator("type")]
PartList = Annotated[list[Part], Field(fail_fast=True)]
_AS_PARTS = BeforeValidator(as_parts, json_schema_input_type=str | list[Part])
Parts = Annotated[PartList, _AS_PARTS]


def _text(parts: Iterable[TextPart | RefusalPart] | None) -> str:
    return "\n".join(part.text for part in parts or ())


# --- items

Listed = Annotated[list[Json], Field(fail_fast=True)] | None
# The prefixes of items' ids.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "tool_search_call": "tsc",
    "response": "resp",
}

Given = ChatMessage | AssistantPart


class _Item(Tolerant):
    id: str | None = None
    call_id: str | None = None

    @property
    def call(self) -> str:
        """The id that a call and its result share."""
        return self.call_id or self.id or "call"

    def _result(self, text: str) -> ChatMessage:
        return {"role": "tool", "content": text, "tool_call_id": self.call}

    def parts(self, offer: OfferedTools) -> Iterator[Given]:
        """Yields the messages of a chat, or parts of them, that stand for this item."""
        raise NotImplementedError


# A null type is the same as none.
_MESSAGE_TYPE = WithJsonSchema({"enum": ["message", None], "default": "message"})


class MessageItem(_Item):
    type: Annotated[Literal["message"], _MESSAGE_TYPE] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        text = _text(self.content)
        if self.role == "assistant":
            yield AssistantPart(text=text)
        else:
            yield {"role": self.role, "content": text}


class FunctionCall(_Item):
    type: Literal["function_call"]
    name: str
    namespace: str | None = None
    arguments: str

    def parts(self, offer: OfferedTools) -> Iterator[Given]:
        name = offer.model_name("function", self.name, self.namespace)
        yield called(self.call, name, self.arguments)


class CustomCall(_Item):
    type: Literal["custom_tool_call"]
    name: str
    namespace: str | None = None
    input: str

    def parts(self, offer: OfferedTools) -> Iterator[Given]:
        name = offer.model_name("custom", self.name, self.namespace)
        yield called(self.call, name, _json({"input": self.input}))


class CallResult(_Item):
    """The result of a call. Its output is a text, or text parts."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    output: Parts

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        yield self._result(_text(self.output))


class DefinedCall(_Item):
    """A call of a tool that OpenAI defines and the client runs."""

    type: Literal["local_shell_call", "shell_call"]
    action: Json

    def parts(self, offer: OfferedTools) -> Iterator[Given]:
        kind: Literal["local_shell", "shell"] = "local_shell"
        if self.type == "shell_call":
            kind = "shell"
        name = offer.model_name(kind, kind)
        arguments = {key: value for key, value in self.action.items() if value}
        arguments.pop("type", None)
        yield called(self.call, name, _json(arguments))


class PatchCall(_Item):
    type: Literal["apply_patch_call"]
    operation: Json

    def parts(self, offer: OfferedTools) -> Iterator[Given]:
        name = offer.model_name("apply_patch", "apply_patch")
        yield called(self.call, name, _json(self.operation))


class SearchCall(_Item):
    type: Literal["tool_search_call"]
    arguments: Json | str

    def parts(self, offer: OfferedTools) -> Iterator[Given]:
        name = offer.model_name("tool_search", "tool_search")
        yield called(self.call, name, _text_or_json(self.arguments))


class DefinedResult(_Item):
    """The result of a shell or of a patch, whose output is text or JSON."""

    type: Literal["shell_call_output", "apply_patch_call_output"]
    output: Any = None
    status: str | None = None

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        output = self.output
        if output is None:
            output = self.status or ""
        yield self._result(_text_or_json(output))


class ToolItem(_Item):
    """Tools that are offered in addition, or that a search has found."""

    type: Literal["additional_tools", "tool_search_output"]
    tools: Annotated[list[ToolDeclaration], Field(fail_fast=True)]

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        if self.type == "tool_search_output":
            names = [getattr(tool, "name", tool.type) for tool in self.tools]
            found = {"available_tools": names}
            yield self._result(_json(found))


class ReasoningItem(_Item):
    """The reasoning before an answer. If another server encrypted it, its summary is used."""

    type: Literal["reasoning"]
    summary: PartList | None = None
    content: PartList | None = None
    encrypted_content: str | None = None

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        thought = _text(self.content) or opened(self.encrypted_content)
        thought = thought or _text(self.summary)
        if thought:
            yield AssistantPart(thought=thought)


class McpCall(_Item):
    """A call that another server made and answered."""

    type: Literal["mcp_call"]
    name: str
    arguments: str = "{}"
    output: str | None = None
    error: Any = None

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        yield called(self.call, self.name, self.arguments)
        if self.output is not None:
            yield self._result(self.output)
        elif self.error is not None:
            yield self._result(_json({"error": self.error}))
        else:
            yield self._result("")


class CodeCall(_Item):
    """Code that another server ran."""

    type: Literal["code_interpreter_call"]
    code: str | None = None
    outputs: Listed = None

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        arguments = {"code": self.code or ""}
        yield called(self.call, "code_interpreter", _json(arguments))
        logs = [str(each.get("logs") or "") for each in self.outputs or ()]
        yield self._result("\n".join(logs))


class FileSearchCall(_Item):
    """A search that another server made in files."""

    type: Literal["file_search_call"]
    queries: Annotated[list[str], Field(fail_fast=True)] = []
    results: Listed = None

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        arguments = {"queries": self.queries}
        yield called(self.call, "file_search", _json(arguments))
        texts = [str(each.get("text") or "") for each in self.results or ()]
        yield self._result("\n".join(texts))


class HostedItem(_Item):
    """An action of another server, without its result, which the next message contains."""

    type: Literal[
        "web_search_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
    ]

    def parts(self, offer: OfferedTools) -> Iterator[Given]:  # noqa: ARG002
        return iter(())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text_or_json(value: Any) -> str:
    if isinstance(value, str):
        return value
    return _json(value)


def _as_items(given: Any) -> Any:
    """Returns an input as a list of items, all of which have their type."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [_with_type(item) for item in listed(given)]


def _with_type(item: Any) -> Any:
    """Returns an item with a type: an item without one becomes a message."""
    if isinstance(item, dict) and item.get("type") is None:
        return {**item, "type": "message"}
    return item


def item_ids(given: Any) -> list[str]:
    """Returns the ids of the stored items that an input refers to."""
    references = filter(_is_reference, given if isinstance(given, list) else [])
    return [reference["id"] for reference in references]


def with_items(given: list[Any], stored: Json) -> list[Any]:
    """Returns an input with stored items in place of its references. `stored` maps ids to items."""
    return [stored[item["id"]] if _is_reference(item) else item for item in given]


def _is_reference(item: Any) -> bool:
    """Whether an item is a reference, which may lack a type if it contains only an id."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    is_bare = kind is None and item.keys() in ({"id"}, {"id", "type"})
    is_reference = is_bare or kind == "item_reference"
    if is_reference and not isinstance(item.get("id"), str):
        raise RequestError("The id of an item_reference must be a string.", param="input")
    return is_reference


Item = Annotated[
    MessageItem
    | ReasoningItem
    | FunctionCall
    | CustomCall
    | CallResult
    | DefinedCall
    | DefinedResult
    | PatchCall
    | SearchCall
    | ToolItem
    | McpCall
    | CodeCall
    | FileSearchCall
    | HostedItem,
    Discriminator("type"),
]
_AS_ITEMS = BeforeValidator(_as_items, json_schema_input_type=str | list[Item])
Items = Annotated[list[Item], Field(min_length=1, fail_fast=True), _AS_ITEMS]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def new_item_id(kind: str) -> str:
    return f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"


def items_of(given: list[Json]) -> list[Item]:
    """Validates items that this server wrote."""
    return _ITEMS.validate_python(given)


def messages_of(items: Iterable[Item], offer: OfferedTools) -> list[ChatMessage]:
    """Converts items to the messages of a chat. Raises RequestError."""
    parts = (part for item in items for part in item.parts(offer))
    return list(joined_parts(parts))
