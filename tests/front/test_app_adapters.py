"""vLLM's calls for adapters, word for word, over a real socket."""

from typing import Any

import httpx2
import pytest

from tests.front.fakes import FakeEngine, Running
from tests.front.test_app import post


def call(server: Running, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body)


def load(server: Running, name: str, **more: Any) -> httpx2.Response:
    return call(server, "/v1/load_lora_adapter", lora_name=name, lora_path=f"p/{name}", **more)


def test_an_adapter_can_be_loaded_and_used_and_replaced_and_unloaded(
    server: Running, engine: FakeEngine
) -> None:
    reply = load(server, "x", base_model_name="tiny")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    reply = post(server, model="x")
    assert reply.headers["x-adapter-version"] == "1"
    assert reply.json()["model"] == "x"
    assert "x-adapter-version" not in post(server).headers
    reply = load(server, "x")
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "The lora adapter 'x' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True."
    )
    reply = load(server, "x", load_inplace=True)
    assert reply.text == "Success: LoRA adapter 'x' replaced successfully."
    with httpx2.stream(
        "POST",
        server.url + "/v1/chat/completions",
        json={"model": "x", "messages": [{"role": "user", "content": "hi"}], "stream": True},
    ) as stream:
        assert stream.headers["x-adapter-version"] == "2"
        assert '"model":"x"' in stream.read().decode()
    assert engine.ranks.submitted == [1, 0, 2]
    reply = call(server, "/v1/unload_lora_adapter", lora_name="x", lora_int_id=7)
    assert reply.text == "Success: LoRA adapter 'x' removed successfully."
    reply = call(server, "/v1/unload_lora_adapter", lora_name="x")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "The lora adapter 'x' cannot be found."
    assert post(server, model="x").status_code == 404


def test_adapters_are_listed_as_models_with_a_parent(server: Running) -> None:
    load(server, "x")
    models = httpx2.get(f"{server.url}/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in models] == [("tiny", None), ("x", "tiny")]
    assert httpx2.get(f"{server.url}/v1/models/x").json()["parent"] == "tiny"
    (adapter,) = httpx2.get(f"{server.url}/v1/lora_adapters").json()["data"]
    assert (
        adapter.items()
        >= {
            "name": "x",
            "version": 1,
            "rank": 8,
            "scale": 2.0,
            "targets": ["q_proj"],
            "bytes": [100_000, 50_000],
            "num_running": 0,
            "source": "p/x",
            "pinned": False,
        }.items()
    )
    reply = call(server, "/admin/adapters", lora_name="x", pin=True, default=True, preload=True)
    assert reply.json()["default"] == "x"
    assert reply.json()["data"][0]["pinned"]
    assert httpx2.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "x"


JSON = {"content-type": "application/json"}
X = {"lora_name": "x", "lora_path": "y"}
LOAD, UNLOAD, CHANGE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/admin/adapters"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (LOAD, {"lora_name": "x"}, 400, "lora_path", "missing_required_parameter"),
        (LOAD, {**X, "lora_name": ""}, 400, "lora_name", "missing_required_parameter"),
        (LOAD, {**X, "lora_name": 3}, 400, "lora_name", "invalid_value"),
        (LOAD, {**X, "is_3d_lora_weight": True}, 400, "is_3d_lora_weight", "unknown_parameter"),
        (LOAD, {**X, "base_model_name": "z"}, 400, "base_model_name", "invalid_value"),
        (LOAD, {**X, "lora_name": "tiny"}, 400, "lora_name", "adapter_name"),
        (LOAD, {**X, "lora_name": "../a"}, 400, "lora_name", "adapter_name"),
        (UNLOAD, {}, 400, "lora_name", "missing_required_parameter"),
        (UNLOAD, {"lora_name": "nobody"}, 404, "lora_name", "adapter_not_found"),
        (CHANGE, {"lora_name": "nobody", "pin": True}, 404, "lora_name", "adapter_not_found"),
        (CHANGE, {"lora_name": "tiny", "pin": "yes"}, 400, "pin", "invalid_value"),
        (CHANGE, {"lora_name": "tiny", "pin": True}, 400, "lora_name", "invalid_value"),
    ],
)
def test_bad_calls_about_adapters_are_refused(
    shared: Running, path: str, body: dict[str, Any], status: int, param: str, code: str
) -> None:
    reply = call(shared, path, **body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert httpx2.get(f"{shared.url}/v1/lora_adapters").json()["data"] == []


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 9_999])
def test_a_body_that_is_not_an_object_is_refused(shared: Running, content: bytes) -> None:
    assert httpx2.post(shared.url + LOAD, content=content, headers=JSON).status_code == 400


@pytest.mark.parametrize("path", [LOAD, UNLOAD, CHANGE, "/v1/lora_adapters"])
def test_adapter_calls_need_admin_access(shared: Running, path: str) -> None:
    method = "GET" if path.endswith("lora_adapters") else "POST"
    reply = httpx2.request(method, shared.url + path, headers={"X-Forwarded-For": "127.0.0.1"})
    assert reply.status_code == 403


def test_a_refusal_by_a_rank_decides_the_status_of_the_reply(
    server: Running, engine: FakeEngine
) -> None:
    engine.ranks.refusals[1] = {"message": "No adapter found for p/x.", "status": 404}
    reply = load(server, "x")
    assert reply.status_code == 404
    assert "Rank 1: No adapter found" in reply.json()["error"]["message"]
    assert post(server, model="x").status_code == 404
    assert engine.ranks.held == set()
