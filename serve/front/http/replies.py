"""The bodies of replies: events and error objects. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from serve.core.errors import (
    BrigadeError,
    GivenUpError,
    OverloadedError,
    RequestError,
    UnavailableError,
)

Json = dict[str, Any]

_SLICE = 64  # the number of list items that are encoded at a time

_STATUS_CODES = {status.value: status.name.lower() for status in HTTPStatus}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def encode(body: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return _json(body).encode()


def encode_in_slices(body: Mapping[str, Any]) -> bytes:
    """Encodes a long reply in a thread, in parts, because json holds the GIL during each call."""
    return "".join(_slices(body)).encode()


def _slices(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_json(str(name))}:"
            yield from _slices(each)
        yield "}"
    elif isinstance(value, list) and len(value) > _SLICE:
        for start in range(0, len(value), _SLICE):
            yield f"{',' if start else '['}{_json(value[start : start + _SLICE])[1:-1]}"
        yield "]"
    elif isinstance(value, list) and value:
        for number, each in enumerate(value):
            yield "," if number else "["
            yield from _slices(each)
        yield "]"
    else:
        yield _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def server_sent(body: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def named_event(event: Mapping[str, Any]) -> bytes:
    """Returns an event as Responses and Anthropic send it: named by its type."""
    return f"event: {event['type']}\n".encode() + server_sent(event)


def json_line(event: Mapping[str, Any]) -> bytes:
    """Returns an event as Ollama sends it: as one line of JSON."""
    return encode(event) + b"\n"


# --- errors


class StatusError(RequestError):
    """An error that HTTP itself defines, such as 405 or 413. 499 means that the client left."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] = {}, code: str | None = None
    ) -> None:
        super().__init__(message, code=code or _STATUS_CODES.get(status))
        self.http_status, self.headers = status, dict(headers)


def error_object(error: BrigadeError) -> Json:
    return {
        "error": {
            "message": _public_message(error),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: BrigadeError, request_id: str) -> Json:
    kind = _ANTHROPIC_TYPES.get(error.http_status, "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": _public_message(error)},
        "request_id": request_id,
    }


def ollama_error(error: BrigadeError) -> Json:
    return {"error": _public_message(error)}


def error_headers(error: BrigadeError) -> dict[str, str]:
    if isinstance(error, StatusError):
        return error.headers
    if error.http_status not in (OverloadedError.http_status, UnavailableError.http_status):
        return {}
    seconds = getattr(error, "retry_after_seconds", UnavailableError.retry_after_seconds)
    return {"retry-after": str(seconds)}


def _public_message(error: BrigadeError) -> str:
    """Returns the message if it is for clients. Other messages may contain paths and addresses."""
    if isinstance(error, RequestError | UnavailableError | GivenUpError):
        return str(error)
    if error.http_status == UnavailableError.http_status:
        return "The model cannot answer, because its cluster failed: try again later."
    return (
        "An internal error of the server: its log has the details under this request's "
        "X-Request-Id."
    )


# --- fields that were left out of a request

MAX_IGNORED_CHARACTERS = 1000
_MAX_NAME_CHARACTERS = 64


def ignored_fields(names: Sequence[str]) -> dict[str, str]:
    return listed("x-ignored-fields", names)


def listed(header: str, names: Sequence[str]) -> dict[str, str]:
    """Returns a header that lists names, percent-encoded; `...` replaces those that do not fit."""
    shown: list[str] = []
    left = MAX_IGNORED_CHARACTERS
    for name in names:
        encoded = quote(name[:_MAX_NAME_CHARACTERS], safe="", errors="replace")
        left -= len(encoded) + 2
        if left < 0:
            shown.append("...")
            break
        shown.append(encoded)
    return {header: ", ".join(shown)} if shown else {}
