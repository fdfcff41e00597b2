"""The bodies that go out: events, error objects, and replies folded out of chunks. Pure."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from serve.core.errors import BrigadeError, OverloadedError, RequestError, UnavailableError
from serve.front.schemas import AnthropicError, AnthropicErrorReply, ErrorReply, Usage

Json = dict[str, Any]

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def server_sent(body: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def named_event(event: Json) -> bytes:
    """As Responses and Anthropic send them: named by their type."""
    return f"event: {event['type']}\n".encode() + server_sent(event)


# --- errors


class StatusError(RequestError):
    """A fault that is HTTP's own, such as 405 or 413. 499 is a client that left."""

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.http_status = status
        self.headers = dict(headers or {})


def error_object(error: BrigadeError) -> ErrorReply:
    return {
        "error": {
            "message": _public_message(error),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def speaks_anthropic(path: str) -> bool:
    """Whether the call at this path has Anthropic's errors, whatever goes wrong with it."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_error(error: BrigadeError, request_id: str) -> AnthropicErrorReply:
    kind = _ANTHROPIC_TYPES.get(error.http_status, "invalid_request_error")
    told: AnthropicError = {"type": kind, "message": _public_message(error)}
    return {"type": "error", "error": told, "request_id": request_id}


def error_headers(error: BrigadeError) -> dict[str, str]:
    if isinstance(error, StatusError):
        return error.headers
    if error.http_status not in (OverloadedError.http_status, UnavailableError.http_status):
        return {}
    seconds = getattr(error, "retry_after_seconds", UnavailableError.retry_after_seconds)
    return {"retry-after": str(seconds)}


def _public_message(error: BrigadeError) -> str:
    """Only messages that are written for clients: others may name paths and addresses."""
    if isinstance(error, RequestError | UnavailableError):
        return str(error)
    if error.http_status == UnavailableError.http_status:
        return "The model cannot answer, because its cluster broke: try again later."
    return "The server made a mistake: its log says more under this request's X-Request-Id."


# --- answers


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached: int = 0) -> Usage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


async def fold(chunks: AsyncIterator[Json]) -> Json:
    """The full reply: what a client would get by adding the stream's chunks up."""
    reply: Json = {}
    choices: dict[int, Json] = {}
    async for chunk in chunks:
        reply |= {name: value for name, value in chunk.items() if name != "choices"}
        for part in chunk["choices"]:
            choices[part["index"]] = _added(choices.get(part["index"], {}), part)
    reply["object"] = reply["object"].removesuffix(".chunk")
    return {**reply, "choices": [_whole(choices[index]) for index in sorted(choices)]}


def _added(total: Any, part: Any) -> Any:
    """Texts and lists are put together, objects by their fields; else the last one counts."""
    if total is None or part is None:
        return total if part is None else part
    if isinstance(part, list) and total and isinstance(total[0], dict) and "index" in total[0]:
        return _added_by_index(total, part)
    if isinstance(part, dict):
        return {**total, **{name: _added(total.get(name), part[name]) for name in part}}
    return total + part if isinstance(part, str | list) else part


def _added_by_index(total: list[Json], part: list[Json]) -> list[Json]:
    """Calls of tools, whose arguments may come in pieces."""
    by_index = {each["index"]: each for each in total}
    for each in part:
        by_index[each["index"]] = _added(by_index.get(each["index"]), each)
    return list(by_index.values())


def _whole(choice: Json) -> Json:
    if "delta" not in choice:
        return choice
    message = choice.pop("delta")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        message["content"] = message["content"] or None
    return {"index": choice.pop("index"), "message": message, **choice}
