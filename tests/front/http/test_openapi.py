"""The document names what serves, and replies have the types that it tells."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from pydantic import TypeAdapter

from serve.front.api.anthropic.body import MessagesBody
from serve.front.api.fields import HARMLESS, NEUTRAL
from serve.front.api.openai import ChatBody, CompletionBody, Lenient
from serve.front.api.responses.body import ResponsesBody
from serve.front.app import Front
from serve.front.http import schemas
from tests.front.fakes import CONFIG, FakeEngine, Running

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "one two"}
SCORED = {"return_token_ids": True, "prompt_logprobs": 2}


@pytest.fixture
def document(server: Running) -> Any:
    return httpx2.get(server.url + "/openapi.json").raise_for_status().json()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_route_is_documented_and_no_other(engine: FakeEngine, document: Any) -> None:
    routes = Front(CONFIG, engine, engine.tokenizer, 512).routes
    wanted = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {(path, method) for path, calls in document["paths"].items() for method in calls}
    assert documented == wanted
    calls = [call for path in document["paths"].values() for call in path.values()]
    assert all(call["summary"] for call in calls)
    assert len({call["operationId"] for call in calls}) == len(calls)


def test_each_method_of_a_path_has_its_own_description(document: Any) -> None:
    calls = document["paths"]["/v1/responses/{id}"]
    get, delete = calls["get"], calls["delete"]
    assert {each["name"] for each in get["parameters"]} == {"id", "include", "include[]"}
    content = delete["responses"]["200"]["content"]
    assert [*content] == ["application/json"]
    assert content["application/json"]["schema"]["$ref"].endswith("/DeletedResponse")
    assert {each["name"] for each in delete["parameters"]} == {"id"}
    assert get["summary"] != delete["summary"]


def test_every_reference_leads_somewhere(document: Any) -> None:
    found = set(references(document))
    assert len(found) > 30
    for reference in found:
        assert reference.rpartition("/")[2] in document["components"]["schemas"]


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_bodies_have_the_fields_that_are_checked(document: Any, body: Any) -> None:
    schema = document["components"]["schemas"][body.__name__]
    is_lenient = issubclass(body, Lenient)
    neutral = NEUTRAL.keys() | HARMLESS if is_lenient else set()
    assert schema["properties"].keys() == body.model_fields.keys() | neutral
    assert schema["additionalProperties"] is is_lenient
    assert schema["required"]


def test_what_clients_may_write_is_documented_and_not_what_becomes_of_it(document: Any) -> None:
    found = document["components"]["schemas"]
    content = found["Message"]["properties"]["content"]
    assert {each.get("type") for each in content["anyOf"]} == {"string", "array", "null"}
    stop = found["ChatBody"]["properties"]["stop"]["anyOf"]
    assert {each["type"] for each in stop} == {"string", "array", "null"}
    assert found["CompletionBody"]["properties"]["suffix"] == {"enum": [None, ""]}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, schemas.ChatReply),
        ("/v1/chat/completions", {**CHAT, **SCORED, "logprobs": True, "n": 2}, schemas.ChatReply),
        ("/v1/completions", COMPLETION, schemas.CompletionReply),
        (
            "/v1/completions",
            {**COMPLETION, **SCORED, "logprobs": 1, "echo": True},
            schemas.CompletionReply,
        ),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, schemas.Tokenized),
        ("/tokenize", CHAT, schemas.Tokenized),
        ("/detokenize", {"tokens": [5]}, schemas.Detokenized),
        ("/v1/messages", {**CHAT, "max_tokens": 5}, schemas.MessageReply),
        ("/v1/messages/count_tokens", CHAT, schemas.MessageTokens),
        ("/v1/messages", CHAT, schemas.AnthropicErrorReply),
        ("/v1/responses/input_tokens", {"input": "hello"}, schemas.InputTokens),
        ("/v1/models", None, schemas.ModelList),
        ("/version", None, schemas.Version),
        ("/ready", None, schemas.Status),
        ("/v1/chat/completions", {}, schemas.ErrorReply),
        ("/v1/models/absent", None, schemas.ErrorReply),
    ],
)
def test_replies_have_their_types(server: Running, path: str, body: Any, kind: Any) -> None:
    method = "GET" if body is None else "POST"
    reply = httpx2.request(method, server.url + path, json=body, timeout=10)
    TypeAdapter(kind).validate_json(reply.content, strict=True, extra="forbid")


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, schemas.ChatChunk),
        ("/v1/completions", COMPLETION, schemas.CompletionReply),
    ],
)
@pytest.mark.parametrize("usage", [False, True])
def test_chunks_have_their_types(
    server: Running, path: str, body: Any, kind: Any, usage: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": usage}, "logprobs": 1}
    if path.endswith("chat/completions"):
        options |= {"logprobs": True, "return_token_ids": True}
    reply = httpx2.post(server.url + path, json={**body, **options}, timeout=10)
    *chunks, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    assert len(chunks) > 3
    for chunk in chunks:
        TypeAdapter(kind).validate_python(json.loads(chunk), strict=True, extra="forbid")


@pytest.mark.parametrize(
    ("path", "body", "is_done"),
    [
        ("/v1/chat/completions", CHAT, True),
        ("/v1/completions", COMPLETION, True),
        ("/v1/responses", {"model": "tiny", "input": "hi"}, False),
        ("/v1/messages", {**CHAT, "max_tokens": 5}, False),
    ],
)
def test_how_a_stream_ends_is_documented(
    server: Running, document: Any, path: str, body: Any, is_done: bool
) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert ("[DONE]" in json.dumps(content)) == is_done
    text = httpx2.post(server.url + path, json={**body, "stream": True}, timeout=10).text
    assert text.endswith("data: [DONE]\n\n") == is_done


def test_document_describes_ollamas_calls_with_their_streams(document: Any) -> None:
    for path in ("/api/chat", "/api/generate"):
        call = document["paths"][path]["post"]
        content = call["responses"]["200"]["content"]
        assert {"application/json", "application/x-ndjson"} <= content.keys()
    schemas = document["components"]["schemas"]
    for name in ("OllamaChatBody", "ChatBody", "TokenizeBody"):
        kinds = [each.get("type") for each in schemas[name]["properties"]["model"]["anyOf"]]
        assert kinds == ["string", "null"], name
