"""Decides which prefixes the ranks write to their disks, read from their disks, and delete. Pure:
it returns what is to be done."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from serve.core.messages import (
    ForgetPrefixFiles,
    PrefixFile,
    PrefixFiles,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
)
from serve.core.ops import NO_CHECKPOINT, Load, Write
from serve.core.types import FIRST_LOADED, NUM_LOADED_IDS, Sequence
from serve.front.parts.disk.index import (
    DiskIndex,
    Found,
    root_name,
    segment_name,
    state_name,
)


@dataclass(frozen=True, slots=True)
class DiskRules:
    """Numbers of tokens: the largest segment, the smallest one at the end of a sequence, and the
    fewest tokens that a read has to save. A running answer is written every `running` tokens, a
    multiple of `segment`."""

    segment: int = 256
    min_segment: int = 64
    min_gain: int = 128
    running: int = 2048


@dataclass(slots=True)
class DiskCounts:
    """Counts how useful the prefix cache on disk was, over all lives of the engines."""

    num_reads: int = 0
    num_read_tokens: int = 0
    num_written_files: int = 0
    num_failed_writes: int = 0
    num_evicted_files: int = 0
    num_damaged_files: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(slots=True)
class _Reading:
    """A prefix that is being read. sequence waits for it. `awaited` holds the ranks that have not
    answered yet; `damaged` is the name of a file that a rank could not read."""

    sequence: Sequence
    found: Found
    awaited: set[int]
    damaged: str | None = None


class Read(NamedTuple):
    """The outcome of reading a prefix: the prefix for the sequence that waited, or None if a rank
    could not read it, and the files to delete."""

    sequence: Sequence
    load: Load | None
    forget: ForgetPrefixFiles | None


class NextWrite(NamedTuple):
    """The next file that all ranks write, and the files that they delete to make room."""

    write: Write | None
    forget: ForgetPrefixFiles | None


@dataclass(slots=True)
class _Writing:
    """A file that is being written. `awaited` holds the ranks that have not answered yet. is_wanted
    is False if everything was cleared since the write began."""

    write: Write
    awaited: set[int]
    num_bytes: dict[int, int] = field(default_factory=dict)
    is_wanted: bool = True


class DiskCache:
    """The prefix cache on disk in one life of the engines. `stored` lists each rank's files at the
    start. With has_states, sequences can begin only where there is a state.

    contents identifies everything besides tokens and stages that keys and values depend on.
    """

    def __init__(
        self,
        stored: Mapping[int, PrefixFiles],
        counts: DiskCounts,
        has_states: bool,
        rules: DiskRules = DiskRules(),  # noqa: B008 - frozen
    ) -> None:
        self._counts, self._rules = counts, rules
        self.has_states = has_states
        self._digests = [own.digest for own in stored.values()]
        max_bytes = {rank: own.max_bytes for rank, own in stored.items()}
        self._index = DiskIndex(max_bytes)
        self._readings: dict[int, _Reading] = {}
        self._writing: _Writing | None = None
        self._wanted: deque[Write] = deque()
        self._ids = itertools.count()
        self._can_write = True
        self.useless_files = _forget(self._index.take_stored(stored))

    @property
    def num_files(self) -> int:
        """The number of files that can be used."""
        return len(self._index)

    @property
    def num_reading_tokens(self) -> int:
        """The tokens that are being read: the stages hold no sequence with them yet."""
        return sum(reading.found.num_tokens for reading in self._readings.values())

    def clear(self) -> ForgetPrefixFiles:
        """Makes the ranks delete everything. Writing starts again, even after a failed write."""
        self._index = DiskIndex(self._index.max_bytes)
        self._wanted.clear()
        if self._writing:
            self._writing.is_wanted = False
        self._can_write = True
        return ForgetPrefixFiles(everything=True)

    def to_json(self) -> dict[str, Any]:
        """Describes the cache for people."""
        return {
            "num_files": len(self._index),
            "num_unwritten_files": len(self._wanted) + (self._writing is not None),
            "num_bytes": sum(self._index.num_bytes.values()),
            "max_bytes": sum(self._index.max_bytes.values()),
            "is_writing": self._can_write,
        }

    # --- reading

    def find(self, sequence: Sequence, contents: str) -> Found | None:
        """Finds a sequence's longest prefix that is worth reading if none is in memory."""
        root = root_name([*self._digests, contents])
        found = self._index.find(root, sequence.tokens[:-1], self.has_states)
        if found is None or found.num_tokens < self._rules.min_gain:
            return None
        return found

    def read(
        self,
        sequence: Sequence,
        found: Found,
        num_in_memory: int,
        room: int | None,
    ) -> ReadPrefix | None:
        """Makes all ranks read a prefix, if it is longer by enough than the prefix in memory and
        fits into room tokens (None: no limit)."""
        if found.num_tokens < num_in_memory + self._rules.min_gain:
            return None
        if room is not None and found.num_tokens > room:
            return None
        id = FIRST_LOADED + next(self._ids) % NUM_LOADED_IDS
        self._use(found)
        ranks = set(self._index.max_bytes)
        self._readings[id] = _Reading(sequence, found, ranks)
        return ReadPrefix(id, found.num_tokens, found.names, found.state)

    def on_read(self, rank: int, answer: PrefixRead) -> Read | None:
        """Takes a rank's answer. Returns None until all ranks have answered."""
        reading = self._readings.get(answer.sequence)
        if reading is None:
            return None
        reading.awaited.discard(rank)
        reading.damaged = reading.damaged or answer.damaged
        if reading.awaited:
            return None
        del self._readings[answer.sequence]
        if reading.damaged is not None:
            self._counts.num_damaged_files += 1
            names = self._index.remove(reading.damaged)
            forget = _forget([reading.damaged, *names], (answer.sequence,))
            return Read(reading.sequence, None, forget)
        num_tokens = reading.found.num_tokens
        self._counts.num_reads += 1
        self._counts.num_read_tokens += num_tokens
        return Read(reading.sequence, Load(answer.sequence, num_tokens), None)

    # --- writing

    def write(
        self,
        sequence_id: int,
        tokens: list[int],
        contents: str,
        checkpoints: Mapping[int, int],
        num_prompt: int,
    ) -> None:
        """Makes the ranks write the part of a sequence that is not on disk. checkpoints maps
        positions to the sequence's checkpoints. The first num_prompt tokens are its prompt, which
        may come again with another answer."""
        if not self._can_write:
            return
        root = root_name([*self._digests, contents])
        if found := self._index.find(root, tokens, with_state=False):
            self._use(found)
        writes = self._writes(sequence_id, tokens, root, checkpoints, num_prompt, found)
        self._wanted.extend(writes)

    def num_to_write(self, sequence: Sequence, checkpoints: Collection[int]) -> int:
        """Returns how many of the first tokens of a running sequence should be on disk: all of its
        prompt but the last token, and a multiple of `running` tokens of the answer. While the
        prompt is computed again, the number is a multiple of `running`. Caches that cannot be cut
        are written at checkpoints, given by their positions."""
        known = min(sequence.num_computed, sequence.num_tokens - 1)
        end = 0
        if self.has_states:
            for position in checkpoints:
                if end < position <= known:
                    end = position
        else:
            start = 0
            if known >= len(sequence.prompt) - 1:
                start = len(sequence.prompt) - 1
            num_after = known - start
            end = known - num_after % self._rules.running
        if end < self._rules.min_gain:
            return 0
        return end

    def forget_writes(self, sequence_id: int) -> None:
        """Forgets the files of a sequence that are still to be written."""
        others = (write for write in self._wanted if write.sequence != sequence_id)
        self._wanted = deque(others)

    def next_write(self, is_held: Callable[[Write], bool]) -> NextWrite:
        """Returns the next file for all ranks to write; none while the previous one is being
        written. is_held says whether the stages still hold a file's content."""
        while self._wanted and self._writing is None:
            write = self._wanted.popleft()
            is_first = not write.start and not write.is_state
            follows = is_first or write.parent in self._index
            is_new = write.name not in self._index
            if not (is_new and follows and is_held(write)):
                continue
            removed = self._index.make_room(write.parent)
            if removed is None:
                continue
            self._counts.num_evicted_files += len(removed)
            self._writing = _Writing(write, set(self._index.max_bytes))
            return NextWrite(write, _forget(removed))
        return NextWrite(None, None)

    def on_written(self, rank: int, answer: PrefixFileWritten) -> ForgetPrefixFiles | None:
        """Takes a rank's answer. If a rank could not write, nothing is written until `clear`."""
        writing = self._writing
        if writing is None or writing.write.name != answer.name:
            return None
        writing.awaited.discard(rank)
        writing.num_bytes[rank] = answer.num_bytes
        if writing.awaited:
            return None
        self._writing = None
        write = writing.write
        if not writing.is_wanted:
            # Some ranks may have deleted everything before they wrote this file, others after.
            return _forget([write.name])
        if all(writing.num_bytes.values()):
            file = PrefixFile(write.name, write.parent, write.start, write.end, 0)
            self._index.add(file, writing.num_bytes)
            self._counts.num_written_files += 1
            return None
        self._counts.num_failed_writes += 1
        self._can_write = False
        self._wanted.clear()
        return _forget([write.name])

    def _writes(
        self,
        sequence_id: int,
        tokens: list[int],
        root: str,
        checkpoints: Mapping[int, int],
        num_prompt: int,
        found: Found | None,
    ) -> Iterator[Write]:
        """Yields the files of a sequence that come after the files that were found."""
        if found:
            name, start = found.names[-1], found.num_tokens
        else:
            name, start = root, 0
        if self.has_states:
            yield from self._states_of_found(sequence_id, checkpoints, found)
            stops = {*checkpoints, len(tokens)}
        else:
            # The last token of a prompt is fed with the answer.
            stops = {min(num_prompt - 1, len(tokens)), len(tokens)}
        for end in self._ends(start, stops, checkpoints):
            parent, name = name, segment_name(name, tokens[start:end])
            yield Write(sequence_id, name, parent, start, end)
            if self.has_states and end in stops:
                yield _state(sequence_id, name, end, checkpoints)
            start = end

    def _states_of_found(
        self, sequence_id: int, checkpoints: Mapping[int, int], found: Found | None
    ) -> Iterator[Write]:
        """Yields the states that end segments which are on disk already."""
        names = found.names if found else ()
        for name in names:
            end = self._index.end(name)
            if end in checkpoints and state_name(name) not in self._index:
                yield _state(sequence_id, name, end, checkpoints)

    def _ends(
        self, start: int, stops: Collection[int], checkpoints: Collection[int]
    ) -> Iterator[int]:
        """Yields the ends of new segments: each stop, and every `segment` tokens between stops."""
        for stop in sorted(stops):
            while stop - start > self._rules.segment:
                start += self._rules.segment
                yield start
            min_length = 1 if stop in checkpoints else self._rules.min_segment
            if stop - start >= min_length:
                yield stop
                start = stop

    def _use(self, found: Found) -> None:
        self._index.use(found.state or found.names[-1])


def _forget(names: list[str], sequences: tuple[int, ...] = ()) -> ForgetPrefixFiles | None:
    if names or sequences:
        return ForgetPrefixFiles(tuple(names), sequences)
    return None


def _state(sequence_id: int, segment: str, end: int, checkpoints: Mapping[int, int]) -> Write:
    """Makes the file of the state at the end of a segment."""
    checkpoint = checkpoints.get(end, NO_CHECKPOINT)
    return Write(sequence_id, state_name(segment), segment, end, end, checkpoint)
