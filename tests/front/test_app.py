"""The endpoints over real sockets, also with the official client."""

import gc
import json
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from starlette.requests import Request

from serve.core.errors import (
    AddressError,
    BrigadeError,
    ClusterError,
    EngineError,
    OverloadedError,
    UnavailableError,
)
from serve.core.helper_messages import CheckGrammar, GrammarChecked, ParsedCall
from serve.front.api import chat
from serve.front.api.reading import kinds
from serve.front.api.writers.chat import ChatWriter
from serve.front.api.writers.messages import MessagesWriter
from serve.front.api.writers.responses import ResponsesWriter
from serve.front.app import Front
from serve.front.http import middleware
from serve.front.http.listening import bind
from serve.front.http.replies import StatusError
from serve.front.routes.answering import WARM_UP_SCHEMA
from serve.front.routes.server import ServerCalls
from serve.front.text import call_parser
from serve.front.text.dialects.interface import Dialect
from serve.front.text.dialects.mlx_lm import ParsedCalls
from serve.front.text.grammars import of_schema
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.fakes import CONFIG, MAX_CONTEXT, TEMPLATE, FakeEngine, Running, byte_level, save

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def post(server: Running, **fields: Any) -> httpx2.Response:
    return httpx2.post(server.url + CHAT, json={**HELLO, **fields})


def get(server: Running, path: str, **headers: str) -> httpx2.Response:
    return httpx2.get(server.url + path, headers=headers)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [
        record.getMessage()
        for record in caplog.records
        if record.name == "serve.front.http.middleware"
    ]
    return [line for line in found if line.startswith("request=")]


# --- answers


def test_a_chat_gets_the_text_and_usage(server: Running, engine: FakeEngine) -> None:
    with client(server) as ai:
        reply = ai.chat.completions.create(**HELLO)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert abs(reply.created - time.time()) < 60
    assert reply.choices[0].message.content == engine.answer
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    num_tokens = len(engine.tokenizer.encode(engine.answer)) + 1
    assert reply.usage.completion_tokens == num_tokens
    assert reply.usage.prompt_tokens == len(engine.prompts[0])
    assert reply.usage.total_tokens == len(engine.prompts[0]) + num_tokens


def test_pieces_of_a_stream_add_up_to_the_reply(server: Running, engine: FakeEngine) -> None:
    with client(server) as ai:
        options = {"include_usage": True}
        chunks = list(ai.chat.completions.create(**HELLO, stream=True, stream_options=options))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == engine.answer
    assert len([text for text in texts if text]) > 3
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == len(engine.prompts[0])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_consists_of_events_and_ends_with_done(shared: Running) -> None:
    reply = post(shared, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all("usage" not in json.loads(event[6:]) for event in events[:-2])


def test_sampling_parameters_reach_the_engine(server: Running, engine: FakeEngine) -> None:
    reply = post(server, temperature=0.5, top_p=0.25, seed=7, max_tokens=3, stop=["zzz"]).json()
    (sampling,) = engine.samplings
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 7)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 3


def test_messages_that_a_client_got_can_be_sent_back(server: Running, engine: FakeEngine) -> None:
    with client(server) as ai:
        first = ai.chat.completions.create(**HELLO).choices[0].message
        history = [*HELLO["messages"], first, {"role": "user", "content": "more"}]
        ai.chat.completions.create(model="tiny", messages=history)
    assert engine.answer in engine.tokenizer.decode(engine.prompts[1])


# --- refusals


def test_the_official_client_raises_its_own_errors(server: Running, engine: FakeEngine) -> None:
    with client(server) as ai:
        with fails(openai.BadRequestError, "invalid_value", match="temperature"):
            ai.chat.completions.create(**HELLO, temperature=9)
        with pytest.raises(openai.NotFoundError) as raised:
            ai.chat.completions.create(**{**HELLO, "model": "other"})
        assert raised.value.code == "model_not_found"
        engine.refuses_with = OverloadedError("The queue is full.")
        with pytest.raises(openai.RateLimitError):
            ai.chat.completions.create(**HELLO)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OverloadedError("The queue is full."), 429, "The queue is full."),
        (UnavailableError("rank 1: loading"), 503, "rank 1: loading"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_reaches_the_client(
    server: Running,
    engine: FakeEngine,
    error: BrigadeError,
    status: int,
    message: str,
    stream: bool,
) -> None:
    engine.refuses_with = error
    reply = post(server, stream=stream)
    assert reply.status_code == status
    assert int(reply.headers["retry-after"]) > 0
    assert reply.json()["error"]["message"] == message


def test_an_engine_that_fails_ends_the_stream_with_an_error(
    server: Running, engine: FakeEngine
) -> None:
    engine.breaks_with = EngineError("rank 1 at /home/x died")
    reply = post(server)
    assert reply.status_code == 503
    assert "/home" not in reply.text
    events = post(server, stream=True).text.split("\n\n")
    assert "error" in json.loads(events[-3][6:])
    assert events[-2:] == ["data: [DONE]", ""]
    engine.breaks_with = None
    assert post(server).status_code == 200


def test_a_prompt_that_is_too_long_is_refused(shared: Running) -> None:
    content = "hello " * MAX_CONTEXT
    error = post(shared, messages=[{"role": "user", "content": content}]).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_CONTEXT) in error["message"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b"[" * 99_999, b'{"a": NaN}'])
def test_the_server_continues_after_a_bad_body(shared: Running, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    reply = httpx2.post(shared.url + CHAT, content=content, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert post(shared).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/%00%0a%22", 400),
    ],
)
def test_unknown_paths_and_methods_get_an_error_object(
    shared: Running, method: str, path: str, status: int
) -> None:
    reply = httpx2.request(method, shared.url + path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in reply.headers) == (status == 405)


def test_details_of_an_internal_error_are_only_in_the_log(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServerCalls, "_described", lambda self, name: {}["/secret/path"])
    reply = get(server, "/v1/models")
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    wait_until(lambda: "event=bug trace=" in caplog.text)
    assert "KeyError in " in caplog.text
    assert "<lambda>" in caplog.text
    assert "secret" not in caplog.text, "a message may quote a client"
    assert get(server, "/health").status_code == 200


# --- the other endpoints


def test_the_served_model_is_listed_and_described(shared: Running) -> None:
    with client(shared) as ai:
        (model,) = ai.models.list().data
        assert model.id == "tiny"
        assert ai.models.retrieve("tiny").id == "tiny"
    (described,) = get(shared, "/v1/models").json()["data"]
    assert described["max_model_len"] == MAX_CONTEXT
    assert described["default_sampling_params"] == {}


def test_the_call_ready_gives_the_reason_while_the_server_is_not_ready(
    server: Running, engine: FakeEngine
) -> None:
    assert get(server, "/ready").json() == {"status": "ready"}
    engine.reason = "rank 1: loading 61 %"
    reply = get(server, "/ready")
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == engine.reason
    assert reply.headers["retry-after"]
    assert get(server, "/health").status_code == 200


def test_version_and_pipeline_and_trace_can_be_read(server: Running, engine: FakeEngine) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", get(server, "/version").json()["version"])
    assert get(server, "/admin/pipeline").json() == engine.pipeline()
    assert get(server, "/admin/trace?seconds=2.5").json()["seconds"] == 2.5


@pytest.mark.parametrize(
    ("body", "status"),
    [({"clear": True}, 200), ({"clear": False}, 400), ({}, 400), ({"clear": True, "x": 1}, 400)],
)
def test_the_prefix_cache_is_cleared_only_by_its_exact_body(
    server: Running, engine: FakeEngine, body: dict, status: int
) -> None:
    reply = httpx2.post(f"{server.url}/admin/prefix-cache", json=body)
    assert reply.status_code == status
    assert engine.num_clears == (status == 200)


def test_the_root_lists_all_calls(shared: Running) -> None:
    """Whoever opens the address in a browser sees what this is."""
    shown = get(shared, "/").json()
    assert (shown["name"], shown["model"]) == ("Brigade", "tiny")
    document = get(shared, "/openapi.json").json()["paths"]
    calls = {f"{method.upper()} {path}" for path in document for method in document[path]}
    assert set(shown["calls"]) == calls
    assert all(shown["calls"].values())
    assert httpx2.head(shared.url + "/").status_code == 200


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "x", ""])
def test_a_trace_with_invalid_seconds_is_refused(shared: Running, seconds: str) -> None:
    reply = get(shared, f"/admin/trace?seconds={seconds}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "seconds"


@pytest.mark.parametrize("path", ["/admin/pipeline", "/admin/trace"])
def test_admin_calls_through_a_proxy_are_refused(shared: Running, path: str) -> None:
    reply = get(shared, path, **{"X-Forwarded-For": "127.0.0.1"})
    assert reply.status_code == 403
    assert "error" in reply.json()


def test_metrics_count_requests_and_tokens(server: Running, engine: FakeEngine) -> None:
    post(server)
    post(server, temperature=9)
    engine.breaks_with = EngineError("broke")
    post(server, stream=True)
    wait_until(lambda: 'status="503"' in get(server, "/metrics").text)
    text = get(server, "/metrics").text
    for status in (200, 400, 503):
        assert f'brigade_requests_total{{endpoint="{CHAT}",status="{status}"}} 1.0' in text
    assert f"brigade_prompt_tokens_total {2.0 * len(engine.prompts[0])}" in text
    assert "brigade_time_to_first_token_seconds_count 2.0" in text
    assert "brigade_e2e_request_latency_seconds_count 1.0" in text
    assert "brigade_num_requests_waiting 3.0" in text


# --- the log


ID = "0b5e-1"


def test_one_line_is_logged_for_each_request(
    server: Running, caplog: pytest.LogCaptureFixture, engine: FakeEngine
) -> None:
    caplog.set_level(logging.INFO)
    reply = httpx2.post(server.url + CHAT, json=HELLO, headers={"X-Request-Id": ID})
    assert reply.headers["x-request-id"] == ID
    httpx2.get(server.url + "/x%0astatus=200")
    get(server, "/health")
    wait_until(lambda: len(log_lines(caplog)) == 2)
    first, second = log_lines(caplog)
    assert re.fullmatch(
        rf"request={ID} client=127\.0\.0\.1 method=POST path=/v1/chat/completions status=200 "
        r"model=tiny body_bytes=\d+ prompt_tokens=\d+ cached_tokens=0 completion_tokens=\d+ "
        r"ttft_seconds=[\d.e-]+ total_seconds=[\d.e-]+ finish_reason=stop",
        first,
    )
    assert " method=GET path=other status=400 " in second
    assert second.endswith(" code=invalid_path")


def line_of(caplog: pytest.LogCaptureFixture) -> str:
    """The last request's, which may come after its reply."""
    before = len(log_lines(caplog))
    wait_until(lambda: len(log_lines(caplog)) > before - 1 and bool(log_lines(caplog)))
    return log_lines(caplog)[-1]


def test_the_log_line_of_a_request_for_an_adapter_names_it(
    server: Running, caplog: pytest.LogCaptureFixture, engine: FakeEngine
) -> None:
    caplog.set_level(logging.INFO)
    body = {"lora_name": "pirate", "lora_path": "p"}
    assert httpx2.post(server.url + "/v1/load_lora_adapter", json=body).status_code == 200
    post(server, model="pirate")
    wait_until(lambda: len(log_lines(caplog)) == 2)
    assert " model=tiny adapter=pirate adapter_version=1 " in log_lines(caplog)[1]


SECRET = 'my "grandmother\'s" secret recipe for a cake with apples and cinnamon'


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"temperature": 9}, "param=temperature"),
        ({"messages": SECRET}, "param=messages"),
        (
            {"messages": [{"role": "user", "content": SECRET * 999}]},
            "code=context_length_exceeded param=messages",
        ),
        ({"structured_outputs": {SECRET: 1}}, 'param="structured_outputs.*"'),
        ({"tool_choice": SECRET}, "param=tool_choice"),
        ({"model": SECRET}, "code=model_not_found param=model"),
        ({"bad_words": [SECRET] * 200}, "param=bad_words"),
    ],
)
def test_the_log_line_of_a_refusal_names_the_field_but_not_its_value(
    server: Running, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], failure: str
) -> None:
    caplog.set_level(logging.INFO)
    assert 400 <= post(server, **fields).status_code < 500
    line = line_of(caplog)
    assert line.endswith(f" {failure}")
    assert "body_bytes=" in line
    assert "apples and cinnamon" not in caplog.text


def test_the_log_line_of_a_template_error_does_not_contain_messages(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates may put any text into their exceptions."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError(f"unexpected content: {SECRET}")

    monkeypatch.setattr(server.engine.tokenizer._transformers, "apply_chat_template", refuse)
    caplog.set_level(logging.INFO)
    reply = post(server)
    assert SECRET in reply.json()["error"]["message"], "its client may know"
    assert line_of(caplog).endswith(" param=messages")
    assert "recipe" not in caplog.text


def test_the_log_line_of_a_wrong_key_does_not_contain_the_key(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Running(engine, api_key=("sk-right",)) as server:
        get(server, "/v1/models?key=sk-query", Authorization="Bearer sk-wrong")
        assert line_of(caplog).endswith(" code=invalid_api_key")
        assert "sk-" not in "".join(log_lines(caplog))


def test_the_log_line_of_a_call_contains_the_reason_sent_to_the_client(
    server: Running,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    call = ParsedCalls("<c>", "</c>", lambda *_: [ParsedCall("f", "{}")])
    monkeypatch.setattr(engine.tokenizer, "dialect", Dialect("c", call))
    engine.answer = "<c>x</c>"
    tools = [{"type": "function", "function": {"name": "f"}}]
    for stream in (False, True):
        caplog.clear()
        assert '"tool_calls"' in post(server, tools=tools, stream=stream).text
        assert line_of(caplog).endswith(" finish_reason=tool_calls")


# --- fields that are ignored

ODD = {"temprature": 1, "größe": 2, "a b": 3, "x\r\nEvil: 1": 4, 'quo"te,': 5}
NAMED = "a%20b, gr%C3%B6%C3%9Fe, quo%22te%2C, temprature, x%0D%0AEvil%3A%201"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_listed_in_a_header(shared: Running, stream: bool) -> None:
    named = sorted(NAMED.split(", "))
    for path, body in (
        (CHAT, HELLO),
        ("/v1/completions", {"model": "tiny", "prompt": "a"}),
    ):
        reply = httpx2.post(shared.url + path, json={**body, **ODD, "stream": stream})
        assert reply.status_code == 200
        assert sorted(reply.headers["x-ignored-fields"].split(", ")) == named
        assert "evil" not in reply.headers
    assert "x-ignored-fields" not in post(shared, stream=stream).headers


def test_unknown_fields_are_only_counted_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"temprature\n": 1, "x" * 9999: 2}
    for path, body in ((CHAT, HELLO), ("/tokenize", {"prompt": "a"})):
        caplog.clear()
        headers = {"X-Request-Id": ID}
        httpx2.post(server.url + path, json={**body, **odd}, headers=headers)
        (line,) = [each for each in caplog.messages if "event=ignored_fields" in each]
        assert line == f"request={ID} event=ignored_fields num=2"


def test_unknown_fields_of_calls_that_generate_nothing_are_listed_in_a_header(
    shared: Running,
) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": HELLO["messages"]}),
        ("/detokenize", {"tokens": [1]}),
    ):
        reply = httpx2.post(shared.url + path, json={**body, "temprature": 1})
        assert reply.headers["x-ignored-fields"] == "temprature"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_unknown_fields_are_refused_in_responses_and_messages(shared: Running, path: str) -> None:
    """So there is none for the header to name."""
    asked = {"input": "hi"} if path == "/v1/responses" else {**HELLO, "max_tokens": 5}
    reply = httpx2.post(shared.url + path, json={"model": "tiny", **asked, "temprature": 1})
    assert reply.status_code == 400
    assert "temprature" in reply.text


@pytest.mark.parametrize("length", [10, 500])
def test_many_ignored_fields_do_not_make_the_header_long(shared: Running, length: int) -> None:
    # Below 1 MiB: longer bodies wait until the process that reads them has started.
    reply = post(shared, **{"😀" * length + str(n): 1 for n in range(450)})
    assert reply.status_code == 200
    named = reply.headers["x-ignored-fields"]
    assert named.endswith(", ...")
    assert len(named) < 1100


# --- addresses


def test_a_port_in_use_is_reported_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with fails(AddressError, "address", match=str(port)):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no host at all"])
def test_an_address_of_another_host_is_refused(host: str) -> None:
    with fails(AddressError, "address", match="--host"):
        bind(host, 0)


def test_the_server_ends_with_the_error_of_a_failed_cluster(
    server: Running, engine: FakeEngine
) -> None:
    engine.delay = 60
    with client(server) as ai:
        server.after(lambda: bool(engine.generations), ClusterError("a rank is lost"))
        with pytest.raises(openai.InternalServerError):
            ai.chat.completions.create(**HELLO)
    assert server.join(60)
    assert isinstance(server.ended_with, ClusterError)
    assert engine.generations[0].closed.is_set()


def test_too_many_answers_are_refused_before_their_prompts_are_encoded(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a prompt was encoded")

    monkeypatch.setattr(engine.tokenizer, "encode", never)
    with Running(engine, max_queue=4, max_num_seqs=2) as server:
        body = {"model": "tiny", "prompt": ["a b"] * 4, "n": 2}
        replies = [
            httpx2.post(server.url + "/v1/completions", json=body),
            post(server, n=8),
        ]
    for reply in replies:
        assert reply.status_code == 400
        assert "8 answers, but only 6 are allowed" in reply.json()["error"]["message"]


def test_an_invalid_grammar_is_reported_in_the_form_of_its_api(shared: Running) -> None:
    schema = {"type": "nil"}
    format = {"type": "json_schema", "name": "x", "schema": schema}
    said = {"messages": HELLO["messages"], "max_tokens": 5}
    asked = {
        "/v1/responses": {"input": "hi", "text": {"format": format}},
        "/v1/messages": {
            **said,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        CHAT: {**said, "structured_outputs": {"json": schema}},
    }
    for path, body in asked.items():
        reply = httpx2.post(shared.url + path, json={"model": "tiny", **body})
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert "nil" in error["message"]
        assert "response_format" not in reply.text
        if path == "/v1/responses":
            assert error["param"] == "text.format"


def test_an_internal_error_is_not_counted_as_a_client_that_disconnected(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ChatWriter, "chunks", lambda *_: iter([{}["FORGED\n"]]))
    assert post(server).status_code == 500
    counted = f'brigade_requests_total{{endpoint="{CHAT}",status="500"}} 1.0'
    wait_until(lambda: counted in get(server, "/metrics").text)
    (line,) = log_lines(caplog)[-1:]
    assert " status=500 " in line
    assert line.endswith(" finish_reason=error code=internal_error")
    own = [entry for entry in caplog.records if entry.name.startswith("serve.")]
    assert all(entry.getMessage().isprintable() for entry in own)
    assert not any(entry.exc_info for entry in own)


ASKED: dict[str, Any] = {
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HELLO["messages"], "max_tokens": 20},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "event", [{"type": "x", "delta": "\ud800"}, {}, None], ids=["surrogate", "no type", "raises"]
)
def test_an_event_that_cannot_be_written_ends_only_its_stream(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, event: Any
) -> None:
    """With an error in the form of its API, and not with a cut connection."""
    writers = {"/v1/responses": ResponsesWriter, "/v1/messages": MessagesWriter}
    body = {"model": "tiny", **ASKED[path]}

    def feed(*_: Any) -> Any:
        yield {}["raises"] if event is None else event

    with monkeypatch.context() as patch:
        patch.setattr(writers[path], "feed", feed)
        streamed = httpx2.post(server.url + path, json={**body, "stream": True})
        last = json.loads(streamed.text.split("\n\n")[-2].partition("data: ")[2])
        assert last["type"] in ("response.failed", "error")
        assert "internal error of the server" in json.dumps(last)
    counted = f'brigade_requests_total{{endpoint="{path}",status="500"}} 1.0'
    wait_until(lambda: counted in get(server, "/metrics").text)
    assert httpx2.post(server.url + path, json=body).status_code == 200


# --- threads


def test_slow_checks_of_grammars_delay_no_other_request(
    server: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a request whose grammar was checked before."""
    checking, going_on = [], threading.Event()
    known = {"type": "json_object"}
    assert post(server, response_format=known).status_code == 200

    def slow(question: CheckGrammar) -> GrammarChecked:
        checking.append(question)
        assert going_on.wait(60)
        return GrammarChecked(None)

    monkeypatch.setattr(engine.tokenizer.grammars._helpers, "call", slow)
    with ThreadPoolExecutor(8) as clients:
        patterns = [{"regex": "a" * num} for num in range(1, 9)]
        asked = [clients.submit(post, server, structured_outputs=each) for each in patterns]
        wait_until(lambda: bool(checking))
        assert post(server).status_code == 200, "it waits for none of them"
        assert post(server, response_format=known).status_code == 200
        assert not any(each.done() for each in asked)
        going_on.set()
        assert [each.result().status_code for each in asked] == [200] * 8
    assert len(checking) == 8


def test_no_request_starts_after_its_client_has_disconnected(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its request waits for a thread."""
    prepared, going_on, prepare = [], threading.Event(), chat.prepare

    def slow(request: Any, *given: Any) -> Any:
        prepared.append(request.cache_salt)
        assert going_on.wait(60)
        return prepare(request, *given)

    monkeypatch.setattr(chat, "prepare", slow)
    with ThreadPoolExecutor(3) as clients:
        busy = [clients.submit(post, server, cache_salt="busy") for _ in range(2)]
        wait_until(lambda: len(prepared) == 2)
        body = json.dumps({**HELLO, "cache_salt": "left"})
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with server.connect() as left:
            left.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        counted = f'brigade_requests_total{{endpoint="{CHAT}",status="499"}} 1.0'
        wait_until(lambda: counted in get(server, "/metrics").text)
        last = clients.submit(post, server, cache_salt="last")
        going_on.set()
        assert [each.result().status_code for each in (*busy, last)] == [200] * 3
    assert prepared == ["busy", "busy", "last"]


@pytest.mark.parametrize("end", ["</c>", ""])
def test_a_slow_parser_of_calls_delays_no_other_request(
    server: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A request can make a model write any call."""
    parsing, going_on = threading.Event(), threading.Event()

    def parse(text: str, tools: Any) -> Any:
        parsing.set()
        assert going_on.wait(60)
        return [ParsedCall("f", json.dumps({"x": text}))]

    calls = ParsedCalls("<c>", end, parse)
    monkeypatch.setattr(engine.tokenizer, "dialect", Dialect("c", calls))
    engine.answer = f"<c>hello world{end}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    with ThreadPoolExecutor(1) as clients:
        calling = clients.submit(post, server, tools=tools)
        assert parsing.wait(60)
        assert post(server, tool_choice="none").status_code == 200
        assert not calling.done()
        going_on.set()
        (call,) = calling.result().json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": "hello world"}


def test_long_calls_that_end_at_the_same_time_do_not_delay_a_short_call(
    server: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = threading.Event()
    parsing = threading.Semaphore(0)

    def parse(text: str, tools: Any) -> Any:
        if len(text) > call_parser.MAX_SHORT_CHARACTERS:
            parsing.release()
            assert going_on.wait(60)
        return [ParsedCall("f", "{}")]

    monkeypatch.setattr(call_parser, "MAX_SHORT_CHARACTERS", 20)
    calls = ParsedCalls("<c>", "</c>", parse)
    monkeypatch.setattr(engine.tokenizer, "dialect", Dialect("c", calls))
    engine.answer = f"<c>{'hello world ' * 10}</c>"
    tools = [{"type": "function", "function": {"name": "f"}}]
    with ThreadPoolExecutor(8) as clients:
        long_calls = [clients.submit(post, server, tools=tools) for _ in range(8)]
        for _ in range(2):  # as many as can be parsed at the same time
            assert parsing.acquire(timeout=60)
        wait_until(lambda: len(engine.generations) == 8)  # The next request gets another answer.
        engine.answer = "<c>hello</c>"
        reply = post(server, tools=tools).json()
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        assert not any(call.done() for call in long_calls)
        going_on.set()
        assert all(call.result().status_code == 200 for call in long_calls)


# --- clients that leave


class Body:
    """In place of bytes, which cannot be weakly referenced."""

    def __iter__(self) -> Iterator[bytes]:
        yield b"{}"


@pytest.mark.anyio
async def test_bodies_of_disconnected_clients_do_not_wait_for_a_thread(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(CONFIG, engine, engine.tokenizer, MAX_CONTEXT)
    bodies, free = [], threading.Event()
    for _ in range(8):
        front.answering._body_readers._threads.submit(free.wait)

    async def read_parts(*_: object) -> Any:
        bodies.append(weakref.ref(body := Body()))
        return body

    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    monkeypatch.setattr(middleware, "read_parts", read_parts)
    request = Request({"type": "http", "headers": []}, leave)
    try:
        with pytest.raises(StatusError):
            await front.answering.read(request, kinds.CHAT)
        gc.collect()
        assert [body() for body in bodies] == [None]
    finally:
        free.set()
        front.answering.close()


@pytest.mark.parametrize("template", [TEMPLATE, None, "{{ raise_exception('tools only') }}"])
def test_warming_up_the_server_sends_no_request_to_its_engine(
    tmp_path: Path, template: str | None
) -> None:
    """Also if its model cannot chat."""
    engine = FakeEngine(Tokenizer(save(byte_level(), tmp_path, template)))
    with Running(engine, warms_up=True) as server:
        metrics = httpx2.get(f"{server.url}/metrics").text
        assert engine.prompts == []
        assert "brigade_requests_total{" not in metrics
    if template == TEMPLATE:
        assert engine.tokenizer.grammars.is_known(of_schema(WARM_UP_SCHEMA))
