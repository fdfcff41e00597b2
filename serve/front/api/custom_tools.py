"""Custom tools, whose input is text: their declarations in chats and Responses, and their calls.

A model knows functions only. A custom tool is offered as a function with one string parameter.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field

from serve.front.api.tools import Function, Tool, ToolName
from serve.front.http.body import Body, Tolerant
from serve.front.text import grammars


class TextInput(Tolerant):
    type: Literal["text"]


class GrammarRules(Tolerant):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]

    def grammar(self) -> str:
        if self.syntax == "regex":
            return grammars.of_regex(self.definition)
        return grammars.of_grammar(self.definition, "tools")


class GrammarInput(GrammarRules):
    type: Literal["grammar"]


class CustomTool(Tolerant):
    """A tool whose input is text, which may have to follow a grammar."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Discriminator("type")] | None = None

    def grammar(self) -> str | None:
        if isinstance(self.format, GrammarInput):
            return self.format.grammar()
        return None

    @property
    def is_lark(self) -> bool:
        return isinstance(self.format, GrammarInput) and self.format.syntax == "lark"

    def function(self) -> Function:
        """Returns the same tool as a function."""
        schema: dict[str, Any] = {"type": "string"}
        description = self.description or ""
        if isinstance(self.format, GrammarInput):
            if self.format.syntax == "regex":
                schema["pattern"] = f"^(?:{self.format.definition})$"
            rule = f"The input follows this {self.format.syntax} grammar:"
            description = f"{description}\n\n{rule}\n{self.format.definition}".strip()
        parameters = {
            "type": "object",
            "properties": {"input": schema},
            "required": ["input"],
            "additionalProperties": False,
        }
        return Function.model_construct(
            name=self.name, description=description, parameters=parameters, strict=None
        )


# --- in chats


class ChatGrammarInput(Tolerant):
    type: Literal["grammar"]
    grammar: GrammarRules


class _Custom(Tolerant):
    name: ToolName
    description: str | None = None
    format: Annotated[TextInput | ChatGrammarInput, Discriminator("type")] | None = None


class ChatCustomTool(Tolerant):
    """A custom tool as chats declare it: the tool and its grammar are each in one more object."""

    type: Literal["custom"]
    custom: _Custom

    def plain(self) -> CustomTool:
        """Returns the same tool in the form of Responses."""
        own = self.custom
        format: TextInput | GrammarInput | None = None
        if isinstance(own.format, ChatGrammarInput):
            rules = own.format.grammar
            format = GrammarInput(type="grammar", syntax=rules.syntax, definition=rules.definition)
        return CustomTool(type="custom", name=own.name, description=own.description, format=format)

    def as_tool(self) -> Tool:
        """Returns the same tool as a function."""
        return Tool.model_construct(type="function", function=self.plain().function())


class CustomName(Body):
    name: str


class NamedCustom(Body):
    type: Literal["custom"]
    custom: CustomName


# --- calls


def custom_input(text: str) -> str:
    """Returns the one string in the arguments that the model wrote, or else the whole text."""
    arguments = as_object(text)
    if arguments is not None and isinstance(arguments.get("input"), str):
        return str(arguments["input"])
    strings = [each for each in (arguments or {}).values() if isinstance(each, str)]
    if len(strings) == 1 and len(arguments or {}) == 1:
        return strings[0]
    return text


def as_object(text: str) -> dict[str, Any] | None:
    """Returns the JSON object in a text; None if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return value
    return None
