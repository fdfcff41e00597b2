"""Rules for arguments that a model writes as text before an end mark, by their schema."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from serve.front.text.calls.lark import Lark
from serve.front.text.calls.values import Json, resolved
from serve.front.text.references import moved, references
from serve.front.text.schemas import closed, is_inexpressible

_DEFINITIONS = ("$defs", "definitions")
_TO_DEFINITIONS = tuple(f"#/{name}/" for name in _DEFINITIONS)
_PLACE = "#/$defs/tool"  # the place of a tool's schema in the schema of each of its values
_ANY_NAME = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_TEXT_LIMITS = ("minLength", "maxLength", "pattern")
# What has a meaning in a regular expression if it is not escaped and in no class.
_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[\^$|()/]", re.DOTALL)


class ValueRules:
    """Rules for values of a tool's arguments, by the document that describes them. Each value
    stands on lines of its own if line is a line end, and before the end mark. tool is the name of a
    tool whose texts may have a grammar."""

    def __init__(self, lark: Lark, document: Json, line: str, end: str, tool: str = "") -> None:
        self._lark, self._document, self._tool = lark, document, tool
        self._line, self._end = line, end
        self._definitions = {name: document[name] for name in _DEFINITIONS if name in document}
        self._is_moved = any(not each.startswith(_TO_DEFINITIONS) for each in references(document))
        if self._is_moved:
            whole = {name: part for name, part in document.items() if name != "$id"}
            self._definitions = {"$defs": {"tool": moved(whole, _PLACE)}}

    def rule_of(self, schema: Any) -> str:
        """Returns the rule of a value that may be text or JSON."""
        return self._lark.choice(dict.fromkeys(rule for _, rule in self.alternatives(schema)))

    def alternatives(self, schema: Any) -> Iterator[tuple[bool, str]]:
        """Yields the rules that a value may follow, with their end marks, and whether the value is
        then a string."""
        waiting = [(resolved(schema, self._document), False)]
        seen: set[str] = set()
        while waiting:
            whole, is_branch = waiting.pop()
            content = json.dumps(whole, sort_keys=True)
            if content in seen:
                continue
            seen.add(content)
            choices = whole.get("enum", [whole["const"]] if "const" in whole else None)
            if isinstance(choices, list) and choices:
                yield from map(self._constant, choices)
                continue
            parts = branches(whole)
            if parts and self._lark.allows_branches(len(parts) if is_branch else 0):
                others = {key: value for key, value in whole.items() if key not in _BRANCHES}
                for branch in reversed(parts):
                    waiting.append(({**others, **resolved(branch, self._document)}, True))
                continue
            if parts:
                self._lark.left_out.update(_BRANCHES & whole.keys())
            yield from self._of_types(_types(whole), whole)

    def _of_types(self, types: list[str], schema: Json) -> Iterator[tuple[bool, str]]:
        if not types:
            yield True, self._text({})
            yield False, self._json({})
            return
        if "string" in types:
            yield True, self._text(schema)
        if others := [each for each in types if each != "string"]:
            yield False, self._json({**schema, "type": others})

    def _constant(self, value: Any) -> tuple[bool, str]:
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        return is_text, self._lark.mark(f"{self._line}{text}{self._line}{self._end}")

    def _json(self, schema: Json) -> str:
        """Returns the rule of a value in JSON. Its schema becomes a document of its own, so what it
        may refer to is put into it."""
        if self._is_moved:
            schema = moved(schema, _PLACE)
        body = self._lark.json({**schema, **self._definitions})
        ending = self._lark.mark(self._line + self._end)
        return " ".join(filter(None, [self._lark.mark(self._line), body, ending]))

    def _text(self, schema: Json) -> str:
        mark = self._line + self._end
        ending = self._lark.input_before(self._tool, mark)
        ending = ending or self._lark.until(mark, self._limited(schema))
        return f"{self._lark.mark(self._line)} {ending}"

    def quoted(self, schema: Json) -> str:
        """Returns the rule of a string that the end mark also begins."""
        return f"{self._lark.mark(self._end)} {self._text(schema)}"

    def _limited(self, schema: Json) -> str:
        """Returns the name of a terminal for texts of the schema's length and pattern."""
        if "format" in schema:
            self._lark.left_out.add("format")
        if not any(name in schema for name in _TEXT_LIMITS):
            return "TEXT"
        min_length = schema.get("minLength", 0)
        max_length = schema.get("maxLength", "")
        parts = [f"/(.|\\n){{{min_length},{max_length}}}/"]
        if isinstance(pattern := schema.get("pattern"), str):
            found = searching(pattern)
            if found is None:
                self._lark.left_out.add("pattern")
            else:
                parts.append(f"/{found}/")
        return self._lark.text_without(self._end, " & ".join(parts))


_BRANCHES = {"anyOf", "oneOf", "allOf"}


def branches(schema: Json) -> list[Any]:
    """Returns the schemas of which a value follows one. An allOf of one part is that part."""
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return list(schema[name])
    parts = schema.get("allOf")
    return parts if isinstance(parts, list) and len(parts) == 1 else []


def _types(schema: Json) -> list[str]:
    named = schema.get("type")
    if named is None:
        named = "object" if "properties" in schema else "array" if "items" in schema else []
    return [named] if isinstance(named, str) else list(named)


def searching(pattern: str) -> str | None:
    """Returns a regular expression of whole texts in which the pattern is found, as a schema means
    it; None if llguidance has none."""
    if is_inexpressible(pattern):
        return None
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern)
    core = pattern[int(begins) : len(pattern) - 1 if ends else len(pattern)]
    depth = 0
    pieces: list[str] = []
    last = 0
    for found in _TOKEN.finditer(core):
        mark = found[0]
        depth += {"(": 1, ")": -1}.get(mark, 0)
        if mark in "^$" or (mark == "|" and not depth and (begins or ends)):
            return None
        pieces.append(core[last : found.start()] + mark.replace("/", r"\/"))
        last = found.end()
    inner = f"(?:{''.join(pieces)}{core[last:]})"
    before, after = "" if begins else r"(.|\n)*", "" if ends else r"(.|\n)*"
    return f"{before}{inner}{after}"


# Makes the rule of one argument: of its name (None: any name) and the alternatives of its value.
Argument = Callable[[str | None, Any], str]


def parameters_grammar(document: Json, lark: Lark, argument: Argument) -> str:
    """Returns the rule of a tool's arguments in the order of their schema. argument makes that of
    one, by its name, or None for any name, and its schema."""
    whole = resolved(document, document)
    properties = whole.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    required = whole["required"] if isinstance(whole.get("required"), list) else []
    bodies = []
    for name, schema in properties.items():
        body = lark.rule(argument(name, schema))
        bodies.append(body if name in required else f"( {body} )?")
    lark.left_out.update(name for name in _BRANCHES if name in whole)
    if closed(whole).get("additionalProperties") is not False:
        others = whole.get("additionalProperties")
        bodies.append(f"( {lark.rule(argument(None, others))} )*")
        if not set(required) <= properties.keys():
            lark.left_out.add("required")
    return " ".join(bodies)


def named(lark: Lark, before: str, name: str | None, after: str) -> str:
    """Returns the marks around a name, which may be any if it is None."""
    if name is not None:
        return lark.mark(before + name + after)
    return f"{lark.mark(before)} {_ANY_NAME} {lark.mark(after)}"
