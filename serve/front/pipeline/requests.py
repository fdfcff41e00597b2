"""The requests of a server: their sequences and answers, which outlive the engines.

Owns the scheduler. Steps are sent between `resume` and `interrupt`, that is, while engines work.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ReadableList
from typing import cast, get_args

from serve.core.config import ServeConfig
from serve.core.errors import (
    BrigadeError,
    GivenUpError,
    OverflowedError,
    RequestError,
    UnavailableError,
)
from serve.core.messages import Admit, Result
from serve.core.outputs import SequenceOutput
from serve.core.plan import KvRoom
from serve.core.types import NUM_SEQUENCE_IDS, Event, Sampling, Sequence, Step
from serve.front.adapters.registry import AdapterRegistry
from serve.front.parts.registry import make_parts
from serve.front.pipeline.capacity import (
    chunk_beside_decoding,
    chunk_without_decoding,
    room_under_limits,
)
from serve.front.pipeline.fault_blame import Blame, FaultBlame
from serve.front.pipeline.generation import Generation
from serve.front.pipeline.gpu_steps import GpuSteps
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.queues import common_position
from serve.front.pipeline.recovery import Interruption
from serve.front.pipeline.scheduler import Scheduler
from serve.front.pipeline.status import StageStatus, StepLog, first_shards
from serve.front.pipeline.warm_up import WarmUp
from serve.front.prefixes.index import Reuse
from serve.parent.engines import Engines

_logger = logging.getLogger(__name__)


class Requests:
    """All requests that run or wait, and the adapters that they may use. hears lists the types of
    the messages that `on_message` takes."""

    def __init__(
        self,
        config: ServeConfig,
        num_stages: int,
        engines: Engines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._engines, self._clock = config, engines, clock
        self.scheduler = Scheduler(
            num_stages,
            max_num_sequences=config.max_num_seqs,
            max_queue=config.max_queue,
            prefill_chunk=config.constants.prefill_chunk,
            num_groups=config.constants.num_groups,
            cuts_short_prompts=config.max_inter_token is not None,
            parts=make_parts(config),
        )
        self._gpu_steps = GpuSteps(config.constants)
        self.scheduler.max_chunk_after = self._gpu_steps.max_tokens
        self.hears = (Result, *(kind for part in self.scheduler.parts for kind in part.hears))
        self.adapters = AdapterRegistry(config, self.num_with_adapter)
        self.step_log = StepLog()
        self._ranks: list[int] = []  # the ranks that take part
        self._stages: list[StageStatus] = []  # one status for each stage
        self._generations: dict[int, Generation] = {}
        self._fault_blame = FaultBlame(config.constants.max_restarts)
        # itertools.cycle would keep everything that it has yielded.
        self._sequence_ids = (number % NUM_SEQUENCE_IDS for number in itertools.count())
        self._is_running = False
        self._warm_up: WarmUp | None = None  # set while a warm-up runs
        self._progress_at = clock()

    # --- for clients

    def submit(
        self,
        prompts: ReadableList[Prompt],
        adapter_version: int,
        cache_scope: str,
    ) -> Generation:
        """Queues the sequences of a request. Raises OverloadedError, RequestError, or
        UnavailableError if a rank has no memory for it."""
        if reason := self._gpu_steps.refusal(is_idle=not self._generations):
            raise UnavailableError(reason, code="no_memory")
        sequences: list[Sequence] = []
        of_sequence: dict[int, Prompt] = {}
        for prompt in prompts:
            self._check(prompt)
            made = self._sequences(prompt, adapter_version)
            of_sequence |= {sequence.id: prompt for sequence in made}
            sequences += made
        self.scheduler.add(*sequences, prompts=of_sequence, scope=cache_scope)
        generation = Generation(sequences, self._leave)
        self._generations |= {sequence.id: generation for sequence in sequences}
        if self._warm_up:
            self._warm_up.stop()
        self._pump()
        return generation

    def _check(self, prompt: Prompt) -> None:
        """Raises RequestError for a prompt without answers that no part takes."""
        if prompt.samplings or any(part.takes(prompt) for part in self.scheduler.parts):
            return
        raise RequestError(
            "This server only generates answers: it has no part that makes anything else of a "
            "prompt, such as an embedding.",
            code="missing_part",
        )

    def _sequences(self, prompt: Prompt, adapter_version: int) -> list[Sequence]:
        """Makes a sequence for each answer: all but the first are copies. A prompt without answers
        has one sequence."""
        sequences: list[Sequence] = []
        # Even a mere echo computes one token.
        max_tokens = max(1, prompt.max_tokens) if prompt.samplings else 0
        for sampling in prompt.samplings or (Sampling(),):
            new_id = next(self._sequence_ids)
            sequence = Sequence(
                new_id,
                prompt.ids,
                max_tokens,
                sampling,
                prompt.end_ids,
                adapter_version,
            )
            sequence.original = sequences[0] if sequences else None
            sequences.append(sequence)
        return sequences

    def _leave(self, sequence_id: int) -> None:
        """Ends a sequence whose client has disconnected, or whose answer has reached a stop string.
        A sequence that may have crashed the engines stays until its next token. Otherwise it would
        never be found, and clients that do not wait could use up the restarts."""
        if sequence_id not in self._generations or self._fault_blame.is_clear(sequence_id):
            self._drop(sequence_id, may_keep=True)
            return
        sequence = self.scheduler.sequence(sequence_id)
        num_tokens = len(sequence.output) + sequence.num_pending + 1
        sequence.max_tokens = min(sequence.max_tokens, num_tokens)

    def _drop(self, sequence_id: int, may_keep: bool = False) -> None:
        if self._generations.pop(sequence_id, None):
            self.scheduler.drop(sequence_id, may_keep)
            self._fault_blame.remove(sequence_id)
            self.scheduler.run_alone(self._fault_blame.alone)
            self._pump()

    # --- from one life of the engines to the next

    def settle(self, stages: list[StageStatus]) -> KvRoom:
        """Adapts to other stages, and ends sequences that do not fit. Raises PlanError."""
        self._gpu_steps.settle(stages)
        room = room_under_limits(stages, self._config, self._gpu_steps.max_chunk)
        self._ranks = [stage.rank for stage in stages]
        self._stages = first_shards(stages)
        self.scheduler.settle(
            len(self._stages),
            room.num_tokens,
            room.num_sequences,
            room.state_tokens,
        )
        if self._config.enable_prefix_caching:
            # All stages get the same steps, so the stage that can reuse the least decides.
            reuses: list[Reuse] = [cast(Reuse, stage.loaded.reuse) for stage in stages]
            self.scheduler.reuse = min(reuses, key=get_args(Reuse)[::-1].index)
        for part in self.scheduler.parts:
            part.settle(stages)
        _logger.info(
            "event=kv_room tokens=%d sequences=%d reuse=%s",
            *(room.num_tokens, room.num_sequences, self.scheduler.reuse),
        )
        reason = f"A rank was lost, and the remaining ranks have room for {room.num_tokens} tokens."
        for sequence_id, generation in list(self._generations.items()):
            if not self.scheduler.sequence(sequence_id).fit(room.num_tokens):
                generation.put(UnavailableError(reason))
                self._drop(sequence_id)
        return room

    async def warm_up(
        self,
        adapter_versions: ReadableList[int],
        progressed: Callable[[int, int], None],
    ) -> None:
        """Warms the engines up, unless requests wait, whose steps do the same. `progressed` is as
        for WarmUp. Raises ClusterError if a step does not come back."""
        if not self._config.constants.warms_up or self._generations:
            return
        room = self.scheduler.budget.max_tokens
        assert room is not None
        self._warm_up = WarmUp(
            self._config,
            len(self._stages),
            room,
            adapter_versions,
            self._send_step,
            self.scheduler.parts,
            times_rows=self._gpu_steps.on_gpus,
            progressed=progressed,
        )
        try:
            await self._warm_up.run()
        finally:
            self._warm_up = None

    @property
    def is_warming_up(self) -> bool:
        """Whether the steps of a warm-up run."""
        return self._warm_up is not None

    def resume(self) -> None:
        """Starts sending steps to engines that hold only the sequences returned by `keep`."""
        self._is_running = True
        self._adapt_to_pace()  # as measured in the warm-up
        self.scheduler.start(self._ranks)
        for sequence in self.scheduler.waiting:
            if sequence.is_held:
                self._admit(sequence)
        self._pump()

    def keep(self, held: ReadableList[Mapping[int, int]]) -> dict[int, int]:
        """Lets sequences go on from the last position that all stages hold. `held` gives the
        positions of each stage, as in Left. Returns the number of tokens of each sequence that the
        stages have to keep for the next life. Everything else is computed again.

        Sequences that go on come first in the queue: others might wait for the room that they take.
        """
        if not self._stages or self._fault_blame.alone is not None:
            return {}
        can_rewind = all(stage.loaded.can_rewind for stage in self._stages)
        positions: dict[int, int] = {}
        kept: list[Sequence] = []
        for sequence in self.scheduler.waiting:
            position = common_position(sequence, held, can_rewind)
            if position:
                sequence.num_computed = position
                sequence.num_done = position
                sequence.num_cached = min(sequence.num_cached, position)
                sequence.is_held = True
                positions[sequence.id] = position
                kept.append(sequence)
                self._fault_blame.clear_if_further(sequence.id, position)
        for sequence in kept:
            self.scheduler.waiting.remove(sequence)
        self.scheduler.waiting.put_back(kept)
        if positions:
            _logger.info(
                "event=sequences_stayed sequences=%d tokens=%d",
                *(len(positions), sum(positions.values())),
            )
        return positions

    def on_message(self, rank: int, message: object) -> None:
        """Takes a message from a rank's engine. Its type is in hears."""
        if isinstance(message, Result):
            self.on_result(message)
            return
        self.scheduler.on_message(rank, message)
        self._pump()

    def clear_prefixes(self) -> None:
        """Drops everything that is kept for later prompts. Data that only a restart can drop is
        dropped after the next restart."""
        self.scheduler.clear_prefixes()
        self._pump()

    def halve_chunks(self) -> None:
        """Takes note that a GPU's limit of time or memory caused the latest interrupt: the prefill
        step is tried again in smaller ones before a request is blamed."""
        self._gpu_steps.halve()
        self._fault_blame.pardon()
        self.scheduler.run_alone(self._fault_blame.alone)

    def interrupt(self) -> Interruption:
        """Returns all sequences to the queue, because no step under way comes back. If a request
        turns out to be the cause, gives it up."""
        held: list[int] = []
        if self._is_running:  # Before `resume`, no sequence has had a step in this life.
            sequences = [self.scheduler.sequence(id) for id in self._generations]
            held = [sequence.id for sequence in sequences if sequence.is_held]
        self._is_running = False
        blame = self._fault_blame.on_fault(held)
        self.scheduler.restart()
        if blame:
            self._give_up(blame)
        self.scheduler.run_alone(self._fault_blame.alone)
        num_explained = blame.num_explained if blame else 0
        return Interruption(num_explained, self._gpu_steps.interrupt())

    def _give_up(self, blame: Blame) -> None:
        _logger.error(
            "event=request_given_up sequence=%d num_faults=%d",
            blame.sequence,
            blame.num_faults,
        )
        error = GivenUpError(
            f"This request crashed the engines {blame.num_faults} times, the last "
            "time while it ran alone: do not send it again."
        )
        self._end(self._generations[blame.sequence], error)

    def _end(self, generation: Generation, error: BrigadeError) -> None:
        generation.put(error)
        for sequence_id in generation.sequence_ids:
            self._drop(sequence_id)

    def fail(self, error: BrigadeError) -> None:
        """Ends every request with an error, because the cluster has failed."""
        self._is_running = False
        for generation in set(self._generations.values()):
            generation.put(error)
        self._generations.clear()

    # --- adapters

    def identify_adapter(self, version: int, contents: str) -> None:
        """Stores a text that identifies the files that the ranks have read as this version."""
        self.scheduler.budget.identify_adapter(version, contents)

    def num_with_adapter(self, version: int) -> int:
        """Counts the sequences that run or wait with this version of an adapter."""
        generations = self._generations.values()
        return sum(generation.adapter_version == version for generation in generations)

    def retire_adapter(self, version: int) -> None:
        """Makes the stages free the version after its last sequence. No new one will use it."""
        self.scheduler.retire(version)
        self._pump()

    def end_with_adapter(self, version: int, error: BrigadeError) -> None:
        """Ends the requests that run or wait with this version of an adapter."""
        for generation in dict.fromkeys(self._generations.values()):
            if generation.adapter_version == version:
                self._end(generation, error)

    # --- steps

    def waiting_seconds(self) -> float:
        """Returns for how long steps have been under way without any result."""
        return self._clock() - self._progress_at if self.scheduler.num_in_flight else 0.0

    def on_result(self, result: Result) -> None:
        """Takes the result of a step. Results of engines that have been ended are ignored."""
        if self._warm_up:
            self._warm_up.on_result(result)
        elif self._is_running:
            self._take(result)
            self._pump()

    def _adapt_to_pace(self) -> None:
        """Adapts chunks of prompts and the parts to the measured speed of the stages."""
        self.scheduler.chunk_beside_decoding = chunk_beside_decoding(
            self._stages,
            len(self.scheduler.groups),
            self._gpu_steps.max_chunk,
            self._config.max_inter_token,
        )
        self.scheduler.chunk_without_decoding = chunk_without_decoding(
            self._stages,
            self._gpu_steps.max_chunk,
        )
        for part in self.scheduler.parts:
            part.measured(self._stages)

    def _take(self, result: Result) -> None:
        self._progress_at = self._clock()
        self._gpu_steps.end(result.number)
        for output in result.outputs:
            if isinstance(output, SequenceOutput):
                self._on_output(output)
        self._adapt_to_pace()
        for event in self.scheduler.update(result):
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        generation = self._generations.get(event.sequence)
        if generation and event.finish_reason == "overflowed":
            generation.put(self._overflowed(generation, event.sequence))
        elif generation:
            generation.put(event)
        self._fault_blame.clear(event.sequence)
        if event.finish_reason:
            self._generations.pop(event.sequence, None)
            self._fault_blame.remove(event.sequence)
        self.scheduler.run_alone(self._fault_blame.alone)

    def _on_output(self, output: SequenceOutput) -> None:
        generation = self._generations.get(output.sequence)
        if generation and output.is_finite:
            generation.put_output(output)
        elif generation:
            generation.put(self._overflowed(generation, output.sequence))
            self._drop(output.sequence)

    def _overflowed(self, generation: Generation, sequence_id: int) -> OverflowedError:
        version = generation.adapter_version
        name = self.adapters.name_of(version)
        _logger.error(
            "event=numbers_overflowed sequence=%d adapter=%s version=%d",
            *(sequence_id, json.dumps(name), version),
        )
        return OverflowedError(sequence_id, name)

    def _pump(self) -> None:
        """Sends all steps that need no further result."""
        while self._is_running:
            if not self.scheduler.num_in_flight:
                self._progress_at = self._clock()
            output = self.scheduler.schedule()
            if output is None:
                return
            if isinstance(output, Step):
                self.step_log.note(output)
                self._gpu_steps.begin(output)
                begun = [self.scheduler.sequence(id) for id in output.begun]
                self._send_step(output, begun)
            else:
                self._engines.send_to_all(output)

    def _send_step(self, step: Step, begun: ReadableList[Sequence]) -> None:
        for sequence in begun:
            self._admit(sequence)
        self._engines.send(step)

    def _admit(self, sequence: Sequence) -> None:
        """Tells rank 0's engine which outputs a sequence needs and how to choose its tokens. This
        happens before its first step, and whenever the sequence begins again."""
        for part in self.scheduler.parts:
            for message in part.begun(sequence):
                self._engines.send(message)
        if not sequence.has_answer:
            return
        sampling = sequence.sampling
        is_read = sampling.reads_tokens or any(part.reads_tokens for part in self.scheduler.parts)
        tokens = sequence.tokens if is_read else []
        self._engines.send(Admit(sequence.id, sampling, len(sequence.prompt), tokens))
