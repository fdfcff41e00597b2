"""Middleware around every request, in plain ASGI: sets its id, writes its log line, counts it, and
limits its body."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar

from serve.core.config import ServeConfig
from serve.core.constants import Constants
from serve.core.errors import BrigadeError
from serve.front.http import replies
from serve.front.http.access import CLIENT, Access, ErrorFormat, Policy
from serve.front.http.metrics import Metrics
from serve.front.http.record import OTHER, AccessRecord, request_id, trace_of
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
MAX_FREE_BYTES = 64 << 10  # the part of each body that need not share the pace

_OF_BROWSERS = {b"origin", b"sec-fetch-site"}
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}

_logger = logging.getLogger(__name__)


class RequestLog:
    """The outermost application: logs and counts requests. It logs only fields in field_names."""

    def __init__(
        self,
        inner: Application,
        metrics: Metrics,
        config: ServeConfig,
        field_names: frozenset[str],
    ) -> None:
        self._inner = inner
        self._metrics = metrics
        self._config = config
        self._field_names = field_names
        self._pace = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        record = AccessRecord(
            request_id(scope["headers"]),
            scope["method"] if scope["method"] in _METHODS else OTHER,
            client=client[0] if client else None,
            field_names=self._field_names,
        )
        if record.method == "POST":  # The method of all calls that use the model.
            record.model = self._config.model_name
        scope[RECORD] = record
        scope[LIMITS] = self._config.constants
        scope[PACE] = self._pace
        scope[POLICY] = CLIENT  # CLIENT applies until a route has matched.

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                names = [b"x-request-id"]
                if error_format_of(scope) is ErrorFormat.ANTHROPIC:
                    names.append(b"request-id")
                named = [(name, record.request.encode("ascii")) for name in names]
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        try:
            await self._inner(scope, receive, watched)
        except Exception as error:
            record.status, record.finish_reason = 500, "error"
            _logger.error("request=%s event=bug trace=%s", record.request, trace_of(error))
        finally:
            self._end(record, scope[POLICY])

    def _end(self, record: AccessRecord, policy: Policy) -> None:
        if record.finish_reason == "abort" or record.status is None:
            record.status = CLIENT_LEFT
        self._metrics.request(record.path, record.status)
        # Probes of a cluster that is starting must not fill the log.
        quiet = policy.access is Access.OPEN and record.status in (200, 304, 503)
        _logger.log(logging.DEBUG if quiet else logging.INFO, "%s", record.line())


def error_format_of(scope: Scope) -> ErrorFormat:
    policy: Policy = scope[POLICY]
    if policy.error_format is not ErrorFormat.BOTH:
        return policy.error_format
    names = {name for name, _ in scope["headers"]}
    return ErrorFormat.ANTHROPIC if b"anthropic-version" in names else ErrorFormat.OPENAI


def error_reply(scope: Scope, error: BrigadeError) -> Mapping[str, Any]:
    record: AccessRecord = scope[RECORD]
    record.fail(error)
    error_format = error_format_of(scope)
    if error_format is ErrorFormat.ANTHROPIC:
        return replies.anthropic_error(error, record.request)
    if error_format is ErrorFormat.OLLAMA:
        return replies.ollama_error(error)
    return replies.error_object(error)


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Returns a small body in one piece, to parse in the event loop. Raises as `read_parts`
    does."""
    limits: Constants = scope[LIMITS]
    max_bytes = min(MAX_JOINED_BYTES, limits.max_body_bytes)
    return b"".join(await _receive(scope, receive, max_bytes))


async def read_parts(scope: Scope, receive: Receive) -> Parts:
    """Returns the body in the parts that arrived: joining megabytes would block the event loop.
    Raises StatusError: 415 if it is not JSON, 413 if it is too large, 408 if it is too slow."""
    limits: Constants = scope[LIMITS]
    return await _receive(scope, receive, limits.max_body_bytes)


async def _receive(scope: Scope, receive: Receive, max_bytes: int) -> Parts:
    limits: Constants = scope[LIMITS]
    headers = dict(scope["headers"])
    _check_type(scope[POLICY].error_format, headers)
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        collecting = _collect(receive, max_bytes, scope[PACE])
        parts = await asyncio.wait_for(collecting, limits.body_timeout)
    except TimeoutError:
        raise StatusError(
            408,
            f"The body took longer than {limits.body_timeout:g} seconds.",
            {"connection": "close"},
        ) from None
    record: AccessRecord = scope[RECORD]
    record.body_bytes = sum(map(len, parts))
    return parts


def _check_type(error_format: ErrorFormat, headers: dict[bytes, bytes]) -> None:
    """Raises StatusError unless the type is JSON: browsers let a web page send other types to any
    server without asking the server first. Some of Ollama's clients, which are not browsers, send
    no type or a form's."""
    is_free = error_format is ErrorFormat.OLLAMA and not headers.keys() & _OF_BROWSERS
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if content_type != b"application/json" and not is_free:
        raise StatusError(415, "The body must be JSON: send Content-Type: application/json.")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise StatusError(
            415, "Compressed bodies are not supported: send the body without Content-Encoding."
        )


async def _collect(receive: Receive, max_bytes: int, pace: asyncio.Lock) -> Parts:
    """Receives a body. Large bodies share pace: each tick of the event loop receives one part of
    one of them, so that many bodies delay other work no more than one does."""
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise StatusError(CLIENT_LEFT, "The client left.", code="client_left")
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return tuple(parts)
        if num_bytes > MAX_FREE_BYTES:
            async with pace:
                await asyncio.sleep(0)


def _too_large(max_bytes: int) -> StatusError:
    return StatusError(413, f"The body is larger than {max_bytes} bytes.")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Returns the result of work. If the client leaves, cancels work and raises StatusError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StatusError(CLIENT_LEFT, "The client left.", code="client_left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
