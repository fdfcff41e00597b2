"""Turns pydantic's errors into plain sentences: the field, what it may be, and what came.

pydantic's own messages never reach a client: they are about inputs, validation and Python's types.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from serve.core.errors import RequestError

MAX_PATH_CHARACTERS = 120
_MAX_SHOWN_CHARACTERS = 40
_MAX_KNOWN_CHARACTERS = 320
_MAX_SHOWN_NUMBER = 10**15
_VERBS = ("must ", "has ", "needs ", "may ")
_PATTERNS = {r"^[a-zA-Z0-9_.:/-]{1,128}$": "1 to 128 letters, digits, or . _ : / -"}

Context = dict[str, Any]
Location = tuple[int | str, ...]

# The kind of value that is required, by the type of pydantic's error.
_WANTED: dict[str, str] = {
    "string_type": "a string",
    "string_unicode": "a string",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
    "mapping_type": "an object",
    "none_required": "null",
}
# The errors of a number beyond a limit, by the name of the limit in the error's context.
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_FIXED_WORDS = ("literal_error", "string_pattern_mismatch")
_LENGTHS = ("too_short", "too_long", "string_too_short", "string_too_long")


def request_error(error: ValidationError, body: dict[str, Any]) -> RequestError:
    """Returns the RequestError that names the first wrong field of body."""
    errors = _errors_of_first_field(error.errors(include_url=False), body)
    first = errors[0]
    kind = first["type"]
    context = first.get("ctx", {})
    is_missing = kind == "missing"
    path = _path(first["loc"], body, is_missing) or context.get("param") or ""
    if kind == "extra_forbidden":
        return RequestError(
            f"Unknown field {path!r}: it is not supported.", param=path, code="unknown_parameter"
        )
    if is_missing:
        return RequestError(
            f"The field {path!r} is missing.", param=path, code="missing_required_parameter"
        )
    if kind == "refused":
        return _refused(context["message"], path)
    where = path or "The body"
    return RequestError(f"{where} {_sentence(errors)}.", param=path or None)


def _refused(message: str, path: str) -> RequestError:
    """Returns the error for our own validators' message, which may begin with the field's name."""
    message = message.rstrip(".")
    says_where = not path or message.startswith(f"{path} ")
    if not says_where:
        between = " " if message.startswith(_VERBS) else ": "
        message = f"{path}{between}{message}"
    return RequestError(f"{message}.", param=path or None)


def _errors_of_first_field(errors: Sequence[ErrorDetails], body: Any) -> list[ErrorDetails]:
    """Returns the deepest errors of the first wrong field. A field with several allowed types has
    an error for each type; the deepest one belongs to the type that the client meant."""
    field = errors[0]["loc"][:1]
    own = [error for error in errors if error["loc"][:1] == field]
    paths = [_steps(error["loc"], body, error["type"] == "missing") for error in own]
    deepest_path = max(paths, key=len)
    return [error for error, path in zip(own, paths, strict=True) if path == deepest_path]


def _sentence(errors: Sequence[ErrorDetails]) -> str:
    """Returns the rest of the sentence after the field's path. All errors are about one value."""
    first = errors[0]
    value = first["input"]
    context = first.get("ctx", {})
    if first["type"] in _LENGTHS:
        return _wrong_length(context, value)
    if first["type"].startswith("union_tag"):
        return _wrong_tag(context, value)
    wanted = [text for text in map(_wanted, errors) if text]
    if not wanted:
        return "has a value that is not allowed"
    choices = ", or ".join(dict.fromkeys(wanted))
    return f"must be {choices}, not {_shown(value, errors)}"


def _wanted(error: ErrorDetails) -> str | None:
    """Returns the values that the field allows, as far as one error names them."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"{words} {_number(context[name])}"
    if kind == "literal_error":
        return _in_json(context["expected"])
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], "another string")
    return _WANTED.get(kind)


def _wrong_tag(context: Context, value: Any) -> str:
    """Returns the rest of the sentence for an object of an unknown kind."""
    if not isinstance(value, dict):
        return f"must be an object, not {_shown(value)}"
    discriminator = context["discriminator"]
    is_field = "'" in discriminator
    field = discriminator.strip("'") if is_field else "type"
    known = context.get("expected_tags", "").replace("'", "")
    if not known:
        return f"needs a {field}"
    if len(known) > _MAX_KNOWN_CHARACTERS:
        whole_names, _, _ = known[:_MAX_KNOWN_CHARACTERS].rpartition(", ")
        known = f"{whole_names} and others"
    tag = value.get(field)
    if isinstance(tag, str):
        shown = json.dumps(tag[:_MAX_SHOWN_CHARACTERS])
    else:
        shown = _shown(tag)
    return f"has the {field} {shown}, which is not one of {known}"


def _wrong_length(context: Context, value: Any) -> str:
    """Returns the rest of the sentence for a list, object or string of the wrong length."""
    unit = "items"
    if isinstance(value, dict):
        unit = "fields"
    elif isinstance(value, str):
        unit = "characters"
    min_length = context.get("min_length")
    max_length = context.get("max_length")
    if min_length is not None:
        return "must not be empty" if min_length == 1 else f"must have at least {min_length} {unit}"
    if max_length == 0:
        return "must be empty"
    return f"may have at most {max_length} {unit}, not {len(value)}"


def _shown(value: Any, errors: Sequence[ErrorDetails] = ()) -> str:
    """Returns a text for the value. Text may be private, except where fixed words are expected."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return _number(value) if abs(value) < _MAX_SHOWN_NUMBER else "a number of that size"
    if isinstance(value, str):
        allows_words = any(error["type"] in _FIXED_WORDS for error in errors)
        return json.dumps(value[:_MAX_SHOWN_CHARACTERS]) if allows_words else "a string"
    return "an object" if isinstance(value, dict) else "a list"


def _number(value: int | float) -> str:
    return repr(value).removesuffix(".0")


def _in_json(expected: str) -> str:
    """Rewrites the list of Python literals that pydantic gives for an enumeration."""
    words = {"True": "true", "False": "false", "None": "null"}
    text = re.sub(r"\b(True|False|None)\b", lambda match: words[match[0]], expected)
    return text.replace("'", '"')


def _steps(location: Location, body: Any, is_missing: bool) -> Location:
    """Returns the steps that exist in body, without those that pydantic adds for unions."""
    steps: list[int | str] = []
    for number, step in enumerate(location):
        if isinstance(step, int) and isinstance(body, list):
            steps.append(step)
            body = body[step] if step < len(body) else None
        elif isinstance(step, str) and isinstance(body, dict):
            rest = location[number + 1 :]
            if _is_field(step, rest, body, is_missing):
                steps.append(step)
                body = body.get(step)
    return tuple(steps)


def _is_field(step: str, rest: Location, body: dict[str, Any], is_missing: bool) -> bool:
    """Whether a step leads to a field of body, and does not name a member of a union."""
    if step not in body:
        return is_missing and not rest
    if not rest or isinstance(body[step], dict | list):
        return True
    # A plain value has no fields: if the next step is a field of body, this one names a member.
    return not is_missing and rest[0] not in body


def _path(location: Location, body: Any, is_missing: bool) -> str:
    """Writes the path of a field as in messages[2].content."""
    path = ""
    for step in _steps(location, body, is_missing):
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path[:MAX_PATH_CHARACTERS]
