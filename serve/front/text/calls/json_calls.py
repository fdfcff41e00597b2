"""Calls as JSON objects between marks: the format of many families, and of the generic one."""

from dataclasses import dataclass
from typing import Any

from serve.front.text.calls.json_values import read_json_calls
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import CallReader, PulledReader, Tools


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`{"name": ..., "arguments": {...}}` between start and end, or a list of such objects."""

    start: str
    end: str
    key: str = "arguments"
    is_list: bool = False

    def reader(self, _tools: Tools, /) -> CallReader:
        return PulledReader(read_json_calls)

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls: dict[str, Any] = {
            "anyOf": [call_schema(number, tool, self.key) for number, tool in enumerate(tools)]
        }
        if self.is_list:
            calls = {"type": "array", "minItems": 1, "items": calls}
            if not lark.is_parallel:
                calls["maxItems"] = 1
        return f"BLANK {lark.json(calls)} BLANK {lark.mark(self.end)}"


def call_schema(number: int, tool: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns the schema of one call. An $id keeps its references (`#/$defs/...`) inside it."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool_name(tool)},
            key: {**parameters_of(tool), "$id": f"urn:tool:{number}"},
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def tool_name(tool: dict[str, Any]) -> str:
    return str((tool.get("function") or tool)["name"])


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments; without parameters, it allows only `{}`."""
    function = tool.get("function") or tool
    return function.get("parameters") or {"type": "object", "properties": {}}
