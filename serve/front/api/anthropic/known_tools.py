"""Tools that Anthropic defines and clients run: shells and editors. Their declarations name only a
type, so the descriptions and schemas that a model needs are here."""

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnownTool:
    """A tool's name, unless its declaration gives one, and its description and schema."""

    name: str
    description: str
    schema: Schema


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


_BASH = KnownTool(
    "bash",
    "Runs a command in a bash session that keeps its state between calls.",
    _object(
        {
            "command": _text("The command to run. Required unless the tool is restarted."),
            "restart": {"type": "boolean", "description": "Set to true to restart the session."},
        }
    ),
)

_VIEWED = "For view of a file: the first and the last line, from 1; -1 is the end."
_LINE = "For insert: the line after which text is inserted; 0 is the start."
_FILE: dict[str, Schema] = {
    "path": _text("The path of a file or folder."),
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
        "description": _VIEWED,
    },
    "file_text": _text("For create: the content of the file."),
    "old_str": _text("For str_replace: the text to replace, which must occur once."),
    "insert_line": {"type": "integer", "description": _LINE},
}


def _editor(name: str, *more_commands: str, **more: Schema) -> KnownTool:
    commands = ["view", "create", "str_replace", "insert", *more_commands]
    command = {"type": "string", "enum": commands}
    return KnownTool(
        name,
        "Views, creates and edits text files.",
        _object({"command": command, **_FILE, **more}, "command", "path"),
    )


_OLD_EDITOR = _editor(
    "str_replace_editor",
    "undo_edit",
    new_str=_text("For str_replace: the text in its place. For insert: the text to insert."),
)
_EDITOR = _editor(
    "str_replace_based_edit_tool",
    new_str=_text("For str_replace: the text in its place."),
    insert_text=_text("For insert: the text to insert."),
)

KNOWN_TOOLS = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
}

# Prefixes of the types of tools that are not offered to the model: they run on Anthropic's servers,
# or are sets of tools whose calls have another form.
HOSTED_PREFIXES = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "tool_search_tool_",
    "advisor_",
    "mcp_toolset",
    "browser_toolset_",
    "computer_toolset_",
)
