"""After each thing that a client should not do, a real cluster answers the next one right."""

import functools
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx2
import psutil
import pytest

from tests.cluster.servers import Server
from tests.faults.cases import (
    ANTHROPIC,
    ANTHROPIC_BODIES,
    BODIES,
    CHAT,
    FULL,
    GOOD,
    JSON,
    MESSAGES,
    REQUESTS,
    WIRE,
    Case,
    get,
    good_body,
    post,
)

pytestmark = pytest.mark.long

PAUSE_SECONDS = 0.02
_SECRETS = re.compile(rb'Traceback|File "|\.py\b|0x[0-9a-f]{6}|/(home|root|work|usr|tmp|opt)/|::1')


@pytest.fixture(autouse=True)
def _alive(cluster: Server, http: httpx2.Client, right_answer: str) -> Iterator[None]:
    """Checks after each case that a small request is answered right and with little work of the
    server, which would else be busy with the case."""
    yield
    began = used_seconds(cluster)
    reply = http.post(CHAT, json=GOOD)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == right_answer
    assert used_seconds(cluster) - began < 2


def used_seconds(server: Server) -> float:
    """The time of a processor that the HTTP server has used."""
    return sum(http_server(server.url).cpu_times()[:2])


@functools.cache
def http_server(url: str) -> psutil.Process:
    """Rank 0's parent."""
    return psutil.Process(httpx2.get(f"{url}/admin/pipeline").json()["stages"][0]["pid"])


def check_error(body: bytes) -> str:
    """Checks an error object, which must reveal nothing of this machine. Returns what it says."""
    assert not _SECRETS.search(body), body
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == error["message"].strip()
    assert len(error["message"]) < 1000
    return f"{error['param']}: {error['message']}"


def check(case: Case, status: int, body: bytes) -> None:
    assert status in case.status, body[:500]
    if status >= 400 and body:
        assert case.words in check_error(body)


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def test_there_are_at_least_two_hundred_cases_with_different_names() -> None:
    cases = [*BODIES, *ANTHROPIC_BODIES, *REQUESTS, *WIRE]
    assert len({case.name for case in cases}) == len(cases) >= 200


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", BODIES, ids=names(BODIES))
def test_each_body_of_a_chat_gets_its_expected_reply(
    http: httpx2.Client, case: Case, stream: bool
) -> None:
    sent = case.sent
    if stream:
        if not sent.endswith(b"}") or b'"stream' in sent:
            pytest.skip("its stream field has a meaning of its own")
        sent = sent[:-1] + b', "stream": true}'
    reply = http.post(CHAT, content=sent, headers=JSON)
    check(case, reply.status_code, reply.content)


@pytest.mark.parametrize("case", ANTHROPIC_BODIES, ids=names(ANTHROPIC_BODIES))
def test_each_body_of_anthropics_messages_gets_its_expected_reply(
    http: httpx2.Client, case: Case
) -> None:
    reply = http.post(ANTHROPIC, content=case.sent, headers=JSON)
    assert reply.status_code in case.status, reply.text[:500]
    if reply.status_code >= 400:
        assert not _SECRETS.search(reply.content)
        body = reply.json()
        assert set(body) == {"type", "error", "request_id"}
        assert set(body["error"]) == {"type", "message"}
        assert case.words in body["error"]["message"]


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths_before_any_rank_works(
    cluster: Server, http: httpx2.Client
) -> None:
    hops = num_hops(cluster)
    for case in MESSAGES[-4:]:
        error = http.post(CHAT, content=case.sent, headers=JSON).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert len(re.findall(r"\d{4,}|\d+ tokens", error["message"])) >= 2, error
    assert num_hops(cluster) == hops


def num_hops(server: Server) -> list[int]:
    """Returns the numbers once the ranks have reported them, which they do four times a second."""
    before: list[int] = []
    while True:
        time.sleep(0.6)
        now = [stage["num_hops"] for stage in server.get("/admin/pipeline")["stages"]]
        if now == before:
            return now
        before = now


@pytest.mark.parametrize("case", REQUESTS, ids=names(REQUESTS))
def test_each_http_request_gets_its_expected_reply(http: httpx2.Client, case: Case) -> None:
    method, path, headers = case.sent
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    content = good_body() if method == "POST" else None
    # By the raw path, because httpx tidies others up.
    url = http.base_url.copy_with(raw_path=path.encode())
    reply = http.request(method, url, content=content, headers=raw)
    check(case, reply.status_code, reply.content)
    assert reply.headers["x-request-id"]
    assert "allow" in reply.headers or case.status != (405,)


# --- bytes


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def exchange(server: Server, pieces: list[bytes]) -> bytes:
    """All that comes back until the other side closes. A reset after an answer is fine."""
    data = b""
    with connect(server) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            for n, piece in enumerate(pieces):
                if n:
                    time.sleep(PAUSE_SECONDS)
                connection.sendall(piece)
        with suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                data += chunk
    return data


def answer_in_time(server: Server) -> str:
    """Asks again until a request is sent as fast as an impatient server wants it."""
    while (reply := httpx2.post(server.url + CHAT, json=GOOD)).status_code == 408:
        continue
    content: str = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("case", WIRE, ids=names(WIRE))
def test_raw_bytes_get_their_expected_reply(
    request: pytest.FixtureRequest, right_answer: str, case: Case
) -> None:
    if {0, 408} & set(case.status):
        impatient: Server = request.getfixturevalue("impatient")
        data = exchange(impatient, case.sent)
        assert answer_in_time(impatient) == right_answer
    else:
        data = exchange(request.getfixturevalue("cluster"), case.sent)
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]
    if case.status == (0,):
        assert data == b""
        return
    check(case, statuses[0], data.partition(b"\r\n\r\n")[2] if len(statuses) == 1 else b"")
    if statuses[0] >= 400:
        assert re.search(rb"x-request-id: \w", data)
        assert len(statuses) == 1, "what follows a request that is refused is none"


def test_pipelined_requests_are_answered_in_order(cluster: Server) -> None:
    keep = get().replace(b"Connection: close\r\n", b"")
    data = exchange(cluster, [keep * 20 + FULL + keep + get(first=b"GET /nope HTTP/1.1")])
    statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", data)
    assert statuses == [b"200"] * 22 + [b"404"]
    assert data.count(b"chat.completion") == 1


# --- clients that go


LEAVE_AT = {
    "before a word": b"",
    "in the header": FULL[:30],
    "in the body": FULL[:-10],
    "after the request": FULL,
    "in the stream": post(
        b"Content-Length: %d" % len(good_body(stream=True, max_tokens=500)),
        body=good_body(stream=True, max_tokens=500),
    ),
}


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("sent", LEAVE_AT.values(), ids=LEAVE_AT.keys())
def test_a_client_that_disconnects_leaves_nothing_behind(
    cluster: Server, sent: bytes, how: str
) -> None:
    for _ in range(5):
        with connect(cluster) as connection:
            connection.sendall(sent)
            if b'"stream": true' in sent:
                connection.recv(100)
            if how == "half":
                connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    while connection.recv(65536):
                        continue
            elif how == "reset":
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wait_until_empty(cluster)


def wait_until_empty(server: Server) -> None:
    deadline = time.monotonic() + 60
    while (pipeline := server.get("/admin/pipeline"))["num_running"] + pipeline["num_waiting"]:
        assert time.monotonic() < deadline, "a row that nobody waits for still runs"
        time.sleep(0.02)


def test_silent_connections_delay_no_request(cluster: Server, http: httpx2.Client) -> None:
    silent = [connect(cluster) for _ in range(300)]
    reply = http.post(CHAT, json=GOOD)
    for connection in silent:
        connection.close()
    assert reply.status_code == 200


# --- memory


def resident_bytes(server: Server) -> int:
    return int(http_server(server.url).memory_info().rss)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_200_megabytes_is_refused_early_and_not_kept_in_memory(
    cluster: Server, announced: bool
) -> None:
    head = b"Content-Length: 200000000" if announced else b"Transfer-Encoding: chunked"
    piece = b" " * 1_000_000 if announced else b"f4240\r\n" + b" " * 1_000_000 + b"\r\n"
    before, max_bytes = resident_bytes(cluster), 0
    with connect(cluster) as connection:
        connection.sendall(post(head))
        num_sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while num_sent < 200:
                connection.sendall(piece)
                num_sent += 1
                if num_sent % 50 == 0:
                    max_bytes = max(max_bytes, resident_bytes(cluster))
        assert b"HTTP/1.1 413 " in connection.recv(65536)
    assert max_bytes - before < 40 << 20


# --- the cluster's own ports


GARBAGE = {
    "nothing": b"",
    "bytes": bytes(range(256)) * 64,
    "HTTP": get(),
    "a frame of another version": b"Bg\xff\x01\x00\x00\x00\x00",
    "a frame of 4 GB": b"Bg\x01\x01\xff\xff\xff\xff" + b"x" * 65536,
    "a frame of no kind": b"Bg\x01\xee\x00\x00\x00\x00",
    "a greeting that is no JSON": b"Bg\x01\x01\x02\x00\x00\x00{]",
    "deep JSON": b"Bg\x01\x01" + struct.pack("<I", 50_000) + b"[" * 50_000,
    "a stranger's greeting": b"",
}


def inner_ports(server: Server) -> set[int]:
    ports: set[int] = set()
    for process in server.family():
        with suppress(psutil.NoSuchProcess):  # A helper has just ended.
            found = process.net_connections("tcp")
            ports |= {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
    return ports - {server.port}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_on_the_ports_between_ranks_does_no_harm(cluster: Server, garbage: bytes) -> None:
    ports = inner_ports(cluster)
    assert ports, "rank 0 listens for the others"
    greeting = {"type": "hello", "rank": 1, "num_ranks": 2, "secret": "x", "facts": {}, "pid": 1}
    body = json.dumps(greeting).encode()
    sent = garbage or b"Bg\x01\x01" + struct.pack("<I", len(body)) + body
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(sent)
                connection.settimeout(60)
                answer = connection.recv(4096)
                assert not _SECRETS.search(answer)
            assert cluster.get("/ready") == {"status": "ready"}


# --- the log


FORGED = "FORGED status=200"


def test_text_from_clients_cannot_forge_lines_of_the_log(
    cluster: Server, http: httpx2.Client
) -> None:
    start = len(cluster.log)
    for ending in ("%0d%0a", "%0a", "%0d", "%85", "%e2%80%a8", "%1b[2K%1b[1G", "%00", "%08" * 40):
        http.get(http.base_url.copy_with(raw_path=f"/x{ending}{FORGED}".encode()))
    for ending in ("\r\n", "\n", "\u2028", "\x1b[2K", "\x85"):
        text = f"x{ending}{FORGED}"
        for body in (
            good_body(model=text),
            good_body(**{text: 1}),
            good_body(messages=[{"role": text, "content": text}]),
            good_body(user=text, stop=[text]),
        ):
            http.post(CHAT, content=body, headers=JSON)
    for value in (b"a\x85" + FORGED.encode(), b"a\t" + FORGED.encode(), b"\xe2\x80\xa8x"):
        http.get("/nope", headers={b"X-Request-Id": value})
    exchange(cluster, [f"GET /x {FORGED}\r\n\r\n".encode()])
    http.get("/nope", headers={"X-Request-Id": "0f-1a57"})
    cluster.wait_for_log("request=0f-1a57 ")
    lines = "".join(cluster.log[start:]).removesuffix("\n").split("\n")
    assert len(lines) >= 30
    for line in lines:
        assert re.match(r"\[rank \d\] \S+ \S+ (INFO|WARNING) (request=\S+|event=\w+) ", line), line
        assert line.count(" status=") <= 1, line
        assert line.isprintable(), line
        assert "FORGED" not in line


def test_the_log_has_no_error_and_no_line_of_unknown_form(cluster: Server) -> None:
    """No traceback either: each of the cases is a client's fault."""
    assert "Traceback" not in cluster.text
    assert " ERROR " not in cluster.text
    assert not [line for line in cluster.log if not line.startswith(("[rank ", "[launch] "))]


def test_no_engine_process_has_ended_after_all_cases(cluster: Server) -> None:
    kinds = []
    for process in cluster.family():
        with suppress(psutil.NoSuchProcess):  # A helper has just ended.
            kinds.append(" ".join(process.cmdline()))
    assert sum("serve.rank.worker" in kind for kind in kinds) == 2
