"""Who is let in: with keys, without, from this host, from a web page, while draining."""

import asyncio
import dataclasses
import time
from typing import Any

import httpx
import openai
import pytest

from serve.front.http import guard
from serve.front.http.door import Door, check_local
from serve.front.http.guard import Scope
from serve.front.http.record import Record
from serve.front.http.replies import StatusError
from serve.front.text.tokens import Tokenizer
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
def test_without_a_right_key_nobody_gets_in(engine: FakeEngine, headers: dict[str, str]) -> None:
    raw = {name: value.encode() for name, value in headers.items()}
    with Running(engine, **KEYS) as server:
        for path in (CHAT, "/v1/models", "/version", "/nothing"):
            reply = httpx.post(server.url + path, json=HELLO, headers=raw)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.headers["x-request-id"]
    assert not engine.prompts


def test_two_keys_at_once_are_none(engine: FakeEngine) -> None:
    with Running(engine, **KEYS) as server:
        for name, before in (("Authorization", "Bearer "), ("X-Api-Key", "")):
            twice = [(name, before + "wrong"), (name, before + "sk-a")]
            assert httpx.get(server.url + "/v1/models", headers=twice).status_code == 401


@pytest.mark.parametrize("key", ["sk-a", "sk-b"])
def test_each_key_gets_in(engine: FakeEngine, key: str) -> None:
    with Running(engine, **KEYS) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key=key) as client:
            assert client.chat.completions.create(**HELLO).choices[0].message.content
        for headers in (
            {"Authorization": f"bEARER   {key}"},
            {"X-Api-Key": key},
            {"X-Api-Key": key, "Authorization": "Bearer of another server"},
        ):
            assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200


def test_the_official_client_sees_its_own_error(engine: FakeEngine) -> None:
    with (
        Running(engine, **KEYS) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="sk-c", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.models.list()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_need_no_key(engine: FakeEngine, path: str) -> None:
    with Running(engine, **KEYS) as server:
        assert get(server, path).status_code == 200


def test_admin_calls_need_the_admin_key(engine: FakeEngine) -> None:
    with Running(engine, **KEYS) as server:
        url = server.url + "/admin/pipeline"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers=bearer("sk-a")).status_code == 401
        assert httpx.get(url, headers=bearer("root")).status_code == 200
        elsewhere = {**bearer("root"), "X-Forwarded-For": "10.0.0.1", "Host": "a.example"}
        assert httpx.get(url, headers=elsewhere).status_code == 200


def test_an_api_key_alone_leaves_admin_calls_to_this_host(engine: FakeEngine) -> None:
    with Running(engine, api_key=("sk-a",)) as server:
        assert get(server, "/admin/pipeline").status_code == 200
        rebound = get(server, "/admin/pipeline", Host="evil.example")
        assert rebound.status_code == 403
        assert "--admin-key-file" in rebound.json()["error"]["message"]


def test_a_page_cannot_post_blindly(shared: Running) -> None:
    page = {"Origin": "https://evil.example"}
    assert httpx.post(shared.url + "/admin/drain", headers=page).status_code == 403
    assert get(shared, "/ready").status_code == 200


# --- this host


def scope(client: tuple[str, int] | None, **headers: str) -> Scope:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"client": client, "headers": raw}


HERE = ("127.0.0.1", 5)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_this_host_may_ask(host: str) -> None:
    check_local(scope((host, 5)))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8080", "[::1]:8080"])
def test_local_names_are_fine(host: str) -> None:
    check_local(scope(HERE, host=host))
    check_local(scope(HERE, host=host, origin=f"http://{host}"))


@pytest.mark.parametrize(
    "given",
    [
        scope(("10.0.0.1", 5)),
        scope(("::ffff:10.0.0.1", 5)),
        scope(("fe80::1%eth0", 5)),
        scope(("localhost.example", 5)),
        scope(None),
        scope(HERE, x_forwarded_for="127.0.0.1"),
        scope(HERE, forwarded="for=127.0.0.1"),
        scope(HERE, host="evil.example"),
        scope(HERE, host="127.0.0.1.evil.example:8080"),
        scope(HERE, host="localhost@evil.example"),
        scope(HERE, host="evil.example#localhost"),
        scope(HERE, host=""),
        scope(HERE, host="[::1"),
        scope(HERE, host="localhost", origin="null"),
        scope(HERE, host="localhost", origin="http://evil.example"),
        scope(HERE, host="localhost", origin="http://localhost.evil.example"),
    ],
)
def test_others_may_not(given: Scope) -> None:
    with pytest.raises(StatusError) as raised:
        check_local(given)
    assert raised.value.http_status == 403


# --- web pages

PAGE = {"Origin": "https://a.example"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def allowed(reply: httpx.Response) -> dict[str, str]:
    return {k: v for k, v in reply.headers.items() if k.startswith("access-control-allow")}


def test_no_page_may_call_unless_asked(shared: Running) -> None:
    assert not allowed(httpx.options(shared.url + CHAT, headers=PREFLIGHT))
    assert not allowed(get(shared, "/v1/models", **PAGE))


def test_a_page_that_is_named_may_call(engine: FakeEngine) -> None:
    with Running(engine, **KEYS, cors_origin=("https://a.example",)) as server:
        preflight = httpx.options(server.url + CHAT, headers=PREFLIGHT)
        assert preflight.status_code == 200, "a browser sends no key with it"
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = get(server, "/v1/models", **PAGE)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert not allowed(get(server, "/v1/models", Origin="https://b.example"))
        assert httpx.options(server.url + CHAT).status_code == 401


@pytest.mark.parametrize("origin", ["*", "https://a.example"])
def test_never_with_credentials(engine: FakeEngine, origin: str) -> None:
    with Running(engine, cors_origin=(origin,)) as server:
        replies = [
            httpx.options(server.url + CHAT, headers=PREFLIGHT),
            get(server, "/v1/models", Cookie="a=b", **PAGE),
        ]
        for reply in replies:
            assert reply.headers["access-control-allow-origin"] == origin
            assert "access-control-allow-credentials" not in reply.headers


# --- room


def test_too_many_connections_are_told_so(engine: FakeEngine) -> None:
    with Running(engine, max_connections=2) as server:
        with server.connect(), server.connect():
            reply = post(server)
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) > 0
            assert "connections" in reply.json()["error"]["message"]
            assert get(server, "/health").status_code == 200
        wait_until(lambda: post(server).status_code == 200)


@pytest.mark.anyio
async def test_what_clients_have_left_takes_room_while_it_is_under_way() -> None:
    """Else one client could have the server hold any number of bodies, by leaving."""
    going_on, statuses = asyncio.Event(), []

    async def inner(*_: Any) -> None:
        await going_on.wait()

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    door = Door(inner, dataclasses.replace(CONFIG, max_connections=2))
    asked = {"path": CHAT, "http_version": "1.1", "headers": [], "state": {}, "method": "POST"}
    asked[guard.RECORD] = Record("id", "POST", CHAT)
    inside = [asyncio.ensure_future(door(asked, inner, send)) for _ in range(2)]
    await asyncio.sleep(0)
    await door(asked, inner, send)
    assert statuses[0] == 503
    going_on.set()
    await asyncio.gather(*inside)
    statuses.clear()
    await door(asked, inner, send)
    assert not statuses


def test_a_crowd_is_turned_away(engine: FakeEngine) -> None:
    """Beyond what can be told: without a bound, silent connections would use up all files."""
    with Running(engine, max_connections=1) as server:
        with server.connect(), server.connect(), server.connect() as third:
            assert third.recv(1) == b""
        wait_until(lambda: post(server).status_code == 200)


# --- draining


@pytest.mark.long
def test_draining_finishes_what_runs_and_then_ends(server: Running, engine: FakeEngine) -> None:
    engine.delay, engine.answer = 0.4, "hello world how are you"
    stream = httpx.stream("POST", server.url + CHAT, json={**HELLO, "stream": True}, timeout=10)
    with stream as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        drain = httpx.post(server.url + "/admin/drain")
        assert (drain.status_code, drain.json()) == (202, {"status": "draining"})
        for refused in (post(server), get(server, "/ready"), get(server, "/v1/models")):
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert "draining" in refused.json()["error"]["message"]
        assert get(server, "/health").status_code == 200
        assert get(server, "/admin/pipeline").status_code == 200
        assert "data: [DONE]" in list(lines)
    assert server.join(5)
    assert server.ended_with is None


@pytest.mark.parametrize("query", ["?seconds=0.2", ""])
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_drain_waits_for_so_long_and_then_ends_answers(
    tokenizer: Tokenizer, query: str, is_complete: bool
) -> None:
    """Not so long for a rank that is gone."""
    engine = FakeEngine(tokenizer)
    engine.delay, engine.is_complete = 60, is_complete
    with Running(engine, drain_timeout=10 if query or not is_complete else 0.2) as server:
        stream = httpx.stream("POST", server.url + CHAT, json={**HELLO, "stream": True}, timeout=10)
        began = time.monotonic()
        with stream as reply:
            wait_until(lambda: bool(engine.generations))
            assert httpx.post(server.url + "/admin/drain" + query).status_code == 202
            lines = list(filter(None, reply.iter_lines()))
        assert "The server is stopping." in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert server.join(5)
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "1e9", "nan"])
def test_a_drain_for_no_time_is_refused_and_none_begins(shared: Running, seconds: str) -> None:
    refused = httpx.post(shared.url + "/admin/drain?seconds=" + seconds)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "seconds"
    assert get(shared, "/ready").status_code == 200


def test_a_misspelt_drain_is_refused_and_none_begins(shared: Running) -> None:
    assert httpx.post(shared.url + "/admin/drain?second=5").status_code == 400
    assert get(shared, "/ready").status_code == 200


def test_an_idle_server_drains_at_once(server: Running) -> None:
    began = time.monotonic()
    assert httpx.post(server.url + "/admin/drain").status_code == 202
    assert server.join(5)
    assert server.ended_with is None
    assert time.monotonic() - began < 3


def test_a_drain_is_a_post(shared: Running) -> None:
    assert get(shared, "/admin/drain").status_code == 405
    assert get(shared, "/ready").status_code == 200
