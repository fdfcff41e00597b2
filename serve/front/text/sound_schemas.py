"""Cleans the schemas of tools: leaves out keywords whose values are not valid.

A tool with such a schema can still be called, and it must not cost all tools of a request their
grammar. Typical cases are keywords that are null, `required: true` for a single parameter, and
types of programming languages.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

from serve.front.text.references import IN_NAMES, bundled, target

Schema = dict[str, Any]
# Returns the valid part of a keyword's value, or None if no part is valid.
Clean = Callable[[Any], Any]

_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
# The keywords that hold one schema, a list of schemas, or schemas by name.
_ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_HOLDING_SCHEMAS = {*_ONE, *_SEVERAL, *_NAMED}
_MAX_NUMBER = 2**53  # A larger number is not exact in JSON.
_MIN_STEP, _MAX_STEP = 1e-6, 1e9  # llguidance's limits of multipleOf
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[4-7]|draft/20(19-09|20-12))/schema#?")
_CATEGORY = re.compile(r"\\[pP](?:\{[^}]*\}|[A-Z])")
_URI = re.compile(r"[\w.~:/?#@!$&'()*+,;=%-]+", re.ASCII)


def sound_tools(tools: Sequence[Schema]) -> tuple[list[Schema], set[str]]:
    """Returns OpenAI's tools with sound parameters, and the keywords that were changed."""
    found: list[Schema] = []
    changed: set[str] = set()
    for tool in tools:
        function = tool.get("function") or tool
        if isinstance(function.get("parameters"), dict):
            parameters = bundled(function["parameters"])
            cleaner = _Cleaner(parameters)
            function = {**function, "parameters": cleaner.schema(parameters)}
            changed |= cleaner.changed
        found.append({**tool, "function": function} if "function" in tool else function)
    return found, changed


def sound(document: Schema) -> Schema:
    """Returns a whole document's schema without invalid keywords."""
    document = bundled(document)
    result: Schema = _Cleaner(document).schema(document)
    return result


class _Cleaner:
    """Cleans the schemas of one document, and collects the keywords that it has changed."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self.changed: set[str] = set()
        sizes = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
        self._cleaners: dict[str, Clean] = {
            **{name: partial(self._one, name) for name in _ONE},
            **{name: partial(self._several, name) for name in _SEVERAL},
            **{name: partial(self._by_name, name) for name in _NAMED},
            **dict.fromkeys(sizes, _size),
            **dict.fromkeys(("minimum", "maximum"), _number),
            **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _number_or_bool),
            "$id": _uri,
            "$ref": self._reference,
            "$schema": _draft,
            "enum": _filled_list,
            "format": _string,
            "multipleOf": _step,
            "pattern": _pattern,
            "required": _names,
            "type": _types,
        }

    def schema(self, schema: Any) -> Any:
        """Returns the valid part of a schema."""
        if isinstance(schema, bool):
            return schema
        found: Schema = {}
        for name, value in schema.items():
            clean = self._cleaners.get(name)
            if clean is None:
                found[name] = value
                continue
            cleaned = clean(value)
            if cleaned is not None:
                found[name] = cleaned
            if cleaned is None or (name not in _HOLDING_SCHEMAS and cleaned != value):
                self.changed.add(name)
        return found

    def _inner(self, keyword: str, value: Any) -> Any:
        """Returns the valid part of an inner schema; an empty schema if value is not a schema."""
        if isinstance(value, dict | bool):
            return self.schema(value)
        self.changed.add(keyword)
        return {}

    def _one(self, keyword: str, value: Any) -> Any:
        if keyword == "items" and isinstance(value, list):
            return self._several(keyword, value)
        return self.schema(value) if isinstance(value, dict | bool) else None

    def _several(self, keyword: str, value: Any) -> Any:
        if not isinstance(value, list) or not value:
            return None
        return [self._inner(keyword, each) for each in value]

    def _by_name(self, keyword: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        names = list(value)
        if keyword == "patternProperties":
            names = [name for name in names if _pattern(name) is not None]
        if len(names) < len(value):
            self.changed.add(keyword)
        return {name: self._inner(keyword, value[name]) for name in names}

    def _reference(self, value: Any) -> Any:
        """Returns a reference as a valid URI: some programs write `List<A>` into it."""
        if not isinstance(value, str) or not isinstance(target(value, self._document), dict | bool):
            return None
        steps = value.removeprefix("#").split("/")
        return "#" + "/".join(quote(unquote(step), safe=IN_NAMES) for step in steps)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    return value if _is_number(value) and abs(value) <= _MAX_NUMBER else None


def _number_or_bool(value: Any) -> Any:
    return value if isinstance(value, bool) else _number(value)


def _step(value: Any) -> Any:
    """Returns the number if a grammar can express its multiples, else None."""
    return value if _is_number(value) and _MIN_STEP <= value <= _MAX_STEP else None


def _size(value: Any) -> Any:
    is_size = _number(value) is not None and value >= 0 and value == int(value)
    return int(value) if is_size else None


def _string(value: Any) -> Any:
    return value if isinstance(value, str) else None


def _uri(value: Any) -> Any:
    return value if isinstance(value, str) and _URI.fullmatch(value) else None


def _draft(value: Any) -> Any:
    return value if isinstance(value, str) and _DRAFT.fullmatch(value) else None


def _filled_list(value: Any) -> Any:
    return value if isinstance(value, list) and value else None


def _pattern(value: Any) -> Any:
    """Returns the value if Python accepts it as a pattern: JSON Schema's patterns differ little."""
    if not isinstance(value, str):
        return None
    python = _CATEGORY.sub(".", value).replace("(?<", "(?P<")
    python = python.replace("(?P<=", "(?<=").replace("(?P<!", "(?<!")
    try:
        re.compile(python)
    except (re.error, RecursionError, OverflowError):
        return None
    return value


def _names(value: Any) -> Any:
    if not isinstance(value, list):
        return None
    return [name for name in value if isinstance(name, str)]


def _types(value: Any) -> Any:
    """Returns the known types in `types`, in lower case (clients use capitals too), or None."""
    given = value if isinstance(value, list) else [value]
    names = [name.lower() for name in given if isinstance(name, str)]
    known = [name for name in names if name in _TYPES]
    if not known:
        return None
    return known if isinstance(value, list) else known[0]
