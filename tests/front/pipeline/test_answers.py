"""Answers of engines about adapters and prefixes: the driver hands them to the part that asked."""

import random
from pathlib import Path

import pytest

from serve.core.config import Cluster
from serve.core.messages import AdapterRefused, PrefixFiles, Report
from serve.front.adapters.loader import AdapterLoader
from serve.front.pipeline import events
from serve.front.pipeline.driver import Driver
from serve.front.pipeline.lifecycle import Lifecycle
from serve.front.pipeline.membership import Membership
from serve.parent.engines import Engines
from tests.configs import serve_config
from tests.front.pipeline.test_driver import FACTS, Silent
from tests.front.prefixes.test_requests_disk import two_shards

pytestmark = pytest.mark.anyio


class Answers:
    """A driver without engines, and what its parts have taken of the answers of both ranks."""

    def __init__(self) -> None:
        config = serve_config()
        cluster = Cluster(0, 2, ("127.0.0.1",) * 2)
        self.engines = Engines(cluster, FACTS, keeps_spare=False)
        self.lifecycle = Lifecycle(config, Membership(config, cluster.hosts, FACTS))
        self.requests = two_shards([])
        self.refused: list[int] = []  # versions: a late refusal retires its version
        self.requests.retire_adapter = self.refused.append  # type: ignore[method-assign]
        adapters = AdapterLoader(config, self.engines, self.requests)
        parts = (self.engines, self.lifecycle, self.requests, adapters)
        self.driver = Driver(config, cluster, Path("."), *parts, Silent())

    def num_stored_bytes(self) -> int:
        """The room on both disks, once both have reported their files."""
        self.requests.resume()
        return int(self.requests.disk_state()["max_bytes"])


@pytest.mark.parametrize("seed", range(20))
async def test_driver_hands_over_answers_of_this_life_alone(seed: int) -> None:
    chance = random.Random(seed)
    answers = Answers()
    wanted: list[int] = []
    version = 0
    for life in range(10):
        answers.lifecycle.life = life
        sizes: dict[int, int] = {}
        for _ in range(chance.randrange(8)):
            of_life = chance.choice([life - 1, life, life, life + 1])
            rank = chance.randrange(2)
            version += 1
            answers.driver.hear(rank, Report(of_life, AdapterRefused(version, "no", 400)))
            answers.driver.hear(rank, Report(of_life, PrefixFiles([], version, "digest")))
            if of_life == life:
                wanted.append(version)
                sizes[rank] = version
        assert answers.num_stored_bytes() == (sum(sizes.values()) if len(sizes) == 2 else 0)
        answers.requests.interrupt()
    assert answers.refused == wanted
    assert answers.lifecycle.recovery.last_fault is None
    await answers.driver.close()


async def test_driver_hands_over_nothing_once_the_server_closes() -> None:
    answers = Answers()
    answers.driver.on(events.Close())
    for rank in range(2):
        answers.driver.hear(rank, Report(0, AdapterRefused(1, "no", 400)))
        answers.driver.hear(rank, Report(0, PrefixFiles([], 100, "digest")))
    assert not answers.refused
    assert not answers.num_stored_bytes()
    await answers.driver.close()
