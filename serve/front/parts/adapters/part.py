"""Versions of adapters: the part of the scheduler that makes the stages free them."""

from collections import defaultdict

from serve.core.config import ServeConfig
from serve.core.ops import Unload
from serve.core.types import Sequence
from serve.front.parts.interface import NOTHING, PartReady, SchedulerPart
from serve.front.pipeline.interface import Prompt


class AdapterVersions(SchedulerPart):
    """Frees a version that no new sequence will use, after its last sequence has ended."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self._sequences: defaultdict[int, set[int]] = defaultdict(set)
        self._retired: set[int] = set()

    def added(self, sequence: Sequence, prompt: Prompt) -> None:
        if sequence.adapter_version:
            self._sequences[sequence.adapter_version].add(sequence.id)

    def ended(self, sequence: Sequence) -> None:
        of_version = self._sequences.get(sequence.adapter_version, set())
        of_version.discard(sequence.id)
        if not of_version:
            self._sequences.pop(sequence.adapter_version, None)

    def retired(self, adapter_version: int) -> None:
        self._retired.add(adapter_version)
        self.budget.drop_adapter(adapter_version)
        for sequence_id in self._sequences.get(adapter_version, ()):
            self.budget.discard(sequence_id)

    def stop(self) -> None:
        # New engines load only versions that a name or a sequence uses.
        self._retired &= self._sequences.keys()

    def ready(self) -> PartReady:
        unused = sorted(self._retired - self._sequences.keys())
        if not unused:
            return NOTHING
        self._retired.difference_update(unused)
        return PartReady(before=tuple(Unload(version) for version in unused))
