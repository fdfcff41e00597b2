"""Arguments that a model writes as text between marks: what JSON they are, by their schema."""

import ast
import json
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from serve.front.text.calls.parts import CallText, Source

Json = dict[str, Any]

_MAX_REFERENCES = 16
_NUMBERS = ("integer", "number")
_PADDED_NUMBER = re.compile("-?0[0-9]{1,15}")


class Declared:
    """The parameters of the declared tools, as JSON schemas."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        functions = [tool.get("function") or tool for tool in tools]
        self._parameters = {each.get("name"): each.get("parameters") for each in functions}

    def types(self, tool: str, parameter: str) -> frozenset[str] | None:
        """The JSON types that the parameter may have; None if the schema declares none."""
        document = self.document(tool)
        properties = resolved(document, document).get("properties")
        if not isinstance(properties, dict) or parameter not in properties:
            return None
        return frozenset(_types(properties[parameter], document, _MAX_REFERENCES))

    def document(self, tool: str) -> Json:
        """The schema of a tool's parameters; an empty one if there is none."""
        document = self._parameters.get(tool)
        return document if isinstance(document, dict) else {}


def types_of(schema: Any, document: Json) -> frozenset[str] | None:
    """The JSON types that a value of this schema may have; None if it declares none."""
    return frozenset(_types(schema, document, _MAX_REFERENCES)) or None


def part_schema(schema: Any, document: Json, key: str | None, depth: int = _MAX_REFERENCES) -> Any:
    """The schema of an object's value under a key, or of a list's items if key is None; an empty
    one if there is none."""
    whole = resolved(schema, document)
    if key is None:
        found = whole.get("items")
    else:
        properties = whole.get("properties")
        others = whole.get("additionalProperties")
        found = properties.get(key, others) if isinstance(properties, dict) else others
    if isinstance(found, dict) or not depth:
        return found if isinstance(found, dict) else {}
    for name in ("anyOf", "oneOf", "allOf"):
        for branch in whole[name] if isinstance(whole.get(name), list) else []:
            if inner := part_schema(branch, document, key, depth - 1):
                return inner
    return {}


def resolved(schema: Any, document: Json) -> Json:
    """The schema with what it refers to in the document beside its own keywords; an empty one if
    that cannot be found."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        own = {name: value for name, value in schema.items() if name != "$ref"}
        target = _target(schema["$ref"], document)
        schema = {**target, **own} if isinstance(target, dict) else {}
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def _target(reference: str, document: Json) -> Any:
    target: Any = document
    for step in reference.removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target


def _types(schema: Any, document: dict[str, Any], num_references: int) -> Iterator[str]:
    if not isinstance(schema, dict) or not num_references:
        return
    named = schema.get("type")
    yield from (each for each in (named if isinstance(named, list) else [named]) if each)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [*values, schema["const"]]
    if not named:
        yield from (type_of(value) for value in values)
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema[name] if isinstance(schema.get(name), list) else []:
            yield from _types(part, document, num_references - 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_target(reference, document), document, num_references - 1)


def type_of(value: Any) -> str:
    """The name that JSON schemas have for the type of a value."""
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
    """Whether a value is a string whatever it looks like, so that it can be given out early."""
    return when_undeclared if types is None else types == {"string"}


def to_json(text: str, types: frozenset[str] | None) -> str:
    """The JSON of a value that is complete: of a type that its schema allows if there is one."""
    is_any_text = types is not None and "string" in types
    original, text = text, text.strip()
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if (converted := _fitting(value, types)) is not None:
            return converted
    if types is not None and types & set(_NUMBERS) and _PADDED_NUMBER.fullmatch(text):
        return str(int(text))  # JSON and Python allow no zeros before a number.
    if types is not None and "boolean" in types and text.lower() in ("true", "false"):
        return text.lower()
    if types is not None and "null" in types and text.lower() in ("null", "none"):
        return "null"
    return json.dumps(original if is_any_text else text, ensure_ascii=False)


def _fitting(value: Any, types: frozenset[str] | None) -> str | None:
    """The value's JSON if its type may be one of these, None otherwise."""
    kind = type_of(value)
    if isinstance(value, float) and value.is_integer() and types and "number" not in types:
        value = int(value)
    if types and kind not in types and not (kind == "integer" and "number" in types):
        return None
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return None


def stream_text(
    source: Source, end: str, *, strips_newline: bool
) -> Generator[CallText | None, None, bool]:
    """The text before the end mark as a JSON string, given out as it is written. With
    strips_newline one line end at each side belongs to the marks. Returns whether the end mark
    came; if not, the string is left open, so that nobody takes it for complete."""
    yield CallText('"')
    if strips_newline:
        while not source.text and not source.is_ended:
            yield None
        source.text = source.text.removeprefix("\n")
    held = f"\n{end}" if strips_newline else end
    while (found := source.text.find(end)) < 0:
        if source.is_ended:
            rest = json.dumps(source.take(len(source.text)), ensure_ascii=False)
            yield CallText(rest[1:-1])
            return False
        kept = max(_overlap(source.text, held), _overlap(source.text, end))
        if text := source.take(len(source.text) - kept):
            yield CallText(json.dumps(text, ensure_ascii=False)[1:-1])
        yield None
    text = source.take(found)
    source.take(len(end))
    text = text.removesuffix("\n") if strips_newline else text
    yield CallText(json.dumps(text, ensure_ascii=False)[1:])
    return True


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of text with which mark begins."""
    sizes = range(min(len(text), len(mark)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
