"""The pipeline as the HTTP server sees it: sequences go in, events come out.

Owns the scheduler, the hub of the ranks and rank 0's engine child. Everything here
runs in one event loop, so that nothing needs a lock.
"""

import asyncio
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence as ReadableList
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

from serve.core import wire
from serve.core.config import Cluster, ServeConfig
from serve.core.errors import (
    BrigadeError,
    ClusterError,
    EngineError,
    ModelError,
    RequestError,
    UnavailableError,
    from_exit_code,
)
from serve.core.plan import StagePlan
from serve.core.types import Sequence
from serve.front.adapters import Adapters
from serve.front.generation import Generation
from serve.front.orders import order, plan_request
from serve.front.prompt import Prompt
from serve.front.scheduler import Reuse, Scheduler
from serve.front.stages import (
    StageStatus,
    better_split,
    chrome_trace,
    chunk_beside_decoding,
    is_silent,
    room_for_tokens,
    suspect,
)
from serve.parent.control import Hello, Hub, engine_ended, raise_if_error
from serve.parent.engine import EngineProcess

_WATCH_SECONDS = 0.5
_BLAME_SECONDS = 0.5
_NUM_SEQUENCE_IDS = 2**30  # they are int32 on the wire, and group numbers are above them

_logger = logging.getLogger(__name__)


class View(Protocol):
    """Who shows people how the start goes on."""

    def planned(self, stages: list[StagePlan]) -> None: ...

    def progressed(self, stage: StageStatus) -> None: ...

    def ready(self, stages: list[StageStatus]) -> None: ...


class Engine:
    """folder is where the model's config is, also that of a hub model. view is told how
    the start goes on."""

    def __init__(
        self,
        config: ServeConfig,
        cluster: Cluster,
        folder: Path,
        facts: dict[str, str],
        view: "View",
    ) -> None:
        self._config, self._cluster = config, cluster
        self._folder, self._view = folder, view
        self._stages = [StageStatus(rank, host) for rank, host in enumerate(cluster.hosts)]
        self._scheduler = Scheduler(
            cluster.num_ranks,
            max_num_sequences=config.max_num_sequences,
            max_queue=config.max_queue,
            prefill_chunk=config.prefill_chunk,
            num_groups=config.num_groups,
        )
        self._hub = Hub(Hello.of(cluster, facts, os.getpid()), self._on_message)
        self.adapters = Adapters(config, cluster.num_ranks, self)
        self._adapters_wanted = bool(config.lora)
        self._process: EngineProcess | None = None
        self._generations: dict[int, Generation] = {}
        self._sequence_ids = itertools.cycle(range(_NUM_SEQUENCE_IDS))
        self._progressed = asyncio.Event()
        self._failure: asyncio.Future[BrigadeError] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._progress_at = time.monotonic()

    # --- life

    async def listen(self) -> None:
        """Opens the door for the other ranks. Raises AddressError."""
        if self._cluster.control:
            await self._hub.listen(self._cluster.control)

    def start(self) -> None:
        """Starts the ranks in the background; ready_reason tells how far they are."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._hub.close()
        if self._process:
            await self._process.stop()

    async def failed(self) -> BrigadeError:
        return await asyncio.shield(self._failure)

    async def _run(self) -> None:
        reading: asyncio.Task[None] | None = None
        try:
            process = await self._start_engines()
            reading = asyncio.create_task(self._read(process))
            joined = {"fetching", "loading", "ready"}
            await self._until_all(joined, self._config.join_timeout, "join the ring")
            await self._until_all({"ready"}, self._config.load_timeout, "load its layers")
            self._share_out_memory()
            await self.adapters.load_at_start()
            self._adapters_wanted = False
            if not self._failure.done():
                self._view.ready(self._stages)
                _logger.info("event=ready num_ranks=%d", self._cluster.num_ranks)
            await asyncio.gather(reading, self._watch())
        except BrigadeError as error:
            self._fail(error)
        except Exception as error:  # The top of the task: without it nobody would be told.
            _logger.exception("event=bug")
            self._fail(EngineError(f"{type(error).__name__}: {error}"))
        finally:
            if reading:
                reading.cancel()

    async def _start_engines(self) -> EngineProcess:
        """The engines start and rank 0's makes the plan while other ranks still join."""
        process = self._process = await EngineProcess.start()
        process.link.send_json(plan_request(self._config, self._cluster, str(self._folder)))
        plan = await self._receive_plan(process)
        await self._hub.wait_for_all(self._config.join_timeout)
        self._view.planned(plan)
        nonce = secrets.randbits(31)
        for stage, planned in zip(self._stages, plan, strict=True):
            stage.plan = planned
            told = order(self._config, self._cluster, planned, nonce)
            if stage.rank:
                stage.pid = self._hub.pid(stage.rank)
                self._hub.send(stage.rank, {"type": "start", "order": told})
            else:
                stage.pid = os.getpid()
                process.link.send_json(told)
        return process

    async def _receive_plan(self, process: EngineProcess) -> list[StagePlan]:
        """Raises what is wrong with the plan or the model."""
        try:
            reply = process.link.receive_json()
            message = await asyncio.wait_for(reply, self._config.load_timeout)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise ModelError(
                f"No plan could be made within {self._config.load_timeout:g} s: does config.json "
                "fit the weights? (--load-timeout)"
            ) from error
        if message is None:
            message = engine_ended(0, await process.wait())
        raise_if_error(message)
        return [StagePlan.from_json(stage) for stage in message["stages"]]

    async def _until_all(self, states: set[str], timeout_seconds: float, what: str) -> None:
        """The time counts from the last progress of any stage: a download may take hours."""
        while late := [stage for stage in self._stages if stage.state not in states]:
            if self._failure.done():
                return
            self._progressed.clear()
            try:
                await asyncio.wait_for(self._progressed.wait(), timeout_seconds)
            except (TimeoutError, asyncio.TimeoutError) as error:
                raise ClusterError(
                    f"Rank {late[0].rank} on {late[0].host} did not {what}: nothing moved for "
                    f"{timeout_seconds:g} s, look at its log."
                ) from error

    def _share_out_memory(self) -> None:
        """Raises PlanError if there is not even room for a short sequence."""
        most = self._scheduler.max_held_tokens = room_for_tokens(self._stages, self._config)
        if not self._config.no_prefix_cache:
            self._scheduler.reuse = cast(Reuse, self._stages[0].reuse)
        _logger.info("event=kv_room tokens=%d reuse=%s", most, self._scheduler.reuse)

    async def _watch(self) -> None:
        """Raises ClusterError when steps are under way and none comes back. A rank that
        is stopped breaks no connection."""
        while not self._failure.done():
            await asyncio.sleep(_WATCH_SECONDS)
            idle_seconds = time.monotonic() - self._progress_at
            if self._scheduler.num_in_flight and idle_seconds > self._config.stall_timeout:
                behind = suspect(self._stages, time.time())
                raise ClusterError(
                    f"No step came back for {self._config.stall_timeout:g} s: rank {behind.rank} "
                    f"on {behind.host} is behind, look at its log (--stall-timeout)."
                )

    async def _read(self, process: EngineProcess) -> None:
        async for kind, body in process.link.messages():
            if kind == wire.Kind.RESULT:
                self._on_result(wire.decode_result(body))
            else:
                self._on_message(0, wire.parse_json(body))
        self._on_message(0, engine_ended(0, await process.wait()))

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        if message["type"] == "error":
            self._fail_with_reason(from_exit_code(message["exit_code"], message["message"]))
        elif message["type"] == "scores":
            scores = wire.parse_scores(message)
            if generation := self._generations.get(scores.sequence):
                generation.put_scores(scores)
        elif message["type"] == "adapter":
            self.adapters.on_answer(rank, message)
        else:
            self._update_stage(self._stages[rank], message)

    def _update_stage(self, stage: StageStatus, message: dict[str, Any]) -> None:
        before = stage.state, stage.done
        stage.update(message, time.time())
        self._scheduler.chunk_beside_decoding = chunk_beside_decoding(
            self._stages, self._config.prefill_chunk
        )
        if (stage.state, stage.done) != before:
            self._progressed.set()
            self._view.progressed(stage)
        if stage.state != before[0]:
            _logger.info("%s", stage.line())

    def _fail_with_reason(self, error: BrigadeError) -> None:
        """That a neighbour is gone is known first and says least: better reasons go before."""
        if type(error) is ClusterError:
            asyncio.get_running_loop().call_later(_BLAME_SECONDS, self._fail, error)
        else:
            self._fail(error)

    def _fail(self, error: BrigadeError) -> None:
        """The first error is the reason; every running request ends with it."""
        if self._failure.done():
            return
        _logger.error("event=failed reason=%s", json.dumps(str(error)))
        self._failure.set_result(error)
        self._progressed.set()
        self.adapters.fail(error)
        for generation in set(self._generations.values()):
            generation.put(error)
        self._generations.clear()

    # --- requests

    def submit(self, prompts: ReadableList[Prompt], adapter: int = 0) -> Generation:
        """adapter is a version. Raises UnavailableError, OverloadedError or RequestError."""
        if reason := self._not_ready():
            raise UnavailableError(f"The cluster is not ready ({reason}): try again later.")
        self._check_lengths(prompts)
        sequences = [
            sequence for prompt in prompts for sequence in self._sequences(prompt, adapter)
        ]
        self._scheduler.add(*sequences)
        generation = Generation(sequences, self.drop)
        self._generations |= {sequence.id: generation for sequence in sequences}
        self._pump()
        return generation

    def _check_lengths(self, prompts: ReadableList[Prompt]) -> None:
        most, longest = self._config.max_prompt_tokens, max(len(prompt.ids) for prompt in prompts)
        if most and longest > most:
            raise RequestError(
                f"The prompt has {longest} tokens, and this server takes {most}: shorten it.",
                code="context_length_exceeded",
            )

    def _sequences(self, prompt: Prompt, adapter: int) -> list[Sequence]:
        """One for each answer. The first one's prompt is computed, the others copy it."""
        sequences: list[Sequence] = []
        max_tokens = max(1, prompt.max_tokens)  # For an echo alone a token is computed, too.
        for sampling in prompt.samplings:
            new_id = next(self._sequence_ids)
            sequence = Sequence(new_id, prompt.ids, max_tokens, sampling, prompt.end_ids, adapter)
            sequence.original = sequences[0] if sequences else None
            sequences.append(sequence)
        return sequences

    def drop(self, sequence_id: int) -> None:
        if self._generations.pop(sequence_id, None):
            self._scheduler.drop(sequence_id)
            self._pump()

    def _on_result(self, result: wire.Result) -> None:
        self._progress_at = time.monotonic()
        for event in self._scheduler.update(result.number, result.tokens):
            generation = self._generations.get(event.sequence)
            if generation:
                generation.put(event)
            if event.finish_reason:
                self._generations.pop(event.sequence, None)
        self._pump()

    def _pump(self) -> None:
        """Sends every step that can go now."""
        while self._process and not self._failure.done():
            if not self._scheduler.num_in_flight:
                self._progress_at = time.monotonic()
            step = self._scheduler.schedule()
            if step is None:
                return
            for sequence_id in step.begun:
                self._admit(sequence_id)
            self._process.link.send(wire.frame(wire.Kind.STEP, wire.encode_step(step)))

    def _admit(self, sequence_id: int) -> None:
        """What choosing its tokens needs goes to rank 0 before its first step, and again if it
        begins anew."""
        sequence = self._scheduler.sequence(sequence_id)
        message = {
            "type": "admit",
            "sequence": sequence_id,
            "sampling": asdict(sequence.sampling),
            "num_prompt": len(sequence.prompt),
            "tokens": sequence.tokens if sequence.sampling.reads_tokens else [],
        }
        if self._process:
            self._process.link.send_json(message)

    # --- adapters

    def tell_engines(self, message: dict[str, Any]) -> None:
        if (late := self._late()) or self._process is None:
            raise UnavailableError(f"The cluster is not ready ({late}): try again later.")
        self._process.link.send_json(message)
        for rank in range(1, self._cluster.num_ranks):
            self._hub.send(rank, message)

    def retire_adapter(self, version: int) -> None:
        self._scheduler.retire(version)
        self._pump()

    def num_with_adapter(self, version: int) -> int:
        return self._scheduler.num_with_adapter(version)

    # --- what is seen from outside

    def ready_reason(self) -> str | None:
        """None when requests can be served, else one line that says why not. A rank that
        is silent for a moment gets requests all the same: they wait for it."""
        silent = [s for s in self._stages if is_silent(s, time.time())]
        return self._not_ready() or (f"rank {silent[0].rank}: silent" if silent else None)

    def _not_ready(self) -> str | None:
        return self._late() or ("loading adapters" if self._adapters_wanted else None)

    def _late(self) -> str | None:
        if self._failure.done():
            return "the cluster broke"  # The reason may name hosts: it is for the log.
        if missing := self._hub.missing():
            return f"waiting for rank {missing[0]}"
        late = [stage.doing for stage in self._stages if stage.state != "ready"]
        return late[0] if late else None

    def pipeline(self) -> dict[str, Any]:
        return {
            "model": self._config.model_name,
            "num_ranks": self._cluster.num_ranks,
            "stages": [stage.to_json() for stage in self._stages],
            "num_running": self._scheduler.num_running,
            "num_waiting": self._scheduler.num_waiting,
            "kv_tokens": self._scheduler.num_held_tokens,
            "max_kv_tokens": self._scheduler.max_held_tokens,
            "better_split": better_split(self._stages),
            "adapters": self.adapters.statistics(),
        }

    def timeline(self, seconds: float) -> dict[str, Any]:
        """The last seconds as a Chrome trace."""
        return chrome_trace(self._stages, time.time() - seconds)
