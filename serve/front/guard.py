"""Around every request: its id and log line, its body's limits, who may ask. Plain ASGI."""

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any, TypeVar

from serve.front.metrics import Metrics
from serve.front.record import Record, request_id
from serve.front.replies import StatusError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
Result = TypeVar("Result")

RECORD = "brigade.record"
MOST_BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
CLIENT_LEFT = 499
_PROBES = {"/health", "/ready", "/metrics"}
_PROXY_HEADERS = {b"forwarded", b"x-forwarded-for", b"x-real-ip"}

_logger = logging.getLogger(__name__)


class Guard:
    """The outermost application: one log line and one count for each request."""

    def __init__(self, inner: Application, metrics: Metrics) -> None:
        self._inner = inner
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record(request_id(scope["headers"]), scope["method"], scope["path"])
        scope[RECORD] = record

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                named = (b"x-request-id", record.request.encode("ascii"))
                message = {**message, "headers": [*message["headers"], named]}
            await send(message)

        try:
            await self._inner(scope, receive, watched)
        except Exception:
            record.status = 500
            _logger.exception("request=%s failed", record.request)
        finally:
            self._end(record)

    def _end(self, record: Record) -> None:
        if record.finish_reason == "abort" or record.status is None:
            record.status = CLIENT_LEFT
        if record.path.startswith("/v1/"):
            self._metrics.request(record.status)
        # Whoever polls while the cluster starts must not fill the log.
        quiet = record.path in _PROBES and record.status in (200, 503)
        _logger.log(logging.DEBUG if quiet else logging.INFO, "%s", record.line())


async def read_body(headers: Headers, receive: Receive) -> bytes:
    """Raises StatusError 413 before reading if the size is announced, 408 for a slow body."""
    announced = dict(headers).get(b"content-length", b"0")
    if announced.isdigit() and int(announced[:20]) > MOST_BODY_BYTES:
        raise _too_large()
    try:
        return await asyncio.wait_for(_collect(receive), BODY_SECONDS)
    except (TimeoutError, asyncio.TimeoutError):
        raise StatusError(
            408, f"The body took longer than {BODY_SECONDS:g} seconds.", {"connection": "close"}
        ) from None


async def _collect(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise StatusError(CLIENT_LEFT, "The client left.")
        body += message.get("body", b"")
        if len(body) > MOST_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(body)


def _too_large() -> StatusError:
    return StatusError(413, f"The body is larger than {MOST_BODY_BYTES} bytes.")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work, which is cancelled if the client leaves before it is there."""
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


def check_local(scope: Scope) -> None:
    """Raises StatusError 403 unless the client is a process of this host.

    A request that a proxy passed on is nobody's word: whoever sent it is elsewhere.
    """
    client = scope.get("client")
    passed_on = any(name in _PROXY_HEADERS for name, _ in scope["headers"])
    if client is None or passed_on or not _is_loopback(client[0]):
        raise StatusError(403, "Admin calls are answered to clients on this host only.")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
