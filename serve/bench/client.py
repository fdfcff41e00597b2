"""One OpenAI-compatible server as its client sees it: a question in, a Record out."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from serve.bench.records import Record
from serve.core.errors import AddressError, UnavailableError, UsageError

_CONNECT_SECONDS = 10.0
_RECONNECT_SECONDS = 0.05
_LONGEST_REASON = 160


@dataclass(slots=True)
class _Answer:
    """What has come of one answer so far."""

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    touched: bool = False  # whether any byte of it has come

    def take(self, data: str) -> str | None:
        """One event of the stream; an error's reason when it says one."""
        came = perf_counter()
        if data == "[DONE]":
            self.done = True
            return None
        chunk = json.loads(data)
        if chunk.get("error"):
            return _message(chunk)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            texts = [delta.get(name) for name in ("content", "reasoning_content", "reasoning")]
            if any(texts):
                self.times.append(came)
                self.texts.append(texts[0] or "")
        return None


class Server:
    """Knows the model's name; `ask` never raises for what the server or the network does."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http, self.model = http, model

    async def ask(
        self, messages: list[dict[str, str]], max_tokens: int, temperature: float = 0.0
    ) -> Record:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, answer = perf_counter(), _Answer()
        error, reconnected = await self._answer(body, answer), False
        if error is _CUT_OFF:
            # Servers with a short listening queue reset some of many connects at once.
            await asyncio.sleep(_RECONNECT_SECONDS)
            error, reconnected = await self._answer(body, answer), True
        return Record(
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
        """Fills answer; None or the reason of a failure."""
        try:
            async with self._http.stream("POST", "chat/completions", json=body) as response:
                answer.touched = True
                if response.status_code != 200:
                    return f"HTTP {response.status_code}: {_reason(await response.aread())}"
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (error := answer.take(line[5:].strip())):
                        return error
        except httpx.TimeoutException as error:
            return f"{type(error).__name__}: no answer in time"
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}" if answer.touched else _CUT_OFF
        except (ValueError, AttributeError, TypeError) as error:
            return f"unreadable stream: {_short(str(error))}"
        return None if answer.done else "the stream ended without [DONE]"


_CUT_OFF = "refused or reset before the answer began"


@asynccontextmanager
async def connected(
    url: str, model: str | None, key: str | None, timeout: float
) -> AsyncIterator[Server]:
    """A server that answers. Raises AddressError if nobody listens, UsageError if it refuses."""
    base = url.rstrip("/")
    async with httpx.AsyncClient(
        base_url=base if base.endswith("/v1") else f"{base}/v1",
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as http:
        yield Server(http, await _model_name(http, url, model))


async def _model_name(http: httpx.AsyncClient, url: str, wanted: str | None) -> str:
    """The first model that the server has, if none is wanted."""
    try:
        response = await http.get("models")
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise AddressError(f"{url} does not answer ({reason}): is a server there?") from error
    if wanted is not None:
        return wanted
    if response.status_code >= 500:
        raise UnavailableError(f"{url} is not ready: {_reason(response.content)}")
    try:
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{url} names no model at /v1/models (status {response.status_code}): give --model."
        ) from error


def _reason(body: bytes) -> str:
    """OpenAI's error message, or the body's beginning."""
    try:
        return _message(json.loads(body))
    except (ValueError, AttributeError):
        return _short(body.decode("utf-8", "replace"))


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return _short(str(error.get("message", error) if isinstance(error, dict) else error))


def _short(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_REASON]
