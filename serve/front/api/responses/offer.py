"""The tools of a response: those that the model is offered, their names, and how their calls become
items.

A model knows functions only. A tool that OpenAI defines (a shell, a patch) is offered as a function
with the parameters of its call's item.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from serve.core.errors import RequestError
from serve.front.api.custom_tools import CustomTool, as_object
from serve.front.api.tools import MAX_TOOLS, Function, NamedTool
from serve.front.http.body import Tolerant

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "tool_search"]
Json = dict[str, Any]

# Prefixes of the types of tools that another server would run.
_HOSTED = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "computer",
    "programmatic_tool_calling",
)
_MAX_TYPE_CHARACTERS = 64


class FunctionTool(Function):
    type: Literal["function"]


class NamespaceTool(Tolerant):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Discriminator("type")]], Field(fail_fast=True)
    ]


class DefinedTool(Tolerant):
    """A tool that the client runs, and whose calls are items of another type."""

    type: Literal["local_shell", "shell", "apply_patch"]


class SearchTool(Tolerant):
    """A search for more tools, which the client runs if execution says so."""

    type: Literal["tool_search"]
    description: str | None = None
    parameters: Json | None = None
    execution: Literal["client", "server"] | None = None


class HostedTool(Tolerant):
    type: str


def is_hosted(type: object) -> bool:
    """Whether a tool of this type would be run by the server."""
    if not isinstance(type, str):
        return False
    return len(type) <= _MAX_TYPE_CHARACTERS and type.startswith(_HOSTED)


def _tag(tool: Any) -> Any:
    type = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if type in ("local_shell", "shell", "apply_patch"):
        return "local_shell, shell, apply_patch"
    if is_hosted(type):
        return "web_search, ..."
    return type


ToolDeclaration = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[DefinedTool, Tag("local_shell, shell, apply_patch")]
    | Annotated[SearchTool, Tag("tool_search")]
    | Annotated[HostedTool, Tag("web_search, ...")],
    Discriminator(_tag),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call. name and namespace are the client's. A call of a custom tool
    is the plain input if is_raw, else JSON that contains the input and, unless is_lark, follows
    grammar."""

    kind: Kind
    name: str
    namespace: str | None = None
    grammar: str | None = None
    is_lark: bool = False
    is_raw: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The offered tools and their functions, by the model's names, and warnings about tools that
    are not offered."""

    tools: Mapping[str, OfferedTool]
    functions: Mapping[str, Function] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    _names: dict[tuple[Kind, str, str | None], str] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for known, offered in self.tools.items():
            # A call without a namespace means the first tool with that name.
            for namespace in {offered.namespace, None}:
                self._names.setdefault((offered.kind, offered.name, namespace), known)

    def model_name(self, kind: Kind, name: str, namespace: str | None = None) -> str:
        """Returns the model's name for a tool; `name` itself if the tool is not offered."""
        return self._names.get((kind, name, namespace), name)

    def name_of_choice(self, kind: Kind, name: str, namespace: str | None = None) -> str:
        """Returns the model's name of a tool that tool_choice demands. Raises RequestError."""
        known = self.model_name(kind, name, namespace)
        if known not in self.tools or self.tools[known].kind != kind:
            raise RequestError(
                f"tool_choice names {name[:80]!r}, which is not among the tools.",
                param="tool_choice",
                code="unknown_tool",
            )
        return known


def offer_of(declared: Iterable[ToolDeclaration]) -> OfferedTools:
    """Returns the offered tools. The last one with a name counts. Raises RequestError."""
    found: dict[tuple[str, str, str | None], tuple[OfferedTool, Function]] = {}
    hosted: dict[str, None] = {}
    for each in declared:
        if isinstance(each, HostedTool) or _is_searched_here(each):
            hosted[each.type] = None
            continue
        for offered, function in _offered(each):
            found[offered.kind, offered.name, offered.namespace] = offered, function
    if len(found) > MAX_TOOLS:
        raise RequestError(
            f"tools, its namespaces and input contain {len(found)} tools, but only "
            f"{MAX_TOOLS} are allowed.",
            param="tools",
        )
    tools: dict[str, OfferedTool] = {}
    functions: dict[str, Function] = {}
    for offered, function in found.values():
        name = _free_name(offered, tools)
        tools[name] = offered
        functions[name] = function.model_copy(update={"name": name})
    warnings = tuple(map(_warning, hosted))
    return OfferedTools(tools, functions, warnings)


def _is_searched_here(tool: ToolDeclaration) -> bool:
    return isinstance(tool, SearchTool) and tool.execution != "client"


def _warning(type: str) -> str:
    return f"The tool {type!r} was not offered to the model: this server runs no tools."


def _offered(declared: ToolDeclaration) -> Iterable[tuple[OfferedTool, Function]]:
    match declared:
        case NamespaceTool():
            about = declared.description
            for inner in declared.tools:
                yield _member(inner, declared.name, about)
                about = None  # One function's description is enough.
        case FunctionTool() | CustomTool():
            yield _member(declared, None, None)
        case SearchTool():
            schema = declared.parameters or _DEFINED["tool_search"].parameters
            about = declared.description or _DEFINED["tool_search"].description
            function = Function.model_construct(
                name="tool_search", description=about, parameters=schema, strict=None
            )
            yield OfferedTool("tool_search", "tool_search"), function
        case DefinedTool():
            yield OfferedTool(declared.type, declared.type), _DEFINED[declared.type]
        case HostedTool():
            pass  # A warning tells the client that the tool is not offered.


def _member(
    declared: FunctionTool | CustomTool, namespace: str | None, about: str | None
) -> tuple[OfferedTool, Function]:
    if isinstance(declared, CustomTool):
        own = declared.function()
        offered = OfferedTool(
            "custom",
            declared.name,
            namespace,
            declared.grammar(),
            declared.is_lark,
        )
    else:
        own = declared
        offered = OfferedTool("function", declared.name, namespace)
    descriptions = [text for text in (about, own.description) if text]
    function = Function.model_construct(
        name=own.name,
        description="\n\n".join(descriptions) or None,
        parameters=own.parameters,
        strict=own.strict,
    )
    return offered, function


def _free_name(offered: OfferedTool, taken: Mapping[str, OfferedTool]) -> str:
    if offered.name not in taken:
        return offered.name
    name = f"{offered.namespace or offered.kind}.{offered.name}"
    number = 2
    while name in taken:
        name = f"{offered.namespace or offered.kind}.{offered.name}.{number}"
        number += 1
    return name


# --- which tools may or must be called


class NamedChoice(Tolerant):
    """One tool, by its name or type. mode says whether one of allowed_tools must be called."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None

    def narrowed(self, offer: OfferedTools) -> OfferedTools:
        """Returns the tools that this choice allows."""
        if self.type != "allowed_tools":
            return offer
        allowed = {name for each in self.tools or () if (name := _allowed(each, offer))}
        tools = {name: tool for name, tool in offer.tools.items() if name in allowed}
        functions = {name: offer.functions[name] for name in tools}
        return OfferedTools(tools, functions, offer.warnings)

    def choice(self, offer: OfferedTools) -> Literal["auto", "required"] | NamedTool:
        """Returns the same choice in a chat. Raises RequestError."""
        if self.type == "allowed_tools":
            return self.mode or "auto"
        kind = _KINDS.get(self.type)
        if kind is None:
            reason = "this server runs no tools" if is_hosted(self.type) else "its type is unknown"
            raise RequestError(
                f"tool_choice demands {self.type[:80]!r}, which is never offered: {reason}.",
                param="tool_choice",
                code="unknown_tool",
            )
        if self.name is None and kind in ("function", "custom"):
            raise RequestError("tool_choice needs the name of a tool.", param="tool_choice")
        name = offer.name_of_choice(kind, self.name or kind, self.namespace)
        return NamedTool.model_validate({"type": "function", "function": {"name": name}})


_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}


def _allowed(given: Json, offer: OfferedTools) -> str | None:
    kind = _KINDS.get(str(given.get("type")))
    if kind is None:
        return None
    name = str(given.get("name") or kind)
    namespace = given.get("namespace")
    return offer.model_name(kind, name, namespace if isinstance(namespace, str) else None)


# --- the tools that OpenAI defines, as functions


def _function(name: str, description: str, properties: Json, required: list[str]) -> Function:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return Function.model_construct(
        name=name, description=description, parameters=parameters, strict=None
    )


_STRING: Json = {"type": "string"}
_STRINGS: Json = {"type": "array", "items": _STRING}
_POSITIVE: Json = {"type": "integer", "minimum": 1}
_DEFINED: dict[str, Function] = {
    "local_shell": _function(
        "local_shell",
        "Runs a command on the user's computer and returns its output.",
        {"command": _STRINGS, "working_directory": _STRING, "timeout_ms": _POSITIVE},
        ["command"],
    ),
    "shell": _function(
        "shell",
        "Runs shell commands on the user's computer and returns their output.",
        {"commands": _STRINGS, "timeout_ms": _POSITIVE, "max_output_length": _POSITIVE},
        ["commands"],
    ),
    "apply_patch": _function(
        "apply_patch",
        "Creates, updates or deletes a file. diff is in the V4A format; deleting needs none.",
        {
            "type": {"enum": ["create_file", "update_file", "delete_file"]},
            "path": _STRING,
            "diff": _STRING,
        },
        ["type", "path"],
    ),
    "tool_search": _function(
        "tool_search",
        "Searches for tools that may help, and makes those that it finds available.",
        {"query": _STRING, "limit": _POSITIVE},
        ["query"],
    ),
}


# --- calls of these tools as items


def call_fields(kind: Kind, text: str) -> Json | None:
    """Returns the fields of a call's item from its arguments; None if they do not fit the tool."""
    arguments = as_object(text)
    if arguments is None:
        return None
    match kind:
        case "local_shell" if _are_strings(arguments.get("command")):
            return {"action": {"type": "exec", "env": {}, **arguments}}
        case "shell" if _are_strings(arguments.get("commands")):
            unset = {"timeout_ms": None, "max_output_length": None}
            return {"action": {**unset, **arguments}, "environment": {"type": "local"}}
        case "apply_patch" if _is_operation(arguments):
            return {"operation": arguments}
        case "tool_search":
            return {"execution": "client", "arguments": arguments}
        case _:
            return None


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_operation(arguments: Json) -> bool:
    required = {"path"} if arguments.get("type") == "delete_file" else {"path", "diff"}
    has_type = arguments.get("type") in ("create_file", "update_file", "delete_file")
    return has_type and all(isinstance(arguments.get(name), str) for name in required)
