"""Gemma 4: calls in a notation of its own, like JSON with bare keys and quoting marks.

Gemma 3 has no format of its own for calls: the generic one is used.
"""

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from serve.front.text.calls.json_calls import parameters_of, tool_name
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    CallEnd,
    CallHeader,
    CallPart,
    CallReader,
    CallText,
    PulledReader,
    TextBuffer,
    Tools,
)
from serve.front.text.calls.value_rules import ValueRules, branches
from serve.front.text.calls.values import resolved, stream_text
from serve.front.text.dialects.interface import Dialect, ReasoningFormat
from serve.front.text.schemas import closed

_CALL = "call:"
_QUOTE = '<|"|>'
_BARE = re.compile(r"[^\s{}\[\],:<]+")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    start: str = "<|tool_call>"
    end: str = "<tool_call|>"

    def reader(self, _tools: Tools, /) -> CallReader:
        return PulledReader(_read)

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = lark.choice(_call_grammar(tool, lark) for tool in tools)
        return f"BLANK {calls} BLANK {lark.mark(self.end)}"


def _call_grammar(tool: dict[str, Any], lark: Lark) -> str:
    document = parameters_of(tool)
    body = _Values(lark, document).rule_of(document)
    return lark.rule(f"{lark.mark(_CALL + tool_name(tool))} {body}")


class _Values:
    """Rules for values of one document's schemas. A schema without a rule allows any value."""

    def __init__(self, lark: Lark, document: dict[str, Any]) -> None:
        self._lark = lark
        self._document = document
        self._depth = 0
        # By the id of the schema, and the depth. Each schema is kept so that its id stays unique.
        self._made: dict[tuple[int, int], tuple[Any, str]] = {}

    def rule_of(self, schema: Any) -> str:
        if not isinstance(schema, dict) or self._depth > 8:
            return self._any()
        place = id(schema), self._depth
        if place not in self._made:
            self._depth += 1
            body = self._body_of(schema)
            self._depth -= 1
            self._made[place] = schema, self._lark.rule(body)
        return self._made[place][1]

    def _body_of(self, schema: dict[str, Any]) -> str:
        if isinstance(schema.get("$ref"), str):
            return self.rule_of(resolved(schema, self._document))
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list) and choices:
            return self._lark.choice(self._constant(each) for each in choices)
        if parts := branches(schema):
            return self._lark.choice(self.rule_of(each) for each in parts)
        kinds = schema.get("type")
        named = kinds if isinstance(kinds, list) else [kinds]
        return self._lark.choice(self._of_type(kind, schema) for kind in named)

    def _of_type(self, kind: Any, schema: dict[str, Any]) -> str:
        if kind == "string":
            return ValueRules(self._lark, self._document, "", _QUOTE).quoted(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema)
        if kind in ("integer", "number", "boolean", "null"):
            limits = {key: schema[key] for key in schema if key.lower().endswith("imum")}
            return self._lark.json({"type": kind, **limits})
        return self._any()

    def _array(self, schema: dict[str, Any]) -> str:
        min_items = schema.get("minItems", 0)
        max_items = schema.get("maxItems")
        if max_items == 0:
            return '"[" BLANK "]"'
        item = self.rule_of(schema.get("items"))
        max_others = "" if max_items is None else max(0, max_items - 1)
        more = f'( BLANK "," BLANK {item} ){{{max(0, min_items - 1)},{max_others}}}'
        items = f"{item} {more}" if min_items else f"( {item} {more} )?"
        return f'"[" BLANK {items} BLANK "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        properties = schema.get("properties")
        is_open = closed(schema).get("additionalProperties") is not False
        if not isinstance(properties, dict) or (is_open and not properties):
            pair = f'/[A-Za-z_]\\w*/ ":" BLANK {self._any()}'
            return f'"{{" BLANK ( {pair} ( BLANK "," BLANK {pair} )* )? BLANK "}}"'
        required = schema.get("required") or []
        pairs = {
            name: self._lark.rule(f"{self._lark.mark(name + ':')} BLANK {self.rule_of(part)}")
            for name, part in properties.items()
        }
        # Required keys come first: then a comma stands before each optional one.
        must = [pairs[name] for name in pairs if name in required]
        may = [pairs[name] for name in pairs if name not in required]
        body = ' BLANK "," BLANK '.join(must)
        if must:
            body += "".join(f' ( BLANK "," BLANK {each} )?' for each in may)
        else:
            chain = ""
            for each in reversed(may):
                tails = f'( BLANK "," BLANK {chain} )?' if chain else ""
                whole = f"( {each} {tails} )"
                # A chain has a name because the next chain contains it twice.
                chain = self._lark.rule(f"( {whole} | {chain} )" if chain else whole)
            body = f"( {chain} )?" if chain else ""
        return f'"{{" BLANK {body} BLANK "}}"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._lark.mark(f"{_QUOTE}{value}{_QUOTE}")
        return self._lark.json({"const": value})

    def _any(self) -> str:
        text = f"{self._lark.mark(_QUOTE)} {self._lark.until(_QUOTE)}"
        bare = self._lark.json({"type": ["number", "boolean", "null"]})
        return f"( {text} | {bare} )"


def _read(source: TextBuffer) -> Generator[CallPart | None, None, None]:
    while (yield from source.first_of(_CALL)):
        name = yield from source.name_until("{")
        yield CallHeader(name)
        source.text = "{" + source.text
        if not (yield from _value(source)):
            return
        yield CallEnd()


def _value(source: TextBuffer) -> Generator[CallPart | None, None, bool]:
    """Translates a value, which may be deep, into JSON. Returns whether it was complete."""
    closing: list[str] = []
    may_be_key = False
    while (yield from source.skip_blanks()):
        character = source.text[0]
        if character in "{[":
            closing.append("}" if character == "{" else "]")
            yield CallText(source.consume(1))
            may_be_key = character == "{"
            continue
        if character in "}]":
            source.consume(1)
            if closing:
                yield CallText(closing.pop())
        elif character in ",:":
            source.consume(1)
            yield CallText(f"{character} ")
            may_be_key = character == "," and closing[-1:] == ["}"]
            continue
        elif character == "<":
            yield from source.first_of(_QUOTE)
            if not (yield from stream_text(source, _QUOTE, strips_newline=False)):
                return False
        else:
            word = yield from _bare_word(source)
            is_key = may_be_key and source.text[:1] == ":"
            yield CallText(json.dumps(word.strip('"')) if is_key else _bare_value(word))
        may_be_key = False
        if not closing:
            return True
    return False


def _bare_word(source: TextBuffer) -> Generator[None, None, str]:
    while True:
        found = _BARE.match(source.text)
        if not found:
            raise ValueError("no value")
        if source.is_cut and found.end() == len(source.text):
            raise ValueError("a word that was cut off")
        if found.end() < len(source.text) or source.is_ended:
            word = source.consume(found.end())
            yield from source.skip_blanks()
            return word
        yield None


def _bare_value(word: str) -> str:
    try:
        return json.dumps(json.loads(word), allow_nan=False)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)


GEMMA4 = Dialect(
    "gemma4",
    GemmaCalls(),
    ReasoningFormat("<|channel>thought", "<channel|>", switch="enable_thinking"),
    end_tokens=("<turn|>", "<|tool_response>"),
    other_marks=(_QUOTE,),
)
