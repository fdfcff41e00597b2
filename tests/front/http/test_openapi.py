"""The document describes every route, and replies have the types of the official clients."""

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import InputTokenCountResponse, Response
from openai.types.shared import ErrorObject

from serve.front.api.anthropic.body import MessagesBody
from serve.front.api.fields import HARMLESS, NEUTRAL
from serve.front.api.openai import ChatBody, CompletionBody, Lenient
from serve.front.api.responses.body import ResponsesBody
from serve.front.app import Front
from tests.front.api.writers.updates import CompletionChunk
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


def test_exactly_the_existing_routes_are_documented(engine: FakeEngine, document: Any) -> None:
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
    assert {each["name"] for each in delete["parameters"]} == {"id"}
    assert get["summary"] != delete["summary"]


def test_every_reference_in_the_document_can_be_resolved(document: Any) -> None:
    found = set(references(document))
    assert len(found) > 30
    for reference in found:
        assert reference.rpartition("/")[2] in document["components"]["schemas"]


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_documented_fields_of_bodies_are_those_that_are_checked(document: Any, body: Any) -> None:
    schema = document["components"]["schemas"][body.__name__]
    is_lenient = issubclass(body, Lenient)
    neutral = NEUTRAL.keys() | HARMLESS if is_lenient else set()
    assert schema["properties"].keys() == body.model_fields.keys() | neutral
    assert schema["additionalProperties"] is is_lenient
    assert schema["required"]


def test_documented_types_are_those_that_clients_send(document: Any) -> None:
    found = document["components"]["schemas"]
    content = found["RequestMessage"]["properties"]["content"]
    assert {each.get("type") for each in content["anyOf"]} == {"string", "array", "null"}
    stop = found["ChatBody"]["properties"]["stop"]["anyOf"]
    assert {each["type"] for each in stop} == {"string", "array", "null"}
    assert found["CompletionBody"]["properties"]["suffix"] == {"enum": [None, ""]}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, ChatCompletion),
        ("/v1/chat/completions", {**CHAT, **SCORED, "logprobs": True, "n": 2}, ChatCompletion),
        ("/v1/completions", COMPLETION, Completion),
        ("/v1/completions", {**COMPLETION, **SCORED, "logprobs": 1}, Completion),
        ("/v1/embeddings", {"model": "tiny", "input": ["hi"]}, CreateEmbeddingResponse),
        ("/v1/responses", {"input": "hello"}, Response),
        ("/v1/responses/input_tokens", {"input": "hello"}, InputTokenCountResponse),
        ("/v1/messages", {**CHAT, "max_tokens": 5}, Message),
        ("/v1/messages/count_tokens", CHAT, MessageTokensCount),
        ("/v1/messages", CHAT, ErrorResponse),
        ("/v1/models/tiny", None, Model),
    ],
)
def test_replies_match_the_types_of_the_official_clients(
    server: Running, path: str, body: Any, kind: Any
) -> None:
    method = "GET" if body is None else "POST"
    reply = httpx2.request(method, server.url + path, json=body)
    kind.model_validate_json(reply.content, strict=True)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {}), ("/v1/models/absent", None)]
)
def test_errors_match_the_type_of_openai(server: Running, path: str, body: Any) -> None:
    method = "GET" if body is None else "POST"
    reply = httpx2.request(method, server.url + path, json=body)
    ErrorObject.model_validate(reply.json()["error"], strict=True)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, ChatCompletionChunk),
        ("/v1/completions", COMPLETION, CompletionChunk),
    ],
)
@pytest.mark.parametrize("usage", [False, True])
def test_chunks_match_the_types_of_openai(
    server: Running, path: str, body: Any, kind: Any, usage: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": usage}, "logprobs": 1}
    if path.endswith("chat/completions"):
        options |= {"logprobs": True, "return_token_ids": True}
    reply = httpx2.post(server.url + path, json={**body, **options})
    *chunks, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    assert len(chunks) > 3
    for chunk in chunks:
        kind.model_validate_json(chunk, strict=True)


def test_the_model_is_optional_in_documented_bodies(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for name in ("OllamaChatBody", "ChatBody", "TokenizeBody"):
        kinds = [each.get("type") for each in schemas[name]["properties"]["model"]["anyOf"]]
        assert kinds == ["string", "null"], name
