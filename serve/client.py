"""The HTTP client of the commands that call a server: bench, demo and `fine-tune --load-into`.

The client depends on no command and no other part of the server, so the launcher can use it too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from httpx2 import AsyncClient, HTTPStatusError, TimeoutException, TransportError

__all__ = [
    "AsyncClient",
    "Client",
    "HTTPStatusError",
    "NoAnswerError",
    "TimeoutException",
    "TransportError",
    "bearer",
    "connections",
]

_CONNECT_SECONDS = 10.0


class NoAnswerError(OSError):
    """The server did not answer, or the connection broke before the answer ended."""


def bearer(key: str | None) -> dict[str, str]:
    """Returns the header that carries an API key."""
    if key:
        return {"Authorization": f"Bearer {key}"}
    return {}


def connections(
    base_url: str,
    key: str | None,
    timeout_seconds: float,
) -> AsyncClient:
    """Returns a client without a limit on simultaneous connections."""
    return AsyncClient(
        base_url=base_url,
        headers=bearer(key),
        timeout=httpx2.Timeout(timeout_seconds, connect=_CONNECT_SECONDS),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    )


@dataclass(frozen=True, slots=True)
class Client:
    """Calls one server, each time over a new connection. uses_proxy says whether calls go through
    the environment's proxy, which cannot reach a server on this machine."""

    url: str
    key: str | None = None
    uses_proxy: bool = True

    def call(self, path: str, body: Any, timeout_seconds: float) -> tuple[int, str]:
        """Returns the status and the text of the answer to a POST of body, or to a GET if body is
        None. Raises NoAnswerError."""
        with self.open(path, body, timeout_seconds) as response:
            text = response.read().decode("utf-8", "replace")
            return response.status_code, text

    @contextmanager
    def open(
        self,
        path: str,
        body: Any,
        timeout_seconds: float,
    ) -> Iterator[httpx2.Response]:
        """Yields the response before its body has arrived. Raises NoAnswerError, also while the
        body is read."""
        try:
            with httpx2.stream(
                "GET" if body is None else "POST",
                self.url.rstrip("/") + path,
                json=body,
                headers=bearer(self.key),
                timeout=timeout_seconds,
                trust_env=self.uses_proxy,
            ) as response:
                yield response
        except (TransportError, httpx2.DecodingError, httpx2.InvalidURL) as error:
            raise NoAnswerError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """Returns the operating system's words for an error, without its number."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
