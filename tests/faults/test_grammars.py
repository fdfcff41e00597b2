"""Thousands of grammars that are too deep, too wide or recursive: none ends an engine.

Of seeds, so that one that does can be sent again: `tests.faults.grammars.request(seed)`.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.cluster.servers import Server, brigade_launch, running
from tests.faults.grammars import request

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
    reply = httpx.post(server.url + path, json=body, timeout=100)
    seconds = time.monotonic() - began
    if reply.status_code != 400:
        return seed, str(reply.status_code), seconds
    found = [name for words, name in REFUSALS.items() if words in reply.text]
    return seed, (found or ["refused"])[0], seconds


def check_seeds(server: Server, seeds: Sequence[int]) -> None:
    engines = server.engines()
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        told = list(threads.map(lambda seed: send(server, seed), seeds))
    ends = Counter(end for _, end, _ in told)
    slowest, slowest_seed = max((seconds, seed) for seed, _, seconds in told)
    print(f"{dict(ends)}, slowest {slowest:.1f} s: seed {slowest_seed}")
    wrong = [(seed, end) for seed, end, _ in told if end.isdigit() and end != "200"]
    assert not wrong
    assert server.engines() == engines, "an engine ended"
    assert server.get("/admin/pipeline")["num_restarts"] == 0
    assert ends["200"] > len(seeds) / 10, "most were refused: they are not near the bounds"


@pytest.mark.timeout(400)
def test_grammars_of_some_seeds_end_no_engine(cluster: Server) -> None:
    check_seeds(cluster, range(NUM_SEEDS, NUM_SEEDS + 100))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(2, "--max-restarts", "1000") as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_OF_A_TEST))
def test_grammars_of_all_seeds_end_no_engine(server: Server, first: int) -> None:
    check_seeds(server, range(first, first + SEEDS_OF_A_TEST))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("limit", ["2048", "unlimited"])
def test_grammars_end_no_engine_under_another_stack_limit(limit: str) -> None:
    with running(2, launch=under_stack_limit(limit)) as server:
        check_seeds(server, range(2 * NUM_SEEDS, 2 * NUM_SEEDS + SEEDS_OF_A_TEST))
