"""The page's files and the operators' calls behind it, over real sockets."""

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from serve.front.app import EarlyServer
from serve.front.http import pages
from serve.front.http.listening import bind
from serve.front.routes import history, page, watching
from serve.front.routes.events import ServerState
from tests.front.fakes import CONFIG, FakeEngine, Running
from tests.front.test_app import CHAT, HELLO, get, wait_until

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
ADMIN = {"authorization": "Bearer boss"}
KEYS: dict[str, Any] = {"api_key": ("user",), "admin_key": ("boss",)}


@pytest.fixture
def keyed(engine: FakeEngine) -> Iterator[Running]:
    with Running(engine, **KEYS) as server:
        yield server


def frames(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def ask(server: Running, request: str, **fields: Any) -> httpx2.Response:
    headers = {"x-request-id": request}
    return httpx2.post(server.url + CHAT, json={**HELLO, **fields}, headers=headers)


# --- the files


def test_the_root_is_a_page_for_browsers_and_json_for_programs(shared: Running) -> None:
    page = get(shared, "/", accept=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<script type="module"' in page.text
    for accept in ("*/*", "application/json", ""):
        assert get(shared, "/", accept=accept).json()["name"] == "Brigade"


def test_files_of_the_page_have_types_and_a_strict_security_policy(shared: Running) -> None:
    for name in ("index.html", "app.js", "style.css", "icon.svg", "lib/dom.js"):
        reply = get(shared, f"/ui/{name}")
        assert reply.status_code == 200, name
        assert reply.headers["content-type"].startswith(("text/", "image/svg")), name
        assert reply.headers["content-security-policy"] == pages.POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "../pages.py", "%2e%2e/pages.py", "lib/", ""])
def test_no_other_files_are_served_beside_the_page(shared: Running, name: str) -> None:
    assert get(shared, f"/ui/{name}").status_code == 404


def test_a_file_of_the_page_is_compressed_and_sent_again_only_if_it_changed(
    shared: Running,
) -> None:
    headers = {"accept-encoding": "gzip"}
    with httpx2.stream("GET", shared.url + "/ui/app.js", headers=headers) as reply:
        raw = b"".join(reply.iter_raw())
    assert gzip.decompress(raw) == (pages.ROOT / "app.js").read_bytes()
    again = get(shared, "/ui/app.js", **{"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_needs_no_key_but_api_calls_need_one(keyed: Running) -> None:
    assert get(keyed, "/", accept=BROWSER).status_code == 200
    assert get(keyed, "/ui/app.js").status_code == 200
    assert get(keyed, "/", accept="application/json").status_code == 401


def test_the_page_can_be_turned_off(engine: FakeEngine) -> None:
    with Running(engine, no_ui=True) as server:
        assert get(server, "/", accept=BROWSER).json()["name"] == "Brigade"
        assert get(server, "/ui/app.js").status_code == 404
        assert render(server, "a").status_code == 404


# --- the chat's Markdown


def render(server: Running, text: str, **headers: str) -> httpx2.Response:
    return httpx2.post(server.url + "/ui/markdown", json={"text": text}, headers=headers)


def test_markdown_is_rendered_by_the_server(shared: Running) -> None:
    assert render(shared, "**a** <b>").json() == {"html": "<p><strong>a</strong> &lt;b&gt;</p>\n"}


def test_rendering_markdown_needs_the_same_key_as_a_chat(keyed: Running) -> None:
    assert render(keyed, "a").status_code == 401
    assert render(keyed, "a", authorization="Bearer user").status_code == 200


def test_very_long_markdown_is_refused(shared: Running) -> None:
    assert render(shared, "a" * 60_000).status_code == 200
    refused = render(shared, "a" * 70_000)
    assert refused.status_code == 413
    assert "error" in refused.json()


def test_rendering_markdown_handles_one_text_at_a_time_and_delays_no_other_call(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def slow(text: str) -> str:
        running.append(text)
        begun.set()
        assert may_end.wait(60)
        return text

    monkeypatch.setattr(page, "rendered", slow)
    clients = [threading.Thread(target=render, args=(shared, text)) for text in ("a", "b")]
    for client in clients:
        client.start()
    try:
        assert begun.wait(60)
        assert get(shared, "/health").status_code == 200
        assert len(running) == 1
    finally:
        may_end.set()
        for client in clients:
            client.join(60)
    assert sorted(running) == ["a", "b"]


# --- the stream


def test_reading_events_needs_the_admin_key(keyed: Running) -> None:
    for headers in ({}, {"authorization": "Bearer user"}):
        assert get(keyed, "/admin/events", **headers).status_code == 401
        assert get(keyed, "/admin/requests", **headers).status_code == 401


def test_events_begin_with_the_same_state_as_other_calls_return(keyed: Running) -> None:
    with httpx2.stream("GET", keyed.url + "/admin/events", headers=ADMIN) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        state = next(frames(stream))
    shown = get(keyed, "/admin/pipeline", **ADMIN).json()
    assert state["stages"] == shown.pop("stages")
    assert state["pipeline"] == shown
    assert state["requests"] == []
    assert state["server"]["model"] == "tiny"
    assert state["server"]["adapter_sources"] == []


def test_events_begin_with_samples_from_before_the_connection(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody watched meanwhile."""
    monkeypatch.setattr(history, "STEP_SECONDS", 0.05)
    with Running(engine) as server:
        ask(server, "early")

        def is_shown() -> bool:
            with httpx2.stream("GET", server.url + "/admin/events") as stream:
                return any(sample[1] > 0 for sample in next(frames(stream))["history"])

        wait_until(is_shown, 60)
        with httpx2.stream("GET", server.url + "/admin/events") as stream:
            states = frames(stream)
            last = next(states)["history"][-1]
            # The first change may repeat the last sample, if it comes before the next one.
            samples = (state["sample"] for state in states if "sample" in state)
            assert next(sample for sample in samples if sample != last)[0] > last[0]


def test_events_contain_the_allowed_sources_of_adapters(engine: FakeEngine) -> None:
    flags: dict[str, Any] = {"adapter_root": pages.ROOT, "allow_hub_adapters": True}
    with (
        Running(engine, **flags) as server,
        httpx2.stream("GET", server.url + "/admin/events") as stream,
    ):
        assert next(frames(stream))["server"]["adapter_sources"] == ["folder", "hub"]


def test_events_contain_requests_while_they_run(server: Running, engine: FakeEngine) -> None:
    engine.delay = 600
    with httpx2.stream("GET", server.url + "/admin/events") as stream:
        states = frames(stream)
        next(states)
        asking = threading.Thread(target=ask, args=(server, "0a-1d"))
        asking.start()
        shown = next(state["requests"] for state in states if state.get("requests"))
        server.hurry(engine.generations[0])
        asking.join(60)
        assert next(s for s in states if "requests" in s and not s["requests"])
    (request,) = shown
    assert request["id"] == "0a-1d"
    assert request["state"] == "prefill"
    assert (request["prompt_tokens_done"], request["model"]) == (3, "tiny")


def test_a_watcher_above_the_limit_is_refused(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_WATCHERS", 1)
    with httpx2.stream("GET", server.url + "/admin/events") as first:
        states = frames(first)  # It is kept: without it the stream would be closed.
        next(states)
        with httpx2.stream("GET", server.url + "/admin/events") as refused:
            assert refused.status_code == 429
            refused.read()
        assert refused.json()["error"]["code"] == "too_many_watchers"

    def is_free() -> bool:
        with httpx2.stream("GET", server.url + "/admin/events") as stream:
            return stream.status_code == 200

    wait_until(is_free)


def test_watchers_of_events_do_not_delay_a_drain(server: Running) -> None:
    with httpx2.stream("GET", server.url + "/admin/events") as stream:
        states = frames(stream)
        next(states)
        httpx2.post(server.url + "/admin/drain", params={"seconds": 60})
        assert server.join(60)
        assert all(state["kind"] == "change" for state in states)


# --- before there is a server


def test_the_page_is_served_before_the_model_is_read() -> None:
    """There is no engine and no tokenizer yet."""

    def look(url: str) -> None:
        assert httpx2.get(url + "/health").status_code == 200
        ready = httpx2.get(url + "/ready")
        assert ready.status_code == 503
        assert "reads the model's files" in ready.json()["error"]["message"]
        assert httpx2.get(url + "/v1/models").status_code == 503
        assert "<script" in httpx2.get(url + "/", headers={"accept": BROWSER}).text
        with httpx2.stream("GET", url + "/admin/events") as stream:
            state = next(frames(stream))
        assert state["cluster"]["name"] == "preparing"
        assert state["server"]["model"] == "tiny"

    async def run() -> None:
        listening = bind("127.0.0.1", 0)
        early = EarlyServer(CONFIG, listening, ServerState(CONFIG))
        await asyncio.to_thread(look, f"http://127.0.0.1:{listening.getsockname()[1]}")
        await early.stop()
        await early.stop()
        assert listening.fileno() != -1
        listening.close()

    asyncio.run(run())


def test_a_signal_while_the_server_of_the_start_ends_ends_the_process_in_order() -> None:
    """The signal cancels the caller, who then waits for the server once more."""

    async def run() -> None:
        listening = bind("127.0.0.1", 0)
        early = EarlyServer(CONFIG, listening, ServerState(CONFIG))
        stopping = asyncio.create_task(early.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()
        await early.stop()
        listening.close()

    asyncio.run(run())


# --- cancelling


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_cancelled_request_ends_with_an_error(
    server: Running, engine: FakeEngine, is_stream: bool
) -> None:
    engine.delay = 600
    replies: list[httpx2.Response] = []
    asking = threading.Thread(
        target=lambda: replies.append(ask(server, "70-e9d", stream=is_stream))
    )
    asking.start()
    wait_until(lambda: bool(get(server, "/admin/requests").json()["data"]))
    cancelled = httpx2.post(server.url + "/admin/requests/70-e9d/cancel")
    assert cancelled.json() == {"id": "70-e9d", "num_cancelled": 1}
    asking.join(60)
    assert "request_cancelled" in replies[0].text
    assert replies[0].status_code == (200 if is_stream else 410)
    wait_until(lambda: get(server, "/admin/requests").json()["data"] == [])


def test_cancelling_an_unknown_request_is_refused(shared: Running) -> None:
    refused = httpx2.post(shared.url + "/admin/requests/nobody/cancel")
    assert refused.status_code == 404
    assert "nobody" in refused.json()["error"]["message"]


def test_cancelling_a_request_needs_the_admin_key(keyed: Running) -> None:
    path = keyed.url + "/admin/requests/a/cancel"
    assert httpx2.post(path).status_code == 401
    assert httpx2.post(path, headers={"authorization": "Bearer user"}).status_code == 401
    assert httpx2.post(path, headers=ADMIN).status_code == 404
