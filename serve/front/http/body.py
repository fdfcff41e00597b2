"""The JSON object of a request's body, read so that no two readers can differ about it."""

import json
import math
from typing import Any

from pydantic_core import from_json

from serve.core.errors import RequestError

# Of one object. What checks a body finds fault with each that it does not know, and tells of one.
MOST_FIELDS = 4096


def json_object(data: bytes) -> dict[str, Any]:
    """Raises RequestError for what is no JSON object by RFC 8259, for a field that is given
    twice, for an object of very many fields and for a number that no float can hold."""
    try:
        body: Any = from_json(data, allow_inf_nan=False)
        # from_json knows surrogates and depth, but takes the last of two, and 1e999 for inf.
        json.loads(data.decode(), object_pairs_hook=_unique, parse_float=_finite)
    except ValueError as error:
        raise RequestError(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object.")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > MOST_FIELDS:
        raise ValueError(f"an object has {len(pairs)} fields, {MOST_FIELDS} are allowed")
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
