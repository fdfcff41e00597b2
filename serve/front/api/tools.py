"""Tools: validates their declarations, and builds the grammar of a forced call.

A forced call (tool_choice required, or a name) is JSON for every model, because a grammar enforces
it, as in vLLM.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from serve.core.errors import RequestError
from serve.front.http.body import Body, Tolerant
from serve.front.text.grammars import of_tool_schema
from serve.front.text.schemas import inexpressible_keyword
from serve.front.text.sound_schemas import sound, sound_tools

MAX_TOOLS = 1024

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class Function(Tolerant):
    """The declaration of a function. Further keys are hints to other servers."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Tolerant):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def declared(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools as JSON, in the form that chat templates take."""
    return [_declared(tool) for tool in tools]


def _declared(tool: Tool) -> dict[str, Any]:
    """Returns a tool as JSON. Schemas keep their nulls: a constant may be one."""
    fields = {name: value for name, value in tool.function if value is not None}
    return {"type": tool.type, "function": fields}


def grammar_of_call(tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool) -> str | None:
    """Returns the grammar of a forced call, or None if no call is forced. Raises RequestError, also
    for a strict tool whose schema no grammar can express."""
    _check_strict(tools)
    if choice in ("none", "auto"):
        return None
    if not tools:
        raise RequestError(
            "tool_choice demands a tool, but the request has none.", param="tool_choice"
        )
    if isinstance(choice, NamedTool):
        tool = _tool_named(choice.function.name, tools)
        return of_tool_schema(_parameters(tool))
    schemas = [_call_schema(number, tool) for number, tool in enumerate(tools)]
    calls: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": schemas},
    }
    if not is_parallel:
        calls["maxItems"] = 1
    return of_tool_schema(calls)


def _tool_named(name: str, tools: Sequence[Tool]) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise RequestError(
        f"tool_choice names {name[:80]!r}, which is not among the tools.",
        param="tool_choice",
        code="unknown_tool",
    )


def _check_strict(tools: Sequence[Tool]) -> None:
    for number, tool in enumerate(tools):
        if not tool.function.strict:
            continue
        _, changed = sound_tools(declared([tool]))
        if changed:
            raise RequestError(
                f"tools[{number}] is strict, but {min(changed)!r} in its schema has a value that "
                "is not valid or not supported: change it, or leave out strict.",
                param=f"tools[{number}]",
                code="unsupported_schema",
            )
        keyword = inexpressible_keyword(_parameters(tool))
        if keyword:
            raise RequestError(
                f"tools[{number}] is strict, but no grammar can express {keyword!r} in "
                "its schema: leave out one of the two.",
                param=f"tools[{number}]",
                code="unsupported_schema",
            )


def _call_schema(number: int, tool: Tool) -> dict[str, Any]:
    """Returns the schema of a call. Its $id keeps references (`#/$defs/...`) inside it."""
    parameters = {**_parameters(tool), "$id": f"urn:tool:{number}"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "parameters": parameters,
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(tool: Tool) -> dict[str, Any]:
    """Returns the sound schema of a tool's arguments; without parameters, it allows only `{}`."""
    return sound(tool.function.parameters or {"type": "object", "properties": {}})
