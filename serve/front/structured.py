"""The grammar that an answer must follow: response_format and structured_outputs.

Grammars are llguidance's, so is the check whether one can be followed at all; rank 0's
engine follows it. Limits of the library bound what a check may cost.
"""

import json
import re
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llguidance import LLMatcher, LLTokenizer
from pydantic import Field, model_validator

from serve.core.errors import RequestError
from serve.front.messages import Body, refuse

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MOST_GRAMMAR_CHARACTERS = 256 << 10
_MOST_KNOWN = 256
# Else a model may write nothing but blanks.
_JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r"[ \n\t]{0,32}"}


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            refuse("json_schema belongs to type json_schema, and to no other")
        return self

    def grammar(self) -> str | None:
        if self.type == "text":
            return None
        return of_schema(self.json_schema.schema_ if self.json_schema else {"type": "object"})


class StructuredOutputs(Body):
    """vLLM's; exactly one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar_: str | None = Field(default=None, alias="grammar")
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        if len(self.model_fields_set - {n for n, v in self if v is None}) != 1:
            refuse("give exactly one of json, regex, choice, grammar and json_object")
        return self

    def grammar(self) -> str:
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, self.choice)))
        if self.grammar_ is not None:
            return LLMatcher.grammar_from_lark(self.grammar_)
        return of_schema({"type": "object"} if self.json_ is None else self.json_)


def of_schema(schema: dict[str, Any] | str) -> str:
    """Raises RequestError if the schema is text that is no JSON object."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise RequestError(
            f"The schema is no JSON object: {error}", param="structured_outputs"
        ) from error


class Grammars:
    """The model's tokenizer as llguidance sees it, and what it said of the last grammars.

    Thread-safe; checking gives Python's lock back.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"
        # Python's lock is given back meanwhile, so two may check the same one.
        self.objection = lru_cache(_MOST_KNOWN)(self._objection)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(str(self._file))

    def check(self, grammar: str, param: str) -> None:
        """Raises RequestError if no answer can follow it, or it is too large or wrong."""
        if len(grammar) > MOST_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"{param} has {len(grammar)} characters, {MOST_GRAMMAR_CHARACTERS} are allowed.",
                param=param,
            )
        if reason := self.objection(grammar):
            raise RequestError(f"{param} cannot be followed: {reason}", param=param)

    def _objection(self, grammar: str) -> str:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        can_begin = not matcher.is_error() and any(matcher.compute_logit_bias())
        if matcher.is_error():
            return matcher.get_error().partition("<state>")[0][:500]
        return "" if can_begin else "no answer can follow it"
