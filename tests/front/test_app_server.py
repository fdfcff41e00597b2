"""Real sockets and clients that behave badly: slow, silent, gone, or no HTTP at all."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from serve.core.errors import BrigadeError, UnavailableError
from serve.front.app import serve
from serve.front.http import server as http_server
from serve.front.http.listening import bind
from serve.front.routes import stream as streaming
from tests.front.fakes import CONFIG, MAX_CONTEXT, FakeEngine, Running
from tests.front.test_app import CHAT, HELLO, post, wait_until


class Times:
    """Times of a server that are over when a test says so, and not when a machine is slow."""

    HEADER = 20_000.0
    BODY = 40_000.0
    LINGER = 60_000.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._timers: list[tuple[float, asyncio.AbstractEventLoop, asyncio.TimerHandle]] = []
        self._received = b""
        call_at, received = asyncio.BaseEventLoop.call_at, http_server.Protocol.data_received

        def noted(
            loop: asyncio.BaseEventLoop, when: float, *words: Any, **named: Any
        ) -> asyncio.TimerHandle:
            timer = call_at(loop, when, *words, **named)
            seconds = round((when - loop.time()) / self.HEADER) * self.HEADER
            if seconds:
                self._timers.append((seconds, loop, timer))
            return timer

        def read(protocol: http_server.Protocol, data: bytes) -> None:
            received(protocol, data)
            self._received = data

        monkeypatch.setattr(http_server.Protocol, "data_received", read)
        monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", noted)
        monkeypatch.setattr(http_server, "LINGER_SECONDS", self.LINGER)

    def run(self) -> bool:
        return any(not timer.cancelled() for _, _, timer in self._timers)

    def pass_(self, seconds: float, after: bytes = b"") -> None:
        """Waits until the server counts this time and has read bytes that end with `after`. Then
        lets the time be over."""

        def counting() -> list[tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle]]:
            timers = list(self._timers)
            return [each[1:] for each in timers if each[0] == seconds and not each[2].cancelled()]

        def end() -> None:
            for _, timer in counting():
                timer._run()
                timer.cancel()

        wait_until(lambda: self._received.endswith(after))
        wait_until(lambda: bool(counting()))
        loop, _ = counting()[0]
        loop.call_soon_threadsafe(end)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    return Times(monkeypatch)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, times: Times) -> Iterator[Running]:
    """A server whose times are held, and that sends pings at once."""
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.1)
    with Running(engine, header_timeout=times.HEADER, body_timeout=times.BODY) as server:
        yield server


def request_bytes(**fields: Any) -> bytes:
    body = json.dumps({**HELLO, **fields}).encode()
    return head(len(body)) + body


def head(content_length: int) -> bytes:
    json_type = "Content-Type: application/json\r\n"
    first = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{json_type}"
    return f"{first}Content-Length: {content_length}\r\n\r\n".encode()


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b" " * 4096)
        time.sleep(0.005)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def read_response(connection: socket.socket) -> bytes:
    """One response of a connection that stays open; head and body may come apart."""
    data, length = b"", None
    while length is None or len(data.partition(b"\r\n\r\n")[2]) < length:
        chunk = connection.recv(65536)
        assert chunk, "closed in the middle of a response"
        data += chunk
        if b"\r\n\r\n" in data:
            length = int(re.findall(rb"content-length: (\d+)", data)[0])
    return data


def body_of(response: bytes) -> Any:
    return json.loads(response.partition(b"\r\n\r\n")[2])


# --- slow and silent clients


def test_a_client_that_sends_nothing_is_disconnected(hasty: Running, times: Times) -> None:
    with hasty.connect() as connection:
        times.pass_(times.HEADER)
        assert read_all(connection) == b""


def test_a_header_that_arrives_too_slowly_is_refused(hasty: Running, times: Times) -> None:
    with hasty.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow")
        times.pass_(times.HEADER, after=b"X-Slow")
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 408 ")
    assert "header" in body_of(response)["error"]["message"]


def test_a_second_header_that_arrives_too_slowly_is_also_refused(
    hasty: Running, times: Times
) -> None:
    """The time-out of an idle connection ends with the first byte."""
    with hasty.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost")
        times.pass_(times.HEADER, after=b"Host")
        assert b"HTTP/1.1 408 " in read_all(connection)


def test_a_body_that_arrives_too_slowly_is_refused(hasty: Running, times: Times) -> None:
    with hasty.connect() as connection:
        connection.sendall(head(100) + b"{")
        times.pass_(times.BODY)
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 408 ")
    assert "body" in body_of(response)["error"]["message"]


def test_a_long_answer_is_not_ended_by_a_time_out(
    hasty: Running, engine: FakeEngine, times: Times
) -> None:
    """Neither the header's nor the body's time-out may end an answer."""
    engine.delay = 600
    with hasty.connect() as connection:
        connection.sendall(request_bytes())
        wait_until(lambda: bool(engine.generations))
        wait_until(lambda: not times.run())
        hasty.hurry(engine.generations[0])
        reply = body_of(read_response(connection))
    assert reply["choices"][0]["message"]["content"] == engine.answer


def test_a_connection_can_be_used_again_after_an_answer(hasty: Running) -> None:
    with httpx2.Client(base_url=hasty.url) as client:
        for _ in range(3):
            assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_stream_without_tokens_gets_pings(hasty: Running, engine: FakeEngine) -> None:
    engine.delay, engine.answer = 600, ""
    body = {**HELLO, "stream": True}
    with httpx2.stream("POST", hasty.url + CHAT, json=body) as reply:
        pieces = reply.iter_text()
        text = ""
        while not text.startswith(": prompt 3/7 tokens\n\n"):
            text += next(pieces)
        hasty.hurry(engine.generations[0])
        text += "".join(pieces)
    _, end, rest = text.partition("data: [DONE]\n\n")
    assert end
    # On a busy machine, another ping may come before the connection is closed.
    assert set(rest.split("\n\n")) <= {"", ": keep-alive"}


# --- no HTTP, or too much of it


def test_a_client_that_still_sends_a_large_body_gets_the_refusal(hasty: Running) -> None:
    """Closing at once would reset the connection of a client that still sends."""
    size = CONFIG.constants.max_body_bytes + 1
    with hasty.connect() as connection:
        connection.sendall(head(size))
        assert select.select([connection], [], [], 60)[0], "no answer before the body"
        connection.sendall(b" " * size)
        response = read_response(connection)
        assert response.startswith(b"HTTP/1.1 413 ")
        assert "larger" in body_of(response)["error"]["message"]
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(connection).startswith(b"HTTP/1.1 200 ")


def test_httpx_gets_413_for_a_body_that_is_too_large(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "LINGER_SECONDS", 600.0)  # to read the body on a busy machine
    body = b" " * (CONFIG.constants.max_body_bytes + 1)
    headers = {"Content-Type": "application/json"}
    reply = httpx2.post(shared.url + CHAT, content=body, headers=headers)
    assert reply.status_code == 413


def test_a_client_that_never_stops_sending_is_disconnected(hasty: Running, times: Times) -> None:
    with hasty.connect() as connection:
        connection.sendall(head(1 << 40))
        assert read_response(connection).startswith(b"HTTP/1.1 413 ")
        connection.sendall(b" ")
        times.pass_(times.LINGER)
        with pytest.raises(ConnectionError):
            send_for_ever(connection)


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "https://"),
        (b"hello\r\n\r\n", 400, "request line"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", 400, "Content-Length"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400,
         "Content-Length"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 501,
         "Transfer-Encoding"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000, 431, "than 65536 bytes"),
        (b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
         b"Transfer-Encoding: chunked\r\n"
         b"Content-Type: application/json\r\n\r\nzz\r\n", 400, "chunk"),
    ],
)  # fmt: skip
def test_input_that_is_not_http_gets_an_error_object(
    shared: Running, data: bytes, status: int, reason: str
) -> None:
    with shared.connect() as connection:
        connection.sendall(data)
        response = read_all(connection)
    assert response.startswith(f"HTTP/1.1 {status} ".encode())
    error = body_of(response)["error"]
    assert error["type"] == "invalid_request_error"
    assert reason in error["message"]
    assert post(shared).status_code == 200


def test_very_many_headers_are_refused_before_they_are_parsed(shared: Running) -> None:
    with shared.connect() as connection:
        lines = b"".join(b"a%d: b\r\n" % n for n in range(http_server.MAX_HEADERS))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 431 ")
    assert "headers" in body_of(response)["error"]["message"]


CHUNKED = (
    f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
).encode()


def chunks(body: bytes, size: int) -> bytes:
    parts = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_body_of_very_many_tiny_chunks_is_refused(shared: Running) -> None:
    """Each costs as much time of the event loop as kilobytes do."""
    padded = json.dumps(HELLO).encode() + b" " * 2 * http_server.MAX_FREE_CHUNKS
    with shared.connect() as connection:
        connection.sendall(CHUNKED + chunks(padded, 1))
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert "chunks" in body_of(response)["error"]["message"]


@pytest.mark.parametrize(("num_blanks", "size"), [(100, 1), (200_000, http_server.MIN_CHUNK_BYTES)])
def test_a_chunked_body_is_read(shared: Running, num_blanks: int, size: int) -> None:
    """Of a few tiny chunks, or of many small ones."""
    padded = json.dumps(HELLO).encode() + b" " * num_blanks
    with shared.connect() as connection:
        connection.sendall(CHUNKED + chunks(padded, size))
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def sizes_read(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that the server reads from now on. Another server of this process may still
    drop the rest of an earlier test's body."""
    sizes: list[int] = []
    received = http_server.Protocol.data_received

    def noted(self: http_server.Protocol, data: bytes) -> None:
        if self.server and self.server[1] == server.port:
            sizes.append(len(data))
        received(self, data)

    monkeypatch.setattr(http_server.Protocol, "data_received", noted)
    return sizes


def test_a_connection_parses_only_a_limited_amount_at_once(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are served between the parts."""
    sizes = sizes_read(server, monkeypatch)
    body = json.dumps(HELLO).encode() + b" " * 500_000
    with server.connect() as connection:
        connection.sendall(head(len(body)) + body)
        assert read_response(connection).startswith(b"HTTP/1.1 200 ")
    assert sum(sizes) >= len(body)
    assert max(sizes) <= http_server.MAX_READ_BYTES


def test_the_rest_of_a_refused_body_is_read_with_pauses(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends many of them would otherwise take the event loop half a core."""
    sizes = sizes_read(server, monkeypatch)
    monkeypatch.setattr(http_server, "DISCARD_PAUSE_SECONDS", 60)
    with server.connect() as connection:
        connection.sendall(head(CONFIG.constants.max_body_bytes + 1) + b" " * 500_000)
        assert read_response(connection).startswith(b"HTTP/1.1 413 ")
        assert [post(server).status_code for _ in range(3)] == [200] * 3
    # Some reads before the answer, and a single one after it.
    assert sum(sizes) < 2 * http_server.MAX_DISCARDED_BYTES


def test_invalid_bytes_after_an_early_answer_end_only_their_connection(
    shared: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be answered any more; an attempt would be an exception in the loop."""
    with shared.connect() as connection:
        connection.sendall(
            b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        assert read_response(connection).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"zz\r\n")
        assert read_all(connection) == b""
    assert post(shared).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_websocket_is_refused(shared: Running) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    assert httpx2.get(shared.url + CHAT, headers=headers).status_code == 405


# --- clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_the_generation_of_a_client_that_disconnects_is_ended(
    server: Running, engine: FakeEngine, stream: bool
) -> None:
    engine.delay = 60
    with server.connect() as connection:
        connection.sendall(request_bytes(stream=stream))
        wait_until(lambda: bool(engine.generations))
        assert not engine.generations[0].closed.is_set()
    assert engine.generations[0].closed.wait(60)
    wait_until(lambda: 'completions",status="499"} 1.0' in httpx2.get(server.url + "/metrics").text)


def test_the_generation_of_a_client_that_disconnects_during_a_stream_is_ended(
    server: Running, engine: FakeEngine
) -> None:
    engine.delay, engine.answer = 0.02, "hello world " * 100
    with server.connect() as connection:
        connection.sendall(request_bytes(stream=True))
        data = b""
        while b"content" not in data:
            data += connection.recv(4096)
    assert engine.generations[0].closed.wait(60)


# --- clients that close one direction


def half_closed(server: Running, data: bytes, before: float = 0) -> bytes:
    """All that comes for a request after which its client closes its sending side, as `nc -N`."""
    with server.connect() as connection:
        connection.sendall(data)
        time.sleep(before)
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def final(response: bytes) -> bytes:
    """Without interim responses."""
    while response.startswith(b"HTTP/1.1 100 "):
        response = response.partition(b"\r\n\r\n")[2]
    return response


@pytest.mark.parametrize("before", [0, 0.1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_only_its_sending_side_gets_its_answer(
    server: Running, engine: FakeEngine, stream: bool, before: float
) -> None:
    engine.delay, engine.answer = 0.05, "hello world how are you"
    response = final(half_closed(server, request_bytes(stream=stream), before))
    assert response.startswith(b"HTTP/1.1 200 ")
    if stream:
        lines = [line for line in response.splitlines() if line.startswith(b"data: {")]
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        assert response.count(b"data: [DONE]") == 1
    else:
        text = body_of(response)["choices"][0]["message"]["content"]
    assert text == engine.answer


@pytest.mark.parametrize("first", ["GET /health HTTP/1.1", "GET /health HTTP/1.0"])
def test_a_client_that_closes_only_its_sending_side_gets_a_small_reply(
    shared: Running, first: str
) -> None:
    response = final(half_closed(shared, f"{first}\r\nHost: localhost\r\n\r\n".encode()))
    assert response.startswith(b"HTTP/1.1 200 ")
    assert body_of(response) == {"status": "alive"}


def test_a_client_that_closes_only_its_sending_side_gets_all_replies(engine: FakeEngine) -> None:
    """Several requests in one connection; which is closed after the last, not when it is idle."""
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Running(engine, header_timeout=600) as server:
        response = half_closed(server, asked * 5)
    assert response.count(b"HTTP/1.1 200 ") == 5


def test_a_client_that_closes_its_sending_side_in_mid_request_gets_no_reply(
    shared: Running,
) -> None:
    for data in (b"", b"GET /health HTTP/1.1\r\nHos", head(100) + b"{"):
        assert half_closed(shared, data) == b""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_the_generation_of_a_client_that_closes_both_sides_one_after_the_other_is_ended(
    server: Running, engine: FakeEngine, stream: bool, is_reset: bool
) -> None:
    """Nothing comes of it any more that could be read: only writing tells."""
    engine.delay = 60
    with server.connect() as connection:
        connection.sendall(request_bytes(stream=stream))
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: bool(engine.generations))
        time.sleep(0.5)
        assert not engine.generations[0].closed.is_set(), "it may still be reading"
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert engine.generations[0].closed.wait(60)
    wait_until(lambda: num_connections(server) == 0)


def test_a_client_of_http_1_0_that_closes_its_sending_side_is_awaited_for_a_while(
    hasty: Running, engine: FakeEngine, times: Times
) -> None:
    """There is nothing that could be written to it before its answer."""
    engine.delay = 600
    with hasty.connect() as connection, contextlib.suppress(ConnectionResetError):
        connection.sendall(request_bytes().replace(b"HTTP/1.1", b"HTTP/1.0"))
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: bool(engine.generations))
        times.pass_(times.LINGER)
        assert read_all(connection) == b""
    assert engine.generations[0].closed.wait(60)


# More than the socket buffers of both sides hold, and in a few pieces at most.
LARGE = b'{"a":"' + b"x" * (8 << 20) + b'"}'
GET_DOCUMENT = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


def num_connections(server: Running) -> int:
    """Returns how many connections the server, which is in this process, holds open."""
    found = psutil.Process().net_connections("tcp")
    return sum(
        each.laddr.port == server.port and each.status == psutil.CONN_ESTABLISHED for each in found
    )


class Deadline:
    """SEND_SECONDS, which are over when the test says so and not when a machine is slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = 12_345.0
        call_later = asyncio.BaseEventLoop.call_later
        self._timer: asyncio.TimerHandle | None = None

        def held(
            loop: asyncio.BaseEventLoop, delay: float, *words: Any, **named: Any
        ) -> asyncio.TimerHandle:
            timer = call_later(loop, delay, *words, **named)
            if delay == seconds:
                self._loop, self._timer, self._call = loop, timer, words
            return timer

        monkeypatch.setattr(http_server, "SEND_SECONDS", seconds)
        monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", held)

    @property
    def is_running(self) -> bool:
        return self._timer is not None and not self._timer.cancelled()

    def share_read(self) -> float:
        """The share of what waited at the beginning that the client has taken since."""
        check, num_before = self._call
        return 1 - check.__self__.transport.get_write_buffer_size() / num_before

    def read(self, connection: socket.socket, share: float) -> int:
        """Reads until the client has taken this share, with pauses: without them, a single `send`
        of the server could go on until everything is read. Returns the number of bytes."""
        num_bytes = 0
        while self.share_read() < share:
            num_bytes += len(connection.recv(1 << 18))
            time.sleep(0.005)
        return num_bytes

    def pass_(self) -> None:
        """Returns when the server has seen that the time is over."""
        seen = threading.Event()
        self._timer, timer = None, self._timer
        assert timer
        timer.cancel()
        self._loop.call_soon_threadsafe(*self._call)
        self._loop.call_soon_threadsafe(seen.set)
        assert seen.wait(60)


@pytest.mark.parametrize(
    "data",
    [
        request_bytes(stream=True),
        request_bytes(stream=False),
        GET_DOCUMENT,
        GET_DOCUMENT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        GET_DOCUMENT * 20,
    ],
    ids=["stream", "reply", "get", "get and close", "pipelined"],
)
def test_a_client_that_reads_nothing_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, data: bytes
) -> None:
    """A transport that is closed waits for its client to read, forever."""
    deadline = Deadline(monkeypatch)
    monkeypatch.setattr("serve.front.http.replies.encode", lambda body: LARGE)
    with Running(engine) as server, server.connect() as connection:
        connection.sendall(data)
        wait_until(lambda: deadline.is_running)
        assert num_connections(server) == 1
        deadline.pass_()
        wait_until(lambda: num_connections(server) == 0)
        assert all(generation.closed.wait(60) for generation in engine.generations)
        assert len(read_all(connection)) < len(LARGE), "only what was on its way"


def test_a_client_that_reads_slowly_gets_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    """It reads for longer than the deadline, but never pauses that long."""
    deadline = Deadline(monkeypatch)
    monkeypatch.setattr("serve.front.http.replies.encode", lambda body: LARGE * 8)
    with Running(engine) as server, server.connect() as connection:
        connection.sendall(GET_DOCUMENT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        received = 0
        wait_until(lambda: deadline.is_running)
        for _ in range(3):
            received += deadline.read(connection, http_server.MIN_SENT_SHARE)
            deadline.pass_()
            assert deadline.is_running
        while chunk := connection.recv(1 << 20):
            received += len(chunk)
        assert received > len(LARGE) * 8


def test_a_client_that_reads_too_little_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    """Otherwise it would keep its connection and buffered output forever."""
    deadline = Deadline(monkeypatch)
    # More than the buffers of the sockets hold.
    monkeypatch.setattr(http_server, "MIN_SENT_SHARE", 0.5)
    monkeypatch.setattr("serve.front.http.replies.encode", lambda body: LARGE * 8)
    with Running(engine) as server, server.connect() as connection:
        connection.sendall(request_bytes(stream=True))
        wait_until(lambda: deadline.is_running)
        assert deadline.read(connection, 0.001)
        assert deadline.share_read() < http_server.MIN_SENT_SHARE
        deadline.pass_()
        wait_until(lambda: num_connections(server) == 0)
        assert all(generation.closed.wait(60) for generation in engine.generations)


def test_two_hundred_clients_at_once_are_all_answered(server: Running, engine: FakeEngine) -> None:
    """All connect before the first is answered; none is reset."""
    engine.delay = 0.01
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(200)]
        for connection in connections:
            connection.sendall(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
        assert all(b"200 OK" in read_all(connection) for connection in connections)


# --- the end


PROGRAM = """
import asyncio, signal, sys
from pathlib import Path
from serve.front.app import serve
from serve.front.http.listening import bind
from serve.front.text.tokens import Tokenizer
from tests.configs import changed
from tests.front.fakes import CONFIG, MAX_CONTEXT, FakeEngine

async def main():
    tokenizer = Tokenizer(Path(sys.argv[1]))
    engine = FakeEngine(tokenizer)
    engine.delay, engine.answer = float(sys.argv[2]), "hello world how are you " * 100

    def hurry():
        for generation in engine.generations:
            generation.hurry()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hurry)
    listening = bind("127.0.0.1", 0)
    print(listening.getsockname()[1], flush=True)
    config = changed(
        CONFIG, drain_timeout=float(sys.argv[3]), body_timeout=float(sys.argv[4])
    )
    await serve(config, engine, tokenizer, listening, MAX_CONTEXT)
    print("returned", all(g.closed.is_set() for g in engine.generations), flush=True)

asyncio.run(main())
"""


@contextlib.contextmanager
def process(
    folder: Path,
    delay: float,
    drain_timeout: float = 600.0,
    body_timeout: float = 60.0,
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    root = Path(__file__).resolve().parents[2]
    words = [str(folder), str(delay), str(drain_timeout), str(body_timeout)]
    command = [sys.executable, "-c", PROGRAM, *words]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE
    ) as running:
        try:
            assert running.stdout is not None
            yield running, int(running.stdout.readline())
        finally:
            running.kill()


def test_a_signal_lets_running_answers_finish(model_folder: Path) -> None:
    """And serve() returns: uvicorn's own handling would kill the process at the end."""
    with process(model_folder, 0.1) as (server, port):
        url = f"http://127.0.0.1:{port}{CHAT}"
        body = {**HELLO, "stream": True}
        with httpx2.Client() as late, httpx2.stream("POST", url, json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: late.post(url, json={}).status_code == 503)  # It was 400.
            refused = late.post(url, json=HELLO)
            server.send_signal(signal.SIGUSR1)
            assert "data: [DONE]" in list(lines)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert server.communicate(timeout=60)[0] == "returned True\n"
        assert server.returncode == 0


@pytest.mark.long
def test_an_unfinished_body_does_not_delay_the_shutdown(model_folder: Path) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        process(model_folder, 0.1, drain_timeout=1.0, body_timeout=600.0) as (server, port),
        socket.create_connection(("127.0.0.1", port)) as half,
    ):
        half.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        httpx2.get(f"http://127.0.0.1:{port}/health")  # It has come, and signals are handled.
        server.send_signal(signal.SIGTERM)
        # Without the drain timeout, the server would wait ten minutes for the body.
        assert server.communicate(timeout=60)[0] == "returned True\n"


async def reply_after_a_signal(
    engine: FakeEngine, number: signal.Signals, stream: bool
) -> httpx2.Response:
    """Of a server in this very process, whose main thread gets the signal."""
    engine.delay = 60
    listening = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}{CHAT}"
    config = dataclasses.replace(CONFIG, drain_timeout=0.2)
    serving = serve(config, engine, engine.tokenizer, listening, MAX_CONTEXT)
    serving_task = asyncio.ensure_future(serving)
    async with httpx2.AsyncClient() as client:
        body = {**HELLO, "stream": stream}
        answering = asyncio.ensure_future(client.post(url, json=body))
        while not engine.generations:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), number)
        reply = await answering
    await asyncio.wait_for(serving_task, 60)
    unharmed = signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
    assert unharmed, "another signal would end the process before its ranks get the message"
    assert engine.generations[0].closed.is_set()
    return reply


@pytest.mark.anyio
async def test_a_stream_that_exceeds_the_drain_time_is_ended_with_an_error(
    engine: FakeEngine,
) -> None:
    reply = await reply_after_a_signal(engine, signal.SIGINT, stream=True)
    assert "The server is stopping." in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.anyio
async def test_a_reply_that_exceeds_the_drain_time_is_refused(
    engine: FakeEngine,
) -> None:
    reply = await reply_after_a_signal(engine, signal.SIGTERM, stream=False)
    assert reply.status_code == 503
    assert reply.headers["retry-after"]


def test_the_server_of_a_failed_cluster_ends_without_waiting_for_clients(
    server: Running, engine: FakeEngine
) -> None:
    engine.delay = 600
    with server.connect() as connection:
        connection.sendall(request_bytes(stream=True))
        wait_until(lambda: bool(engine.generations))
        server.fail(UnavailableError("lost"))
        assert b"lost" in read_all(connection)
        assert server.join(60), "it waited for the answer"
    assert isinstance(server.ended_with, BrigadeError)
