"""Anthropic's messages: bodies as chats, replies over HTTP, errors in its own words."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import ErrorResponse

from serve.core.errors import BrigadeError, EngineError, OverloadedError, RequestError
from serve.front.http import server as http_server
from serve.front.routes import stream as streaming
from serve.front.text.tokens import Tokenizer
from tests.agents.played import MAX_CONTEXT, Call, PlayedEngine, save_model
from tests.front.fakes import FakeEngine, Running
from tests.front.test_app import wait_until

MESSAGES = "/v1/messages"
HELLO: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hello"}],
}


def client(server: Running, **options: Any) -> anthropic.Anthropic:
    options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    return anthropic.Anthropic(base_url=server.url, **options)


def test_the_official_client_gets_a_reply_and_a_stream(server: Running, engine: FakeEngine) -> None:
    with client(server) as ai:
        reply = ai.messages.create(**HELLO)
        with ai.messages.stream(**HELLO) as stream:
            pieces = list(stream.text_stream)
            streamed = stream.get_final_message()
        count = ai.messages.count_tokens(model="tiny", messages=HELLO["messages"])
    assert reply.content[0].text == "".join(pieces) == engine.answer  # type: ignore[union-attr]
    assert len(pieces) > 3
    assert streamed.content[0].text == "".join(pieces)  # type: ignore[union-attr]
    assert streamed.usage == reply.usage
    assert reply.stop_reason == streamed.stop_reason == "end_turn"
    assert reply.usage.input_tokens == len(engine.prompts[0]) == count.input_tokens
    assert reply._request_id


@pytest.mark.parametrize(
    "named", [{}, {"model": None}, {"model": "default"}, {"model": "openai/tiny"}]
)
def test_a_request_without_a_model_name_goes_to_the_served_model(
    shared: Running, named: Any
) -> None:
    plain = {name: value for name, value in HELLO.items() if name != "model"}
    reply = httpx2.post(shared.url + MESSAGES, json={**plain, **named})
    assert (reply.status_code, reply.json()["model"]) == (200, "tiny")
    counted = {"messages": HELLO["messages"], **named}
    reply = httpx2.post(f"{shared.url}{MESSAGES}/count_tokens", json=counted)
    assert reply.status_code == 200


def test_the_stop_sequence_that_ended_a_message_is_reported(server: Running) -> None:
    with client(server) as ai:
        reply = ai.messages.create(**HELLO, stop_sequences=["how", "zz"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "how")
    assert reply.content[0].text == "hello world 😀 "  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_rows(
    server: Running, engine: FakeEngine, stream: bool
) -> None:
    engine.delay = 600
    body = json.dumps({**HELLO, "stream": stream})
    head = f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with server.connect() as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: bool(engine.generations))
        assert not engine.generations[0].closed.is_set()
    assert engine.generations[0].closed.wait(60)


def test_pings_are_sent_during_a_long_prefill(
    monkeypatch: pytest.MonkeyPatch, server: Running, engine: FakeEngine
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.05)
    engine.delay = 600
    body = {**HELLO, "max_tokens": 1, "stream": True}
    ping = 'event: ping\ndata: {"type":"ping"}\n\n'
    with httpx2.stream("POST", server.url + MESSAGES, json=body) as reply:
        pieces = reply.iter_text()
        text = ""
        while len(text) < len(ping):
            text += next(pieces)
        server.hurry(engine.generations[0])
        text += "".join(pieces)
    assert text.startswith(ping)
    assert "event: message_start\n" in text
    engine.delay = 0.2
    with client(server) as ai, ai.messages.stream(**HELLO) as stream:
        assert stream.get_final_text() == engine.answer


ERRORS = [
    (RequestError("No."), anthropic.BadRequestError, "invalid_request_error"),
    (OverloadedError("Full."), anthropic.RateLimitError, "rate_limit_error"),
    (EngineError("/a/path"), anthropic.InternalServerError, "overloaded_error"),
    (BrigadeError("/a/path"), anthropic.InternalServerError, "api_error"),
]


@pytest.mark.parametrize(("error", "kind", "type"), ERRORS)
def test_errors_have_the_form_and_types_of_anthropic(
    server: Running, engine: FakeEngine, error: Any, kind: Any, type: str
) -> None:
    engine.refuses_with = error
    with client(server) as ai, pytest.raises(kind) as caught:
        ai.messages.create(**HELLO)
    body = ErrorResponse.model_validate(caught.value.body)
    assert body.error.type == type
    assert (
        body.request_id == caught.value.request_id == caught.value.response.headers["x-request-id"]
    )
    assert "/a/path" not in body.error.message


@pytest.mark.parametrize(("error", "kind", "type"), ERRORS)
def test_errors_in_a_stream_have_the_types_of_anthropic(
    server: Running, engine: FakeEngine, error: Any, kind: Any, type: str
) -> None:
    engine.breaks_with = error
    events = []
    with client(server) as ai, pytest.raises(anthropic.APIStatusError) as caught:
        events += ai.messages.create(**HELLO, stream=True)
    assert caught.value.body["error"]["type"] == type  # type: ignore[index]
    with client(server) as ai, pytest.raises(kind):
        ai.messages.create(**HELLO)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "type"),
    [
        ("POST", MESSAGES, b"{", {}, 400, "invalid_request_error"),
        ("POST", MESSAGES, b"x" * (9 << 20), {}, 413, "request_too_large"),
        ("POST", MESSAGES, b"{}", {"content-type": "text/plain"}, 415, "invalid_request_error"),
        ("GET", MESSAGES, b"", {}, 405, "invalid_request_error"),
        ("GET", f"{MESSAGES}/batches", b"", {}, 404, "not_found_error"),
        (
            *("POST", MESSAGES, json.dumps({**HELLO, "model": "x"}).encode(), {}),
            *(404, "not_found_error"),
        ),
        ("POST", f"{MESSAGES}/count_tokens", b"{}", {}, 400, "invalid_request_error"),
    ],
)
def test_bad_requests_are_refused(
    shared: Running,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    body: bytes,
    headers: Any,
    status: int,
    type: str,
) -> None:
    monkeypatch.setattr(http_server, "LINGER_SECONDS", 600.0)  # for the rest of the long body
    headers = {"content-type": "application/json", **headers}
    reply = httpx2.request(method, shared.url + path, content=body, headers=headers)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == type
    with client(shared) as ai:
        assert ai.messages.create(**HELLO).content


def test_a_key_is_accepted_in_either_of_two_headers(engine: FakeEngine) -> None:
    with Running(engine, api_key=("sk-a",)) as server:
        for key in ({"api_key": "sk-a"}, {"api_key": None, "auth_token": "sk-a"}):
            with client(server, **key) as ai:
                assert ai.messages.create(**HELLO).content
        refused = pytest.raises(anthropic.AuthenticationError, match="X-Api-Key")
        with client(server, api_key="sk-b") as ai, refused as caught:
            ai.messages.create(**HELLO)
    assert caught.value.type == "authentication_error"


def test_a_server_that_drains_refuses_messages_with_the_reason(
    server: Running, engine: FakeEngine
) -> None:
    engine.delay = 600  # The server ends as soon as nothing runs any more.
    body = {**HELLO, "max_tokens": 5, "stream": True}
    with httpx2.stream("POST", server.url + MESSAGES, json=body) as running:
        wait_until(lambda: bool(engine.generations))
        assert httpx2.post(server.url + "/admin/drain?seconds=100").status_code == 202
        reply = httpx2.post(server.url + MESSAGES, json=HELLO)
        server.hurry(engine.generations[0])
        running.read()
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
    assert reply.json()["error"]["type"] == "overloaded_error"


# --- thoughts and tools, with played answers

TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.fixture(scope="module")
def played_engine(tmp_path_factory: pytest.TempPathFactory) -> PlayedEngine:
    tokenizer = Tokenizer(save_model(tmp_path_factory.mktemp("played")))

    def play(prompt: str, is_allowed: Callable[[str], bool]) -> str:
        calls = '"add"' in prompt and "Call it" in prompt
        forms = Call("add", {"x": 3}).forms() if calls else ["Seven."]
        said = [text for form in forms for text in (f"<think>Think hard.</think>{form}", form)]
        return next(filter(is_allowed, said))

    return PlayedEngine(tokenizer, play)


@pytest.fixture(scope="module")
def played(played_engine: PlayedEngine) -> Iterator[Running]:
    with Running(played_engine, max_context=MAX_CONTEXT) as running:
        yield running


def prompt_of(engine: PlayedEngine) -> str:
    return engine.tokenizer.decode(engine.prompts[-1], skip_special_tokens=False)


@pytest.mark.parametrize("display", [None, "summarized", "updates"])
def test_thinking_is_returned_in_blocks_of_its_own(played: Running, display: Any) -> None:
    thinking: Any = {"type": "adaptive", "display": display}
    with client(played) as ai, ai.beta.messages.stream(**HELLO, thinking=thinking) as stream:
        thought, said = stream.get_final_message().content
    assert (thought.type, said.type) == ("thinking", "text")
    assert thought.thinking.strip() == "Think hard."
    assert "Think" not in thought.signature


@pytest.mark.parametrize("is_streamed", [False, True])
def test_omitted_thinking_reaches_the_model_again_in_the_next_request(
    played: Running, played_engine: PlayedEngine, is_streamed: bool
) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    fields: Any = {**HELLO, "max_tokens": 2000, "thinking": thinking}
    with client(played) as ai:
        if is_streamed:
            with ai.beta.messages.stream(**fields) as stream:
                kinds = [event.type for event in stream]
                reply = stream.get_final_message()
            assert "thinking" not in kinds
            assert "signature" in kinds
        else:
            reply = ai.beta.messages.create(**fields)
        thought, said = reply.content
        assert (thought.type, thought.thinking, said.text) == ("thinking", "", "Seven.")  # type: ignore[union-attr]
        turns = [*HELLO["messages"], {"role": "assistant", "content": reply.content}]
        turns.append({"role": "user", "content": "Why?"})
        ai.beta.messages.create(**{**fields, "messages": turns})
    assert "Think hard." in prompt_of(played_engine)


def test_no_thinking_is_returned_if_it_is_disabled(played: Running) -> None:
    with client(played) as ai:
        reply = ai.messages.create(**HELLO, thinking={"type": "disabled"})
    assert [block.type for block in reply.content] == ["text"]


def test_tools_that_anthropic_hosts_are_left_out_and_reported(
    played: Running, played_engine: PlayedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**HELLO, "tools": [TOOL, SEARCH, {"type": "mcp_toolset", "mcp_server_name": "a b"}]}
    with caplog.at_level("WARNING"):
        reply = httpx2.post(played.url + MESSAGES, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tools-not-offered"] == "web_search, a%20b"
    assert '"add"' in prompt_of(played_engine)
    assert "web_search" not in prompt_of(played_engine)
    (line,) = [r.getMessage() for r in caplog.records if "tools_not_offered" in r.getMessage()]
    assert line == f"request={reply.headers['x-request-id']} event=tools_not_offered num=2"
    plain = httpx2.post(played.url + MESSAGES, json={**HELLO, "tools": [TOOL]})
    assert "x-tools-not-offered" not in plain.headers


def test_tools_that_anthropic_hosts_cannot_be_demanded(played: Running) -> None:
    choice: Any = {"type": "tool", "name": "web_search"}
    with client(played) as ai, pytest.raises(anthropic.BadRequestError) as caught:
        ai.messages.create(**HELLO, tools=[SEARCH], tool_choice=choice)  # type: ignore[list-item]
    assert caught.value.type == "invalid_request_error"
    assert "tool_choice" in str(caught.value)
    assert "web_search" in str(caught.value)


def test_the_shell_tool_that_anthropic_defines_is_offered_to_the_model(
    played: Running, played_engine: PlayedEngine
) -> None:
    """Anthropic defines its schema, and the client runs it."""
    with client(played) as ai:
        ai.beta.messages.create(**HELLO, tools=[{"type": "bash_20250124", "name": "bash"}])
    assert '"restart"' in prompt_of(played_engine)


def test_a_tool_can_be_called_in_a_stream(played: Running) -> None:
    """The blocks and deltas come in the order that the official helper wants."""
    asked: Any = {**HELLO, "messages": [{"role": "user", "content": "Call it."}], "tools": [TOOL]}
    with client(played) as ai, ai.messages.stream(**{**asked, "max_tokens": 200}) as stream:
        reply = stream.get_final_message()
    thought, call = reply.content
    assert (thought.type, call.type) == ("thinking", "tool_use")
    assert (call.name, call.input) == ("add", {"x": 3})  # type: ignore[union-attr]
    assert reply.stop_reason == "tool_use"


FORMAT: Any = {
    "format": {
        "type": "json_schema",
        "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}},
    }
}


def test_a_format_beside_tools_still_allows_calls(
    played: Running, played_engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any text that is neither a call nor of the format is ruled out."""
    call, *_ = Call("add", {"x": 3}).forms()
    wrong = "Seven.", '{"total": 7}', "[7]"
    ruled_out: list[str] = []

    def play(right: str) -> Callable[[str, Callable[[str], bool]], str]:
        def choose(_: str, is_allowed: Callable[[str], bool]) -> str:
            ruled_out.extend(text for text in wrong if not is_allowed(text))
            return next(filter(is_allowed, (*wrong, right)))

        return choose

    fields: Any = {**HELLO, "max_tokens": 200, "tools": [TOOL], "output_config": FORMAT}
    with client(played) as ai:
        monkeypatch.setattr(played_engine, "play", play('{"sum": 7}'))
        said = ai.messages.create(**fields)
        monkeypatch.setattr(played_engine, "play", play(call))
        called = ai.messages.create(**fields)
    assert ruled_out == [*wrong, *wrong]
    assert [block.text for block in said.content] == ['{"sum": 7}']  # type: ignore[union-attr]
    assert [block.input for block in called.content] == [{"x": 3}]  # type: ignore[union-attr]


def test_the_format_is_ignored_if_a_tool_is_forced(
    played: Running, played_engine: PlayedEngine
) -> None:
    body = {**HELLO, "max_tokens": 200, "tools": [TOOL], "output_config": FORMAT}
    asked = [{"role": "user", "content": "Call it."}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        fields = {**body, "messages": asked, "tool_choice": choice}
        fields["thinking"] = {"type": "disabled"}
        reply = httpx2.post(played.url + MESSAGES, json=fields)
        assert reply.status_code == 200, reply.text
        assert reply.json()["content"][-1]["input"] == {"x": 3}
        assert reply.headers["x-ignored-fields"] == "output_config.format"


def test_fields_of_beta_features_are_accepted(played: Running) -> None:
    """As the beta namespace sends them: names in a header, and fields in the body."""
    with client(played) as ai:
        reply = ai.beta.messages.create(
            **HELLO,
            betas=["context-management-2025-06-27", "effort-2025-11-24"],
            output_config={"effort": "low"},
            mcp_servers=[],
            container=None,
            inference_geo="eu",
            service_tier="standard_only",
            metadata={"user_id": "u"},
            cache_control={"type": "ephemeral"},
        )
    assert reply.content[-1].text == "Seven."  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "lots"}}, "output_config.effort"),
        ({"tools": [{"type": "teleport_2030", "name": "t"}]}, "tools[0]"),
        ({"unheard_of": 1}, "unheard_of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_the_error_about_a_wrong_field_names_it_in_the_form_of_anthropic(
    played: Running, fields: Any, field: str
) -> None:
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        body = {**HELLO, **fields}
        if path != MESSAGES:
            del body["max_tokens"]
        reply = httpx2.post(played.url + path, json=body)
        assert reply.status_code == 400
        error = ErrorResponse.model_validate_json(reply.content).error
        assert error.type == "invalid_request_error"
        assert field in error.message
