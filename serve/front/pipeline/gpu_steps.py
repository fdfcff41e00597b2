"""Decides how large a prefill step may be, so that GPUs survive it. Pure.

macOS ends work of a GPU that takes about 5 s, or that holds up the screen. A step takes longer the
more context it has, so its size is limited by measured times. A step that was ended all the same is
tried again in parts of half its work, and no later step has more. The more context a token has, the
more work it is (`serve.front.pipeline.prefill_order`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from serve.core.amounts import format_bytes
from serve.core.constants import Constants
from serve.core.sections import StepLimit
from serve.core.types import Step
from serve.front.pipeline.chunks import MAX_CHUNK_SHARE
from serve.front.pipeline.prefill_order import work
from serve.front.pipeline.status import StageStatus

_FIRST_CHUNK = 128  # the chunk while a GPU's speed is unknown
_MIN_CHUNK = 16


class _PrefillStep(NamedTuple):
    work: float
    num_tokens: int


class GpuSteps:
    """The prefill steps of a cluster. max_chunk is the most tokens that a step may have: GPUs gain
    from larger steps than CPUs."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self.max_chunk = constants.prefill_chunk
        self._stages: Sequence[StageStatus] = ()
        self._under_way: dict[int, _PrefillStep] = {}  # by the step's number
        self._interrupted = _PrefillStep(0.0, 0)
        self._max_work = math.inf

    def settle(self, stages: Sequence[StageStatus]) -> None:
        """Adapts to other stages, whose status is in these objects from here on."""
        self._stages = stages
        self.max_chunk = self._constants.prefill_chunk
        if self.on_gpus:
            self.max_chunk = max(self.max_chunk, self._constants.gpu_prefill_chunk)

    @property
    def on_gpus(self) -> bool:
        return bool(self._stages) and all(s.loaded.section(StepLimit) for s in self._stages)

    def max_tokens(self, context: int) -> int:
        """Returns how many tokens a prefill step may have that begins after `context` tokens."""
        sizes = [self._tokens_in_work(context)]
        for stage in self._stages:
            sizes += [self._tokens_in_time(stage, context), self._tokens_in_memory(stage)]
        return max(min(_MIN_CHUNK, self.max_chunk), min(sizes))

    def _tokens_in_work(self, context: int) -> int:
        """Returns how many tokens the limit of work allows. All count as much as the last one."""
        max_work = self._max_work / MAX_CHUNK_SHARE
        last = context + int(min(self.max_chunk, max_work / work(context, context + 1)))
        return int(min(self.max_chunk, max_work / work(last, last + 1)))

    def _tokens_in_time(self, stage: StageStatus, context: int) -> int:
        """Returns how many tokens a stage can compute in the time that a GPU has."""
        limit = stage.loaded.section(StepLimit)
        if limit is None:
            return self.max_chunk
        seconds_per_token = stage.pace.prefill_seconds_after(context)
        if not seconds_per_token:
            return _FIRST_CHUNK
        seconds = limit.max_seconds / MAX_CHUNK_SHARE - (stage.pace.decode_seconds or 0.0)
        return int(seconds / seconds_per_token)

    def _tokens_in_memory(self, stage: StageStatus) -> int:
        """Returns how many tokens a stage has memory for, beside keys and values."""
        use = stage.memory
        if use is None or not use.bytes_per_token:
            return self.max_chunk
        return int(use.head_room_bytes / MAX_CHUNK_SHARE / use.bytes_per_token)

    def refusal(self, *, is_idle: bool) -> str | None:
        """Returns why no prompt can be computed, if a rank has no memory left for a small chunk.
        Keys and values have reserved memory, so other programs have taken it. While nothing else
        runs, a prompt may try: only a prompt shows whether it needs less memory than the last."""
        for stage in self._stages:
            use = stage.memory
            if use is None or (is_idle and use.head_room_bytes):
                continue
            if self._tokens_in_memory(stage) < _MIN_CHUNK:
                used, left = use.active_bytes, use.head_room_bytes
                return (
                    f"Rank {stage.rank} on {stage.host} uses {format_bytes(used)} of memory and "
                    f"has {format_bytes(left)} left, too little for a prompt: close other programs "
                    "there, or give it less with --memory."
                )
        return None

    # --- steps under way

    def begin(self, step: Step) -> None:
        if not step.sample and step.rows:
            ends = [(row.position, row.position + row.num_tokens) for row in step.rows]
            whole = sum(work(start, end) for start, end in ends)
            self._under_way[step.number] = _PrefillStep(whole, len(step.tokens))

    def end(self, number: int) -> None:
        """Takes the result of a step."""
        self._under_way.pop(number, None)

    # --- faults

    def interrupt(self) -> bool:
        """Takes note that no step comes back. Returns whether the largest step can be halved."""
        self._interrupted = max(self._under_way.values(), default=_PrefillStep(0.0, 0))
        self._under_way.clear()
        return self._interrupted.num_tokens > MAX_CHUNK_SHARE * _MIN_CHUNK

    def halve(self) -> None:
        """Limits the work of later steps to half of the largest step that was interrupted: a GPU
        did not survive it."""
        self._max_work = min(self._max_work, self._interrupted.work / 2)
