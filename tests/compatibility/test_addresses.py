"""The addresses of calls, and the names of the model, as clients of several servers write them."""

from typing import Any

import httpx2
import pytest

from tests.agents.played import MAX_CONTEXT
from tests.compatibility.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    NEEDED,
    OLLAMA_CHAT,
    RESPONSES,
    Server,
)
from tests.front.fakes import CONFIG

MODEL = "tiny"


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/embeddings"])
def test_paths_work_without_v1(server: Server, prefix: str, path: str) -> None:
    fields = NEEDED.get(path, {"input": "hello"})
    reply = server.post(prefix + path.removeprefix("/v1"), {**fields, "model": MODEL})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1"])
@pytest.mark.parametrize("path", ["/models", f"/models/{MODEL}"])
def test_paths_of_models_work_without_v1(server: Server, prefix: str, path: str) -> None:
    assert server.client.get(prefix + path).status_code == 200


def test_paths_without_v1_give_the_same_form_of_errors(server: Server) -> None:
    reply = server.post("/messages", {**NEEDED[MESSAGES], "model": "other"})
    assert reply.status_code == 404
    assert reply.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing", "/v1/v1/nothing", "/api/nothing"])
def test_paths_that_do_not_exist_get_status_404(server: Server, path: str) -> None:
    assert server.client.get(path).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/ping", "/health", "/props", "/server_info", "/version", "/openapi.json"),
        *("/api/tags", "/api/version", "/api/ps"),
    ],
)
def test_paths_used_by_probes_return_json(server: Server, path: str) -> None:
    assert server.client.get(path).json() is not None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (OLLAMA_CHAT, NEEDED[OLLAMA_CHAT]),
        ("/api/generate", {"prompt": "hello", "stream": False}),
        ("/api/show", {}),
    ],
)
@pytest.mark.parametrize("model", [MODEL, f"{MODEL}:latest"])
def test_paths_of_ollama_return_json(server: Server, path: str, fields: Any, model: str) -> None:
    reply = server.post(path, {**fields, "model": model})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("path", [OLLAMA_CHAT, "/api/generate"])
def test_paths_of_ollama_stream_lines_of_json(server: Server, path: str) -> None:
    reply = server.post(path, {"messages": NEEDED[CHAT]["messages"], "prompt": "hello"})
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert '"done":true' in reply.text.splitlines()[-1].replace(" ", "")


def test_the_path_props_returns_the_length_of_the_context(server: Server) -> None:
    props = server.client.get("/props").json()
    info = server.client.get("/server_info").json()
    length = props["default_generation_settings"]["n_ctx"]
    assert length == info["max_model_len"] == MAX_CONTEXT
    assert props["total_slots"] == CONFIG.max_num_seqs


NAMES: list[dict[str, Any]] = [
    {},
    *({"model": name} for name in (None, "", "default", "openai/tiny", "tiny:latest", MODEL)),
]


@pytest.mark.parametrize("named", NAMES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_other_names_of_the_only_model_are_accepted(server: Server, path: str, named: Any) -> None:
    assert server.ask(path, named).body["model"] == MODEL


@pytest.mark.parametrize("model", ["other", "openai/other", "tiny:7b", "openai/"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_names_of_models_that_are_not_served_are_refused(
    server: Server, path: str, model: str
) -> None:
    reply = server.post(path, {**NEEDED[path], "model": model})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def usages(reply: httpx2.Response) -> list[Any]:
    data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return [httpx2.Response(200, content=each).json().get("usage") for each in data]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage_stats_count_tokens_in_each_chunk(server: Server, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"stream": True, "stream_options": options}
    counted = usages(server.ask(path, fields, "one two three").reply)
    counts = [usage["completion_tokens"] for usage in counted]
    assert counts == sorted(counts)
    assert set(counts) >= {1, 2, 3, 4}
    assert len({usage["prompt_tokens"] for usage in counted}) == 1
