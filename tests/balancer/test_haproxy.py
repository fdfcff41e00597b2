"""What examples/balancer/haproxy.cfg does that LiteLLM's proxy cannot."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.balancer.asking import ask, long_stream, user
from tests.balancer.clusters import Clusters
from tests.balancer.programs import Balancer, haproxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PARTS = [{"type": "text", "text": "How many are three and four?"}]
SYSTEM = {"role": "system", "content": "You are brief."}
CLAUDE_CODE = {"metadata": {"user_id": "user_1_session_2"}}
# The first turns of conversations, and how each can be known.
CONVERSATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/chat/completions", {"messages": [user("Hello!")]}),
    "parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARTS}]}),
    "system": ("/v1/chat/completions", {"messages": [SYSTEM, user("Who are you?")]}),
    "system and parts": (
        "/v1/chat/completions",
        {"messages": [SYSTEM, {"role": "user", "content": PARTS}]},
    ),
    "Claude Code": ("/v1/messages", {"messages": [user("Do it.")], **CLAUDE_CODE}),
    "Codex": ("/v1/responses", {"input": "Do it.", "prompt_cache_key": "a-session"}),
}


@pytest.fixture
def balancer(clusters: Clusters, tmp_path: Path) -> Iterator[Balancer]:
    with haproxy(clusters.ports, tmp_path) as running:
        yield running


def send_turn(balancer: Balancer, name: str, number: int) -> int:
    """Returns the cluster that got the turn of a conversation."""
    path, first = CONVERSATIONS[name]
    body = {"model": "tiny-chat", "temperature": 0, **first}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body[limit] = 8
    later = [{"role": "assistant", "content": "Yes."}, user("And then?")] * number
    if "messages" in body:
        body["messages"] = body["messages"] + later
    elif number:
        body["input"] = [user(body["input"]), *later]
    headers = {"authorization": f"Bearer {balancer.key}"}
    reply = httpx2.post(balancer.url + path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return balancer.cluster_of(reply)


def test_each_kind_of_conversation_stays_on_its_cluster(balancer: Balancer) -> None:
    with long_stream(balancer) as (busy, _):
        assert {send_turn(balancer, name, 0) for name in CONVERSATIONS} == {1 - busy}
    with ExitStack() as streams:
        while streams.enter_context(long_stream(balancer))[0] != 1 - busy:
            continue
        assert {send_turn(balancer, name, 1) for name in CONVERSATIONS} == {1 - busy}


def test_a_conversation_moves_if_haproxy_finds_its_cluster_full(
    clusters: Clusters, tmp_path: Path
) -> None:
    changes = {"maxconn 264": "maxconn 1"}
    with haproxy(clusters.ports, tmp_path, changes) as balancer, ThreadPoolExecutor() as threads:
        with long_stream(balancer, "song") as (busy, _):
            arguments = (balancer.url, balancer.key, [user("Hello")])
            fields = {"prompt_cache_key": "song"}
            asked = [threads.submit(ask, *arguments, **fields) for _ in range(2)]
            moved = next(as_completed(asked)).result()
            assert balancer.cluster_of(moved) == 1 - busy
        # The other waited for its cluster, which the end of the stream makes free.
        assert all(each.result().status_code == 200 for each in asked)


def test_haproxy_waits_for_full_clusters_and_then_answers_503(
    clusters: Clusters, tmp_path: Path
) -> None:
    changes = {"maxconn 264": "maxconn 1", "timeout queue 30s": "timeout queue 500"}
    with haproxy(clusters.ports, tmp_path, changes) as balancer, ExitStack() as streams:
        used = {streams.enter_context(long_stream(balancer))[0] for _ in range(2)}
        assert used == {0, 1}
        reply = ask(balancer.url, balancer.key, [user("Hello")])
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0


@pytest.mark.parametrize("path", ["/admin/drain", "/v1/admin/drain", "/v1/load_lora_adapter"])
def test_calls_of_operators_do_not_pass(balancer: Balancer, path: str) -> None:
    headers = {"authorization": f"Bearer {balancer.key}"}
    assert httpx2.post(balancer.url + path, headers=headers).status_code == 403
