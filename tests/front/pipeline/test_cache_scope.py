"""Who shares prefixes: cache_salt, and API keys that are kept apart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from serve.core.config import ServeConfig, with_keys
from serve.core.errors import UsageError
from serve.core.messages import Result
from serve.core.types import Sampling, Sequence
from serve.front.pipeline.scheduler import Scheduler
from serve.front.prefixes.index import scope_of
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.fakes import FakeEngine, Running, byte_level, save

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
RESPONSE = {"model": "tiny", "input": "hi", "max_output_tokens": 1}
CALLS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
    ("/v1/responses", RESPONSE),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(byte_level(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with Running(FakeEngine(tokenizer)) as running:
        yield running


def scope(server: Running, path: str, body: dict[str, Any], **headers: str) -> str:
    reply = httpx2.post(server.url + path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return server.engine.cache_scopes[-1]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_only_requests_with_the_same_cache_salt_share_prefixes(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    assert scope(server, path, body) == ""
    first = scope(server, path, {**body, "cache_salt": "one"})
    assert first == scope(server, "/v1/completions", {**COMPLETION, "cache_salt": "one"})
    assert first not in ("", scope(server, path, {**body, "cache_salt": "two"}))


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("salt", ["", 5, ["a"]])
def test_a_cache_salt_that_is_empty_or_not_a_string_is_refused(
    server: Running, path: str, body: dict[str, Any], salt: Any
) -> None:
    reply = httpx2.post(server.url + path, json={**body, "cache_salt": salt})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "cache_salt"


def test_a_response_does_not_contain_its_cache_salt(server: Running) -> None:
    reply = httpx2.post(f"{server.url}/v1/responses", json={**RESPONSE, "cache_salt": "secret"})
    assert "secret" not in reply.text


def test_requests_with_different_keys_share_no_prefix_if_the_scope_is_key(
    tokenizer: Tokenizer,
) -> None:
    """Whichever header a key comes in."""
    with Running(FakeEngine(tokenizer), api_key=("k1", "k2"), prefix_cache_scope="key") as server:
        path = "/v1/completions"
        one = scope(server, path, COMPLETION, authorization="Bearer k1")
        assert one == scope(server, path, COMPLETION, **{"x-api-key": "k1"})
        assert one not in ("", scope(server, path, COMPLETION, authorization="Bearer k2"))
        salted = scope(server, path, {**COMPLETION, "cache_salt": "s"}, authorization="Bearer k1")
        assert salted not in (one, scope_of("s", ""))


def test_all_clients_share_prefixes_by_default(tokenizer: Tokenizer) -> None:
    with Running(FakeEngine(tokenizer), api_key=("k1",)) as server:
        assert scope(server, "/v1/completions", COMPLETION, authorization="Bearer k1") == ""


def test_the_prefix_cache_scope_key_is_refused_without_keys() -> None:
    config = ServeConfig(model=Path("m"), prefix_cache_scope="key")
    with fails(UsageError, "usage", match="--api-key-file"):
        with_keys(config, {})
    assert with_keys(config, {"BRIGADE_API_KEY": "k"}).api_key == ("k",)


def test_no_prefix_of_another_scope_is_copied() -> None:
    """cached_tokens and the time to the first token follow from what is copied."""
    scheduler = Scheduler(1, max_num_sequences=4, max_queue=4, prefill_chunk=64)
    scheduler.reuse = "any"
    cached = []
    for id, of in enumerate(["a", "a", "b", "", "a"]):
        sequence = Sequence(id, [5] * 40, 1, Sampling(), frozenset())
        scheduler.add(sequence, scope=of)
        while scheduler.num_running or scheduler.num_waiting:
            step = scheduler.schedule()
            assert step
            tokens = (7,) * len(step.rows) if step.sample else ()
            scheduler.update(Result(step.number, tokens))
        cached.append(sequence.num_cached)
    assert cached == [0, 39, 0, 0, 39]
