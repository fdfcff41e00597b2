"""Adapter versions come and go between the steps: what each stage must see, by simulation."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import strategies as st

from serve.core.ops import Copy, Unload
from serve.core.types import Sequence, Step
from serve.front.parts.adapters.part import AdapterVersions
from serve.front.pipeline.scheduler import Reuse
from serve.front.prefixes.checkpoints import PrefixKey
from serve.front.prefixes.index import Gone, PrefixIndex, PrefixMatch
from tests.configs import serve_config
from tests.front.pipeline.simulation import (
    Pipeline,
    check_examples,
    check_outputs,
    expected,
    make_sequence,
)
from tests.front.pipeline.stage_model import StageModel, next_token
from tests.front.pipeline.test_scheduler import check_all_ended


def unloaded(step: Step) -> list[int]:
    return [op.adapter_version for op in step.ops(Unload)]


@dataclass
class AdapterStage(StageModel):
    """loaded are the versions that it could compute with."""

    loaded: set[int] = field(default_factory=lambda: {0})
    version: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def run(self, step: Step) -> None:
        for copy in step.ops(Copy):
            # The version that the source was fed with is known.
            assert self.version[copy.source] == self.sequences[copy.sequence].adapter_version
            self.version[copy.sequence] = self.version[copy.source]
        super().run(step)
        for version in unloaded(step):
            self.loaded.discard(version)  # A rank that refused it never had it.
            assert not any(self.version[s] == version for s in self.held), "it is still held"
        for row in step.rows:
            assert row.adapter_version in self.loaded, f"version {row.adapter_version} is not there"
            assert self.version.setdefault(row.sequence, row.adapter_version) == row.adapter_version
            assert row.adapter_version == self.sequences[row.sequence].adapter_version


class AdapterPipeline(Pipeline):
    def __post_init__(self) -> None:
        self.parts = (AdapterVersions(serve_config()),)
        super().__post_init__()
        self.versions: Iterator[int] = count(1)
        self.current: dict[str, int] = {"base": 0}

    def _new_stage(self) -> AdapterStage:
        return AdapterStage(sequences=self.added)

    def load(self, name: str) -> None:
        """The registry's part: a new version that all have, in place of the old one."""
        version = next(self.versions)
        for stage in self.stages:
            assert isinstance(stage, AdapterStage)
            stage.loaded.add(version)
        self.unload(name)
        self.current[name] = version

    def unload(self, name: str) -> None:
        if name in self.current:
            self.scheduler.retire(self.current.pop(name))

    def check_only_current_are_loaded(self) -> None:
        self.pump()
        self.run()
        for stage in self.stages:
            assert isinstance(stage, AdapterStage)
            assert stage.loaded == set(self.current.values())
            assert {stage.version[s] for s in stage.held} <= stage.loaded


def drain(pipeline: Pipeline) -> None:
    while any(pipeline.queues):
        pipeline.tick()


LIVES = st.tuples(
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from([None, 130, 300]),
    st.sampled_from(["any", "checkpoints", "none"]),
    st.integers(0, 2**32),
)


def check_random_life(
    num_stages: int, max_num_sequences: int, held: int | None, reuse: Reuse, seed: int
) -> None:
    """Has adapters loaded and unloaded while requests come and are aborted."""
    chance = random.Random(seed)
    pipeline = AdapterPipeline(num_stages, max_num_sequences=max_num_sequences, prefill_chunk=8)
    pipeline.scheduler.budget.max_tokens, pipeline.scheduler.reuse = held, reuse
    wanted: dict[int, list[int]] = {}
    dropped = set()
    for id in range(30):
        name = chance.choice("xyz")
        chance.choice([pipeline.load, pipeline.unload, lambda _: None, lambda _: None])(name)
        # Few prompts, so that many begin alike.
        prompt = [chance.randint(0, 1)] * chance.choice([20, 30, 40])
        # Some end early, with a step under way that is computed for nothing.
        end = next_token(id, len(prompt) + chance.randint(1, 12))
        sequence = make_sequence(id, prompt, chance.randint(1, 9), frozenset({end}))
        sequence.adapter_version = pipeline.current[chance.choice(list(pipeline.current))]
        wanted[id] = expected(id, len(prompt), sequence.max_tokens)
        if end in wanted[id]:
            wanted[id] = wanted[id][: wanted[id].index(end) + 1]
        pipeline.add(sequence)
        for _ in range(chance.randint(0, 5)):
            pipeline.tick()
        if chance.random() < 0.2:
            dropped.add(victim := chance.randint(0, id))
            pipeline.scheduler.drop(victim)
    pipeline.run()
    drain(pipeline)
    for id, whole in wanted.items():
        output = pipeline.output(id)
        assert output == whole if id not in dropped else output == whole[: len(output)]
    pipeline.check_only_current_are_loaded()
    check_all_ended(pipeline)


def test_an_adapter_stays_loaded_for_a_drop_that_waits_for_tokens() -> None:
    check_random_life(3, 4, None, "none", 2585)


@pytest.mark.parametrize("num_examples", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_random_requests_use_only_versions_that_every_stage_has_loaded(num_examples: int) -> None:
    check_examples(check_random_life, LIVES, num_examples)


def test_a_running_sequence_keeps_its_adapter_version_and_frees_it_at_its_end() -> None:
    pipeline = AdapterPipeline(2)
    pipeline.load("x")
    old = make_sequence(0, 20, 30)
    old.adapter_version = pipeline.current["x"]
    pipeline.add(old)
    for _ in range(10):
        pipeline.tick()
    pipeline.load("x")
    new = make_sequence(1, 20, 3)
    new.adapter_version = pipeline.current["x"]
    pipeline.add(new)
    while not pipeline.output(1):
        pipeline.tick()
    assert len(pipeline.output(0)) < 30
    assert all(old.adapter_version in stage.loaded for stage in pipeline.stages)
    pipeline.run()
    unloads = [version for step in pipeline.steps for version in unloaded(step)]
    assert unloads == [old.adapter_version]
    versions = {
        row.adapter_version for step in pipeline.steps for row in step.rows if row.sequence == 0
    }
    assert versions == {old.adapter_version}


def test_prefixes_of_a_replaced_adapter_version_are_dropped_at_once() -> None:
    pipeline = AdapterPipeline(1)
    pipeline.scheduler.reuse = "any"
    pipeline.load("x")
    for id, version in enumerate((pipeline.current["x"], 0)):
        sequence = make_sequence(id, [7] * 20, 2)
        sequence.adapter_version = version
        pipeline.add(sequence)
        pipeline.run()
    assert set(pipeline.scheduler.budget.kept) == {0, 1}, "versions share a prefix"
    pipeline.unload("x")
    pipeline.pump()
    drain(pipeline)
    assert set(pipeline.stages[0].held) == {1}
    assert pipeline.stages[0].loaded == {0}


def test_prefixes_are_shared_only_under_the_same_adapter_version() -> None:
    index = PrefixIndex()
    index.keep(1, [5] * 30, PrefixKey(adapter_version=1))
    assert index.keep(2, [5] * 40, PrefixKey(adapter_version=2)) == Gone([], [])
    assert index.longest([5] * 40, PrefixKey(adapter_version=1)) == PrefixMatch(1, 30)
    assert index.longest([5] * 40, PrefixKey(adapter_version=2)) == PrefixMatch(2, 40)
    assert index.longest([5] * 40) is None
    assert index.keep(3, [5] * 35, PrefixKey(adapter_version=1)) == Gone([1], [])
    assert set(index.with_adapter(1)) == {3}


def test_new_engines_are_not_asked_to_unload_adapters_that_they_never_loaded() -> None:
    pipeline = Pipeline(2, parts=(AdapterVersions(serve_config()),))
    sequence = make_sequence(0, 10, 5)
    sequence.adapter_version = 3
    pipeline.add(sequence)
    for _ in range(8):
        pipeline.tick()
    pipeline.scheduler.retire(3)
    pipeline.scheduler.retire(4)
    pipeline.kill()
    num_before = len(pipeline.steps)
    pipeline.run()
    unloaded = [
        op.adapter_version for step in pipeline.steps[num_before:] for op in step.ops(Unload)
    ]
    assert unloaded == [3], "version 4 died with its engines, 3 goes after its last sequence"
    check_outputs(pipeline, dropped=set())
    check_all_ended(pipeline)
