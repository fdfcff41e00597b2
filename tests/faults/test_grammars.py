"""Thousands of grammars that are too deep, too wide or recursive: none ends an engine.

Each comes from a seed, so that one that does can be sent again:
`tests.faults.grammars.request(seed)`.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.cluster.servers import Server, brigade_launch, quick, running
from tests.faults.grammars import COMPLETIONS, Json, request

pytestmark = pytest.mark.long

NUM_SEEDS = 5000
SEEDS_OF_A_TEST = 500
REQUESTS_AT_ONCE = 4
REFUSALS = {
    "more than 1 s": "too slow",
    "too much memory": "too much memory",
    "nested too deeply": "ended by its stack",
    "takes too long to follow": "too slow to follow",
}


def under_stack_limit(limit: str) -> Any:
    def launch(num_ranks: int, flags: Sequence[str]) -> list[str]:
        shell = ["bash", "-c", f'ulimit -s {limit} && exec "$@"', "bash"]
        return [*shell, *brigade_launch(num_ranks, flags)]

    return launch


def send(server: Server, seed: int) -> tuple[int, str, float]:
    """The seed, what became of its request, and its seconds."""
    path, body = request(seed)
    began = time.monotonic()
    reply = httpx2.post(server.url + path, json=body, timeout=100)
    seconds = time.monotonic() - began
    if reply.status_code != 400:
        return seed, str(reply.status_code), seconds
    found = [name for words, name in REFUSALS.items() if words in reply.text]
    return seed, (found or ["refused"])[0], seconds


def check_seeds(server: Server, seeds: Sequence[int]) -> None:
    engines = server.engines()
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        outcomes = list(threads.map(lambda seed: send(server, seed), seeds))
    ends = Counter(end for _, end, _ in outcomes)
    slowest, slowest_seed = max((seconds, seed) for seed, _, seconds in outcomes)
    print(f"{dict(ends)}, slowest {slowest:.1f} s: seed {slowest_seed}")
    wrong = [(seed, end) for seed, end, _ in outcomes if end.isdigit() and end != "200"]
    assert not wrong
    assert server.engines() == engines, "an engine ended"
    assert server.get("/admin/pipeline")["num_restarts"] == 0
    assert ends["200"] > len(seeds) / 10, "most were refused: they are not near the bounds"


def chain_of_rules(length: int) -> Json:
    rules = [f'r{n}: "a" r{n + 1}' for n in range(length)]
    return {"grammar": "\n".join(["start: r0", *rules, f'r{length}: "b"'])}


def chain_of_definitions(length: int) -> Json:
    definitions: Json = {
        f"d{n}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}},
            "required": ["a"],
        }
        for n in range(length)
    }
    definitions[f"d{length}"] = {"type": "string"}
    return {"json": {"$ref": "#/$defs/d0", "$defs": definitions}}


def test_chains_of_grammar_rules_around_the_stack_limit_crash_no_engine(cluster: Server) -> None:
    """Chains for which 8 MB of stack are just too small are accepted; far longer ones are
    refused."""
    engines = cluster.engines()
    lengths = {
        chain_of_rules: (2655, 2662, 2670, 5000),
        chain_of_definitions: (917, 919, 921, 5000),
    }
    statuses = []
    for chain, each in lengths.items():
        for length in each:
            body = {"model": "tiny-chat", "prompt": "hi", "max_tokens": 3}
            body["structured_outputs"] = chain(length)
            reply = httpx2.post(cluster.url + COMPLETIONS, json=body, timeout=60)
            statuses.append(reply.status_code)
    assert statuses == [200, 200, 200, 400] * 2
    assert cluster.engines() == engines


def test_grammars_work_together_with_stop_tokens_and_allowed_tokens(cluster: Server) -> None:
    """A stop token that the grammar allows ends the answer. Allowed tokens that the grammar forbids
    are refused by name."""

    def id_of(text: str) -> int:
        tokenized = httpx2.post(
            cluster.url + "/tokenize", json={"model": "tiny-chat", "prompt": text}
        )
        return int(tokenized.json()["tokens"][0])

    body: Json = {
        "model": "tiny-chat",
        "prompt": "hi",
        "max_tokens": 9,
        "structured_outputs": {"regex": "[ab]{5}"},
    }
    a, b, c = map(id_of, "abc")
    only = {"allowed_token_ids": [a, b]}
    stopped = httpx2.post(
        cluster.url + COMPLETIONS, json={**body, **only, "stop_token_ids": [a, b]}, timeout=60
    ).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] in (a, b)
    assert stopped["usage"]["completion_tokens"] == 1
    refused = httpx2.post(
        cluster.url + COMPLETIONS, json={**body, "allowed_token_ids": [c]}, timeout=60
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.timeout(400)
def test_grammars_generated_from_a_hundred_seeds_crash_no_engine(cluster: Server) -> None:
    check_seeds(cluster, range(NUM_SEEDS, NUM_SEEDS + 100))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(2, quick(max_restarts=1000)) as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_OF_A_TEST))
def test_grammars_generated_from_all_seeds_crash_no_engine(server: Server, first: int) -> None:
    check_seeds(server, range(first, first + SEEDS_OF_A_TEST))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("limit", ["2048", "unlimited"])
def test_grammars_crash_no_engine_with_a_small_or_unlimited_stack(limit: str) -> None:
    with running(2, launch=under_stack_limit(limit)) as server:
        check_seeds(server, range(2 * NUM_SEEDS, 2 * NUM_SEEDS + SEEDS_OF_A_TEST))
