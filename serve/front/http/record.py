"""The log line of one HTTP request, written at its end."""

import json
import re
import secrets
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from serve.core.errors import BrigadeError, RequestError

_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)
# Applications and proxies choose this id to find requests in logs, so it contains no user's text.
_REQUEST_ID = re.compile(r"(?!\.{1,2}\Z)[\w.:@+-]{1,128}", re.ASCII)
OTHER = "other"  # in place of a path or method that this server does not know
_MAX_NAME_CHARACTERS = 150
_MAX_REASON_CHARACTERS = 300
_MAX_CAUSES = 5
_UNKNOWN_FIELD = "*"


@dataclass(slots=True)
class AccessRecord:
    """The values of a request's log line; None if unknown. `started` is a time of perf_counter.
    path is the route's, and param shows field_names only, so the id is the only text that a client
    can choose."""

    request: str
    method: str
    path: str = OTHER
    client: str | None = None
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    model: str | None = None
    adapter: str | None = None
    adapter_version: int | None = None
    body_bytes: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_seconds: float | None = None
    total_seconds: float | None = None  # None until the line is written
    finish_reason: str | None = None
    code: str | None = None
    param: str | None = None
    reason: str | None = None
    field_names: frozenset[str] = frozenset()

    def fail(self, error: BrigadeError) -> None:
        """Records why the request failed. A RequestError's message may quote the client."""
        self.code = error.code
        self.param = error.param and self._known(error.param)
        is_internal = error.http_status == BrigadeError.http_status  # Tracebacks are logged.
        if not isinstance(error, RequestError) and not is_internal:
            self.reason = str(error)[:_MAX_REASON_CHARACTERS]

    def _known(self, param: str) -> str:
        """Returns the path of a field, without the parts that a client chose."""
        names = re.split(r"[.\[\]]+", param.strip(".[]"))
        return ".".join(name if name in self.field_names else _UNKNOWN_FIELD for name in names)

    def failure(self) -> str:
        pairs = {"status": self.status, "code": self.code, "param": self.param}
        return _line({**pairs, "reason": self.reason})

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def line(self) -> str:
        """Returns the log line, as key=value without unknown values or line breaks."""
        facts: dict[str, Any] = {"request": self.request, "client": self.client}
        facts |= {each.name: getattr(self, each.name) for each in fields(self)}
        del facts["started"], facts["field_names"]
        for name in ("model", "adapter"):
            facts[name] = facts[name] and facts[name][:_MAX_NAME_CHARACTERS]
        facts["ttft_seconds"] = _rounded(self.ttft_seconds)
        facts["total_seconds"] = _rounded(self.seconds())
        return _line(facts)


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Returns the client's X-Request-Id if it is a plain word, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return secrets.token_hex(16)


def trace_of(error: BaseException) -> str:
    """Returns the types of an error and its causes, and where each was raised, on one line. Their
    messages are left out, because they may quote a client."""
    raised: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(raised) < _MAX_CAUSES:
        frames = traceback.extract_tb(cause.__traceback__)
        where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        raised.append(f"{type(cause).__name__} in {', '.join(where)}")
        cause = cause.__cause__ or cause.__context__
    return json.dumps("; after ".join(raised))


def _line(pairs: Mapping[str, object]) -> str:
    return " ".join(f"{key}={_value(v)}" for key, v in pairs.items() if v is not None)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
