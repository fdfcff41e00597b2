"""The pipeline as the HTTP server sees it: sequences go in, events come out.

Owns the scheduler and the sequences, which outlive the engines (`serve.front.pipeline.lives`).
Everything here runs in one event loop, so that nothing needs a lock.
"""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Sequence as ReadableList
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from serve.core.config import Cluster, ServeConfig
from serve.core.errors import (
    BrigadeError,
    EngineError,
    GivenUpError,
    OverflowedError,
    PlanError,
    RequestError,
    UnavailableError,
)
from serve.core.messages import AdapterRead, AdapterRefused, Admit, Result, Scores
from serve.core.types import NUM_SEQUENCE_IDS, Sequence, Step
from serve.front.pipeline.adapter_loader import AdapterLoader, Ranks
from serve.front.pipeline.capacity import better_split, chunk_beside_decoding, room_under_limits
from serve.front.pipeline.fault_blame import Blame, FaultBlame
from serve.front.pipeline.generation import Generation
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.lives import Lives, StartView
from serve.front.pipeline.scheduler import Reuse, Scheduler
from serve.front.pipeline.timeline import chrome_trace
from serve.front.pipeline.warm_up import WarmUp

_logger = logging.getLogger(__name__)


class Engine:
    """As Lives. Requests that come while engines start anew wait for them."""

    def __init__(
        self,
        config: ServeConfig,
        cluster: Cluster,
        folder: Path,
        facts: dict[str, str],
        view: StartView,
    ) -> None:
        self._config, self._cluster = config, cluster
        self._view = view
        self._lives = Lives(config, cluster, folder, facts, view, self)
        self._scheduler = Scheduler(
            cluster.num_ranks,
            max_num_sequences=config.max_num_sequences,
            max_queue=config.max_queue,
            prefill_chunk=config.prefill_chunk,
            num_groups=config.num_groups,
        )
        ranks = Ranks(
            ring=lambda: self._lives.ring,
            loaded=self._until_loaded,
            tell=self._lives.tell_all,
            retire=self._retire_adapter,
            end_requests=self._end_with_adapter,
            num_sequences=self._scheduler.num_with_adapter,
        )
        self.adapters = AdapterLoader(config, ranks)
        self._generations: dict[int, Generation] = {}
        self._fault_blame = FaultBlame(config.max_restarts)
        # Not by cycle, which keeps all that it has given.
        self._sequence_ids = (number % NUM_SEQUENCE_IDS for number in itertools.count())
        self._has_worked = False
        self._warm_up: WarmUp | None = None  # while it runs
        self._settled: tuple[int, ...] = ()
        self._loaded = asyncio.Event()
        self._failure: asyncio.Future[BrigadeError] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._progress_at = time.monotonic()

    # --- life

    async def listen(self) -> None:
        """Opens the door for the other ranks. Raises AddressError."""
        if self._cluster.control:
            await self._lives.control.listen(self._cluster.control)

    def start(self) -> None:
        """Starts the ranks in the background; ready_reason tells how far they are."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._lives.close()

    async def failed(self) -> BrigadeError:
        return await asyncio.shield(self._failure)

    async def _run(self) -> None:
        try:
            await self._lives.run()
        except BrigadeError as error:
            self._fail(error)
        except Exception as error:  # The top of the task: without it nobody would be told.
            _logger.exception("event=bug")
            self._fail(EngineError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: BrigadeError) -> None:
        """Every running request ends with the reason, which the command's last line says."""
        _logger.error("event=failed exit_code=%d", error.exit_code)
        self._failure.set_result(error)
        self.adapters.fail(error)
        self._loaded.set()
        for generation in set(self._generations.values()):
            generation.put(error)
        self._generations.clear()

    # --- what the engines tell

    async def prepare(self) -> None:
        if self._lives.ring != self._settled:
            self._settle()
        await self.adapters.restore()
        self._loaded.set()
        if not self._has_worked:
            await self.adapters.load_at_start()
        if not self._config.no_warm_up and not self._generations:
            await self._run_warm_up()

    async def _run_warm_up(self) -> None:
        """Not where requests wait for new engines: theirs are steps as good."""
        room = self._scheduler.max_held_tokens
        assert room is not None
        versions = self.adapters.registry.loaded_versions()
        self._warm_up = WarmUp(self._config, len(self._lives.ring), room, versions, self._send_step)
        try:
            await self._warm_up.run()
        finally:
            self._warm_up = None

    @property
    def is_warming_up(self) -> bool:
        return self._warm_up is not None

    def _settle(self) -> None:
        """On other ranks than before. Raises PlanError if there is not even room for a short
        sequence."""
        stages = self._lives.stages
        try:
            room = room_under_limits(stages, self._config)
        except PlanError as error:
            self._lives.refuse_ring(error, self._settled)
            raise
        most = room.num_tokens
        self._settled = self._lives.ring
        self._scheduler.settle(len(stages), most, room.num_sequences)
        if not self._config.no_prefix_cache:
            self._scheduler.reuse = cast(Reuse, stages[0].reuse)
        _logger.info(
            "event=kv_room tokens=%d sequences=%d reuse=%s",
            *(most, room.num_sequences, self._scheduler.reuse),
        )
        self._view.loaded(stages, most)
        reason = f"A rank was lost, and those that are left have room for {most} tokens."
        for sequence_id, generation in list(self._generations.items()):
            if not self._scheduler.sequence(sequence_id).fit(most):
                generation.put(UnavailableError(reason))
                self._drop(sequence_id)

    def go(self) -> None:
        self._has_worked = True
        self._pump()

    def interrupt(self) -> int:
        self._loaded.clear()
        sequences = [self._scheduler.sequence(id) for id in self._generations]
        blame = self._fault_blame.after_fault(s.id for s in sequences if s.is_held)
        self._scheduler.restart()
        self.adapters.interrupt()
        if blame:
            self._give_up(blame)
        self._scheduler.run_alone(self._fault_blame.alone)
        return blame.num_explained if blame else 0

    def _give_up(self, blame: Blame) -> None:
        _logger.error(
            "event=request_given_up sequence=%d num_faults=%d", blame.sequence, blame.num_faults
        )
        generation = self._generations[blame.sequence]
        generation.put(
            GivenUpError(
                f"This request ended the engines {blame.num_faults} times, the last time while it "
                "ran alone: given up. Do not send it again."
            )
        )
        for id in [id for id, of in self._generations.items() if of is generation]:
            self._drop(id)

    def waiting_seconds(self) -> float:
        return time.monotonic() - self._progress_at if self._scheduler.num_in_flight else 0.0

    def on_result(self, result: Result) -> None:
        if self._warm_up:
            self._warm_up.on_result(result)
            return
        self._progress_at = time.monotonic()
        for scores in result.scores:
            self._note_scores(scores)
        self._scheduler.chunk_beside_decoding = chunk_beside_decoding(
            self._lives.stages, self._config.prefill_chunk
        )
        for event in self._scheduler.update(result.number, result.tokens):
            generation = self._generations.get(event.sequence)
            if generation and event.finish_reason == "overflowed":
                generation.put(self._overflowed(generation, event.sequence))
            elif generation:
                generation.put(event)
            self._fault_blame.clear(event.sequence)
            if event.finish_reason:
                self._generations.pop(event.sequence, None)
                self._fault_blame.forget(event.sequence)
            self._scheduler.run_alone(self._fault_blame.alone)
        self._pump()

    def _note_scores(self, scores: Scores) -> None:
        generation = self._generations.get(scores.sequence)
        if generation and scores.is_finite:
            generation.put_scores(scores)
        elif generation:
            generation.put(self._overflowed(generation, scores.sequence))
            self._drop(scores.sequence)

    def on_adapter(self, rank: int, answer: AdapterRead | AdapterRefused) -> None:
        self.adapters.on_answer(rank, answer)

    def _overflowed(self, generation: Generation, sequence_id: int) -> OverflowedError:
        version = generation.adapter_version
        name = self.adapters.registry.name_of(version)
        _logger.error(
            "event=numbers_overflowed sequence=%d adapter=%s version=%d",
            *(sequence_id, json.dumps(name), version),
        )
        return OverflowedError(sequence_id, name)

    # --- requests

    def submit(
        self, prompts: ReadableList[Prompt], adapter_version: int = 0, cache_scope: str = ""
    ) -> Generation:
        """adapter_version is 0 for the model alone; prefixes are shared within cache_scope. Raises
        UnavailableError, OverloadedError or RequestError."""
        reason = self._not_ready()
        if reason and (self._failure.done() or not self._has_worked):
            raise UnavailableError(f"The cluster is not ready ({reason}): try again later.")
        self._check_lengths(prompts)
        sequences = [
            sequence
            for prompt in prompts
            for sequence in self._sequences(prompt, adapter_version, cache_scope)
        ]
        self._scheduler.add(*sequences)
        generation = Generation(sequences, self._leave)
        self._generations |= {sequence.id: generation for sequence in sequences}
        if self._warm_up:
            self._warm_up.stop()
        self._pump()
        return generation

    def _check_lengths(self, prompts: ReadableList[Prompt]) -> None:
        most, longest = self._config.max_prompt_tokens, max(len(prompt.ids) for prompt in prompts)
        if most and longest > most:
            raise RequestError(
                f"The prompt has {longest} tokens, and this server takes {most}: shorten it.",
                code="context_length_exceeded",
            )

    def _sequences(self, prompt: Prompt, adapter_version: int, cache_scope: str) -> list[Sequence]:
        """One for each answer. The first one's prompt is computed, the others copy it."""
        sequences: list[Sequence] = []
        max_tokens = max(1, prompt.max_tokens)  # For an echo alone a token is computed, too.
        for sampling in prompt.samplings:
            new_id = next(self._sequence_ids)
            sequence = Sequence(
                new_id, prompt.ids, max_tokens, sampling, prompt.end_ids, adapter_version
            )
            sequence.original = sequences[0] if sequences else None
            sequence.cache_scope = cache_scope
            sequences.append(sequence)
        return sequences

    def _leave(self, sequence_id: int) -> None:
        """Its client has gone. One that may be what ended the engines stays until its next token:
        else nobody would know, and its like could come until no restarts are left."""
        if sequence_id not in self._generations or self._fault_blame.is_clear(sequence_id):
            self._drop(sequence_id)
            return
        sequence = self._scheduler.sequence(sequence_id)
        num_tokens = len(sequence.output) + sequence.num_pending + 1
        sequence.max_tokens = min(sequence.max_tokens, num_tokens)

    def _drop(self, sequence_id: int) -> None:
        if self._generations.pop(sequence_id, None):
            self._scheduler.drop(sequence_id)
            self._fault_blame.forget(sequence_id)
            self._scheduler.run_alone(self._fault_blame.alone)
            self._pump()

    def _pump(self) -> None:
        """Sends every step that can go now."""
        while self._lives.is_working:
            if not self._scheduler.num_in_flight:
                self._progress_at = time.monotonic()
            step = self._scheduler.schedule()
            if step is None:
                return
            self._send_step(step, [self._scheduler.sequence(id) for id in step.begun])

    def _send_step(self, step: Step, begun: ReadableList[Sequence]) -> None:
        for sequence in begun:
            self._admit(sequence)
        self._lives.send(step)

    def _admit(self, sequence: Sequence) -> None:
        """What choosing its tokens needs goes to rank 0 before its first step, and again if it
        begins anew."""
        sampling = sequence.sampling
        tokens = sequence.tokens if sampling.reads_tokens else []
        self._lives.send(Admit(sequence.id, sampling, len(sequence.prompt), tokens))

    # --- adapters

    async def _until_loaded(self) -> None:
        if not self._has_worked and (late := self._lives.late()):
            raise UnavailableError(f"The cluster is not ready ({late}): try again later.")
        await self._loaded.wait()

    def _retire_adapter(self, version: int) -> None:
        self._scheduler.retire(version)
        self._pump()

    def _end_with_adapter(self, version: int, error: BrigadeError) -> None:
        for id, generation in list(self._generations.items()):
            if id in self._generations and self._scheduler.sequence(id).adapter_version == version:
                generation.put(error)
                self._drop(id)

    # --- what is seen from outside

    @property
    def is_complete(self) -> bool:
        return not self._lives.missing

    def ready_reason(self) -> str | None:
        """None when requests can be served, else one line that says why not. A rank that
        is silent for a moment gets requests all the same: they wait for it."""
        return self._not_ready() or self._lives.silent()

    def _not_ready(self) -> str | None:
        if self._failure.done():
            return "the cluster broke"  # The reason may name hosts: it is for the log.
        if late := self._lives.late():
            return late
        if self._lives.is_working:
            return None
        return "warming up" if self._warm_up else "loading adapters"

    def pipeline(self) -> dict[str, Any]:
        return {
            "model": self._config.model_name,
            "num_ranks": len(self._lives.ring),
            "stages": [stage.to_json() for stage in self._lives.stages],
            "num_running": self._scheduler.num_running,
            "num_waiting": self._scheduler.num_waiting,
            "kv_tokens": self._scheduler.num_held_tokens,
            "max_kv_tokens": self._scheduler.max_held_tokens,
            "better_split": better_split(self._lives.stages),
            "adapters": self.adapters.registry.statistics.to_json(),
            "num_restarts": self._lives.number,
            "recovery_seconds": round(self._lives.recovery_seconds, 3),
        }

    def timeline(self, seconds: float) -> dict[str, Any]:
        """The last seconds as a Chrome trace."""
        return chrome_trace(self._lives.stages, time.time() - seconds)
