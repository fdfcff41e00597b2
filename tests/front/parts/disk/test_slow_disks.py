"""What is written of running sequences, also when they return to the queue while a disk is slow."""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st

from serve.core.messages import (
    PrefixFile,
    PrefixFiles,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
    ToPrefixCache,
)
from serve.core.ops import NO_CHECKPOINT, Write
from serve.core.types import Sampling, Sequence, Step
from serve.front.parts.disk.cache import DiskRules
from serve.front.parts.disk.index import segment_name
from serve.front.parts.disk.part import DiskPrefixes
from serve.front.parts.interface import NOTHING, Fed
from serve.front.prefixes.checkpoints import Sharing
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.index import Admission, PrefixIndex, Reuse
from serve.front.prefixes.kv_budget import KvBudget
from tests.configs import serve_config
from tests.front.parts.disk.observing import is_busy
from tests.front.pipeline.simulation import (
    Pipeline,
    check_examples,
    check_outputs,
    live,
    make_sequence,
)
from tests.front.pipeline.stage_model import StageModel
from tests.front.pipeline.test_scheduler import check_all_ended, make_prompt

MAX_BYTES = 10**9
SHORT = DiskRules(segment=4, min_segment=2, min_gain=16, running=8)


def make_disk() -> DiskPrefixes:
    """The prefix cache on the empty disk of one rank."""
    disk = DiskPrefixes(serve_config())
    disk.budget = KvBudget(PrefixCounts())
    disk.on_message(0, PrefixFiles([], MAX_BYTES, "a"))
    disk.start([0], "any")
    return disk


def feed(disk: DiskPrefixes, sequence: Sequence) -> None:
    """Shows the part a step that has fed a sequence."""
    assert not disk.after(Fed([sequence], None, (), (), is_prefilling=False))


def next_write(disk: DiskPrefixes) -> Write | None:
    ready = disk.ready()
    assert not ready.messages
    return next((op for op in ready.after if isinstance(op, Write)), None)


def running(num_computed: int, output: list[int], max_tokens: int = 50) -> Sequence:
    prompt = [i % 900 for i in range(9000)]
    return Sequence(
        7,
        prompt,
        max_tokens,
        Sampling(),
        frozenset(),
        output=output,
        num_computed=num_computed,
        is_held=True,
    )


def test_writes_of_a_sequence_that_begins_again_are_forgotten() -> None:
    """While a slow disk writes a file, memory runs out, and the sequence returns to the queue."""
    disk = make_disk()
    sequence = running(8192, [1])
    feed(disk, sequence)
    write = next_write(disk)
    assert write
    sequence.reset()
    disk.reset(sequence)
    assert next_write(disk) is None, "it is busy"
    sequence.num_computed = 2048
    sequence.is_held = True
    feed(disk, sequence)
    ends: list[int] = []
    while write:
        ends.append(write.end)
        assert disk.on_message(0, PrefixFileWritten(write.name, 100)) == NOTHING
        write = next_write(disk)
    assert ends == list(range(256, 2049, 256))


def test_stages_must_keep_only_tokens_that_are_not_yet_written() -> None:
    disk = make_disk()
    sequence = running(3000, [1])
    feed(disk, sequence)
    assert disk.is_held(Write(7, "b", "a", 1792, 2048))
    assert not disk.is_held(Write(7, "b", "a", 1792, 2049))
    assert not disk.is_held(Write(8, "b", "a", 0, 256))
    assert disk.budget.end(sequence, 0, may_keep=True)
    disk.kept(sequence)
    disk.ended(sequence)
    assert disk.is_held(Write(7, "b", "a", 2048, 2304)), "all of a kept sequence"
    assert is_busy(disk)


def test_a_prompt_without_logits_is_not_written_to_disk() -> None:
    """Its numbers may have overflowed."""
    disk = make_disk()
    for unknown in (running(8999, []), running(9000, [], max_tokens=0)):
        feed(disk, unknown)
        assert not is_busy(disk)
    feed(disk, running(9000, [1]))
    assert is_busy(disk)


def asking(id: int, prompt: list[int], adapter_version: int = 0) -> Sequence:
    return Sequence(id, prompt, 5, Sampling(), frozenset(), adapter_version)


def written(disk: DiskPrefixes) -> None:
    """Has the rank write all files."""
    while write := next_write(disk):
        disk.on_message(0, PrefixFileWritten(write.name, 100))


def is_read(disk: DiskPrefixes, sequence: Sequence) -> bool:
    """Whether a sequence waits for a prefix that is on disk only."""
    admission = Admission(sequence, disk.budget.key(sequence), PrefixIndex(), "any")
    return disk.blocks(admission, None) is not None


def test_a_prefix_is_read_from_disk_only_once_in_a_life() -> None:
    disk = make_disk()
    feed(disk, running(9000, [1]))
    written(disk)
    again = asking(1, [*range(900), 1])
    assert is_read(disk, again)
    assert not is_read(disk, again)
    disk.reset(again)
    assert is_read(disk, again), "it begins again"
    scored = replace(asking(2, again.prompt), sampling=Sampling(prompt_logprobs=1))
    assert not is_read(disk, scored), "its prompt is computed whole"


def test_prefixes_on_disk_are_shared_only_within_a_scope_and_an_adapter() -> None:
    disk = make_disk()
    disk.budget.add(7, Sharing("a"))
    feed(disk, running(9000, [1]))
    written(disk)
    disk.budget.identify_adapter(2, "contents")
    for id, scope, adapter_version in ((1, "b", 0), (2, "", 0), (3, "a", 2), (4, "a", 3)):
        disk.budget.add(id, Sharing(scope))
        assert not is_read(disk, asking(id, [*range(900), 1], adapter_version))
    disk.budget.add(5, Sharing("a"))
    assert is_read(disk, asking(5, [*range(900), 1]))


def test_prefixes_of_an_adapter_are_found_on_disk_by_its_contents() -> None:
    disk = make_disk()
    disk.budget.identify_adapter(2, "contents")
    feed(disk, replace(running(9000, [1]), adapter_version=2))
    written(disk)
    disk.budget.drop_adapter(2)
    assert not is_read(disk, asking(1, [*range(900), 1], adapter_version=2))
    disk.budget.identify_adapter(3, "contents")
    assert is_read(disk, asking(2, [*range(900), 1], adapter_version=3))


# --- by simulation


@dataclass
class DiskStage(StageModel):
    """A stage that checks that it holds what it is to write."""

    def run(self, step: Step) -> None:
        super().run(step)
        for write in step.ops(Write):
            held = self.held[write.sequence]
            assert len(held) >= write.end, f"{write} of {len(held)} tokens"
            if write.is_state:
                own = held
                if write.checkpoint != NO_CHECKPOINT:
                    own = self.checkpoints[write.checkpoint]
                assert len(own) == write.end, f"{write} of {len(own)} tokens"
            else:
                assert write.name == segment_name(write.parent, held[write.start : write.end])


@dataclass
class DiskPipeline(Pipeline):
    """A pipeline with a disk that takes a random time for each file. contents has all tokens up to
    the end of each file."""

    chance: random.Random = field(default_factory=random.Random)
    reuse: Reuse = "any"
    contents: dict[str, list[int]] = field(default_factory=dict)
    files: dict[str, PrefixFile] = field(default_factory=dict)
    num_reads: int = 0

    def __post_init__(self) -> None:
        self.disk = DiskPrefixes(serve_config(), SHORT)
        self.parts = (self.disk,)
        super().__post_init__()
        self.scheduler.reuse = self.reuse
        self.open_disk()

    def _new_stage(self) -> StageModel:
        return DiskStage()

    def open_disk(self) -> None:
        self.writing: list[Write] = []
        self.reading: list[ReadPrefix] = []
        stored = PrefixFiles(list(self.files.values()), MAX_BYTES, "a")
        self.scheduler.on_message(0, stored)
        self.scheduler.start([0])

    def kill(self) -> None:
        super().kill()
        self.open_disk()

    def send_to_all(self, message: ToPrefixCache) -> None:
        if isinstance(message, ReadPrefix):
            self.reading.append(message)

    def tick(self) -> None:
        super().tick()
        if self.reading and self.chance.random() < 0.3:
            self.read(self.reading.pop())
        if self.writing and self.chance.random() < 0.3:
            write = self.writing.pop()
            self.files[write.name] = PrefixFile(write.name, write.parent, write.start, write.end, 9)
            self.scheduler.on_message(0, PrefixFileWritten(write.name, 9))

    def read(self, message: ReadPrefix) -> None:
        held = self.contents[message.names[-1]]
        assert len(held) == message.num_tokens
        for stage in self.stages:
            stage.loaded[message.sequence] = held
        self.num_reads += 1
        self.scheduler.on_message(0, PrefixRead(message.sequence))

    def flush(self) -> None:
        for _ in range(100_000):
            if not is_busy(self.disk):
                return
            self.tick()
        raise AssertionError("the disk does not come to an end")

    def _finish(self, step: Step) -> None:
        super()._finish(step)
        for write in step.ops(Write):
            self.writing.append(write)
            self.contents[write.name] = self.stages[-1].held[write.sequence][: write.end]


LIVES = st.tuples(
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from([130, 200, 500]),
    st.sampled_from(["any", "checkpoints"]),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 2**32),
)


@pytest.mark.parametrize("num_examples", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_random_requests_with_slow_disks_write_the_right_tokens(num_examples: int) -> None:
    """Stages hold all tokens of the files that they are to write, and these are the right ones."""
    num_reads = 0

    def check(
        num_stages: int,
        chunk: int,
        held: int,
        reuse: Reuse,
        kill_share: float,
        seed: int,
    ) -> None:
        nonlocal num_reads
        chance = random.Random(seed)
        pipeline = DiskPipeline(
            num_stages,
            max_num_sequences=6,
            prefill_chunk=chunk,
            chance=chance,
            reuse=reuse,
        )
        pipeline.scheduler.budget.max_tokens = held

        def next_sequence(id: int) -> Sequence:
            prompt = make_prompt(chance, pipeline)[:80]
            return make_sequence(id, prompt, chance.randint(1, 40))

        dropped = live(pipeline, chance, next_sequence, kill_share=kill_share)
        pipeline.run()
        pipeline.flush()
        check_outputs(pipeline, dropped)
        check_all_ended(pipeline)
        num_reads += pipeline.num_reads

    check_examples(check, LIVES, num_examples)
    for number in range(100):  # By chance, no random example may have read anything.
        if num_reads > 0:
            break
        check(2, 4, 500, "any", 0.0, number)
    assert num_reads > 0
