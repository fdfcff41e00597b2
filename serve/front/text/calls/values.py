"""Converts arguments that a model writes as text between marks to JSON, by their schema."""

import ast
import json
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from serve.front.text.calls.parts import CallText, TextBuffer, overlap
from serve.front.text.references import target
from serve.front.text.sound_schemas import sound

Json = dict[str, Any]

_MAX_REFERENCES = 16
_NUMBERS = ("integer", "number")
_PADDED_NUMBER = re.compile("-?0[0-9]{1,15}")


class Declared:
    """The parameters of the declared tools, as JSON schemas."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._parameters: dict[Any, Any] = {}
        self._sound: dict[str, Json] = {}
        for tool in tools:
            function = tool.get("function") or tool
            self._parameters[function.get("name")] = function.get("parameters")

    def types(self, tool: str, parameter: str) -> frozenset[str] | None:
        """Returns the JSON types that the parameter may have; None if the schema declares none."""
        document = self.document(tool)
        properties = resolved(document, document).get("properties")
        if not isinstance(properties, dict) or parameter not in properties:
            return None
        return frozenset(_types(properties[parameter], document))

    def document(self, tool: str) -> Json:
        """Returns the sound schema of a tool's parameters; an empty one if there is none."""
        if tool not in self._sound:
            document = self._parameters.get(tool)
            self._sound[tool] = sound(document) if isinstance(document, dict) else {}
        return self._sound[tool]


def types_of(schema: Any, document: Json) -> frozenset[str] | None:
    """Returns the JSON types that a value of this schema may have; None if it declares none."""
    return frozenset(_types(schema, document)) or None


def part_schema(schema: Any, document: Json, key: str | None) -> Any:
    """Returns the schema of an object's key, or of a list's items (key None); {} without one."""
    waiting = [schema]
    seen: set[int] = set()
    while waiting:
        branch = waiting.pop()
        if id(branch) in seen:
            continue
        seen.add(id(branch))
        whole = resolved(branch, document)
        found = _own_part(whole, key)
        if not isinstance(found, dict):
            waiting += reversed(_branches(whole))
        elif found or branch is schema:
            return found
    return {}


def _own_part(schema: Json, key: str | None) -> Any:
    """Returns a part's schema from the schema itself; None if only branches may have it."""
    if key is None:
        return schema.get("items")
    properties = schema.get("properties")
    others = schema.get("additionalProperties")
    return properties.get(key, others) if isinstance(properties, dict) else others


def resolved(schema: Any, document: Json) -> Json:
    """Returns the schema merged with its reference's target; an empty one without a target."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        own = {name: value for name, value in schema.items() if name != "$ref"}
        found = target(schema["$ref"], document)
        schema = {**found, **own} if isinstance(found, dict) else {}
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def _types(schema: Any, document: Json) -> Iterator[str]:
    waiting = [schema]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        named = part.get("type")
        if isinstance(named, list):
            yield from filter(None, named)
        elif named:
            yield named
        if not named:
            yield from map(type_of, choices_in(part) or ())
        waiting += _branches(part)
        if isinstance(part.get("$ref"), str):
            waiting.append(target(part["$ref"], document))


def _branches(schema: Json) -> list[Any]:
    """Lists the alternatives and parts of a schema: the items of its anyOf, oneOf and allOf."""
    listed = [schema.get(name) for name in ("anyOf", "oneOf", "allOf")]
    return [part for parts in listed if isinstance(parts, list) for part in parts]


def choices_in(schema: dict[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists; None if it lists none."""
    choices = schema.get("enum")
    if not isinstance(choices, list):
        choices = []
    if "const" in schema:
        choices = [*choices, schema["const"]]
    return choices or None


def type_of(value: Any) -> str:
    """Returns the name that JSON schemas have for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list | tuple) else "object"


def is_text(types: frozenset[str] | None, *, when_undeclared: bool) -> bool:
    """Whether this parameter is always a string, so that its text can be streamed."""
    return when_undeclared if types is None else types == {"string"}


def to_json(text: str, types: frozenset[str] | None) -> str:
    """Returns the JSON of a complete value, of a type that its schema allows if possible."""
    allowed = types or frozenset()
    bare = text.strip()
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(bare)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        converted = _fitting(value, types)
        if converted is not None:
            return converted
    if not allowed.isdisjoint(_NUMBERS) and _PADDED_NUMBER.fullmatch(bare):
        return str(int(bare))  # JSON and Python allow no zeros before a number.
    word = bare.lower()
    if "boolean" in allowed and word in ("true", "false"):
        return word
    if "null" in allowed and word in ("null", "none"):
        return "null"
    return json.dumps(text if "string" in allowed else bare, ensure_ascii=False)


def _fitting(value: Any, types: frozenset[str] | None) -> str | None:
    """Returns the value's JSON if its type is one of these, None otherwise."""
    if types:
        kind = type_of(value)
        is_number = kind == "integer" and "number" in types
        if kind not in types and not is_number:
            return None
        if kind == "integer" and not is_number:
            value = int(value)  # 3.0 is a whole number in JSON, too.
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return None


def stream_text(
    source: TextBuffer, end: str, *, strips_newline: bool
) -> Generator[CallText | None, None, bool]:
    """Reads the text before the end mark, and yields it as a JSON string while it comes.
    strips_newline drops one line end at each side. Returns whether the mark came: if not, the
    string stays open, without the start of a mark."""
    yield CallText('"')
    if strips_newline:
        while not source.text and not source.is_ended:
            yield None
        source.text = source.text.removeprefix("\n")
    held = f"\n{end}" if strips_newline else end
    while (found := source.text.find(end)) < 0:
        if source.is_ended:
            rest = source.consume(len(source.text))
            if not source.is_cut:
                yield CallText(_inside_quotes(rest))
            return False
        kept = max(overlap(source.text, held), overlap(source.text, end))
        text = source.consume(len(source.text) - kept)
        if text:
            yield CallText(_inside_quotes(text))
        yield None
    text = source.consume(found)
    source.consume(len(end))
    if strips_newline:
        text = text.removesuffix("\n")
    yield CallText(_inside_quotes(text) + '"')
    return True


def _inside_quotes(text: str) -> str:
    """Returns the text as JSON, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
