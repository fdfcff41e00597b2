"""Pipelines whose ranks have a prefix cache on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from serve.core.messages import Result
from serve.core.types import Sequence
from serve.front.parts.disk.cache import DiskRules
from serve.front.parts.disk.part import DiskPrefixes
from serve.front.pipeline.scheduler import Scheduler
from serve.front.prefixes.index import Reuse
from serve.model.stage import Stage
from serve.rank.parts.disk.part import DiskPart
from serve.rank.parts.disk.store import PrefixStore
from serve.rank.parts.interface import Surroundings
from tests.configs import serve_config
from tests.front.parts.disk.observing import is_busy, is_writing
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

    def use_disk(self, rules: DiskRules) -> DiskPrefixes:
        """Gives the pipeline a scheduler that can use the files on disk."""
        self.disk = DiskPrefixes(serve_config(), rules)
        self.scheduler = Scheduler(
            len(self.ring),
            max_num_sequences=32,
            max_queue=64,
            prefill_chunk=32,
            parts=[self.disk],
        )
        return self.disk

    def open_disk(self, reuse: Reuse) -> None:
        """Makes the scheduler use the files on disk, as serve.front.pipeline.requests does."""
        self.scheduler.reuse = reuse
        for rank, store in self.stores.items():
            self.scheduler.on_message(rank, store.files())
        self.scheduler.start([*self.stores])

    def flush(self) -> None:
        """Waits until no step and no read or write of a file is under way."""
        self._pump()
        while is_busy(self.disk) or self.scheduler.num_in_flight:
            self._take(self.results.get(timeout=60))
            self._pump()

    def interrupt(self, sequences: list[Sequence], num_tokens: int) -> None:
        """Runs sequences until the answer of each has num_tokens tokens and all their files are
        written. Takes no result after that."""
        self._add(sequences)
        self._pump()
        held: list[Result] = []
        while (
            is_busy(self.disk) or min(len(sequence.output) for sequence in sequences) < num_tokens
        ):
            result = self.results.get(timeout=60)
            # On a slow disk, the answers would otherwise end before their files are written.
            if is_writing(self.disk) and isinstance(result, Result):
                held.append(result)
                continue
            for each in (*held, result):
                self._take(each)
            held.clear()
            self._pump()
        assert all(sequence.num_left > 0 for sequence in sequences)


@contextmanager
def disk_pipeline(num_ranks: int, make: Make, prefix_dir: Path) -> Iterator[DiskPipeline]:
    with running(DiskPipeline(num_ranks, make, prefix_dir)) as local:
        yield local
    for store in local.stores.values():
        store.close()
