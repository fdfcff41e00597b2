"""Who is let in: with keys, without, from this host, from a web page, while draining."""

import asyncio
import contextlib
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from serve.core.errors import AddressError, UnavailableError
from serve.front.http.access import CLIENT
from serve.front.http.admission import AccessCheck
from serve.front.http.listening import bind
from serve.front.text.tokens import Tokenizer
from tests.configs import changed
from tests.errors import fails
from tests.front.fakes import CONFIG, FakeEngine, Running
from tests.front.test_app import CHAT, HELLO, get, post, wait_until

KEYS: dict[str, Any] = {"api_key": ("sk-a", "sk-b"), "admin_key": ("root",)}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- keys


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        bearer("sk-"),
        bearer("sk-a sk-b"),
        bearer("root"),
        bearer("sk-é"),
        {"Authorization": "sk-a"},
        {"Authorization": "Basic sk-a"},
        {"X-Api-Key": "sk-"},
        {"X-Api-Key": "root"},
        {"X-Api-Key": "Bearer sk-a"},
    ],
)
def test_requests_without_a_valid_key_are_refused(
    engine: FakeEngine, headers: dict[str, str]
) -> None:
    raw = {name: value.encode() for name, value in headers.items()}
    with Running(engine, **KEYS) as server:
        for path in (CHAT, "/v1/models", "/version", "/nothing"):
            reply = httpx2.post(server.url + path, json=HELLO, headers=raw)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.headers["x-request-id"]
    assert not engine.prompts


def test_a_key_header_given_twice_is_refused(engine: FakeEngine) -> None:
    with Running(engine, **KEYS) as server:
        for name, before in (("Authorization", "Bearer "), ("X-Api-Key", "")):
            twice = [(name, before + "wrong"), (name, before + "sk-a")]
            assert httpx2.get(server.url + "/v1/models", headers=twice).status_code == 401


@pytest.mark.parametrize("key", ["sk-a", "sk-b"])
def test_each_key_is_accepted(engine: FakeEngine, key: str) -> None:
    with Running(engine, **KEYS) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key=key) as client:
            assert client.chat.completions.create(**HELLO).choices[0].message.content
        for headers in (
            {"Authorization": f"bEARER   {key}"},
            {"X-Api-Key": key},
            {"X-Api-Key": key, "Authorization": "Bearer of another server"},
        ):
            assert httpx2.get(server.url + "/v1/models", headers=headers).status_code == 200


def test_the_official_client_raises_its_authentication_error(engine: FakeEngine) -> None:
    with (
        Running(engine, **KEYS) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="sk-c", max_retries=0) as client,
        fails(openai.AuthenticationError, "invalid_api_key"),
    ):
        client.models.list()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_health_checks_and_metrics_need_no_key(engine: FakeEngine, path: str) -> None:
    with Running(engine, **KEYS) as server:
        assert get(server, path).status_code == 200


def test_admin_calls_need_the_admin_key(engine: FakeEngine) -> None:
    with Running(engine, **KEYS) as server:
        url = server.url + "/admin/pipeline"
        assert httpx2.get(url).status_code == 401
        assert httpx2.get(url, headers=bearer("sk-a")).status_code == 401
        assert httpx2.get(url, headers=bearer("root")).status_code == 200
        elsewhere = {**bearer("root"), "X-Forwarded-For": "10.0.0.1", "Host": "a.example"}
        assert httpx2.get(url, headers=elsewhere).status_code == 200


def test_admin_calls_need_an_api_key_if_there_is_no_admin_key(
    engine: FakeEngine,
) -> None:
    with Running(engine, api_key=("sk-a",)) as server:
        for path in ("/admin/pipeline", "/v1/lora_adapters"):
            assert get(server, path).status_code == 401
            assert httpx2.get(server.url + path, headers=bearer("sk-b")).status_code == 401
            assert httpx2.get(server.url + path, headers=bearer("sk-a")).status_code == 200
        for path in ("/admin/drain", "/v1/load_lora_adapter", "/admin/adapters"):
            assert httpx2.post(server.url + path, json={}).status_code == 401
        assert get(server, "/ready").status_code == 200


def test_every_call_but_health_checks_and_metrics_needs_a_key(engine: FakeEngine) -> None:
    """Also with methods and spellings that no client uses."""
    with Running(engine, api_key=("sk-a",)) as server:
        document = httpx2.get(server.url + "/openapi.json", headers=bearer("sk-a")).json()
        paths = {path.replace("{id}", "a").replace("{name}", "a") for path in document["paths"]}
        assert len(paths) > 15
        for path in paths - {"/health", "/ping", "/ready", "/metrics"}:
            for spelling in (
                path,
                path.replace("a", "%61").replace("/", "%2F"),
                path + "?x=/health",
            ):
                for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"):
                    reply = raw(server, f"{method} /{spelling.lstrip('/')} HTTP/1.1", HERE)
                    assert reply == 401, (method, spelling)


def raw(server: Running, first_line: str, *headers: str) -> int:
    """The status of a request exactly as written."""
    with server.connect() as connection:
        lines = [first_line, *headers, "Connection: close", "Content-Length: 0"]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.makefile("rb").readline().split()[1])


HERE = "Host: localhost"


@pytest.mark.parametrize(
    "target",
    [
        "/admin/pipeline",
        "/%61dmin/pipeline",
        "/admin%2Fpipeline",
        "//admin/pipeline",
        "/admin//pipeline",
        "/admin/pipeline/",
        "/./admin/pipeline",
        "/v1/../admin/pipeline",
        "/ADMIN/pipeline",
        "/admin/pipeline#x",
        "/admin/pipeline?a=b",
        "http://localhost/admin/pipeline",
        "http://evil.example/admin/pipeline",
        "/v1/lora_adapters",
        "/v1/lora%5Fadapters",
        "/v1//lora_adapters",
    ],
)
def test_no_spelling_of_an_admin_path_is_open_to_strangers(shared: Running, target: str) -> None:
    for method in ("GET", "HEAD"):
        for line in ("Host: evil.example", "X-Forwarded-For: 127.0.0.1"):
            host = [] if line.startswith("Host") else [HERE]
            status = raw(shared, f"{method} {target} HTTP/1.1", *host, line)
            assert status in (400, 403, 404), (method, line)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
def test_an_absolute_request_target_is_routed_by_its_path(
    shared: Running, scheme: str, version: str
) -> None:
    here = f"{scheme}://localhost"
    for path, status in (("/v1/models", 200), ("/models?a=b", 200), ("", 200), ("/x", 404)):
        assert raw(shared, f"GET {here}{path} HTTP/{version}", HERE) == status
    assert raw(shared, f"GET {here}/admin/pipeline HTTP/{version}", HERE) == 200
    forwarded = "X-Forwarded-For: 203.0.113.9"
    assert raw(shared, f"GET {here}/admin/pipeline HTTP/{version}", HERE, forwarded) == 403
    assert raw(shared, f"GET {here}/admin/pipeline%0A HTTP/{version}", HERE) == 400


def test_an_absolute_request_target_counts_as_the_host(shared: Running) -> None:
    """In place of Host, and never another one."""
    assert raw(shared, "GET http://localhost/v1/models HTTP/1.0") == 200
    assert raw(shared, "GET http://evil.example/v1/models HTTP/1.0") == 403
    evil = "Host: evil.example"
    for path in ("/v1/models", "/admin/pipeline"):
        assert raw(shared, f"GET http://evil.example{path} HTTP/1.1", evil) == 403
        assert raw(shared, f"GET http://evil.example{path} HTTP/1.1", HERE) == 400
        assert raw(shared, f"GET http://localhost{path} HTTP/1.1", evil) == 400
        assert raw(shared, f"GET http://localhost@evil.example{path} HTTP/1.1", HERE) == 400
    for target in ("ftp://localhost/v1/models", "localhost/v1/models", "*"):
        assert raw(shared, f"GET {target} HTTP/1.1", HERE) == 404


def test_a_websocket_upgrade_does_not_bypass_the_check_of_the_host(shared: Running) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    line = "GET /admin/pipeline HTTP/1.1"
    assert raw(shared, line, "Host: evil.example", *upgrade) == 403


def test_a_request_with_several_hosts_is_refused(shared: Running) -> None:
    line = "GET /admin/pipeline HTTP/1.1"
    assert raw(shared, line, HERE, "Host: evil.example") == 400
    assert raw(shared, line, "Host: evil.example", HERE) == 400
    assert raw(shared, line, HERE) == 200
    assert raw(shared, "GET /admin/pipeline HTTP/1.0") == 403


def has_ipv6() -> bool:
    try:
        bind("::1", 0).close()
    except AddressError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="This host has no IPv6 loopback address.")
@pytest.mark.parametrize("address", ["::1", "::"])
def test_this_host_is_recognised_over_ipv6(engine: FakeEngine, address: str) -> None:
    with Running(engine, address, host=address) as server:
        url = f"http://[::1]:{server.port}"
        for path in ("/admin/pipeline", "/v1/models"):
            assert httpx2.get(url + path).status_code == 200
            assert httpx2.get(url + path, headers={"Host": "LocalHost.:5"}).status_code == 200
            assert httpx2.get(url + path, headers={"Host": "evil.example"}).status_code == 403
        if address == "::":
            assert get(server, "/admin/pipeline").status_code == 200, "as ::ffff:127.0.0.1"
            assert get(server, "/admin/pipeline", Host="10.0.0.1").status_code == 403
            assert get(server, "/v1/models", Host="10.0.0.1").status_code == 200


# --- forwarders


class Forwarder(socketserver.ThreadingTCPServer):
    """Passes bytes on, as socat, `ssh -R` and load balancers in TCP mode do."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.2", 0), _Forwarded)
        self.there = ("127.0.0.1", port)


class _Forwarded(socketserver.BaseRequestHandler):
    server: Forwarder

    def handle(self) -> None:
        with socket.create_connection(self.server.there, timeout=60) as there:
            back = threading.Thread(target=pump, args=(there, self.request))
            back.start()
            pump(self.request, there)
            back.join(60)


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def forwarder(server: Running) -> Iterator[str]:
    """Gives its URL."""
    with Forwarder(server.port) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield "http://{}:{}".format(*running.server_address[:2])
        finally:
            running.shutdown()
            thread.join(60)


def test_a_reverse_proxy_does_not_open_admin_calls_of_a_server_with_keys(
    engine: FakeEngine,
) -> None:
    """Whatever the client writes into Host."""
    with Running(engine, api_key=("sk-a",)) as server, forwarder(server) as url:
        assert httpx2.get(url + "/health").status_code == 200
        for host in ("localhost", f"127.0.0.1:{server.port}", "evil.example"):
            headers = {"Host": host}
            assert httpx2.get(url + "/admin/pipeline", headers=headers).status_code == 401
            assert httpx2.post(url + "/admin/drain", headers=headers).status_code == 401
            body = {"lora_name": "x", "lora_path": "x"}
            load = httpx2.post(url + "/v1/load_lora_adapter", json=body, headers=headers)
            assert load.status_code == 401
        assert get(server, "/ready").status_code == 200


def test_a_reverse_proxy_that_sends_its_own_host_is_not_treated_as_this_host(
    shared: Running,
) -> None:
    """Without keys, 127.0.0.2 stands for any address here: it is the forwarder's Host."""
    with forwarder(shared) as url:
        for host in ("203.0.113.7", "proxy.example", ""):
            assert httpx2.get(url + "/admin/pipeline", headers={"Host": host}).status_code == 403


def test_a_page_of_another_origin_cannot_send_a_post(shared: Running) -> None:
    local_page = f"http://127.0.0.1:{shared.port + 1}"
    for page in ("https://evil.example", "http://localhost", local_page, "null"):
        reply = httpx2.post(shared.url + "/admin/drain", headers={"Origin": page})
        assert reply.status_code == 403
    assert get(shared, "/ready").status_code == 200


# --- names of this server


def test_dns_rebinding_reaches_only_health_checks_and_metrics(shared: Running) -> None:
    rebound = {"Host": f"evil.example:{shared.port}"}
    for path in ("/v1/models", "/openapi.json", "/version", "/v1/lora_adapters", "/nothing"):
        assert get(shared, path, **rebound).status_code == 403
    chat = httpx2.post(shared.url + CHAT, json=HELLO, headers=rebound)
    assert chat.status_code == 403
    assert chat.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in chat.json()["error"]["message"]
    for path in ("/health", "/ready", "/metrics"):
        assert get(shared, path, **rebound).status_code == 200


def test_dns_rebinding_is_refused_with_the_error_format_of_the_called_api(shared: Running) -> None:
    reply = httpx2.post(shared.url + "/v1/messages", json={}, headers={"Host": "evil.example"})
    assert (reply.status_code, reply.json()["type"]) == (403, "error")


def test_an_allowed_host_name_reaches_clients_calls_but_no_admin_calls(engine: FakeEngine) -> None:
    with Running(engine, allowed_host=("LLM.example",)) as server:
        named = {"Host": "llm.example.:443"}
        assert get(server, "/v1/models", **named).status_code == 200
        assert get(server, "/admin/pipeline", **named).status_code == 403
        assert get(server, "/v1/models", Host="evil.example").status_code == 403


def test_any_host_name_is_accepted_with_a_key(engine: FakeEngine) -> None:
    with Running(engine, **KEYS) as server:
        elsewhere = {**bearer("sk-a"), "Host": "a.example"}
        assert httpx2.get(server.url + "/v1/models", headers=elsewhere).status_code == 200


@pytest.mark.parametrize(
    ("flags", "calls", "admin", "level"),
    [
        ({}, "open without a key", "open without a key", "INFO"),
        ({"host": "0.0.0.0"}, "open without a key", "open without a key", "WARNING"),
        ({"api_key": ("sk-a",)}, "with an API key", "with an API key", "INFO"),
        ({"admin_key": ("root",)}, "open without a key", "with an admin key", "INFO"),
        (KEYS, "with an API key", "with an admin key", "INFO"),
    ],
)
def test_the_start_logs_once_which_calls_need_no_key(
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    flags: dict[str, Any],
    calls: str,
    admin: str,
    level: str,
) -> None:
    caplog.set_level(logging.INFO)
    with Running(engine, **flags) as server:
        wait_until(lambda: get(server, "/health").status_code == 200)
    (record,) = [r for r in caplog.records if r.getMessage().startswith("event=access ")]
    said = record.getMessage().partition(" calls=")[2]
    assert said.startswith(json.dumps(calls)[:-1])
    assert f"admin={json.dumps(admin)[:-1]}" in said
    assert record.levelname == level
    assert "sk-a" not in said
    assert "root" not in said


# --- web pages

PAGE = {"Origin": "https://a.example"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def allowed(reply: httpx2.Response) -> dict[str, str]:
    return {k: v for k, v in reply.headers.items() if k.startswith("access-control-allow")}


def test_no_origin_is_allowed_by_default(shared: Running) -> None:
    assert not allowed(httpx2.options(shared.url + CHAT, headers=PREFLIGHT))
    assert not allowed(get(shared, "/v1/models", **PAGE))


def test_a_page_of_an_allowed_origin_can_call_the_server(engine: FakeEngine) -> None:
    with Running(engine, **KEYS, allowed_origins=("https://a.example",)) as server:
        preflight = httpx2.options(server.url + CHAT, headers=PREFLIGHT)
        assert preflight.status_code == 200, "a browser sends no key with it"
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = get(server, "/v1/models", **PAGE)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert not allowed(get(server, "/v1/models", Origin="https://b.example"))
        assert httpx2.options(server.url + CHAT).status_code == 401


@pytest.mark.parametrize("origin", ["*", "https://a.example"])
def test_cors_never_allows_credentials(engine: FakeEngine, origin: str) -> None:
    with Running(engine, allowed_origins=(origin,)) as server:
        replies = [
            httpx2.options(server.url + CHAT, headers=PREFLIGHT),
            get(server, "/v1/models", Cookie="a=b", **PAGE),
        ]
        for reply in replies:
            assert reply.headers["access-control-allow-origin"] == origin
            assert "access-control-allow-credentials" not in reply.headers


# --- room


def test_connections_above_the_limit_get_an_error(engine: FakeEngine) -> None:
    with Running(engine, max_connections=2) as server:
        with server.connect(), server.connect():
            reply = post(server)
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) > 0
            assert "connections" in reply.json()["error"]["message"]
            assert get(server, "/health").status_code == 200
        wait_until(lambda: post(server).status_code == 200)


@pytest.mark.anyio
async def test_requests_still_count_while_they_run_after_their_client_has_left() -> None:
    """Otherwise, one client could make the server hold any number of bodies, by leaving."""
    going_on = asyncio.Event()

    async def inner(*_: Any) -> None:
        await going_on.wait()

    check = AccessCheck(changed(CONFIG, max_connections=2))
    asked: Any = {"path": CHAT, "http_version": "1.1", "headers": [], "state": {}}

    async def ask() -> None:
        await check.run(CLIENT, inner, asked, inner, inner)

    inside = [asyncio.ensure_future(ask()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await ask()
    going_on.set()
    await asyncio.gather(*inside)
    await ask()


def test_connections_above_twice_the_limit_are_closed(engine: FakeEngine) -> None:
    """Connections over this limit get no answer: silent ones would use up all file descriptors."""
    with Running(engine, max_connections=1) as server:
        with server.connect(), server.connect(), server.connect() as third:
            assert third.recv(1) == b""
        wait_until(lambda: post(server).status_code == 200)


# --- draining


def test_draining_finishes_running_requests_and_then_ends(
    server: Running, engine: FakeEngine
) -> None:
    engine.delay, engine.answer = 0.5, "hello world " * 200
    stream = httpx2.stream("POST", server.url + CHAT, json={**HELLO, "stream": True})
    with stream as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        drain = httpx2.post(server.url + "/admin/drain?seconds=600")
        assert (drain.status_code, drain.json()) == (202, {"status": "draining"})
        for refused in (post(server), get(server, "/ready"), get(server, "/v1/models")):
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert "draining" in refused.json()["error"]["message"]
        assert get(server, "/health").status_code == 200
        assert get(server, "/admin/pipeline").status_code == 200
        server.hurry(engine.generations[0])
        assert "data: [DONE]" in list(lines)
    assert server.join(60)
    assert server.ended_with is None


@pytest.mark.parametrize("query", ["?seconds=0.2", ""])
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_drain_ends_answers_after_the_given_seconds(
    tokenizer: Tokenizer, query: str, is_complete: bool
) -> None:
    """The wait is shorter if a rank is gone."""
    engine = FakeEngine(tokenizer)
    engine.delay, engine.is_complete = 600, is_complete
    with Running(engine, drain_timeout=600 if query or not is_complete else 0.2) as server:
        stream = httpx2.stream(
            "POST", server.url + CHAT, json={**HELLO, "stream": True}, timeout=60
        )
        with stream as reply:
            wait_until(lambda: bool(engine.generations))
            assert httpx2.post(server.url + "/admin/drain" + query).status_code == 202
            lines = list(filter(None, reply.iter_lines()))
        assert "The server is stopping." in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert server.join(60), "it waited as long as --drain-timeout"


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "1e9", "nan"])
def test_a_drain_with_invalid_seconds_is_refused(shared: Running, seconds: str) -> None:
    refused = httpx2.post(shared.url + "/admin/drain?seconds=" + seconds)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "seconds"
    assert get(shared, "/ready").status_code == 200


def test_a_drain_with_an_unknown_parameter_is_refused(shared: Running) -> None:
    assert httpx2.post(shared.url + "/admin/drain?second=5").status_code == 400
    assert get(shared, "/ready").status_code == 200


def drain_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [line for line in found if line.startswith("event=drain")]


def test_a_drain_logs_its_start_and_how_many_answers_it_ended(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine(tokenizer)
    engine.delay = 60
    with Running(engine) as server:
        stream = httpx2.stream("POST", server.url + CHAT, json={**HELLO, "stream": True})
        with stream as reply:
            wait_until(lambda: bool(engine.generations))
            assert httpx2.post(server.url + "/admin/drain?seconds=0.2").status_code == 202
            assert "stopping" in reply.read().decode()
        assert server.join(60)
    begun, ended = drain_lines(caplog)
    assert begun == "event=draining seconds=0.2 answers=1"
    assert ended == "event=drained answers_ended=1"


def test_an_idle_server_drains_at_once(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Running(engine, drain_timeout=600) as server:
        assert httpx2.post(server.url + "/admin/drain").status_code == 202
        assert server.join(60), "it waited as long as --drain-timeout"
    assert drain_lines(caplog)[-1] == "event=drained answers_ended=0"
    assert server.ended_with is None


def test_a_drain_must_be_asked_for_by_post(shared: Running) -> None:
    assert get(shared, "/admin/drain").status_code == 405
    assert get(shared, "/ready").status_code == 200
