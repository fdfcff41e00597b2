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
_PLACE = "#/$defs/tool"  # the place of a tool's schema inside each value's schema
_ANY_NAME = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_TEXT_LIMITS = ("minLength", "maxLength", "pattern")
_ANY_TEXT = r"(.|\n)*"
_END = re.compile(r"(?<!\\)(?:\\\\)*\$$")  # a $ at the end that is not escaped
# An escape, a character class, or a character that has a meaning outside of classes.
_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[\^$|()/]", re.DOTALL)


class ValueRules:
    """Rules for values of a tool's arguments. document is the schema of all arguments. line, a line
    end or "", surrounds each value. tool is the name of a tool whose texts may have a grammar."""

    def __init__(self, lark: Lark, document: Json, line: str, end: str, tool: str = "") -> None:
        self._lark = lark
        self._document = document
        self._tool = tool
        self._line = line
        self._end = end
        self._definitions = {name: document[name] for name in _DEFINITIONS if name in document}
        # References to other places need the whole document beside each value.
        others = [each for each in references(document) if not each.startswith(_TO_DEFINITIONS)]
        self._is_moved = bool(others)
        if self._is_moved:
            whole = {name: part for name, part in document.items() if name != "$id"}
            self._definitions = {"$defs": {"tool": moved(whole, _PLACE)}}

    def rule_of(self, schema: Any) -> str:
        """Returns the rule of a value that may be text or JSON."""
        rules = [rule for _, rule in self.alternatives(schema)]
        return self._lark.choice(dict.fromkeys(rules))

    def alternatives(self, schema: Any) -> Iterator[tuple[bool, str]]:
        """Yields a value's possible rules, with end marks, and whether each is for a string."""
        waiting = [(resolved(schema, self._document), False)]
        seen: set[str] = set()
        while waiting:
            whole, is_branch = waiting.pop()
            content = json.dumps(whole, sort_keys=True)
            if content in seen:
                continue
            seen.add(content)
            choices = _choices(whole)
            if choices:
                yield from map(self._constant, choices)
                continue
            parts = branches(whole)
            num_inside = len(parts) if is_branch else 0
            if parts and self._lark.allows_branches(num_inside):
                others = {key: value for key, value in whole.items() if key not in _BRANCHES}
                for part in reversed(parts):
                    branch = {**others, **resolved(part, self._document)}
                    waiting.append((branch, True))
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
        others = [each for each in types if each != "string"]
        if others:
            yield False, self._json({**schema, "type": others})

    def _constant(self, value: Any) -> tuple[bool, str]:
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        return is_text, self._lark.mark(f"{self._line}{text}{self._line}{self._end}")

    def _json(self, schema: Json) -> str:
        """Returns the rule of a JSON value, with the definitions: it is compiled alone."""
        if self._is_moved:
            schema = moved(schema, _PLACE)
        beginning = self._lark.mark(self._line)
        body = self._lark.json({**schema, **self._definitions})
        ending = self._lark.mark(self._line + self._end)
        if beginning:
            return f"{beginning} {body} {ending}"
        return f"{body} {ending}"

    def _text(self, schema: Json) -> str:
        mark = self._line + self._end
        beginning = self._lark.mark(self._line)
        ending = self._lark.input_before(self._tool, mark)
        if not ending:
            ending = self._lark.until(mark, self._limited(schema))
        return f"{beginning} {ending}"

    def quoted(self, schema: Json) -> str:
        """Returns the rule of a string between two end marks."""
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
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            found = searching(pattern)
            if found is None:
                self._lark.left_out.add("pattern")
            else:
                parts.append(f"/{found}/")
        return self._lark.text_without(self._end, " & ".join(parts))


_BRANCHES = {"anyOf", "oneOf", "allOf"}


def branches(schema: Json) -> list[Any]:
    """Returns the alternatives of a schema: its anyOf or oneOf, or the only part of its allOf."""
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return list(schema[name])
    parts = schema.get("allOf")
    return parts if isinstance(parts, list) and len(parts) == 1 else []


def _choices(schema: Json) -> list[Any]:
    """Lists the values of an enum or a const; none if the schema has neither."""
    if "enum" in schema:
        choices = schema["enum"]
        return choices if isinstance(choices, list) else []
    return [schema["const"]] if "const" in schema else []


def _types(schema: Json) -> list[str]:
    """Lists the types that a schema names, or the type that its keywords imply."""
    types = schema.get("type")
    if isinstance(types, str):
        return [types]
    if types is not None:
        return list(types)
    if "properties" in schema:
        return ["object"]
    return ["array"] if "items" in schema else []


def searching(pattern: str) -> str | None:
    """Returns a regular expression for texts that contain the pattern; None if there is none."""
    if is_inexpressible(pattern):
        return None
    at_start = pattern.startswith("^")
    at_end = bool(_END.search(pattern))
    core = pattern.removeprefix("^")
    if at_end:
        core = core[:-1]
    depth = 0
    pieces: list[str] = []
    last = 0
    for found in _TOKEN.finditer(core):
        mark = found[0]
        depth += {"(": 1, ")": -1}.get(mark, 0)
        # In a|b$, for example, $ belongs to b alone.
        is_ambiguous = mark == "|" and not depth and (at_start or at_end)
        if mark in "^$" or is_ambiguous:
            return None
        pieces += [core[last : found.start()], mark.replace("/", r"\/")]
        last = found.end()
    pieces.append(core[last:])
    inner = "".join(pieces)
    before = "" if at_start else _ANY_TEXT
    after = "" if at_end else _ANY_TEXT
    return f"{before}(?:{inner}){after}"


# Makes the rule of one argument from the argument's name (None: any name) and schema.
Argument = Callable[[str | None, Any], str]


def parameters_grammar(document: Json, lark: Lark, argument: Argument) -> str:
    """Returns the rule of a tool's arguments, in the schema's order. `argument` makes each."""
    whole = resolved(document, document)
    properties = whole.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    required = whole.get("required")
    if not isinstance(required, list):
        required = []
    bodies = []
    for name, schema in properties.items():
        body = lark.rule(argument(name, schema))
        bodies.append(body if name in required else f"( {body} )?")
    lark.left_out.update(name for name in _BRANCHES if name in whole)
    if closed(whole).get("additionalProperties") is not False:
        others = whole.get("additionalProperties")
        body = lark.rule(argument(None, others))
        bodies.append(f"( {body} )*")
        if not set(required) <= properties.keys():
            lark.left_out.add("required")
    return " ".join(bodies)


def marked_name(lark: Lark, before: str, name: str | None, after: str) -> str:
    """Returns the marks around a name, or around a rule for any name if `name` is None."""
    if name is not None:
        return lark.mark(before + name + after)
    return f"{lark.mark(before)} {_ANY_NAME} {lark.mark(after)}"
