"""Structural tags: free text in which a trigger begins JSON that must follow a schema."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, StructTag

from serve.core.errors import RequestError
from serve.front.text.schemas import GUIDANCE, closed


@dataclass(frozen=True, slots=True)
class Tag:
    """A text that starts with begin, continues with JSON of the schema, and stops with end."""

    begin: str
    schema: dict[str, Any]
    end: str


def of_tags(triggers: Sequence[str], tags: Sequence[Tag], param: str) -> str:
    """Returns the grammar of free text in which one of the tags must follow wherever a trigger
    comes. Each tag begins with one of the triggers. Raises RequestError for the field param."""
    made = []
    for tag in tags:
        trigger = next(each for each in triggers if tag.begin.startswith(each))
        try:
            body = {**closed(tag.schema), "x-guidance": GUIDANCE}
            schema = json.dumps(body)
        except RecursionError as error:
            raise RequestError("The schema is nested too deeply.", param=param) from error
        made.append(StructTag(trigger=trigger, begin=tag.begin, grammar=schema, end=tag.end))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(made, assume_special=False))
