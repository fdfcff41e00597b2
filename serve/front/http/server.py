"""uvicorn, with the time-outs, error bodies and graceful end that it lacks."""

import asyncio
import contextlib
import logging
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.core.config import ServeConfig
from serve.front.http import replies
from serve.front.http.guard import Application
from serve.front.http.record import Record, request_id

BACKLOG = 2048
LINGER_SECONDS = 10.0
SEND_SECONDS = 60.0
HALF_CLOSED = "half_closed"  # in a request's state: an event
_PROBE_SECONDS = 0.1
_MAX_PROBE_SECONDS = 5.0
# A read of this size is parsed in one go, and no other client is served meanwhile.
MAX_READ_BYTES = 16 << 10
# A body that was refused is dropped in larger reads with pauses, to spare the event loop.
MAX_DISCARDED_BYTES = 128 << 10  # in one read
DISCARD_PAUSE_SECONDS = 0.002
MAX_HEADERS = 256
_HEADER_TOO_LARGE = 431
_MAX_REASON_CHARACTERS = 200
_TLS_HANDSHAKE = b"\x16\x03"
# Each chunk of a body costs as much as kilobytes of it do.
MAX_FREE_CHUNKS = 1024
MIN_CHUNK_BYTES = 64  # on average, of those after them
# In these seconds a client has to take so much of what waits for it, and so large a share.
MIN_SENT_BYTES = 4096
MIN_SENT_SHARE = 0.1
_CANCEL_SECONDS = 2  # for what still runs after the drain
_NUM_OTHER_FILES = 256
_MAX_CROWD = 2  # times max_connections: further connections are closed without an answer
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_logger = logging.getLogger(__name__)


class Config(uvicorn.Config):
    """uvicorn's, with limits that it does not have."""

    def __init__(self, app: Application, limits: ServeConfig) -> None:
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


class TooManyError(h11.RemoteProtocolError):
    """A request has more parts than are allowed, each of which costs time. Its text is for the
    client."""


class Connection(h11.Connection):
    """h11's, with bounds on what costs time for each header line and for each chunk of a body."""

    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            self._check_headers(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._check_chunks(event)
        return event

    def _check_headers(self, received: bytes) -> None:
        """Checks the number of headers before h11 parses them."""
        if received.partition(b"\r\n\r\n")[0].count(b"\n") > MAX_HEADERS:
            raise TooManyError(
                f"The request has more than {MAX_HEADERS} headers.", error_status_hint=431
            )

    def _check_chunks(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_bytes += len(data.data)
        if self._num_chunks > MAX_FREE_CHUNKS + self._num_bytes // MIN_CHUNK_BYTES:
            raise TooManyError("The chunks of the body are too small: send larger ones.")


class Protocol(H11Protocol):
    """One connection. A deadline runs while its client owes a header or, after an early
    answer, the rest of a body that nobody reads any more. Another one runs while it has not
    taken all that was sent: a transport that is closed waits for that, forever.

    A client that closes its sending side after a request looks like one that has left, until
    something is written to it: one that has left answers with a reset, and the write after
    that fails. So such a client is written to until its answer is complete."""

    config: Config
    _probing: asyncio.TimerHandle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _is_refused = False  # What still comes is not read.
    _is_tls = False  # The bytes that came last begin as https:// does.
    _owed: object = None  # of their states in h11, the one with the deadline
    _sending: asyncio.TimerHandle | None = None
    _pausing: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = Connection(h11.SERVER, self.config.limits.max_header_bytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_max_read(MAX_READ_BYTES)
        # Of whatever is not taken at once, pause_writing tells.
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
        # asyncio's selector transports read so much at once.
        self.transport.max_size = num_bytes  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._clear()
        self._stop_sending()
        self._stop_probing()
        if self._pausing is not None:
            self._pausing.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open, for the answer to a request that is complete."""
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
        """Before an answer begins, an interim response is all that HTTP lets a server write, and
        HTTP/1.0 does not have even that. Streams write comments when they see half_closed."""
        if not self._owes_answer() or self.cycle.response_started:
            return
        if self.conn.their_http_version != b"1.1":
            self._probing = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
            return
        interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        self.transport.write(self.conn.send(interim) or b"")
        self._probing = self.loop.call_later(next(intervals), self._probe, intervals)

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()

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
        """Gives a client up that took too little since so many bytes were left. Nothing is
        written meanwhile: what is taken is missing in the buffer."""
        taken = num_before - self.transport.get_write_buffer_size()
        if taken >= max(MIN_SENT_BYTES, MIN_SENT_SHARE * num_before):
            self._expect_progress()
            return
        _logger.warning("event=slow_client bytes=%d seconds=%g", max(0, taken), SEND_SECONDS)
        self.transport.abort()

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses input that is not HTTP or has too many parts. h11 says which status fits."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self._refuse(replies.StatusError(status, self._objection(status, error or msg)))

    def _objection(self, status: int, error: BaseException | str) -> str:
        if isinstance(error, TooManyError):
            return str(error)
        if status == _HEADER_TOO_LARGE:
            num_bytes = self.config.limits.max_header_bytes
            return f"The request's header is larger than {num_bytes} bytes (--max-header-bytes)."
        if self._is_tls:
            return "This server speaks http://, and the client speaks https://."
        return f"The request is not valid HTTP: {str(error)[:_MAX_REASON_CHARACTERS]}."

    def _watch(self) -> None:
        if self.conn.their_state is not self._owed:
            self._clear()
        self._owed = self.conn.their_state
        if self.conn.their_state is h11.IDLE:
            self._arm(self.config.limits.header_timeout)
        elif self._is_discarding():
            self._arm(LINGER_SECONDS)
        else:
            self._clear()

    def _is_discarding(self) -> bool:
        """Whether the answer was complete before the body: the rest of it is read and dropped."""
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
        record = Record(request_id([]), "-", "-", client=client, status=error.http_status)
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
        """Closed at once, with something unread, the connection would be reset, and the client
        might not get what was written."""
        self._is_refused = True
        self._clear()
        self._arm(LINGER_SECONDS)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()


def probe_intervals() -> Iterator[float]:
    """Seconds between writes to a client that may have left. The second write detects it;
    those after that are for clients that leave later."""
    seconds = _PROBE_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, _MAX_PROBE_SECONDS)


class QuietServer(uvicorn.Server):
    """uvicorn's, which leaves signals to whoever runs it."""

    def __init__(self, app: Application, limits: ServeConfig) -> None:
        super().__init__(Config(app, limits))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures nothing."""
        yield


class Server(uvicorn.Server):
    """drain is called at the first signal. It has should_exit set when nothing runs any more,
    and until then whoever comes is told so, and not met by a closed port."""

    def __init__(self, app: Application, limits: ServeConfig, drain: Callable[[], None]) -> None:
        super().__init__(Config(app, limits))
        self._drain = drain
        self._is_asked = False
        _allow_files(_MAX_CROWD * limits.max_connections + _NUM_OTHER_FILES)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal once more at the end, which kills the process
        before its ranks are told. So would another one that comes then: these stay."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        yield

    def _stop(self, number: int) -> None:
        if self._is_asked and number == signal.SIGINT:
            self.force_exit = self.should_exit = True
        self._is_asked = True
        self._drain()


def _allow_files(wanted: int) -> None:
    """A connection is a file, and systems allow a process as few as 256 unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _logger.warning("event=few_files allowed=%d wanted=%d", allowed, wanted)
