"""The blocks and turns of Anthropic's messages, and their conversion to messages of a chat.

Unknown fields of blocks change nothing: clients send back what servers gave them.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from serve.front.api.messages import AssistantPart, ChatMessage, called
from serve.front.api.opaque import opened
from serve.front.http.body import Tolerant, refuse

Role = Literal["system", "user", "assistant"]
Parts = Iterator[ChatMessage | AssistantPart]


def _as_blocks(content: Any) -> Any:
    """Returns content as a list of blocks. A text becomes one block, and null an empty list."""
    if content is None:
        return []
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        refuse("must be a string or a list of blocks")
    return [_as_block(block) for block in content]


def _as_block(block: Any) -> Any:
    return {"type": "text", "text": block} if isinstance(block, str) else block


def _as_list_of(kind: Any) -> BeforeValidator:
    return BeforeValidator(_as_blocks, json_schema_input_type=None | str | list[str | kind])


_FAIL_FAST = Field(fail_fast=True)


def _said(role: Role, text: str) -> ChatMessage | AssistantPart:
    if role == "assistant":
        return AssistantPart(text=text)
    return {"role": role, "content": text}


class TextBlock(Tolerant):
    type: Literal["text"]
    text: str

    def parts(self, role: Role) -> Parts:
        yield _said(role, self.text)


Texts = Annotated[list[TextBlock], _FAIL_FAST, _as_list_of(TextBlock)]


def _lines(texts: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in texts)


class SearchResultBlock(Tolerant):
    type: Literal["search_result"]
    source: str
    title: str
    content: Texts

    @property
    def text(self) -> str:
        heading = f"{self.title} ({self.source})"
        return f"{heading}\n{_lines(self.content)}" if self.content else heading

    def parts(self, role: Role) -> Parts:
        yield _said(role, self.text)


class TextSource(Tolerant):
    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class ContentSource(Tolerant):
    type: Literal["content"]
    content: Texts

    @property
    def text(self) -> str:
        return _lines(self.content)


class DocumentBlock(Tolerant):
    """A document that is text."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        texts = self.title, self.context, self.source.text
        return "\n".join(filter(None, texts))

    def parts(self, role: Role) -> Parts:
        yield _said(role, self.text)


class ToolReferenceBlock(Tolerant):
    """The result of a search for tools: from here on the tool is offered."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} is available."


ResultBlock = Annotated[
    TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]


class ToolUseBlock(Tolerant):
    """A call of a tool that the client runs, or that another server ran."""

    type: Literal["tool_use", "server_tool_use", "mcp_tool_use"]
    id: str
    name: str
    input: dict[str, Any] | None = None

    def parts(self, _: Role) -> Parts:
        arguments = json.dumps(self.input or {}, ensure_ascii=False)
        yield called(self.id, self.name, arguments)


class ToolResultBlock(Tolerant):
    """The result of a call. Templates cannot show failures, so the text mentions is_error."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[ResultBlock], _FAIL_FAST, _as_list_of(ResultBlock)] = []
    is_error: bool | None = None

    def parts(self, _: Role) -> Parts:
        text = "\n".join(block.text for block in self.content)
        content = f"Error: {text}" if self.is_error else text
        yield {"role": "tool", "content": content, "tool_call_id": self.tool_use_id}


class ServerResultBlock(Tolerant):
    """The result of a tool that another server ran, in that server's own form."""

    type: Literal[
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_result",
        "advisor_tool_result",
    ]
    tool_use_id: str
    content: Any = None

    def parts(self, _: Role) -> Parts:
        text = _plain_text(self.content)
        yield {"role": "tool", "content": text, "tool_call_id": self.tool_use_id}


def _plain_text(content: Any) -> str:
    """Returns the content of a result as text, without encrypted fields."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(map(_plain_text, content))
    if not isinstance(content, dict):
        return json.dumps(content)
    if isinstance(content.get("text"), str):
        return str(content["text"])
    readable = {name: content[name] for name in content if not name.startswith("encrypted_")}
    return json.dumps(readable, ensure_ascii=False)


class ThinkingBlock(Tolerant):
    """A thought of an earlier answer. The signature is not checked, but may contain the thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    def parts(self, _: Role) -> Parts:
        thought = self.thinking or opened(self.signature)
        if thought:
            yield AssistantPart(thought=thought)


class RedactedThinkingBlock(Tolerant):
    """A thought that only Anthropic can read, so it is left out."""

    type: Literal["redacted_thinking"]

    def parts(self, _: Role) -> Parts:
        yield from ()


class ChangedTool(Tolerant):
    type: Literal["tool_reference"]
    name: str


class ToolChangeBlock(Tolerant):
    """Offers a declared tool from here on, or withdraws it."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedTool

    def parts(self, _: Role) -> Parts:
        yield from ()


UserBlock = Annotated[
    TextBlock | ToolResultBlock | DocumentBlock | SearchResultBlock | ToolChangeBlock,
    Field(discriminator="type"),
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ServerResultBlock,
    Field(discriminator="type"),
]
SystemBlock = Annotated[TextBlock | ToolChangeBlock, Field(discriminator="type")]


class SystemTurn(Tolerant):
    """A system message in a chat. clear_at may end it at the user's next message."""

    role: Literal["system"]
    content: Annotated[list[SystemBlock], _FAIL_FAST, _as_list_of(SystemBlock)] = []
    clear_at: Literal["next_user_message", "never"] | None = None


class UserTurn(Tolerant):
    role: Literal["user"]
    content: Annotated[list[UserBlock], _FAIL_FAST, _as_list_of(UserBlock)]


class AssistantTurn(Tolerant):
    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], _FAIL_FAST, _as_list_of(AssistantBlock)]


Turn = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]


def parts_of(turns: Sequence[Turn]) -> Parts:
    """Returns the parts of turns, one by one."""
    users = [number for number, turn in enumerate(turns) if turn.role == "user"]
    last_user = users[-1] if users else -1
    for number, turn in enumerate(turns):
        is_temporary = turn.role == "system" and turn.clear_at == "next_user_message"
        if is_temporary and number < last_user:
            continue
        for block in turn.content:
            yield from block.parts(turn.role)
