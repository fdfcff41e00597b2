"""uvicorn, with the time-outs, error bodies and graceful end that it lacks."""

import asyncio
import contextlib
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.core.constants import Constants
from serve.core.open_files import allow_files
from serve.front.http import replies
from serve.front.http.middleware import Application
from serve.front.http.record import AccessRecord, request_id

BACKLOG = 2048
LINGER_SECONDS = 10.0
SEND_SECONDS = 60.0
HALF_CLOSED = "half_closed"  # the key of an event in a request's state
_PROBE_SECONDS = 0.1
_MAX_PROBE_SECONDS = 5.0
# While a read is parsed, no other client is served.
MAX_READ_BYTES = 16 << 10
# A refused body is dropped in larger reads with pauses, to spare the event loop.
MAX_DISCARDED_BYTES = 128 << 10  # the most bytes that one read may drop
DISCARD_PAUSE_SECONDS = 0.002
MAX_HEADERS = 256
_HEADER_TOO_LARGE = 431
_MAX_REASON_CHARACTERS = 200
_ABSOLUTE = re.compile(rb"https?://(?P<authority>[^/?#]*)(?P<rest>.*)", re.IGNORECASE)
_TLS_HANDSHAKE = b"\x16\x03"
# How many chunks of a body may have any size. Parsing a chunk takes as long as some kilobytes.
MAX_FREE_CHUNKS = 1024
MIN_CHUNK_BYTES = 64  # the least average size of chunks beyond MAX_FREE_CHUNKS
# In SEND_SECONDS, a client must read both this number and this share of the bytes that wait for it.
MIN_SENT_BYTES = 4096
MIN_SENT_SHARE = 0.1
_CANCEL_SECONDS = 2  # how long requests that outlast a drain may take to end
_NUM_OTHER_FILES = 256
_MAX_CROWD = 2  # Connections beyond this multiple of max_connections are closed unanswered.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_logger = logging.getLogger(__name__)


class Config(uvicorn.Config):
    def __init__(self, app: Application, limits: Constants) -> None:
        super().__init__(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            # A header must not say who the client is.
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=limits.max_header_bytes,
            timeout_graceful_shutdown=_CANCEL_SECONDS,
        )
        self.limits = limits


class RefusedError(h11.RemoteProtocolError):
    """A request that h11 allows but this server does not. Its text is for the client."""


class BoundedConnection(h11.Connection):
    """h11's connection, with limits for headers and chunks, each of which takes time to parse."""

    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            self._check_headers(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            return origin_form(event)
        if isinstance(event, h11.Data):
            self._check_chunks(event)
        return event

    def _check_headers(self, received: bytes) -> None:
        if received.partition(b"\r\n\r\n")[0].count(b"\n") > MAX_HEADERS:
            raise RefusedError(
                f"The request has more than {MAX_HEADERS} headers.", error_status_hint=431
            )

    def _check_chunks(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_bytes += len(data.data)
        if self._num_chunks > MAX_FREE_CHUNKS + self._num_bytes // MIN_CHUNK_BYTES:
            raise RefusedError("The chunks of the body are too small: send larger ones.")


def origin_form(request: h11.Request) -> h11.Request:
    """Returns a request for an absolute URL (RFC 9112, 3.2.2) as one for a path, and other requests
    unchanged. Raises RefusedError if the URL and Host name different servers."""
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        return request
    hosts = [value.lower() for name, value in request.headers if name == b"host"]
    if any(host != absolute["authority"].lower() for host in hosts):
        raise RefusedError("The request's URL and its Host header name different servers.")
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    target = absolute["rest"]
    return h11.Request(
        method=request.method,
        target=target if target.startswith(b"/") else b"/" + target,
        headers=[*headers, (b"host", absolute["authority"])],
        http_version=request.http_version,
    )


class Protocol(H11Protocol):
    """A connection with two deadlines. The first runs while the client has to send a header or,
    after an early answer, the rest of a body that is dropped. The second runs while output waits to
    be sent: without it, a closing transport would wait forever.

    A client that closes its sending side after a request may still read, or may have left. Writing
    shows which: the machine of a client that has left answers with a reset, and the next write
    fails. So the server writes to such a client until the answer is complete."""

    config: Config
    _probing: asyncio.TimerHandle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _is_refused = False  # whether further input is dropped
    _is_tls = False  # whether the latest input begins like a TLS handshake
    _watched_state: object = None  # the client's state in h11 for which the deadline was set
    _sending: asyncio.TimerHandle | None = None
    _pausing: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = BoundedConnection(h11.SERVER, self.config.limits.max_header_bytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_max_read(MAX_READ_BYTES)
        # With this limit, pause_writing is called as soon as any output has to wait.
        transport.set_write_buffer_limits(0)
        self._half_closed = asyncio.Event()
        self.app_state = {"connections": self.connections, HALF_CLOSED: self._half_closed}
        if len(self.connections) > _MAX_CROWD * self.config.limits.max_connections:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._is_tls = data.startswith(_TLS_HANDSHAKE)
        super().data_received(data)
        self._watch()
        is_discarding = self._is_discarding()
        self._set_max_read(MAX_DISCARDED_BYTES if is_discarding else MAX_READ_BYTES)
        if is_discarding:
            self.flow.pause_reading()
            resume = self.flow.resume_reading
            self._pausing = self.loop.call_later(DISCARD_PAUSE_SECONDS, resume)

    def _set_max_read(self, num_bytes: int) -> None:
        # The largest read of asyncio's selector transports.
        self.transport.max_size = num_bytes  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._deadline, self._sending, self._probing, self._pausing):
            if timer is not None:
                timer.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether to keep the connection open, for the answer to a complete request."""
        if self._is_refused or not self._owes_answer():
            return False
        if not self._half_closed.is_set():
            self._half_closed.set()
            self._probe(probe_intervals())
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Requests that came before the half-close have begun by now, one after the other.
        if self._half_closed.is_set() and not self._owes_answer():
            self.transport.close()

    def _owes_answer(self) -> bool:
        is_whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return is_whole and self.cycle is not None and not self.cycle.response_complete

    def _probe(self, intervals: Iterator[float]) -> None:
        """Writes to a client that may have left. Before an answer begins, HTTP allows interim
        responses only, and HTTP/1.0 has none. Streams write comments themselves."""
        if not self._owes_answer() or self.cycle.response_started:
            return
        if self.conn.their_http_version != b"1.1":
            self._probing = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
            return
        interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        self.transport.write(self.conn.send(interim) or b"")
        self._probing = self.loop.call_later(next(intervals), self._probe, intervals)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_sending()

    def _expect_progress(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(SEND_SECONDS, self._check_progress, left)

    def _check_progress(self, num_before: int) -> None:
        """Disconnects a client that has read too little since num_before bytes waited for it. No
        output was added since then, so the size of the buffer shows how much was read."""
        num_read = num_before - self.transport.get_write_buffer_size()
        if num_read >= max(MIN_SENT_BYTES, MIN_SENT_SHARE * num_before):
            self._expect_progress()
            return
        _logger.warning("event=slow_client bytes=%d seconds=%g", max(0, num_read), SEND_SECONDS)
        self.transport.abort()

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses input that is not HTTP or has too many headers or chunks, with h11's status."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self._refuse(replies.StatusError(status, self._objection(status, error or msg)))

    def _objection(self, status: int, error: BaseException | str) -> str:
        if isinstance(error, RefusedError):
            return str(error)
        if status == _HEADER_TOO_LARGE:
            num_bytes = self.config.limits.max_header_bytes
            return f"The request's header is larger than {num_bytes} bytes."
        if self._is_tls:
            return "This server speaks http://, and the client speaks https://."
        return f"The request is not valid HTTP: {str(error)[:_MAX_REASON_CHARACTERS]}."

    def _watch(self) -> None:
        if self.conn.their_state is not self._watched_state:
            self._clear()
        self._watched_state = self.conn.their_state
        if self.conn.their_state is h11.IDLE:
            self._arm(self.config.limits.header_timeout)
        elif self._is_discarding():
            self._arm(LINGER_SECONDS)
        else:
            self._clear()

    def _is_discarding(self) -> bool:
        """Whether the rest of the body is dropped, because the answer was complete before it."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _arm(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self._expire)

    def _clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        is_slow = self.conn.their_state is h11.IDLE and not self._is_refused
        if is_slow and self.conn.trailing_data[0]:
            self._refuse(replies.StatusError(408, "The request's header took too long."))
        self.transport.close()

    def _refuse(self, error: replies.StatusError) -> None:
        """Answers without the application, if an answer can still be given, and closes."""
        client = self.client[0] if self.client else None
        record = AccessRecord(request_id([]), "-", "-", client=client, status=error.http_status)
        record.fail(error)
        _logger.info("%s", record.line())
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = replies.encode(replies.error_object(error))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                (b"x-request-id", record.request.encode()),
            ]
            response = h11.Response(status_code=error.http_status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._hang_up()

    def _hang_up(self) -> None:
        """Closes the sending side and drops further input. If the connection were closed with
        unread input, it would be reset, and the client might not get the answer."""
        self._is_refused = True
        self._clear()
        self._arm(LINGER_SECONDS)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()


def probe_intervals() -> Iterator[float]:
    """Seconds between writes to a client. If it has left, the second write fails."""
    seconds = _PROBE_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, _MAX_PROBE_SECONDS)


class QuietServer(uvicorn.Server):
    def __init__(self, app: Application, limits: Constants) -> None:
        super().__init__(Config(app, limits))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signal handlers as they are."""
        yield


class HttpServer(uvicorn.Server):
    """uvicorn's server. It calls drain at the first signal; should_exit closes the port."""

    def __init__(self, app: Application, limits: Constants, drain: Callable[[], None]) -> None:
        super().__init__(Config(app, limits))
        self._drain = drain
        self._has_signal = False
        wanted = _MAX_CROWD * limits.max_connections + _NUM_OTHER_FILES
        allowed = allow_files(wanted)
        if allowed < wanted:
            _logger.warning("event=few_files allowed=%d wanted=%d", allowed, wanted)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs handlers for good. uvicorn's own handlers raise the signal again at the end,
        which would kill the process before it has stopped its ranks."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        yield

    def _stop(self, number: int) -> None:
        if self._has_signal and number == signal.SIGINT:
            self.force_exit = self.should_exit = True
        self._has_signal = True
        self._drain()
