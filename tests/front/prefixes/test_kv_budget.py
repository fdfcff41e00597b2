"""What is written of running sequences, also when they return to the queue while a disk is slow."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st

from serve.core.messages import PrefixFile, PrefixFiles, PrefixFileWritten, PrefixRead, ReadPrefix
from serve.core.ops import Write
from serve.core.types import Sampling, Sequence, Step
from serve.front.pipeline.scheduler import Reuse
from serve.front.prefixes.counts import PrefixCounts
from serve.front.prefixes.disk import DiskCounts, DiskPrefixes, DiskRules
from serve.front.prefixes.kv_budget import KvBudget
from tests.front.pipeline.simulation import (
    Pipeline,
    check_examples,
    check_outputs,
    live,
    make_sequence,
)
from tests.front.pipeline.test_scheduler import check_all_ended, make_prompt
from tests.front.prefixes.observing import is_busy

MAX_BYTES = 10**9
SHORT = DiskRules(segment=4, min_segment=2, min_gain=16, running=8)


def make_budget() -> tuple[KvBudget, DiskPrefixes]:
    budget = KvBudget(PrefixCounts())
    budget.resize(10**6)
    stored = {0: PrefixFiles([], MAX_BYTES, "a")}
    disk = budget.disk = DiskPrefixes(stored, str, DiskCounts(), has_states=False)
    return budget, disk


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


def test_budget_forgets_the_writes_of_a_sequence_that_begins_again() -> None:
    """While a slow disk writes a file, memory runs out, and the sequence returns to the queue."""
    budget, disk = make_budget()
    sequence = running(8192, [1])
    budget.write_running(sequence)
    write = disk.next_write(budget.holds)
    assert write
    budget.forget(sequence)
    sequence.reset()
    assert disk.next_write(budget.holds) is None, "it is busy"
    sequence.num_computed = 2048
    sequence.is_held = True
    budget.write_running(sequence)
    ends: list[int] = []
    while write:
        ends.append(write.end)
        disk.on_written(0, PrefixFileWritten(write.name, 100))
        write = disk.next_write(budget.holds)
    assert ends == list(range(256, 2049, 256))


def test_budget_holds_of_a_running_sequence_only_what_is_to_be_written() -> None:
    budget, _ = make_budget()
    sequence = running(3000, [1])
    budget.write_running(sequence)
    assert budget.holds(Write(7, "b", "a", 1792, 2048))
    assert not budget.holds(Write(7, "b", "a", 1792, 2049))
    assert not budget.holds(Write(8, "b", "a", 0, 256))
    budget.end(sequence, 0, may_keep=True)
    assert budget.holds(Write(7, "b", "a", 2048, 2304)), "all of a kept sequence"


def test_budget_writes_nothing_of_a_prompt_without_logits() -> None:
    """Its numbers may have overflowed."""
    budget, disk = make_budget()
    for unknown in (running(8999, []), running(9000, [], max_tokens=0)):
        budget.write_running(unknown)
        assert not is_busy(disk)
    budget.write_running(running(9000, [1]))
    assert is_busy(disk)


# --- by simulation


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
        super().__post_init__()
        self.scheduler.reuse = self.reuse
        self.open_disk()

    def open_disk(self) -> None:
        self.writing: list[Write] = []
        self.reading: list[ReadPrefix] = []
        self.disk = DiskPrefixes(
            {0: PrefixFiles(list(self.files.values()), MAX_BYTES, "a")},
            str,
            DiskCounts(),
            has_states=self.reuse == "checkpoints",
            rules=SHORT,
        )
        self.scheduler.budget.disk = self.disk

    def kill(self) -> None:
        super().kill()
        self.open_disk()

    def pump(self) -> None:
        super().pump()
        messages = self.disk.take_messages()
        self.reading += [message for message in messages if isinstance(message, ReadPrefix)]

    def tick(self) -> None:
        super().tick()
        if self.reading and self.chance.random() < 0.3:
            self.read(self.reading.pop())
        if self.writing and self.chance.random() < 0.3:
            write = self.writing.pop()
            self.files[write.name] = PrefixFile(write.name, write.parent, write.start, write.end, 9)
            self.disk.on_written(0, PrefixFileWritten(write.name, 9))

    def read(self, message: ReadPrefix) -> None:
        held = self.contents[message.names[-1]]
        assert len(held) == message.num_tokens
        for stage in self.stages:
            stage.loaded[message.sequence] = held
        self.num_reads += 1
        self.scheduler.on_prefix_read(0, PrefixRead(message.sequence))

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
def test_random_lives_with_slow_disks(num_examples: int) -> None:
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
    assert num_reads > 0
