"""Prefixes on disk: the part of the scheduler that makes the ranks write and read them."""

import json
import logging
from collections.abc import Mapping
from collections.abc import Sequence as ReadableList
from typing import Any, TypeVar

from serve.core.config import ServeConfig
from serve.core.messages import (
    FromPrefixCache,
    PrefixFiles,
    PrefixFileWritten,
    PrefixRead,
    ToPrefixCache,
)
from serve.core.ops import Write
from serve.core.types import Sequence
from serve.front.parts.disk.cache import DiskCache, DiskCounts, DiskRules
from serve.front.parts.interface import NOTHING, Fed, PartReady, SchedulerPart
from serve.front.prefixes.index import Admission, Reuse, may_begin_as_copy

ItemT = TypeVar("ItemT")

_logger = logging.getLogger(__name__)


class DiskPrefixes(SchedulerPart):
    """The prefix cache on disk over all lives of the engines, used while all ranks have one."""

    hears = (PrefixFiles, PrefixRead, PrefixFileWritten)

    def __init__(self, config: ServeConfig, rules: DiskRules = DiskRules()) -> None:  # noqa: B008
        super().__init__(config)
        self.counts = DiskCounts()
        self._rules = rules
        self._cache: DiskCache | None = None
        self._stored: dict[int, PrefixFiles] = {}  # each rank's files at the start
        self._must_clear = False
        # Sequences whose prefix is not looked for again in this life of the engines.
        self._tried: set[int] = set()
        # By running sequence, the number of tokens that may be written.
        self._written: dict[int, int] = {}

    # --- the engines

    def start(self, ranks: ReadableList[int], reuse: Reuse) -> PartReady:
        present = {rank: self._stored[rank] for rank in ranks if rank in self._stored}
        if not present or reuse == "none":
            return NOTHING
        if missing := sorted(set(ranks) - present.keys()):
            _logger.warning("event=prefix_cache_disk_off ranks_without=%s", missing)
            return NOTHING
        has_states = reuse == "checkpoints"
        self._cache = DiskCache(present, self.counts, has_states=has_states, rules=self._rules)
        ready = _sent(self._cache.useless_files)
        if self._must_clear:
            ready = _sent(self._cache.useless_files, self._cache.clear())
            self._must_clear = False
        _logger.info("event=prefix_cache_disk files=%d", self._cache.num_files)
        return ready

    def stop(self) -> None:
        self._cache = None
        self._stored.clear()
        self._tried.clear()
        self._written.clear()

    def on_message(self, rank: int, message: FromPrefixCache) -> PartReady:
        if isinstance(message, PrefixFiles):
            self._stored[rank] = message
        elif isinstance(message, PrefixRead):
            return self._on_read(rank, message)
        elif self._cache:
            return _sent(self._cache.on_written(rank, message))
        return NOTHING

    def clear(self) -> PartReady:
        if self._cache is None:
            self._must_clear = True  # The cache is cleared when the engines work again.
            return NOTHING
        return _sent(self._cache.clear())

    # --- reading

    @property
    def num_tokens(self) -> int:
        return self._cache.num_reading_tokens if self._cache else 0

    def blocks(self, admission: Admission, num_free: int | None) -> PartReady | None:
        sequence = admission.sequence
        if self._cache is None or sequence.id in self._tried:
            return None
        self._tried.add(sequence.id)
        contents = self._contents(sequence)
        if contents is None or not may_begin_as_copy(sequence):
            return None
        found = self._cache.find(sequence, contents)
        if found is None:
            return None
        num_in_memory = admission.match.num_tokens if admission.match else 0
        message = self._cache.read(sequence, found, num_in_memory, num_free)
        return _sent(message) if message else None

    def _on_read(self, rank: int, answer: PrefixRead) -> PartReady:
        read = self._cache.on_read(rank, answer) if self._cache else None
        if read is None:
            return NOTHING
        if read.load is None:
            return PartReady(messages=_some(read.forget), unblocked=(read.sequence,))
        self.budget.keep_loaded(read.sequence, read.load)
        return PartReady(before=(read.load,), unblocked=(read.sequence,))

    # --- writing

    def after(self, fed: Fed) -> ReadableList[Write]:
        if self._cache:
            for sequence in fed.sequences:
                self._write_running(self._cache, sequence)
        return ()

    def _write_running(self, cache: DiskCache, sequence: Sequence) -> None:
        """Makes the ranks write a running sequence to disk, once it is long enough."""
        # A prompt whose numbers have overflowed never gets a first token.
        if not sequence.output:
            return
        end = cache.num_to_write(sequence, self.budget.checkpoints_of(sequence.id))
        if end > self._written.get(sequence.id, 0):
            self._written[sequence.id] = end
            self._write(cache, sequence, end)

    def kept(self, sequence: Sequence) -> None:
        self._written.pop(sequence.id, None)
        if self._cache:
            self._write(self._cache, sequence, sequence.num_computed)

    def _write(self, cache: DiskCache, sequence: Sequence, end: int) -> None:
        contents = self._contents(sequence)
        if contents is None:
            return
        checkpoints = self.budget.checkpoints_of(sequence.id)
        num_prompt = len(sequence.prompt)
        cache.write(sequence.id, sequence.tokens[:end], contents, checkpoints, num_prompt)

    def reset(self, sequence: Sequence) -> None:
        self._tried.discard(sequence.id)
        # After the sequence begins again, the stages hold too few tokens for the files that wait.
        if self._written.pop(sequence.id, None) and self._cache:
            self._cache.forget_writes(sequence.id)

    def ended(self, sequence: Sequence) -> None:
        self.reset(sequence)

    def ready(self) -> PartReady:
        if self._cache is None:
            return NOTHING
        write, forget = self._cache.next_write(self.is_held)
        return PartReady(after=_some(write), messages=_some(forget))

    def is_held(self, write: Write) -> bool:
        """Whether the stages still hold the content of a file that is to be written."""
        return self.budget.kept.holds(write, self._written.get(write.sequence, 0))

    def _contents(self, sequence: Sequence) -> str | None:
        """Identifies everything, besides its tokens and the stages, that a sequence's keys and
        values depend on. None if it is unknown: then the sequence is neither written nor read."""
        key = self.budget.key(sequence)
        adapter = self.budget.adapter_contents(key.adapter_version)
        return None if adapter is None else json.dumps([adapter, key.scope])

    # --- what others see

    def to_json(self) -> Mapping[str, Any]:
        state: dict[str, Any] = {
            "num_files": 0,
            "num_unwritten_files": 0,
            "num_bytes": 0,
            "max_bytes": 0,
            "is_writing": False,
        }
        if self._cache:
            state = self._cache.to_json()
        return {"prefix_cache": {"disk": {**self.counts.to_json(), **state}}}


def _sent(*messages: ToPrefixCache | None) -> PartReady:
    return PartReady(messages=tuple(message for message in messages if message))


def _some(item: ItemT | None) -> tuple[ItemT, ...]:
    return () if item is None else (item,)
