"""Pipelines whose ranks have a prefix cache on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from serve.core.messages import FromEngine, PrefixFileWritten, PrefixRead, Result
from serve.core.types import Sequence
from serve.front.prefixes.disk import DiskCounts, DiskPrefixes, DiskRules
from serve.front.prefixes.index import Reuse
from serve.model.stage import Stage
from serve.rank.parts.disk.part import DiskPart
from serve.rank.parts.disk.store import PrefixStore
from serve.rank.parts.interface import Surroundings
from tests.front.prefixes.observing import is_busy
from tests.rank.loops import part_of
from tests.rank.test_pipeline import LocalPipeline, Make, running


class DiskPipeline(LocalPipeline):
    def __init__(self, num_ranks: int, make: Make, prefix_dir: Path) -> None:
        super().__init__(num_ranks, make)
        self.prefix_dir = prefix_dir

    def _surroundings(self, rank: int, stage: Stage, batchable: bool) -> Surroundings:
        made = super()._surroundings(rank, stage, batchable)
        order = msgspec.structs.replace(
            made.order, prefix_dir=str(self.prefix_dir), prefix_bytes=1 << 30
        )
        return replace(made, order=order)

    @property
    def stores(self) -> dict[int, PrefixStore]:
        assert self.started.wait(60)
        parts = {rank: part_of(loop, DiskPart) for rank, loop in self.loops.items()}
        return {rank: part.store for rank, part in parts.items() if part.store}

    def open_disk(self, rules: DiskRules, reuse: Reuse) -> DiskCounts:
        """Makes the scheduler use the files on disk, as serve.front.pipeline.requests does."""
        counts = DiskCounts()
        stored = {rank: store.files() for rank, store in self.stores.items()}
        self.scheduler.reuse = reuse
        self.scheduler.budget.disk = DiskPrefixes(
            stored,
            str,
            counts,
            has_states=reuse == "checkpoints",
            rules=rules,
        )
        return counts

    def flush(self) -> None:
        """Waits until no step and no read or write of a file is under way."""
        disk = self.scheduler.budget.disk
        assert disk
        self._pump()
        while is_busy(disk) or self.scheduler.num_in_flight:
            self._take(self.results.get(timeout=30))
            self._pump()

    def interrupt(self, sequences: list[Sequence], num_tokens: int) -> None:
        """Runs sequences until the answer of each has num_tokens tokens and all their files are
        written. Takes no result after that."""
        disk = self.scheduler.budget.disk
        assert disk
        self._add(sequences)
        self._pump()
        held: list[Result] = []
        while is_busy(disk) or min(len(sequence.output) for sequence in sequences) < num_tokens:
            result = self.results.get(timeout=30)
            # On a slow disk, the answers would otherwise end before their files are written.
            if disk._writing and isinstance(result, Result):
                held.append(result)
                continue
            for each in (*held, result):
                self._take(each)
            held.clear()
            self._pump()
        assert all(sequence.num_left > 0 for sequence in sequences)

    def _take_message(self, rank: int, message: FromEngine) -> None:
        if isinstance(message, PrefixRead):
            self.scheduler.on_prefix_read(rank, message)
            return
        assert isinstance(message, PrefixFileWritten)
        if self.scheduler.budget.disk:
            self.scheduler.budget.disk.on_written(rank, message)

    def _tell_parts(self) -> None:
        disk = self.scheduler.budget.disk
        for message in disk.take_messages() if disk else ():
            for loop in self.loops.values():
                loop.parts.obey(message)


@contextmanager
def disk_pipeline(num_ranks: int, make: Make, prefix_dir: Path) -> Iterator[DiskPipeline]:
    with running(DiskPipeline(num_ranks, make, prefix_dir)) as local:
        yield local
    for store in local.stores.values():
        store.close()
