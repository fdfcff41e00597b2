"""Answers of engines about adapters and prefixes: the driver hands them to the part that asked."""

import random
from pathlib import Path

import pytest

from serve.core.config import Cluster, ServeConfig
from serve.core.messages import AdapterRefused, PrefixFiles, Report
from serve.front.adapters.loader import AdapterLoader
from serve.front.parts import registry
from serve.front.parts.interface import NOTHING, PartReady, SchedulerPart
from serve.front.pipeline import events
from serve.front.pipeline.driver import Driver
from serve.front.pipeline.lifecycle import Lifecycle
from serve.front.pipeline.membership import Membership
from serve.parent.engines import Engines
from tests.configs import serve_config
from tests.front.pipeline.test_driver import FACTS, Silent
from tests.front.pipeline.two_shards import two_shards

pytestmark = pytest.mark.anyio


class Disks(SchedulerPart):
    """A part that adds up the sizes of disks. None is left once the engines have ended."""

    hears = (PrefixFiles,)

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self.sizes: dict[int, int] = {}

    def on_message(self, rank: int, message: PrefixFiles) -> PartReady:
        self.sizes[rank] = message.max_bytes
        return NOTHING

    def stop(self) -> None:
        self.sizes.clear()


class Answers:
    """A driver without engines, and what its parts have taken of the answers of both ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "PARTS", [Disks])
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

    @property
    def sizes(self) -> dict[int, int]:
        """The sizes of the disks, by rank, as far as they were reported."""
        (disks,) = self.requests.scheduler.parts
        assert isinstance(disks, Disks)
        return disks.sizes


@pytest.mark.parametrize("seed", range(20))
async def test_answers_of_engines_from_an_earlier_life_are_ignored(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    answers = Answers(monkeypatch)
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
        assert answers.sizes == sizes
        answers.requests.interrupt()
    assert answers.refused == wanted
    assert answers.lifecycle.recovery.last_fault is None
    await answers.driver.close()


async def test_answers_of_engines_are_ignored_once_the_server_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(monkeypatch)
    answers.driver.on(events.Close())
    for rank in range(2):
        answers.driver.hear(rank, Report(0, AdapterRefused(1, "no", 400)))
        answers.driver.hear(rank, Report(0, PrefixFiles([], 100, "digest")))
    assert not answers.refused
    assert not answers.sizes
    await answers.driver.close()
