"""JSON schemas whose objects are closed: they allow only the keys that the schema names.

Few people write `additionalProperties: false` in their schemas, and a model that may invent keys
does: it then calls the function with arguments that the function does not take.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from serve.front.text.references import target
from serve.front.text.sound_schemas import sound_tools

Schema = dict[str, Any]
Kind = TypeVar("Kind")

# The entry for all tools' schemas in the list of keywords that a grammar does not enforce.
TOOLS = "tools"

# JSON printers write nothing, a blank, or an indented line end between tokens. A
# model that may write more blanks spends its tokens on them.
WHITE_SPACE = r" |\n {0,16}"

# llguidance's options for a schema. Keywords that a grammar cannot express are left out, and oneOf
# is treated as anyOf; the check reports both.
GUIDANCE: Any = {
    "whitespace_pattern": f"({WHITE_SPACE})?",
    "lenient": True,
    "coerce_one_of": True,
}

# Keywords that hold the schemas of values inside an object or array.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "contains", "additionalItems", "unevaluatedItems")
# Keywords that hold alternatives or further schemas of the object itself.
_ALTERNATIVES = ("anyOf", "oneOf")
_COMBINED = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords with which a schema itself says which other keys are allowed.
_SAYS_OTHER_KEYS = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "dependencies",
)
_INEXPRESSIBLE = {
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "propertyNames",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
}
# Parts of patterns that llguidance's regular expressions lack: look-around, word boundaries,
# references back, and some escapes.
_INEXPRESSIBLE_PATTERN = re.compile(r"\(\?<?[=!]|\\[bBAZzckK1-9]")
_VALUES = ("const", "enum", "default", "examples")

# Keywords that limit keys: a branch with only these names no new keys.
_ONLY_LIMITS = {"required", "type", "title", "description", "minProperties", "maxProperties"}


def closed(schema: Schema) -> Schema:
    """Returns the schema with `additionalProperties: false` in objects with `properties`, unless
    they say otherwise or are parts of a composition."""
    result: Schema = _Closing(schema).close(schema)
    return result


def closed_text(schema: Schema | str) -> str:
    """Returns the JSON of a closed schema. A text that is not a JSON object is unchanged."""
    if not isinstance(schema, str):
        return json.dumps(closed(schema))
    try:
        parsed = json.loads(schema)
        return json.dumps(closed(parsed)) if isinstance(parsed, dict) else schema
    except (ValueError, RecursionError):
        return schema


def expressible_text(schema: Schema) -> str:
    """Returns the JSON of a closed schema, as far as a grammar can express it with GUIDANCE."""
    return json.dumps(without_inexpressible_patterns(closed(schema)))


def schema_of(grammar: str) -> str | None:
    """Returns the JSON text of the schema that llguidance's grammar is made from, or None."""
    try:
        parts = json.loads(grammar)
    except (ValueError, RecursionError):  # A client's own grammar may begin like JSON.
        return None
    match parts:
        case {"grammars": [{"json_schema": dict(schema)}]}:
            return json.dumps(schema)
        case _:
            return None


def inexpressible_keyword(schema: Any) -> str | None:
    """Returns a keyword in the schema that a grammar cannot express, or None."""
    if isinstance(schema, list):
        return next(filter(None, map(inexpressible_keyword, schema)), None)
    if not isinstance(schema, dict):
        return None
    for name, value in schema.items():
        if name in _INEXPRESSIBLE or (name == "pattern" and is_inexpressible(value)):
            return str(name)
        inner = value
        if name in _MAPS and isinstance(value, dict):
            inner = list(value.values())  # The keys of this map are names, not keywords.
        found = None if name in _VALUES else inexpressible_keyword(inner)
        if found:
            return found
    return None


def without_inexpressible_patterns(schema: Any) -> Any:
    """Returns the schema without the patterns that a grammar cannot express."""
    if isinstance(schema, list):
        return [without_inexpressible_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    expressible: Schema = {}
    for name, value in schema.items():
        if name in _VALUES:
            expressible[name] = value
        elif name != "pattern" or not is_inexpressible(value):
            expressible[name] = without_inexpressible_patterns(value)
    return expressible


def omitted_keywords(tools: Sequence[Schema]) -> tuple[str, ...]:
    """Returns the tools' keywords that `expressible_text` omits; llguidance may omit more."""
    tools, left_out = sound_tools(tools)
    schemas = [tool["function"].get("parameters") or {} for tool in tools]
    is_whole = all(without_inexpressible_patterns(schema) == schema for schema in schemas)
    if not is_whole:
        left_out.add("pattern")
    return tuple(sorted(left_out))


def is_inexpressible(pattern: object) -> bool:
    """Whether no grammar can express the pattern."""
    return isinstance(pattern, str) and bool(_INEXPRESSIBLE_PATTERN.search(pattern))


class _Closing:
    """Closes one document: the schema at which references like `#/$defs/...` begin."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._open_ids = set(self._open_parts())

    def close(self, schema: Any) -> Any:
        if not isinstance(schema, dict) or id(schema) in self._open_ids:
            return schema
        if self._is_other_document(schema):
            return _Closing(schema).close(schema)  # This schema is its own document.
        closed = dict(schema)
        for name, named in _present(schema, _MAPS, dict):
            closed[name] = {key: self.close(part) for key, part in named.items()}
        for name, listed in _present(schema, (*_LISTS, *self._parts_to_close(schema)), list):
            closed[name] = [self.close(part) for part in listed]
        for name, single in _present(schema, _SINGLE, dict):
            closed[name] = self.close(single)
        if _can_be_closed(schema):
            closed["additionalProperties"] = False
        return closed

    def _is_other_document(self, schema: Schema) -> bool:
        return isinstance(schema.get("$id"), str) and schema is not self._document

    def _parts_to_close(self, schema: Schema) -> tuple[str, ...]:
        """Returns the keyword whose parts all describe the same object; empty without one."""
        if not schema.keys().isdisjoint(("properties", *_REFERENCES)):
            return ()
        if not schema.keys().isdisjoint(("not", "if", "dependentSchemas")):
            return ()
        kinds = [name for name in ("allOf", *_ALTERNATIVES) if name in schema]
        if len(kinds) != 1:
            return ()
        if kinds == ["allOf"]:
            parts = schema["allOf"]
            is_one = isinstance(parts, list) and len(parts) == 1
            return ("allOf",) if is_one else ()
        return tuple(kinds)

    def _open_parts(self) -> Iterator[int]:
        """Yields the ids of schemas that together describe an object, and so must stay open."""
        waiting = list(self._shared_parts(self._document))
        seen: set[int] = set()
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield id(part)
            if isinstance(part, dict):
                target = self._target(part)
                if target is not None:
                    waiting.append(target)
                waiting += part.values()
            elif isinstance(part, list):
                waiting += part

    def _shared_parts(self, schema: Any) -> Iterator[Any]:
        if not isinstance(schema, dict) or self._is_other_document(schema):
            return
        to_close = self._parts_to_close(schema)
        for name in _COMBINED:
            if name in schema and name not in to_close:
                yield schema[name]
        # A reference adds the properties of its target to the schema's own.
        target = self._target(schema)
        if "properties" in schema and target is not None:
            yield target
        for child in _children(schema, to_close):
            yield from self._shared_parts(child)

    def _target(self, schema: Schema) -> Any:
        """Resolves a schema's reference; returns the whole document if that is impossible."""
        references = [schema[name] for name in _REFERENCES if name in schema]
        reference = references[0] if references else None
        if not isinstance(reference, str):
            return None
        found = target(reference, self._document)
        return self._document if found is None else found


def _children(schema: Schema, parts: tuple[str, ...]) -> Iterator[Any]:
    """Yields the schemas directly inside another: of inner values, and under the names in parts."""
    for _, named in _present(schema, _MAPS, dict):
        yield from named.values()
    for _, listed in _present(schema, (*_LISTS, *parts), list):
        yield from listed
    for _, single in _present(schema, _SINGLE, dict):
        yield single


def _present(schema: Schema, names: Iterable[str], kind: type[Kind]) -> Iterator[tuple[str, Kind]]:
    """Yields each of names whose value in the schema is of this kind, with the value."""
    for name in names:
        value = schema.get(name)
        if isinstance(value, kind):
            yield name, value


def _can_be_closed(schema: Schema) -> bool:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return False
    if not schema.keys().isdisjoint((*_SAYS_OTHER_KEYS, *_REFERENCES)):
        return False
    compositions = [schema[name] for name in _COMBINED if name in schema]
    if not all(map(_only_limits, compositions)):
        return False
    # If a required key is not among the properties, no value could follow a closed schema.
    required = schema.get("required", [])
    if not isinstance(required, list):
        return False
    if not all(isinstance(name, str) and name in properties for name in required):
        return False
    min_keys = schema.get("minProperties", 0)
    return isinstance(min_keys, int | float) and min_keys <= len(properties)


def _only_limits(parts: Any) -> bool:
    """Whether the parts of a composition name no keys of their own."""
    branches = parts if isinstance(parts, list) else [parts]
    return all(isinstance(each, dict) and each.keys() <= _ONLY_LIMITS for each in branches)
