"""What is known of one HTTP request at its end, as one line of the log."""

import json
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)
_REQUEST_ID = re.compile(r"[\w.:@+-]{1,128}", re.ASCII)
_MOST_PATH_CHARACTERS = 200


@dataclass(slots=True)
class Record:
    """Filled in by whoever knows. Clocks are time.perf_counter's."""

    request: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_seconds: float | None = None
    finish_reason: str | None = None

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def line(self) -> str:
        """key=value, unknown ones left out. Nothing in it can begin a line of its own."""
        pairs = {
            "request": self.request,
            "method": self.method,
            "path": self.path[:_MOST_PATH_CHARACTERS],
            "status": self.status,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_seconds": _rounded(self.ttft_seconds),
            "total_seconds": _rounded(self.seconds()),
            "finish_reason": self.finish_reason,
        }
        return " ".join(f"{key}={_value(v)}" for key, v in pairs.items() if v is not None)


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's X-Request-Id if it is harmless, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return secrets.token_hex(16)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
