"""Rank 0's decisions about prefixes on disk. The simulated ranks only list their files."""

import random
from dataclasses import dataclass, field

import pytest

from serve.core.messages import (
    ForgetPrefixFiles,
    PrefixFile,
    PrefixFiles,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
)
from serve.core.ops import Write
from serve.core.types import Sampling, Sequence
from serve.front.parts.disk.cache import DiskCache, DiskCounts, DiskRules, Read

RULES = DiskRules(segment=16, min_segment=4, min_gain=8)
CONTENTS = "a scope"
BYTES_PER_TOKEN = 10


def tokens(start: int, count: int) -> list[int]:
    return [(start * 7 + i) % 1000 for i in range(count)]


def asking(prompt: list[int]) -> Sequence:
    return Sequence(99, [*prompt, 1], 5, Sampling(), frozenset())


@dataclass
class Ranks:
    """The disks of two ranks, and the DiskCache that decides about them."""

    max_bytes: int = 10**6
    has_states: bool = False
    files: dict[int, dict[str, PrefixFile]] = field(default_factory=lambda: {0: {}, 1: {}})
    counts: DiskCounts = field(default_factory=DiskCounts)
    digests: list[str] = field(default_factory=lambda: ["a", "b"])
    broken: set[int] = field(default_factory=set)  # ranks whose disks are full

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Starts the engines again, with the files that are there."""
        stored = {
            rank: PrefixFiles(list(own.values()), self.max_bytes, self.digests[rank])
            for rank, own in self.files.items()
        }
        self.disk = DiskCache(stored, self.counts, has_states=self.has_states, rules=RULES)
        self.obey(self.disk.useless_files)

    def keep(
        self,
        held: list[int],
        checkpoints: dict[int, int] | None = None,
        contents: str = CONTENTS,
        num_prompt: int = 1,
    ) -> None:
        """Keeps a sequence on all stages, which write the files that rank 0 asks for."""
        self.disk.write(1, held, contents, checkpoints or {}, num_prompt)
        while write := self.next_write():
            for rank in self.files:
                self.write(rank, write)

    def next_write(self) -> Write | None:
        write, forget = self.disk.next_write(lambda _: True)
        self.obey(forget)
        return write

    def write(self, rank: int, write: Write) -> None:
        size = max(1, write.end - write.start) * BYTES_PER_TOKEN
        if rank in self.broken:
            size = 0
        else:
            file = PrefixFile(write.name, write.parent, write.start, write.end, size)
            self.files[rank][write.name] = file
        self.obey(self.disk.on_written(rank, PrefixFileWritten(write.name, size)))

    def ask(
        self,
        prompt: list[int],
        contents: str = CONTENTS,
        num_in_memory: int = 0,
        room: int | None = None,
    ) -> ReadPrefix | None:
        found = self.disk.find(asking(prompt), contents)
        return found and self.disk.read(asking(prompt), found, num_in_memory, room)

    def read(self, prompt: list[int], contents: str = CONTENTS) -> int | None:
        """Returns the number of tokens that were read: 0 if a file was damaged, and None if no file
        matches the prompt."""
        message = self.ask(prompt, contents)
        if message is None:
            return None
        names = [*message.names, message.state] if message.state else message.names
        read: Read | None = None
        for rank, own in self.files.items():
            damaged = next((name for name in names if name not in own), None)
            read = self.disk.on_read(rank, PrefixRead(message.sequence, damaged))
        assert read
        self.obey(read.forget)
        return read.load.num_tokens if read.load else 0

    def obey(self, message: ForgetPrefixFiles | None) -> None:
        if message is None:
            return
        for own in self.files.values():
            if message.everything:
                own.clear()
            for name in message.names:
                own.pop(name, None)

    def num_bytes(self, rank: int) -> int:
        return sum(file.num_bytes for file in self.files[rank].values())


def test_prefixes_on_disk_are_found_after_a_restart() -> None:
    ranks = Ranks()
    ranks.keep(tokens(1, 100))
    ranks.start()
    assert ranks.read([*tokens(1, 100), 5, 6]) == 100
    assert ranks.read([*tokens(1, 50), *tokens(2, 50)]) == 48, "whole segments of 16"
    assert ranks.read(tokens(2, 100)) is None
    assert ranks.counts.num_reads == 2


def test_only_new_segments_of_a_prefix_are_written_to_disk() -> None:
    ranks = Ranks()
    ranks.keep(tokens(1, 64))
    ranks.keep([*tokens(1, 64), *tokens(2, 32)])
    ranks.keep([*tokens(1, 64), *tokens(3, 32)])
    assert ranks.counts.num_written_files == 4 + 2 + 2
    assert ranks.num_bytes(0) == BYTES_PER_TOKEN * (64 + 32 + 32)


def test_a_segment_on_disk_ends_where_the_prompt_ends() -> None:
    ranks = Ranks()
    ranks.keep([*tokens(1, 56), *tokens(2, 20)], num_prompt=56)
    assert [file.end for file in ranks.files[0].values()] == [16, 32, 48, 55, 71, 76]
    assert ranks.read(tokens(1, 56)) == 55
    assert ranks.read([*tokens(1, 56), *tokens(2, 20)]) == 76
    ranks.keep(tokens(3, 30), num_prompt=100)  # of which only this much was computed
    assert [file.end for file in ranks.files[0].values()][6:] == [16, 30]


@pytest.mark.parametrize(
    ("num_computed", "num_answered", "expected"),
    [(0, 0, 0), (2047, 0, 0), (2100, 0, 2048), (4999, 0, 4999), (5100, 101, 4999),
     (7046, 2048, 4999), (7047, 2048, 7047), (7050, 2049, 7047)],
)  # fmt: skip
def test_prompt_and_whole_segments_of_a_running_sequence_are_written_to_disk(
    num_computed: int, num_answered: int, expected: int
) -> None:
    """It has a prompt of 5,000 tokens, of which the last one is fed with the answer."""
    running = Sequence(1, tokens(1, 5000), 9999, Sampling(), frozenset())
    running.output = [1] * num_answered
    running.num_computed = num_computed
    disk = DiskCache({0: PrefixFiles([], 100, "a")}, DiskCounts(), has_states=False)
    assert disk.num_to_write(running, {}) == expected


def test_a_running_sequence_is_written_up_to_a_checkpoint_if_caches_cannot_be_cut() -> None:
    running = Sequence(1, tokens(1, 5000), 9999, Sampling(), frozenset(), num_computed=3000)
    disk = DiskCache({0: PrefixFiles([], 100, "a")}, DiskCounts(), has_states=True)
    assert disk.num_to_write(running, {70: 1}) == 0, "too few to save anything"
    assert disk.num_to_write(running, {70: 1, 2048: 2, 3500: 3}) == 2048


def test_a_short_rest_of_a_sequence_is_not_written_to_disk() -> None:
    ranks = Ranks()
    ranks.keep(tokens(1, 16 + 3))
    assert [file.end for file in ranks.files[0].values()] == [16]


def test_prefixes_on_disk_are_not_shared_between_scopes() -> None:
    ranks = Ranks()
    ranks.keep(tokens(1, 64), contents="another scope")
    assert ranks.read(tokens(1, 64)) is None


def test_prefixes_on_disk_are_used_only_if_all_ranks_had_the_same_stages() -> None:
    """Two models may have the same last layers."""
    ranks = Ranks()
    ranks.keep(tokens(1, 64))
    ranks.digests[1] = "c"
    ranks.start()
    assert ranks.read(tokens(1, 64)) is None
    ranks.digests[1] = "b"
    ranks.start()
    assert ranks.read(tokens(1, 64)) == 64


def test_prefixes_on_disk_end_only_at_stored_states_if_caches_cannot_be_cut() -> None:
    ranks = Ranks(has_states=True)
    ranks.keep(tokens(1, 100), {40: 7, 70: 8})
    ranks.start()
    for length, found in ((100, 100), (99, 70), (70, 70), (69, 40)):
        assert ranks.read([*tokens(1, length), 999]) == found
    assert ranks.read([*tokens(1, 39), 999]) is None


def test_states_can_be_added_to_segments_on_disk() -> None:
    ranks = Ranks(has_states=True)
    ranks.keep(tokens(1, 64), {32: 7})
    for own in ranks.files.values():
        (state,) = (name for name, file in own.items() if file.is_state and file.end == 32)
        del own[state]
    ranks.start()
    ranks.keep(tokens(1, 64), {32: 9})
    assert ranks.read([*tokens(1, 40), 999]) == 32


def test_prefixes_that_only_one_rank_has_on_disk_are_deleted() -> None:
    """A kill between the writes of two ranks leaves such files. Files that follow a missing one are
    useless, too."""
    ranks = Ranks()
    ranks.keep(tokens(1, 64))
    second = [name for name, file in ranks.files[1].items() if file.end == 32]
    del ranks.files[1][second[0]]
    ranks.start()
    assert [file.end for file in ranks.files[0].values()] == [16]
    assert ranks.files[0] == ranks.files[1]


def test_segments_after_a_damaged_file_are_deleted() -> None:
    ranks = Ranks()
    ranks.keep(tokens(1, 64))
    damaged = [name for name, file in ranks.files[1].items() if file.end == 48]
    del ranks.files[1][damaged[0]]
    assert ranks.read(tokens(1, 64)) == 0
    assert ranks.counts.num_damaged_files == 1
    assert ranks.read(tokens(1, 64)) == 32
    assert ranks.files[0].keys() == ranks.files[1].keys()


@pytest.mark.parametrize("seed", range(5))
def test_prefixes_on_disk_stay_within_their_limit(seed: int) -> None:
    """The least recently used file goes first, but none that another file continues."""
    chance = random.Random(seed)
    ranks = Ranks(max_bytes=100 * BYTES_PER_TOKEN)
    for _ in range(100):
        start = chance.randrange(5)
        prompt = [*tokens(start, 20), *tokens(chance.randrange(50), chance.randrange(60))]
        ranks.keep(prompt)
        if chance.random() < 0.3:
            ranks.read(prompt)
        if chance.random() < 0.1:
            ranks.start()
        for rank in (0, 1):
            assert ranks.num_bytes(rank) <= ranks.max_bytes
            for file in ranks.files[rank].values():
                assert not file.start or file.parent in ranks.files[rank]
    assert ranks.counts.num_evicted_files > 10
    assert not ranks.counts.num_damaged_files


def test_prefixes_on_disk_that_are_used_are_not_evicted() -> None:
    ranks = Ranks(max_bytes=120 * BYTES_PER_TOKEN)
    ranks.keep(tokens(1, 32))
    for start in range(2, 20):
        ranks.keep(tokens(start, 32))
        assert ranks.read(tokens(1, 32)) == 32


def test_nothing_is_written_to_a_full_disk_until_it_is_cleared() -> None:
    ranks = Ranks()
    ranks.keep(tokens(1, 32))
    ranks.broken = {1}
    ranks.keep(tokens(2, 32))
    ranks.broken = set()
    ranks.keep(tokens(3, 32))
    assert ranks.counts.num_written_files == 2
    assert ranks.counts.num_failed_writes == 1
    assert ranks.files[0].keys() == ranks.files[1].keys()
    assert ranks.read(tokens(1, 32)) == 32
    ranks.obey(ranks.disk.clear())
    assert not ranks.files[0]
    ranks.keep(tokens(3, 32))
    assert ranks.counts.num_written_files == 4


def test_prefixes_that_are_cleared_while_they_are_written_are_deleted() -> None:
    ranks = Ranks()
    ranks.disk.write(1, tokens(1, 16), CONTENTS, {}, 16)
    write = ranks.next_write()
    assert write
    ranks.obey(ranks.disk.clear())
    ranks.write(0, write)
    assert ranks.files[0], "the message to delete everything came before the step"
    ranks.write(1, write)
    assert not ranks.files[0]
    assert not ranks.disk.num_files


def test_no_prefix_is_evicted_for_a_file_that_cannot_fit() -> None:
    ranks = Ranks(max_bytes=40 * BYTES_PER_TOKEN)
    ranks.keep(tokens(2, 4))
    ranks.keep(tokens(1, 48))
    assert ranks.read(tokens(1, 48)) == 32
    for own in ranks.files.values():
        assert len(own) == ranks.disk.num_files == 3


def test_segments_of_a_very_long_sequence_are_deleted_after_a_damaged_file() -> None:
    ranks = Ranks()
    ranks.keep(tokens(1, 16 * 1200))
    first = next(name for name, file in ranks.files[1].items() if not file.start)
    del ranks.files[1][first]
    assert ranks.read(tokens(1, 16 * 1200)) == 0
    assert not ranks.files[0]
    assert not ranks.disk.num_files


def test_prefixes_are_read_from_disk_only_if_that_saves_enough() -> None:
    ranks = Ranks()
    ranks.keep(tokens(1, 64))
    prompt = tokens(1, 64)
    assert ranks.ask(prompt, num_in_memory=60) is None, "memory has nearly all of it"
    assert ranks.ask(prompt, room=63) is None, "there is no room"
    assert ranks.ask(prompt, num_in_memory=56, room=64)
    assert ranks.disk.num_reading_tokens == 64
