"""The registry over a pipeline without machines, against the simplest model of it: a name stands
for a path, and a request sees what it stood for when it began, from its first token to its last."""

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

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
from serve.front.adapters import Adapters
from tests.front.fakes import CONFIG
from tests.front.simulation import make_sequence
from tests.front.test_scheduler import check_all_ended, expected
from tests.front.test_scheduler_adapters import AdapterPipeline, AdapterStage, drain

NUM_BYTES, MEMORY, MOST_HELD = 100_000, "250KB", 2
NAMES = "wxyz"


class Ranks:
    """Stages that read what they are told to, each when chance lets it answer."""

    def __init__(self, chance: random.Random, num_stages: int) -> None:
        self.chance = chance
        self.pipeline = AdapterPipeline(num_stages, max_num_sequences=6, prefill_chunk=8)
        self.pipeline.scheduler.reuse = "any"
        flags: dict[str, Any] = {"adapter_root": Path("/adapters"), "adapter_memory": MEMORY}
        self.ring = tuple(range(num_stages))
        self.adapters = Adapters(dataclasses.replace(CONFIG, **flags), self)
        self.asked: list[tuple[int, int, bool]] = []
        self.path_of = {0: "base"}

    async def loaded(self) -> None:
        """No engine ever ends here: tests/front/test_adapters.py has that."""

    def end_with_adapter(self, version: int, error: BrigadeError) -> None:
        raise AssertionError("only after a fault")

    def tell_engines(self, message: dict[str, Any]) -> None:
        self.path_of[message["version"]] = message["path"]
        ranks = range(self.pipeline.num_stages)
        refusing = self.chance.choice(ranks) if self.chance.random() < 0.2 else None
        self.asked += [(rank, message["version"], rank == refusing) for rank in ranks]

    def answer_one(self) -> None:
        if self.asked:
            rank, version, refuses = self.asked.pop(self.chance.randrange(len(self.asked)))
            stage = self.pipeline.stages[rank]
            assert isinstance(stage, AdapterStage)
            if not refuses:
                stage.loaded.add(version)
            answer: dict[str, Any] = {"version": version, "error": None, "digest": "d"}
            answer["checksum"] = "c"
            answer |= {"targets": ["a"], "own": ["a"], "kinds": ["q_proj"]}
            answer |= {"lora_rank": 8, "scale": 2.0, "num_bytes": NUM_BYTES}
            if refuses:
                answer["error"] = {"message": "it is not whole", "status": 400}
            self.adapters.on_answer(rank, answer)

    def retire_adapter(self, version: int) -> None:
        self.pipeline.scheduler.retire(version)

    def num_with_adapter(self, version: int) -> int:
        return self.pipeline.scheduler.num_with_adapter(version)


class Life:
    """paths is the model: what each name stands for."""

    def __init__(self, seed: int, num_stages: int) -> None:
        self.chance = random.Random(seed)
        self.ranks = Ranks(self.chance, num_stages)
        self.adapters, self.pipeline = self.ranks.adapters, self.ranks.pipeline
        self.paths = {CONFIG.model_name: "base"}
        self.wanted: dict[int, list[int]] = {}
        self.dropped: set[int] = set()
        self.num_loads = 0

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
        sequence.adapter = version
        self.wanted[id] = expected(id, len(prompt), sequence.max_tokens)
        self.pipeline.add(sequence)

    async def drop(self, _: str) -> None:
        if self.wanted:
            self.dropped.add(victim := self.chance.randrange(len(self.wanted)))
            self.pipeline.scheduler.drop(victim)

    async def run(self) -> None:
        actions: list[Callable[[str], Awaitable[None]]] = [self.load, self.unload, self.pin]
        actions += [self.request] * 6 + [self.drop]
        tasks = []
        for _ in range(60):
            name = self.chance.choice([*NAMES, CONFIG.model_name])
            action = self.chance.choice(actions)
            if name != CONFIG.model_name or action in (self.request, self.drop):
                tasks.append(asyncio.create_task(action(name)))
            for _ in range(self.chance.randint(0, 4)):
                await self.go_on()
        while not all(task.done() for task in tasks):
            await self.go_on()
        for task in tasks:
            task.result()
        self.check()

    async def go_on(self) -> None:
        self.ranks.answer_one()
        self.pipeline.tick()
        await asyncio.sleep(0)

    def check(self) -> None:
        self.pipeline.run()
        self.pipeline.pump()
        drain(self.pipeline)
        for id, whole in self.wanted.items():
            output = self.pipeline.output(id)
            assert output == whole if id not in self.dropped else output == whole[: len(output)]
        check_all_ended(self.pipeline)
        described = {a["name"]: a["version"] for a in self.adapters.described()}
        assert described.keys() == self.paths.keys() - {CONFIG.model_name}
        there = {version for version in described.values() if version}
        assert len(there) <= MOST_HELD
        assert {self.ranks.path_of[v] for v in there} <= set(self.paths.values())
        for stage in self.pipeline.stages:
            assert isinstance(stage, AdapterStage)
            assert stage.loaded == {0, *there}


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2**32))
def test_each_request_sees_what_its_name_stood_for(num_stages: int, seed: int) -> None:
    asyncio.run(Life(seed, num_stages).run())
