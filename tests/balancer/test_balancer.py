"""Two clusters behind HAProxy and behind LiteLLM's proxy, with the files of examples/balancer: what
docs/cluster.md says about more than one cluster."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2
import pytest

from tests.balancer.asking import NUM_LONG_TOKENS, ask, long_stream, user
from tests.balancer.clusters import HEADERS, MAX_RUNNING, MAX_WAITING, Clusters
from tests.balancer.load import Load, direct_texts
from tests.balancer.programs import CLUSTER_KEY, Balancer, haproxy, litellm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ANSWERS = 16
# LiteLLM chooses by chance.
MIN_CONVERSATIONS, MAX_CONVERSATIONS = 4, 40


@pytest.fixture(scope="module", params=[haproxy, litellm], ids=["haproxy", "litellm"])
def balancer(
    request: pytest.FixtureRequest, clusters: Clusters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Balancer]:
    with request.param(clusters.ports, tmp_path_factory.mktemp("balancer")) as running:
        yield running


def converse(balancer: Balancer, direct: str, session: str, num_turns: int) -> set[int]:
    """The clusters of a conversation's turns. Each has the text of a direct request, and finds the
    prefix of the turn before."""
    used = set()
    messages = [{"role": "system", "content": "You are brief."}, user(f"Tell me about {session}")]
    for turn in range(num_turns):
        reply = ask(balancer.url, balancer.key, messages, session).raise_for_status()
        used.add(balancer.cluster_of(reply))
        whole = reply.json()
        text = whole["choices"][0]["message"]["content"]
        if turn:
            assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        messages += [{"role": "assistant", "content": text}, user("And then?")]
    last = messages[:-2]
    reply = ask(direct, CLUSTER_KEY, last)
    assert reply.json()["choices"][0]["message"]["content"] == messages[-2]["content"]
    return used


def test_conversations_stay_on_a_cluster_and_are_spread(
    balancer: Balancer, clusters: Clusters
) -> None:
    used: set[int] = set()
    for number in range(MAX_CONVERSATIONS):
        of_one = converse(balancer, clusters.servers[0].url, f"number {number}", 4)
        assert len(of_one) == 1
        used |= of_one
        if len(used) == 2 and number >= MIN_CONVERSATIONS:
            return
    raise AssertionError(f"all conversations went to cluster {used}")


def test_a_rolling_restart_loses_nothing(balancer: Balancer, clusters: Clusters) -> None:
    load = Load(balancer, direct_texts(clusters.servers[0].url))
    with load.running():
        for number in (0, 1):
            load.wait_for(NUM_ANSWERS)
            assert "event=drained answers_ended=0" in clusters.drain(number)
            load.wait_for(NUM_ANSWERS)
            clusters.start(number)
            load.wait_for(4, cluster=number)
    assert load.failed() == []
    print(len(load.outcomes), "answers, none lost")


def stream_of(balancer: Balancer, wanted: int, streams: ExitStack) -> Iterator[str]:
    """What is left of the texts of a long stream that this cluster has begun."""
    while True:
        with ExitStack() as tried:
            cluster, texts = tried.enter_context(long_stream(balancer))
            if cluster == wanted:
                streams.push(tried.pop_all())
                return texts


def test_a_killed_cluster_loses_only_the_streams_that_it_had_begun(
    balancer: Balancer, clusters: Clusters
) -> None:
    load = Load(balancer, direct_texts(clusters.servers[0].url))
    with ExitStack() as streams:
        rest = stream_of(balancer, 1, streams)
        streams.enter_context(load.running())
        load.wait_for(4, cluster=1)
        clusters.kill(1)
        killed = time.monotonic()
        with pytest.raises((AssertionError, httpx2.HTTPError)):
            list(rest)
        load.wait_for(NUM_ANSWERS, cluster=0)
        clusters.start(1)
        load.wait_for(4, cluster=1)
    for each in load.failed():
        assert (each.is_stream, each.cluster) == (True, 1), each
        assert each.sent < killed, each
    waits = [each.began - each.sent for each in load.outcomes if each.began and each.sent > killed]
    counts = f"{len(load.outcomes)} answers, {len(load.failed())} streams lost"
    print(f"{counts}; after the kill an answer began within {max(waits):.1f} s")


def test_a_wrong_key_is_refused(balancer: Balancer) -> None:
    reply = ask(balancer.url, "wrong", [user("Hello")])
    if balancer.name == "litellm":
        # Without a database, LiteLLM cannot say that it does not know a key.
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "no_db_connection")
    else:
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")


def test_full_clusters_are_429_with_retry_after(balancer: Balancer, clusters: Clusters) -> None:
    sequences = {"prompt": "one two", "n": MAX_RUNNING + MAX_WAITING, "stream": True}
    body = {**sequences, "model": "tiny-chat", "max_tokens": NUM_LONG_TOKENS, "ignore_eos": True}
    with ExitStack() as streams:
        lines = []
        for server in clusters.servers.values():
            call = httpx2.stream("POST", f"{server.url}/v1/completions", json=body, headers=HEADERS)
            lines.append(streams.enter_context(call).iter_lines())
            next(lines[-1])
        reply = ask(balancer.url, balancer.key, [user("Hello")])
        assert reply.status_code == 429, reply.text
        # LiteLLM renames it, unless it already avoids both clusters.
        renamed = reply.headers.get("llm_provider-retry-after", "0")
        assert int(reply.headers.get("retry-after", renamed)) > 0
