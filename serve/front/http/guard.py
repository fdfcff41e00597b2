"""Wraps every request: it sets the id, writes the log line, counts, and limits the body. Plain
ASGI."""

import asyncio
import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any, TypeVar

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError
from serve.front.http import replies
from serve.front.http.access import Access, Dialect, Policies, Policy
from serve.front.http.metrics import Metrics
from serve.front.http.pace import MAX_FREE_BYTES, Pace
from serve.front.http.record import Record, request_id
from serve.front.http.replies import StatusError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Parts = tuple[bytes, ...]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Result = TypeVar("Result")

RECORD = "brigade.record"
LIMITS = "brigade.limits"
PACE = "brigade.pace"
POLICY = "brigade.policy"
CLIENT_LEFT = 499
MAX_JOINED_BYTES = 64 << 10

_logger = logging.getLogger(__name__)


class Guard:
    """The outermost application, which logs one line for each request and counts it. The metrics
    name the paths in `paths`; all others are counted together."""

    def __init__(
        self,
        inner: Application,
        metrics: Metrics,
        limits: ServeConfig,
        paths: Collection[str],
        policies: Policies,
    ) -> None:
        self._inner = inner
        self._metrics = metrics
        self._limits = limits
        self._paths = frozenset(paths)
        self._policies = policies
        self._pace = Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = self._policies.address(scope["path"])
        client = scope.get("client")
        record = Record(
            request_id(scope["headers"]),
            scope["method"],
            scope["path"],
            client=client[0] if client else None,
        )
        if record.method == "POST":  # The method of all calls that use the model.
            record.model = self._limits.model_name
        policy = self._policies.policy(record.path)
        scope[RECORD] = record
        scope[LIMITS] = self._limits
        scope[PACE] = self._pace
        scope[POLICY] = policy

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                names = [b"x-request-id"]
                if policy.dialect is Dialect.ANTHROPIC:
                    names.append(b"request-id")
                named = [(name, record.request.encode("ascii")) for name in names]
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        try:
            await self._inner(scope, receive, watched)
        except Exception:
            record.status, record.finish_reason = 500, "error"
            # On one line, because an exception may quote a client's text.
            trace = json.dumps(traceback.format_exc())
            _logger.error("request=%s event=bug trace=%s", record.request, trace)
        finally:
            self._end(record, policy)

    def _end(self, record: Record, policy: Policy) -> None:
        if record.finish_reason == "abort" or record.status is None:
            record.status = CLIENT_LEFT
        endpoint = record.path if record.path in self._paths else "other"
        self._metrics.request(endpoint, record.status)
        # Probes of a cluster that is starting must not fill the log.
        quiet = policy.access is Access.OPEN and record.status in (200, 304, 503)
        _logger.log(logging.DEBUG if quiet else logging.INFO, "%s", record.line())


def error_reply(scope: Scope, error: BrigadeError) -> Mapping[str, Any]:
    """Returns the error object of the call's dialect."""
    record: Record = scope[RECORD]
    policy: Policy = scope[POLICY]
    record.fail(error)
    if policy.dialect is Dialect.ANTHROPIC:
        return replies.anthropic_error(error, record.request)
    if policy.dialect is Dialect.OLLAMA:
        return replies.ollama_error(error)
    return replies.error_object(error)


async def answer(scope: Scope, send: Send, error: BrigadeError) -> None:
    """Sends an error outside of Starlette."""
    body = replies.encode(error_reply(scope, error))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **replies.error_headers(error),
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.http_status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Returns the body, joined: for calls whose bodies are parsed in the event loop, and so must be
    small. Raises what `read_parts` raises."""
    limits: ServeConfig = scope[LIMITS]
    max_bytes = min(MAX_JOINED_BYTES, limits.max_body_bytes)
    return b"".join(await _receive(scope, receive, max_bytes))


async def read_parts(scope: Scope, receive: Receive) -> Parts:
    """Returns the body in the parts that arrived, because joining megabytes would block the event
    loop.

    Raises StatusError: before reading, 415 for another type than JSON and 413 for an announced size
    over the limit; later 408 for a slow body.
    """
    limits: ServeConfig = scope[LIMITS]
    return await _receive(scope, receive, limits.max_body_bytes)


async def _receive(scope: Scope, receive: Receive, max_bytes: int) -> Parts:
    limits: ServeConfig = scope[LIMITS]
    headers = dict(scope["headers"])
    _check_type(headers)
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        collecting = _collect(receive, max_bytes, scope[PACE])
        return await asyncio.wait_for(collecting, limits.body_timeout)
    except TimeoutError:
        raise StatusError(
            408,
            f"The body took longer than {limits.body_timeout:g} seconds.",
            {"connection": "close"},
        ) from None


def _check_type(headers: dict[bytes, bytes]) -> None:
    """Raises StatusError. A web page may send other types to any server without asking it first."""
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise StatusError(415, "The body must be JSON: send Content-Type: application/json.")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise StatusError(
            415, "Compressed bodies are not supported: send the body without Content-Encoding."
        )


async def _collect(receive: Receive, max_bytes: int, pace: Pace) -> Parts:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise StatusError(CLIENT_LEFT, "The client left.")
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return tuple(parts)
        if num_bytes > MAX_FREE_BYTES:
            await pace.wait()


def _too_large(max_bytes: int) -> StatusError:
    return StatusError(413, f"The body is larger than {max_bytes} bytes.")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Returns the result of work. If the client leaves first, work is cancelled and StatusError
    raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StatusError(CLIENT_LEFT, "The client left.")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
