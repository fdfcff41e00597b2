"""The log line of one HTTP request, written at its end."""

import json
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from serve.core.errors import BrigadeError, RequestError

_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)
# A part of a path: clients resolve "." and ".." in it, and could not name such a request.
_REQUEST_ID = re.compile(r"(?!\.{1,2}\Z)[\w.:@+-]{1,128}", re.ASCII)
_MAX_PATH_CHARACTERS = 200
_MAX_NAME_CHARACTERS = 150
_MAX_REASON_CHARACTERS = 300
_MAX_MESSAGE_CHARACTERS = 3000  # of an error's message; the rest is dropped before the search below
# One character of a quotation, as repr and JSON escape it. A backslash matches in one way only, and
# the quantifier is possessive, so no client's text makes the search for the closing mark slow.
_CHARACTER = r"(?:\\.|(?!(?P=mark))[^\\])"
# Behind two letters a mark is an apostrophe; behind one it may begin the repr of bytes.
_QUOTE = re.compile(
    rf"""(?<!\w\w)(?P<mark>['"])"""
    rf"""(?:{_CHARACTER}{{0,40}}+|(?P<start>{_CHARACTER}{{40}}+){_CHARACTER}++)(?P=mark)"""
)


@dataclass(slots=True)
class Record:
    """The facts about a request that its log line shows; None if unknown. started is a time of
    time.perf_counter."""

    request: str
    method: str
    path: str
    client: str | None = None
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    model: str | None = None
    adapter: str | None = None
    adapter_version: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_seconds: float | None = None
    finish_reason: str | None = None
    reason: str | None = None

    def fail(self, error: BrigadeError) -> None:
        """Notes why the request failed. A client's text may be private, so long quotations are
        cut, and details that are for the client only are left out."""
        if error.http_status == BrigadeError.http_status:
            return  # An internal error has a log line with its traceback.
        message = error.logged if isinstance(error, RequestError) else str(error)
        text = message[:_MAX_MESSAGE_CHARACTERS].rstrip(":")
        cut = _QUOTE.sub(_shortened, text)
        self.reason = cut[:_MAX_REASON_CHARACTERS]

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def line(self) -> str:
        """Returns the log line, as key=value without unknown values. No value can contain a line
        break."""
        pairs = {
            "request": self.request,
            "client": self.client,
            "method": self.method,
            "path": self.path[:_MAX_PATH_CHARACTERS],
            "status": self.status,
            "model": self.model and self.model[:_MAX_NAME_CHARACTERS],
            "adapter": self.adapter and self.adapter[:_MAX_NAME_CHARACTERS],
            "adapter_version": self.adapter_version,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_seconds": _rounded(self.ttft_seconds),
            "total_seconds": _rounded(self.seconds()),
            "finish_reason": self.finish_reason,
            "reason": self.reason,
        }
        return " ".join(f"{key}={_value(v)}" for key, v in pairs.items() if v is not None)


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Returns the client's X-Request-Id if it is harmless, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return secrets.token_hex(16)


def _shortened(quote: re.Match[str]) -> str:
    """Returns a quotation, of which only the start is left if it is long."""
    if quote["start"] is None:
        return quote[0]
    return f"{quote['mark']}{quote['start']}...{quote['mark']}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
