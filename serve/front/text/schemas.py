"""JSON schemas whose objects are closed: a key that the schema does not name may not come.

Few schemas that people write say `additionalProperties: false`, and a model that may invent keys
does so: the call that it writes then has arguments that the function does not take.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

Schema = dict[str, Any]

# Stands for the schemas of all tools, among the keywords that a grammar does not hold.
TOOLS = "tools"

# llguidance's options for a schema. Without a limit a model may write blanks forever. Keywords that
# a grammar cannot hold are left out, and oneOf is taken for anyOf; the check reports both.
GUIDANCE: Any = {"whitespace_pattern": r"[ \n\t]{0,32}", "lenient": True, "coerce_one_of": True}

# Keywords that hold schemas of other values than the object itself.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "contains", "additionalItems", "unevaluatedItems")
# Keywords that hold alternatives or further schemas of the object itself.
_ALTERNATIVES = ("anyOf", "oneOf")
_COMBINED = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# A schema with one of these says itself which other keys may come.
_SAYS_OTHER_KEYS = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "dependencies",
)
_INEXPRESSIBLE = {
    *("not", "if", "then", "else", "uniqueItems", "propertyNames", "contains"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
}
# What it has no such option for: look-around, word boundaries, references back, and escapes that
# its regular expressions lack.
_INEXPRESSIBLE_PATTERN = re.compile(r"\(\?<?[=!]|\\[bBAZzckK1-9]")
_VALUES = ("const", "enum", "default", "examples")

# A branch with only these limits which keys must come, and names no new ones.
_ONLY_LIMITS = {"required", "type", "title", "description", "minProperties", "maxProperties"}


def closed(schema: Schema) -> Schema:
    """The schema with `additionalProperties: false` in every object that gives `properties` (also
    empty ones) and neither says which other keys may come nor is a part of a composition."""
    result: Schema = _Closing(schema).close(schema)
    return result


def closed_text(schema: Schema | str) -> str:
    """The JSON of a closed schema, which may be given as JSON too. A text that is not a JSON object
    is returned as it is."""
    if not isinstance(schema, str):
        return json.dumps(closed(schema))
    try:
        parsed = json.loads(schema)
        return json.dumps(closed(parsed)) if isinstance(parsed, dict) else schema
    except (ValueError, RecursionError):
        return schema


def expressible_text(schema: Schema) -> str:
    """The JSON of a closed schema, as far as a grammar can express it with GUIDANCE."""
    return json.dumps(without_inexpressible_patterns(closed(schema)))


def schema_of(grammar: str) -> str | None:
    """The JSON text of the schema that a grammar of llguidance is made of; None for others."""
    if not grammar.startswith("{"):
        return None
    parts = json.loads(grammar)["grammars"]
    schema = parts[0].get("json_schema") if len(parts) == 1 else None
    return json.dumps(schema) if isinstance(schema, dict) else None


def inexpressible_keyword(schema: Any) -> str | None:
    """A keyword in the schema that a grammar cannot express, or None."""
    if isinstance(schema, list):
        return next(filter(None, map(inexpressible_keyword, schema)), None)
    if not isinstance(schema, dict):
        return None
    for name, value in schema.items():
        if name in _INEXPRESSIBLE or (name == "pattern" and is_inexpressible(value)):
            return str(name)
        inner = value
        if name in _MAPS and isinstance(value, dict):
            inner = list(value.values())  # Its keys are names, and no keywords.
        if name not in _VALUES and (found := inexpressible_keyword(inner)):
            return found
    return None


def without_inexpressible_patterns(schema: Any) -> Any:
    """The schema without the patterns that a grammar cannot express."""
    if isinstance(schema, list):
        return [without_inexpressible_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in _VALUES else without_inexpressible_patterns(value)
        for name, value in schema.items()
        if not (name == "pattern" and is_inexpressible(value))
    }


def left_out_of(tools: Sequence[Schema]) -> tuple[str, ...]:
    """The keywords of the tools' schemas that grammars of `expressible_text` do not hold, beside
    those that llguidance itself leaves out."""
    schemas = [tool["function"].get("parameters") or {} for tool in tools]
    is_whole = all(without_inexpressible_patterns(schema) == schema for schema in schemas)
    return () if is_whole else ("pattern",)


def is_inexpressible(pattern: object) -> bool:
    """Whether no grammar can hold the pattern."""
    return isinstance(pattern, str) and bool(_INEXPRESSIBLE_PATTERN.search(pattern))


class _Closing:
    """Closes one document: the schema that references like `#/$defs/...` begin at."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._kept_open = set(self._open_parts())

    def close(self, schema: Any) -> Any:
        if not isinstance(schema, dict) or id(schema) in self._kept_open:
            return schema
        if isinstance(schema.get("$id"), str) and schema is not self._document:
            return _Closing(schema).close(schema)  # Its references begin at itself.
        closed = dict(schema)
        for name in _MAPS:
            if isinstance(schema.get(name), dict):
                closed[name] = {key: self.close(value) for key, value in schema[name].items()}
        for name in (*_LISTS, *self._parts_to_close(schema)):
            if isinstance(schema.get(name), list):
                closed[name] = [self.close(each) for each in schema[name]]
        for name in _SINGLE:
            if isinstance(schema.get(name), dict):
                closed[name] = self.close(schema[name])
        if _can_be_closed(schema):
            closed["additionalProperties"] = False
        return closed

    def _parts_to_close(self, schema: Schema) -> tuple[str, ...]:
        """Parts that each describe the whole object. pydantic writes an allOf of one part."""
        if "properties" in schema or any(name in schema for name in _REFERENCES):
            return ()
        if any(name in schema for name in ("not", "if", "dependentSchemas")):
            return ()
        is_one = len(schema["allOf"]) == 1 if isinstance(schema.get("allOf"), list) else False
        kinds = [name for name in ("allOf", *_ALTERNATIVES) if name in schema]
        return tuple(kinds) if len(kinds) == 1 and (is_one or kinds != ["allOf"]) else ()

    def _open_parts(self) -> Iterator[int]:
        """The ids of all schemas that describe an object together with others, with what they
        refer to: no one of them may forbid the keys of the others."""
        waiting = list(self._shared_parts(self._document))
        seen: set[int] = set()
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield id(part)
            if isinstance(part, dict):
                if (target := self._target(part)) is not None:
                    waiting.append(target)
                waiting += part.values()
            elif isinstance(part, list):
                waiting += part

    def _shared_parts(self, schema: Any) -> Iterator[Any]:
        if not isinstance(schema, dict):
            return
        if isinstance(schema.get("$id"), str) and schema is not self._document:
            return
        to_close = self._parts_to_close(schema)
        yield from (schema[name] for name in _COMBINED if name in schema and name not in to_close)
        # Beside its own properties a reference adds those of its target.
        if "properties" in schema and (target := self._target(schema)) is not None:
            yield target
        for child in _children(schema, to_close):
            yield from self._shared_parts(child)

    def _target(self, schema: Schema) -> Any:
        """Resolves the reference of a schema; returns the whole document if that is not
        possible."""
        reference = next((schema[name] for name in _REFERENCES if name in schema), None)
        if not isinstance(reference, str):
            return None
        if reference == "#" or not reference.startswith("#/"):
            return self._document
        target: Any = self._document
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                return self._document
        return target


def _children(schema: Schema, parts: tuple[str, ...]) -> Iterator[Any]:
    """The schemas directly inside: of other values, and the parts of its own that are named."""
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()
    for name in (*_LISTS, *parts):
        if isinstance(schema.get(name), list):
            yield from schema[name]
    yield from (schema[name] for name in _SINGLE if isinstance(schema.get(name), dict))


def _can_be_closed(schema: Schema) -> bool:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(name in schema for name in _SAYS_OTHER_KEYS):
        return False
    if any(name in schema for name in _REFERENCES):
        return False
    if not all(_only_limits(schema[name]) for name in _COMBINED if name in schema):
        return False
    # Keys that must come and are not named would leave nothing that can be followed.
    required = schema.get("required", [])
    least = schema.get("minProperties", 0)
    is_named = isinstance(required, list) and all(
        isinstance(name, str) and name in properties for name in required
    )
    return is_named and isinstance(least, int | float) and least <= len(properties)


def _only_limits(parts: Any) -> bool:
    """Whether the parts of a composition name no keys of their own."""
    branches = parts if isinstance(parts, list) else [parts]
    return all(isinstance(each, dict) and each.keys() <= _ONLY_LIMITS for each in branches)
