"""Structured output, with the fields of OpenAI and of other servers."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from serve.front.http.body import Body, refuse
from serve.front.text import grammars
from serve.front.text.tags import Tag, of_tags

MAX_TAGS = 128

Schema = dict[str, Any]


def _not_blank(value: Any) -> Any:
    """Refuses a blank text: as a grammar, a blank would allow everything, or nothing."""
    if isinstance(value, str) and not value.strip():
        refuse("must not be empty")
    return value


Grammar = Annotated[str, BeforeValidator(_not_blank)]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class _TagContent(Body):
    type: Literal["json_schema"]
    json_schema: Schema


class StructuralTag(Body):
    """JSON of a schema, between `begin` and `end`. Newer vLLM names the schema `content`."""

    type: Literal["tag"] | None = None
    begin: Grammar
    end: str = ""
    schema_: Schema | None = Field(default=None, alias="schema")
    content: _TagContent | None = None

    @model_validator(mode="after")
    def _has_one_schema(self) -> "StructuralTag":
        if (self.schema_ is None) == (self.content is None):
            refuse("give exactly one of schema and content")
        return self

    def parts(self) -> Tag:
        schema = self.schema_ if self.content is None else self.content.json_schema
        assert schema is not None
        return Tag(self.begin, schema, self.end)


_FEW = Field(min_length=1, max_length=MAX_TAGS, fail_fast=True)
Triggers = Annotated[list[Grammar], _FEW]
Tags = Annotated[list[StructuralTag], _FEW]


class TriggeredTags(Body):
    type: Literal["triggered_tags"]
    triggers: Triggers
    tags: Tags


class ResponseFormat(Body):
    """A response_format of OpenAI, llama.cpp and SGLang (schema, regex, grammar), or vLLM."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    pattern: Grammar | None = None
    regex: Grammar | None = None
    grammar_: Grammar | None = Field(default=None, alias="grammar")
    structures: Tags | None = None
    triggers: Triggers | None = None
    format: TriggeredTags | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "ResponseFormat":
        given = set(_names_of_set_fields(self)) - {"type"}
        allowed = _FIELDS_OF_TYPES[self.type]
        if given not in allowed:
            choices = [" and ".join(sorted(fields)) or "nothing else" for fields in allowed]
            names = " or ".join(choices)
            refuse(f"has the type {self.type}, which needs {names}, and no other field")
        self._check_triggers()
        return self

    def _check_triggers(self) -> None:
        triggers, tags = self._tags()
        for tag in tags:
            if not tag.begin.startswith(tuple(triggers)):
                refuse("has a tag whose begin starts with none of the triggers")

    def _tags(self) -> tuple[list[str], list[StructuralTag]]:
        if self.format is not None:
            return self.format.triggers, self.format.tags
        return self.triggers or [], self.structures or []

    def grammar(self) -> str | None:
        """Returns the grammar of the format; None for text."""
        if self.type == "structural_tag":
            triggers, tags = self._tags()
            parts = [tag.parts() for tag in tags]
            return of_tags(triggers, parts, "response_format")
        if self.type == "text":
            return None
        regex = self.pattern or self.regex
        if regex:
            return grammars.of_regex(regex)
        if self.grammar_ is not None:
            return grammars.of_grammar(self.grammar_, "response_format")
        if self.type == "json_object" and self.schema_ is None:
            return format_grammar("json_object", {})
        schema = self.json_schema.schema_ if self.json_schema else self.schema_
        return format_grammar("json_schema", schema or {})


# For each type, the sets of fields that may come with it.
_FIELDS_OF_TYPES: dict[str, list[set[str]]] = {
    "text": [set()],
    "json_object": [set(), {"schema"}],
    "json_schema": [{"json_schema"}, {"schema"}],
    "regex": [{"pattern"}, {"regex"}],
    "grammar": [{"grammar"}],
    "structural_tag": [{"structures", "triggers"}, {"format"}],
}


def _names_of_set_fields(body: Body) -> Iterator[str]:
    """Yields the names of fields that are not null, as the client writes them."""
    for name, value in body:
        if value is not None:
            yield type(body).model_fields[name].alias or name


def format_grammar(
    type: Literal["text", "json_object", "json_schema"], schema: Schema
) -> str | None:
    """Returns the grammar of a format, None for text. schema belongs to the type json_schema."""
    if type == "text":
        return None
    asked = schema if type == "json_schema" else {"type": "object"}
    return grammars.of_schema(asked, "response_format")


class StructuredOutputs(Body):
    """vLLM's structured_outputs: an object in which exactly one field must be set."""

    json_: Schema | str | None = Field(default=None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar_: Grammar | None = Field(default=None, alias="grammar")
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        num_given = sum(value is not None for _, value in self)
        if num_given != 1:
            refuse("give exactly one of json, regex, choice, grammar and json_object")
        return self

    def grammar(self) -> str:
        if self.regex is not None:
            return grammars.of_regex(self.regex)
        if self.choice is not None:
            return grammars.of_choice(self.choice)
        if self.grammar_ is not None:
            return grammars.of_grammar(self.grammar_, "structured_outputs")
        schema = {"type": "object"} if self.json_ is None else self.json_
        return grammars.of_schema(schema)


class OtherServersGrammars(Body):
    """A grammar in the fields of llama.cpp, SGLang, TGI and older vLLM. A null has no effect."""

    json_schema: Schema | Grammar | None = None
    regex: Grammar | None = None
    grammar: Grammar | None = None
    ebnf: Grammar | None = None
    guided_json: Schema | Grammar | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None

    def other_grammars(self) -> Iterator[tuple[str, str]]:
        """Yields each given field and its grammar. Raises RequestError."""
        for name in ("json_schema", "guided_json"):
            schema = getattr(self, name)
            if schema is not None:
                yield name, grammars.of_schema(schema, name)
        for name in ("regex", "guided_regex"):
            pattern = getattr(self, name)
            if pattern is not None:
                yield name, grammars.of_regex(pattern)
        for name in ("grammar", "ebnf", "guided_grammar"):
            text = getattr(self, name)
            if text is not None:
                yield name, grammars.of_grammar(text, name)
        if self.guided_choice is not None:
            yield "guided_choice", grammars.of_choice(self.guided_choice)
