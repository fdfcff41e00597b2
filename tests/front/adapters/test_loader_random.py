"""The registry over a pipeline without machines, against the simplest model of it: a name stands
for a path, and a request sees what was there when its version was read, from its first token to its
last, whatever becomes of the engines and of the files meanwhile."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.errors import (
    AdapterError,
    BrigadeError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve.core.messages import AdapterRead, AdapterRefused, LoadAdapter
from serve.front.pipeline.driver import cancelled
from tests.front.fakes import CONFIG, loader_over
from tests.front.parts.adapters.test_scheduling import AdapterPipeline, AdapterStage, drain
from tests.front.pipeline.simulation import expected, make_sequence
from tests.front.pipeline.test_scheduler import check_all_ended

NUM_BYTES, MEMORY, MAX_HELD = 100_000, "250KB", 2
pytestmark = pytest.mark.uses("adapters")

NAMES = "wxyz"


class RandomRanks:
    """Stages that read the requested adapters and answer at random times. A file's content
    is how often it was written over. copies are what each rank's parent keeps for the next engine,
    by version."""

    def __init__(self, chance: random.Random, num_stages: int) -> None:
        self.chance = chance
        self.pipeline = AdapterPipeline(num_stages, max_num_sequences=6, prefill_chunk=8)
        self.pipeline.scheduler.reuse = "any"
        self.ring = tuple(range(num_stages))
        self.contents: dict[int, str] = {}  # of the versions that were read
        self.adapters = loader_over(self, adapter_memory=MEMORY)
        self.asked: list[tuple[int, LoadAdapter, bool]] = []
        self.path_of = {0: "base"}
        self.content: Counter[str] = Counter()
        self.copies: list[dict[int, int]] = [{} for _ in range(num_stages)]
        self.read_first: defaultdict[int, set[int]] = defaultdict(set)
        self.lost: set[int] = set()  # what some rank could not read a second time
        self.ended: set[int] = set()
        self.are_working = True

    def fault(self) -> None:
        """As Engine.interrupt. Now and then a whole rank goes, with what its parent kept."""
        self.are_working = False
        self.asked.clear()
        self.pipeline.kill()
        self.adapters.interrupt()
        if self.chance.random() < 0.3:
            self.chance.choice(self.copies).clear()

    async def restore(self) -> None:
        await self.adapters.restore()
        self.adapters.resume()
        self.are_working = True

    def end_with_adapter(self, version: int, error: BrigadeError) -> None:
        assert version in self.lost, "it could have been read again"
        for id, sequence in self.pipeline.added.items():
            if sequence.adapter_version == version:
                self.ended.add(id)
                self.pipeline.scheduler.drop(id)

    def send_to_all(self, message: LoadAdapter) -> None:
        ranks = range(self.pipeline.num_stages)
        self.path_of[message.version] = message.path
        if message.version not in message.held:
            self.read_first[message.version].clear()  # which a fault may have interrupted
        refusing = self.chance.choice(ranks) if self.chance.random() < 0.2 else None
        self.asked += [(rank, message, rank == refusing) for rank in ranks]

    def answer_one(self) -> None:
        if self.asked:
            rank, message, refuses = self.asked.pop(self.chance.randrange(len(self.asked)))
            content = self.read(rank, message, refuses)
            self.adapters.on_message(rank, self.answer(message.version, content))

    def answer(self, version: int, content: int | None) -> AdapterRead | AdapterRefused:
        if content is None:
            return AdapterRefused(version, "it is not whole", 400)
        return AdapterRead(
            version=version,
            digest=str(content),
            checksum=str(content),
            targets=["a"],
            own=["a"],
            kinds=["q_proj"],
            lora_rank=8,
            scale=2.0,
            num_bytes=NUM_BYTES,
        )

    def read(self, rank: int, message: LoadAdapter, refuses: bool) -> int | None:
        """As serve.lora.copies. A stage has only what is right, so that a step with
        something else fails; None for what cannot be read."""
        version, held = message.version, message.held
        stage, copies = self.pipeline.stages[rank], self.copies[rank]
        assert isinstance(stage, AdapterStage)
        for old in copies.keys() - held:
            del copies[old]
        content = copies.get(version, None if refuses else self.content[message.path])
        if version not in held and content is not None:
            self.read_first[version].add(content)
        if version in held and {content} != self.read_first[version]:
            self.lost.add(version)
        elif content is not None:
            stage.loaded.add(version)
            copies[version] = content
        return content

    def retire_adapter(self, version: int) -> None:
        self.pipeline.scheduler.retire(version)

    def num_with_adapter(self, version: int) -> int:
        live = self.pipeline.scheduler._live.values()
        return sum(sequence.adapter_version == version for sequence in live)


class Life:
    """paths is the model: what each name stands for."""

    def __init__(self, seed: int, num_stages: int, fault_share: float) -> None:
        self.fault_share = fault_share
        self.chance = random.Random(seed)
        self.ranks = RandomRanks(self.chance, num_stages)
        self.adapters, self.pipeline = self.ranks.adapters, self.ranks.pipeline
        self.paths = {CONFIG.model_name: "base"}
        self.wanted: dict[int, list[int]] = {}
        self.dropped: set[int] = set()
        self.num_loads = 0
        self.restoring: asyncio.Task[None] | None = None

    async def load(self, name: str) -> None:
        self.num_loads += 1
        path, in_place = f"{name}/{self.num_loads}", self.chance.random() < 0.7
        try:
            await self.adapters.load(name, path, in_place)
        except OverloadedError:
            return
        except AdapterError:
            return  # a rank refused
        except RequestError:
            assert not in_place
            assert name in self.paths
            return
        self.paths[name] = path

    async def unload(self, name: str) -> None:
        try:
            await self.adapters.unload(name)
        except NotFoundError:
            assert name not in self.paths
            return
        del self.paths[name]

    async def pin(self, name: str) -> None:
        try:
            pin = self.chance.random() < 0.3
            await self.adapters.change(name, pin=pin, default=None, preload=False)
        except (NotFoundError, OverloadedError, AdapterError):
            return

    async def request(self, name: str) -> None:
        try:
            version = await self.adapters.version(name)
        except NotFoundError:
            assert name not in self.paths
            return
        except (OverloadedError, UnavailableError):
            return  # everything is in use, or a rank could not read it again
        assert self.ranks.path_of[version] == self.paths[name]
        id = len(self.wanted)
        prompt = [self.chance.randint(0, 1)] * self.chance.choice([20, 30])
        sequence = make_sequence(id, prompt, self.chance.randint(1, 9))
        sequence.adapter_version = version
        self.wanted[id] = expected(id, len(prompt), sequence.max_tokens)
        self.pipeline.add(sequence)

    async def drop(self, _: str) -> None:
        if self.wanted:
            self.dropped.add(victim := self.chance.randrange(len(self.wanted)))
            self.pipeline.scheduler.drop(victim)

    async def write_over(self, _: str) -> None:
        if files := sorted(set(self.ranks.path_of.values())):
            self.ranks.content[self.chance.choice(files)] += 1

    async def fault(self) -> None:
        """As the driver does it: the work of a life has ended before the next one begins."""
        if self.restoring:
            await cancelled(self.restoring)
        self.ranks.fault()
        self.restoring = asyncio.create_task(self.ranks.restore())

    async def run(self) -> None:
        actions: list[Callable[[str], Awaitable[None]]] = [self.load, self.unload, self.pin]
        actions += [self.request] * 6 + [self.drop, self.write_over]
        tasks = []
        for _ in range(60):
            name = self.chance.choice([*NAMES, CONFIG.model_name])
            action = self.chance.choice(actions)
            if name != CONFIG.model_name or action in (self.request, self.drop):
                tasks.append(asyncio.create_task(action(name)))
            if self.chance.random() < self.fault_share:
                await self.fault()
            for _ in range(self.chance.randint(0, 4)):
                await self.go_on()
        if self.restoring:
            tasks.append(self.restoring)
        while not all(task.done() for task in tasks):
            await self.go_on()
        for task in tasks:
            task.result()
        self.check()

    async def go_on(self) -> None:
        self.ranks.answer_one()
        if self.restoring and self.restoring.done():
            self.restoring.result()
        if self.ranks.are_working:
            self.pipeline.tick()
        await asyncio.sleep(0)

    def check(self) -> None:
        self.pipeline.run()
        self.pipeline.pump()
        drain(self.pipeline)
        for id, whole in self.wanted.items():
            output = self.pipeline.output(id)
            has_ended = id in self.dropped | self.ranks.ended
            assert output == (whole[: len(output)] if has_ended else whole)
        check_all_ended(self.pipeline)
        described = {a["name"]: a["version"] for a in self.adapters.registry.described()}
        assert described.keys() == self.paths.keys() - {CONFIG.model_name}
        there = {version for version in described.values() if version}
        assert len(there) <= MAX_HELD
        assert {self.ranks.path_of[v] for v in there} <= set(self.paths.values())
        for stage in self.pipeline.stages:
            assert isinstance(stage, AdapterStage)
            assert stage.loaded == {0, *there}


@pytest.mark.long
@settings(max_examples=200)
@given(st.integers(1, 3), st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.2]))
def test_each_request_uses_the_version_that_its_name_had_at_its_start(
    num_stages: int, seed: int, fault_share: float
) -> None:
    asyncio.run(Life(seed, num_stages, fault_share).run())
