"""Tools as Anthropic's requests declare them, and the choice of those that the model is offered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from serve.core.errors import RequestError
from serve.front.api.anthropic.blocks import (
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    Turn,
)
from serve.front.api.anthropic.known_tools import HOSTED_PREFIXES, KNOWN_TOOLS
from serve.front.api.tools import MAX_TOOLS, Function, FunctionName, NamedTool, Tool, ToolName
from serve.front.api.tools import ToolChoice as ChatToolChoice
from serve.front.http.body import Body, Tolerant, refuse


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        refuse('must be a schema of type "object"')
    return {**schema, "type": "object"}  # An existing type keeps its place.


class UserDefinedTool(Tolerant):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(_of_object)]
    strict: bool | None = None
    defer_loading: bool | None = None

    def as_tool(self) -> Tool:
        """Returns the tool as a chat declares it."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class ClientTool(Tolerant):
    """A tool that Anthropic defines and the client runs."""

    type: str
    name: ToolName | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    max_characters: int | None = None

    def as_tool(self) -> Tool:
        """Returns the tool as a chat declares it."""
        known = KNOWN_TOOLS[self.type]
        description = known.description
        if self.max_characters is not None:
            description += f" A view shows up to {self.max_characters} characters."
        function = Function(
            name=self.name or known.name,
            description=description,
            parameters=known.schema,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class ServerTool(Tolerant):
    """A tool that would run on Anthropic's servers. It is not offered to the model."""

    type: str
    name: str | None = None
    mcp_server_name: str | None = None

    @property
    def shown_name(self) -> str:
        return self.name or self.mcp_server_name or self.type


def _kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if kind is None or kind == "custom":
        return "custom"
    if not isinstance(kind, str):
        return None
    if kind in KNOWN_TOOLS:
        return "client"
    return "hosted" if kind.startswith(HOSTED_PREFIXES) else None


def _of_known_type(tool: Any) -> Any:
    if isinstance(tool, dict) and _kind(tool) is None:
        types = ", ".join(KNOWN_TOOLS)
        refuse(f"has an unknown type: leave type out, or give custom, {types}")
    return tool


DeclaredTool = Annotated[
    Annotated[UserDefinedTool, Tag("custom")]
    | Annotated[ClientTool, Tag("client")]
    | Annotated[ServerTool, Tag("hosted")],
    Discriminator(_kind),
    BeforeValidator(_of_known_type),
]
DeclaredTools = Annotated[list[DeclaredTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_its_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            refuse("name is allowed with type tool only")
        return self

    def as_chat(self) -> ChatToolChoice:
        """Returns this choice in the form of a chat."""
        if self.name is not None:
            return NamedTool(type="function", function=FunctionName(name=self.name))
        if self.type == "any":
            return "required"
        return "none" if self.type == "none" else "auto"


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """The tools that the model is offered, and the names of tools that this server cannot run."""

    tools: list[Tool]
    left_out: tuple[str, ...]

    def check(self, choice: ToolChoice | None) -> None:
        """Raises RequestError if choice demands a tool that is not offered."""
        if choice is None or choice.type not in ("any", "tool") or not self.left_out:
            return
        if choice.name in self.left_out or not self.tools:
            demanded = choice.name or "a tool"
            left_out = ", ".join(self.left_out)
            raise RequestError(
                f"tool_choice demands {demanded}, but {left_out} would run on Anthropic's "
                "servers: demand a tool that the client runs.",
                param="tool_choice",
            )


def select_tools(
    declared: Sequence[DeclaredTool], turns: Sequence[Turn], choice: ToolChoice | None
) -> ToolSelection:
    """Decides which of the declared tools the model is offered after these turns. A deferred tool
    is offered once a turn refers to it, or from the start if only a hosted search could find it."""
    hosted = [tool for tool in declared if isinstance(tool, ServerTool)]
    has_hosted_search = any(tool.type.startswith("tool_search_tool_") for tool in hosted)
    changes = _changes(turns)
    if choice is not None and choice.name is not None:
        changes[choice.name] = True
    tools: list[Tool] = []
    for each in declared:
        if isinstance(each, ServerTool):
            continue
        tool = each.as_tool()
        is_loaded = has_hosted_search or not each.defer_loading
        if changes.get(tool.function.name, is_loaded):
            tools.append(tool)
    left_out = tuple(tool.shown_name for tool in hosted)
    return ToolSelection(tools, left_out)


def _changes(turns: Sequence[Turn]) -> dict[str, bool]:
    """Returns, for each tool that the turns name, whether it is offered after them."""
    found: dict[str, bool] = {}
    for turn in turns:
        for block in turn.content:
            if isinstance(block, ToolChangeBlock):
                found[block.tool.name] = block.type == "tool_addition"
            elif isinstance(block, ToolResultBlock):
                for part in block.content:
                    if isinstance(part, ToolReferenceBlock):
                        found[part.tool_name] = True
    return found
