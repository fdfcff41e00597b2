"""The JSON object of a request's body, parsed so strictly that no two parsers can disagree on it,
and the base class of the models that validate it."""

import json
import math
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError, from_json

from serve.core.errors import RequestError

# The most fields of an object: validation makes an error for each unknown one.
MAX_FIELDS = 4096


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Tolerant(Body):
    """Ignores unknown fields, such as those of messages that a client sends back."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})


def refuse(message: str, param: str | None = None) -> NoReturn:
    """Makes a validator fail. param is the field's path, if pydantic cannot know it."""
    raise PydanticCustomError("refused", "{message}", {"message": message, "param": param})


def json_object(data: bytes) -> dict[str, Any]:
    """Parses a body. Raises RequestError if it is not a JSON object by RFC 8259, or if it has a
    field twice, an object with more than MAX_FIELDS fields, or a number too large for a float."""
    if not data.strip():
        raise RequestError("The body is empty: send a JSON object.")
    try:
        body: Any = from_json(data, allow_inf_nan=False)
        # from_json checks surrogates and depth, but it takes the last of two equal fields, and
        # it reads 1e999 as infinity.
        json.loads(data.decode(), object_pairs_hook=_unique, parse_float=_finite)
    except ValueError as error:
        raise RequestError(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object.")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > MAX_FIELDS:
        raise ValueError(f"an object has {len(pairs)} fields, but only {MAX_FIELDS} are allowed")
    names = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"the field {name[:100]!r} is given twice")
        names.add(name)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number
