"""The client of a load run: it asks an OpenAI-compatible server and records the answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from serve.bench.records import RequestRecord
from serve.client import (
    AsyncClient,
    HTTPStatusError,
    TimeoutException,
    TransportError,
    connections,
)
from serve.core.errors import AddressError, UnavailableError, UsageError

_RECONNECT_SECONDS = 0.05
_MAX_REASON_CHARACTERS = 160
_CUT_OFF = "refused or reset before the answer began"


@dataclass(slots=True)
class _Answer:
    """The part of one answer that has arrived so far."""

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    has_begun: bool = False  # whether any byte has arrived

    def add_event(self, data: str) -> str | None:
        """Adds one event of the stream. Returns its message if it is an error."""
        arrived = perf_counter()
        if data == "[DONE]":
            self.done = True
            return None
        chunk = json.loads(data)
        if chunk.get("error"):
            return _message(chunk)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            content = delta.get("content")
            if content or delta.get("reasoning_content") or delta.get("reasoning"):
                self.times.append(arrived)
                self.texts.append(content or "")
        return None


class ChatClient:
    """A client of one model on a server. Failures of the server or network go into the record."""

    def __init__(self, http: AsyncClient, model: str) -> None:
        self._http = http
        self.model = model

    async def chat(
        self,
        messages: list[dict[str, str]],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> RequestRecord:
        """Sends one chat and reads its whole answer, which is streamed."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = _Answer()
        start = perf_counter()
        error = await self._answer(body, answer)
        reconnected = error is _CUT_OFF
        if reconnected:
            # A server with a short listening queue resets some of many simultaneous connections.
            await asyncio.sleep(_RECONNECT_SECONDS)
            error = await self._answer(body, answer)
        return RequestRecord(
            start=start,
            end=perf_counter(),
            times=tuple(answer.times),
            tokens=answer.usage.get("completion_tokens"),
            prompt_tokens=answer.usage.get("prompt_tokens"),
            text="".join(answer.texts),
            error=error,
            reconnected=reconnected,
        )

    async def _answer(self, body: dict[str, Any], answer: _Answer) -> str | None:
        """Sends a request and fills answer. Returns None, or the reason of a failure."""
        try:
            failure = await self._read_stream(body, answer)
        except TimeoutException as error:
            return f"{type(error).__name__}: no answer in time"
        except TransportError as error:
            return f"{type(error).__name__}: {error}" if answer.has_begun else _CUT_OFF
        except (ValueError, AttributeError, TypeError) as error:
            return f"unreadable stream: {_short(str(error))}"
        if failure is None and not answer.done:
            return "the stream ended without [DONE]"
        return failure

    async def _read_stream(self, body: dict[str, Any], answer: _Answer) -> str | None:
        async with self._http.stream("POST", "chat/completions", json=body) as response:
            answer.has_begun = True
            if response.status_code != 200:
                reply = await response.aread()
                return f"HTTP {response.status_code}: {_reason(reply)}"
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                failure = answer.add_event(data)
                if failure:
                    return failure
        return None


@asynccontextmanager
async def connected(
    url: str,
    model: str | None,
    key: str | None,
    timeout: float,
) -> AsyncIterator[ChatClient]:
    """Connects to a model of a server. Raises AddressError, UnavailableError or UsageError."""
    base = url.rstrip("/")
    if not base.endswith("/v1"):
        base = f"{base}/v1"
    async with connections(base, key, timeout) as http:
        name = await _model_name(http, url, model)
        yield ChatClient(http, name)


async def _model_name(http: AsyncClient, url: str, wanted: str | None) -> str:
    """Returns the wanted model's name or, if none is wanted, that of the server's first model."""
    try:
        response = await http.get("models")
    except TransportError as error:
        reason = str(error) or type(error).__name__
        raise AddressError(f"{url} does not answer ({reason}): is a server there?") from error
    if wanted is not None:
        return wanted
    if response.status_code >= 500:
        raise UnavailableError(f"{url} is not ready: {_reason(response.content)}")
    try:
        models = response.raise_for_status().json()["data"]
        return str(models[0]["id"])
    except (HTTPStatusError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{url} names no model at /v1/models (status {response.status_code}): give --model.",
            code="model_not_found",
        ) from error


def _reason(body: bytes) -> str:
    """Returns the message of an OpenAI error object, or else the beginning of the body."""
    try:
        return _message(json.loads(body))
    except (ValueError, AttributeError):
        return _short(body.decode("utf-8", "replace"))


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    message = error.get("message", error) if isinstance(error, dict) else error
    return _short(str(message))


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line[:_MAX_REASON_CHARACTERS]
