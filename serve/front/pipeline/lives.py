"""The lives of the engines. All start together, work, and end together: that is a life.

    renewing ── every rank has an engine ──> joining the ring ── loaded ──> working
        ^                                            │                         │
        └──────────── a fault: an engine ended, a link broke, a stall ─────────┘

The ranks' parents outlive it, and so does what they hold: sequences and connections. A fault
for which new engines are no remedy, and too many faults, end the cluster.
"""

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from serve.core.config import Cluster, ServeConfig
from serve.core.errors import BrigadeError, ClusterError, EngineError, PlanError, from_exit_code
from serve.core.folder import own_folder
from serve.core.messages import (
    AdapterRead,
    AdapterRefused,
    Admit,
    Fault,
    FromEngine,
    LoadAdapter,
    Renew,
    Report,
    Result,
    Start,
    Status,
)
from serve.core.plan import StagePlan
from serve.core.types import Step
from serve.front.pipeline.orders import order
from serve.front.pipeline.plans import Plans
from serve.front.pipeline.stall import is_silent, stall_cause
from serve.front.pipeline.status import StageStatus
from serve.parent.control import ControlServer, Gone, Heard, Identity, Joined, engine_ended
from serve.parent.engine import EngineProcess
from serve.parent.restarts import Restarts, may_pass

_WATCH_SECONDS = 0.5
_BLAME_SECONDS = 0.5
_GLANCE_SECONDS = 0.1  # the same where clients wait
_RENEW_SECONDS = 10.0  # for a parent to hear that it is to start an engine

_logger = logging.getLogger(__name__)


class StartView(Protocol):
    """Who shows people how the start goes on."""

    def planned(self, stages: list[StagePlan]) -> None: ...

    def progressed(self, stage: StageStatus) -> None: ...

    def loaded(self, stages: list[StageStatus], room: int) -> None:
        """They have room for keys and values of so many tokens."""

    def ready(self) -> None: ...


class Work(Protocol):
    """What the engines are for."""

    async def prepare(self) -> None:
        """The engines are loaded, and have nothing of what those before them had."""

    @property
    def is_warming_up(self) -> bool:
        """Whether `prepare` has them run steps."""

    def go(self) -> None:
        """They may get steps."""

    def interrupt(self) -> int:
        """They are ended, or will be: nothing that is under way comes back. Returns how many
        faults, this one included, were the doing of a request that is found and given up."""

    def on_result(self, result: Result) -> None: ...

    def on_adapter(self, rank: int, answer: AdapterRead | AdapterRefused) -> None: ...

    def waiting_seconds(self) -> float:
        """How long steps have been under way without any coming back."""


class Lives:
    """folder is where the model's config is, also that of a hub model. view is told how
    the start goes on."""

    def __init__(
        self,
        config: ServeConfig,
        cluster: Cluster,
        folder: Path,
        facts: dict[str, str],
        view: StartView,
        work: Work,
    ) -> None:
        self._config, self._cluster = config, cluster
        self._view, self._work = view, work
        self._ranks = [StageStatus(rank, host) for rank, host in enumerate(cluster.hosts)]
        self.stages = list(self._ranks)  # those that take part
        self._plans = Plans(config, folder)
        self.control = ControlServer(Identity.of(cluster, facts, os.getpid()), self._on_message)
        self._restarts = Restarts(config.max_restarts, config.restart_window)
        self._copies = own_folder()
        self._process: EngineProcess | None = None
        self.number = 0  # how often engines started anew
        self._faulty = asyncio.Event()
        self._reason: BrigadeError | None = None
        self._stalled = False
        self._progressed = asyncio.Event()
        self._recovering_since: float | None = None
        self._has_worked = self.is_working = False
        self._unfit: set[int] = set()  # ranks whose engine says that it never can
        self.recovery_seconds = 0.0

    async def run(self) -> None:
        """Raises why the cluster cannot go on."""
        self._process = await EngineProcess.start()
        plan = await self._plans.first(self.ring, self._process)
        await self.control.wait_for(self.ring[1:], self._config.join_timeout)
        self._take_part(plan)
        wait_seconds = 0.0
        while True:
            wait_seconds = await self._live(wait_seconds)
            await self._renew()

    async def close(self) -> None:
        await self.control.close()
        if self._process:
            await self._process.stop()
        self._copies.cleanup()

    # --- one life

    async def _live(self, wait_seconds: float) -> float:
        """Until a fault. Returns how long the next life has to wait, or raises why there is
        none."""
        assert self._process is not None
        reading = asyncio.create_task(self._guarded(self._read(self._process)))
        working = asyncio.create_task(self._guarded(self._work_on(wait_seconds)))
        try:
            await self._faulty.wait()
            # First, so that nobody takes what the end of the engines breaks for a reason of it.
            await _cancelled(working)
            return await self._judge()
        finally:
            await _cancelled(working)
            await _cancelled(reading)

    async def _guarded(self, task: Coroutine[Any, Any, None]) -> None:
        try:
            await task
        except BrigadeError as error:
            self._on_fault(error)
        except Exception as error:  # The top of the task: without it nobody would be told.
            _logger.exception("event=bug")
            self._on_fault(BrigadeError(f"{type(error).__name__}: {error}"))

    async def _work_on(self, wait_seconds: float) -> None:
        await asyncio.sleep(wait_seconds)
        await self._until_all({"starting"}, _RENEW_SECONDS, "start an engine")
        self._give_orders()
        joined = {"fetching", "loading", "ready"}
        await self._until_all(joined, self._config.join_timeout, "join the ring")
        await self._until_all({"ready"}, self._config.load_timeout, "load its layers")
        await self._work.prepare()
        self._begin()
        await self._watch()

    def _give_orders(self) -> None:
        """Under a new nonce: what is left of an older ring cannot be mixed in."""
        assert self._process is not None
        nonce = secrets.randbits(31)
        for stage in self.stages:
            assert stage.plan is not None
            stage.state = "joining"
            told = order(
                self._config, self._cluster, self.ring, stage.plan, nonce, self._copies.name
            )
            if stage.rank:
                stage.pid = self.control.pid(stage.rank)
                self.control.send(stage.rank, Start(told))
            else:
                stage.pid = os.getpid()
                self._process.link.send(told)

    def _begin(self) -> None:
        self._has_worked = self.is_working = True
        self._work.go()
        _logger.info("event=ready num_ranks=%d url=%s", len(self.stages), self._config.url)
        if self._recovering_since is None:
            self._view.ready()
            return
        seconds = time.monotonic() - self._recovering_since
        self._recovering_since = None
        self.recovery_seconds += seconds
        _logger.info("event=recovered life=%d seconds=%.2f", self.number, seconds)

    async def _watch(self) -> None:
        """Raises ClusterError when steps are under way and none comes back, for a rank that
        is stopped breaks no connection; and when one that was gone is there again."""
        most = self._config.stall_timeout
        while self._work.waiting_seconds() <= most:
            newcomers = self._fit - set(self.ring)
            # Not with the last restart, which is for a fault of what works.
            if newcomers and self._restarts.num_left(time.monotonic()) > 1:
                raise ClusterError(f"Ranks {sorted(newcomers)} are back: all share the layers.")
            # An engine may be at work while its parent stands still. Where steps wait, that they
            # do is told first: it says more.
            for stage in self.stages:
                if time.monotonic() - stage.heard_at > most + 2 * _WATCH_SECONDS:
                    self._stalled = True
                    await self._let_go(stage.rank)
                    if not stage.rank:  # It has no connection that could break.
                        raise ClusterError(f"Rank 0 on {stage.host} is silent.")
            before = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            if time.monotonic() - before > 2 * _WATCH_SECONDS:
                # It was this process that stood still: what came meanwhile is read first.
                await asyncio.sleep(_WATCH_SECONDS)
        self._stalled = True
        now = time.monotonic()
        cause = stall_cause(self.stages, now)
        for stage in self.stages:
            if is_silent(stage, now):
                await self._let_go(stage.rank, even_if_it_answers=False)
        raise ClusterError(
            f"No step came back for {most:g} s: {cause}, look at its log (--stall-timeout)."
        )

    async def _until_all(self, states: set[str], timeout_seconds: float, what: str) -> None:
        """The time counts from the last progress of any stage: a download may take hours."""
        while late := [stage for stage in self.stages if stage.state not in states]:
            self._progressed.clear()
            try:
                await asyncio.wait_for(self._progressed.wait(), timeout_seconds)
            except TimeoutError as error:
                if late[0].state == "renewing":  # Its parent hears nothing: it has to join anew.
                    await self._let_go(late[0].rank)
                raise ClusterError(
                    f"Rank {late[0].rank} on {late[0].host} did not {what}: nothing moved for "
                    f"{timeout_seconds:g} s, look at its log."
                ) from error

    async def _let_go(self, rank: int, even_if_it_answers: bool = True) -> None:
        """Ends the connection of a silent rank. If it is the parent that does not answer, a line
        of the log says so: `brigade launch` reads it, and replaces that process."""
        answers = rank not in self.control.joined or await self.control.answers(rank)
        if not answers:
            _logger.warning("event=rank_silent rank=%d pid=%d", rank, self.control.pid(rank))
        if even_if_it_answers or not answers:
            self.control.forget(rank)

    # --- from one life to the next

    async def _judge(self) -> float:
        was_ready, self.is_working = self.is_working, False
        self._recovering_since = self._recovering_since or time.monotonic()
        num_explained = self._work.interrupt()
        # That a neighbour is gone is known first and says least: a better reason replaces it.
        if not was_ready or not self._restarts.num_left(time.monotonic()):
            await asyncio.sleep(_BLAME_SECONDS)
        elif type(self._reason) is ClusterError:
            await asyncio.sleep(_GLANCE_SECONDS)
        assert self._reason is not None
        now = time.monotonic()
        return self._restarts.wait_seconds(self._reason, was_ready, now, num_explained)

    async def _renew(self) -> None:
        """New engines on all ranks. Raises ClusterError if a rank is gone for good."""
        self.number += 1
        reason = json.dumps(str(self._reason))
        _logger.warning("event=recovering life=%d reason=%s", self.number, reason)
        self._faulty.clear()
        self._reason = None
        for stage in self._ranks:
            self._renew_member(stage)
        if self._process:
            if self._stalled:
                await self._process.dump()
            await self._process.stop()
        self._stalled = False
        self._process = await EngineProcess.start()
        self.stages[0].state = "starting"
        if not self._config.replan:
            return await self._gather_all()
        try:
            await self._gather_some()
        except EngineError as error:  # Rank 0's, while it made a plan.
            self._on_fault(error)

    async def _gather_all(self) -> None:
        others, seconds = self.ring[1:], self._config.return_timeout
        if self.missing:
            ranks = ",".join(map(str, self.missing))
            _logger.warning("event=waiting ranks=%s timeout=%g", ranks, seconds)
        await self.control.wait_for(others, seconds, "--return-timeout")

    async def _gather_some(self) -> None:
        """Those that took part are waited for, but not for long: then all that are there
        share the layers, if they have the memory."""
        try:
            await self.control.wait_for(self.ring[1:], self._config.join_timeout)
        except ClusterError as error:
            _logger.warning("event=going_on reason=%s", json.dumps(str(error)))
        deadline = time.monotonic() + self._config.return_timeout
        while True:
            there = (0, *sorted(self._fit))
            memory = [self._ranks[rank].memory_bytes for rank in there]
            assert self._process is not None
            try:
                plan = await self._plans.again(there, memory, self._process)
                break
            except PlanError as error:
                _logger.warning("event=waiting reason=%s", json.dumps(str(error)))
            await self._process.stop()
            self._process = await EngineProcess.start()
            await self.control.wait_for_more((there, self._unfit), deadline - time.monotonic())
        if there != self.ring:
            self._take_part(plan)

    def _renew_member(self, stage: StageStatus) -> None:
        stage.renew()
        self.control.send(stage.rank, Renew(self.number, self._stalled))

    def _take_part(self, plan: list[StagePlan]) -> None:
        self.stages = [self._ranks[planned.rank] for planned in plan]
        for stage, planned in zip(self.stages, plan, strict=True):
            stage.assign(planned)
        self._view.planned(plan)

    # --- what is heard

    async def _read(self, process: EngineProcess) -> None:
        has_said_why = False
        while message := await process.link.receive():
            has_said_why |= isinstance(message, Fault)
            if not isinstance(message, Result):
                self._on_message(0, Report(self.number, message))
            elif self.is_working or self._work.is_warming_up:  # else it comes too late
                self._work.on_result(message)
        if not has_said_why:
            fault = engine_ended(0, await process.wait())
            self._on_message(0, Report(self.number, fault))

    def _on_message(self, rank: int, heard: Heard) -> None:
        match heard:
            case Joined():
                self._unfit.discard(rank)
                self._renew_member(self._ranks[rank])
            case Gone(reason):
                # While a rank is waited for it may come and go.
                _logger.warning("event=rank_gone rank=%d reason=%s", rank, json.dumps(reason))
                if rank in self.ring and self._ranks[rank].state != "renewing":
                    self._on_fault(ClusterError(reason))
            case Report(life, Fault(exit_code, reason)):
                self._on_reported(rank, life, from_exit_code(exit_code, reason))
            case Report(life, message) if life == self.number:
                self._on_report(rank, message)

    def _on_reported(self, rank: int, life: int, error: BrigadeError) -> None:
        """What engines say that are ended by now is of no use, but for a better reason."""
        _logger.warning("event=fault rank=%d reason=%s", rank, json.dumps(str(error)))
        if rank and self._config.replan and self._has_worked and not may_pass(error):
            self._unfit.add(rank)  # The others have a model that works.
            error = ClusterError(str(error))
        if (life == self.number and rank in self.ring) or not may_pass(error):
            self._on_fault(error)

    def _on_report(self, rank: int, message: FromEngine) -> None:
        match message:
            case Status():
                self._update_stage(self._ranks[rank], message)
            case AdapterRead() | AdapterRefused():
                self._work.on_adapter(rank, message)
            case _:
                raise ClusterError(f"Rank {rank} sent {type(message).__name__} unasked.")

    def _on_fault(self, error: BrigadeError) -> None:
        """The first one is the reason, unless all that it says is that a neighbour is gone."""
        is_better = type(self._reason) is ClusterError and type(error) is not ClusterError
        if self._reason is None or is_better or not may_pass(error):
            self._reason = error
        self._faulty.set()
        self._progressed.set()

    def _update_stage(self, stage: StageStatus, status: Status) -> None:
        before = stage.state, stage.done
        stage.update(status, self.ring, time.monotonic())
        if (stage.state, stage.done) != before:
            self._progressed.set()
            self._view.progressed(stage)
        if stage.state != before[0]:
            _logger.info("%s", stage.line())

    # --- what is seen from outside

    @property
    def ring(self) -> tuple[int, ...]:
        """The ranks that take part, in order."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def _fit(self) -> set[int]:
        """The other ranks that are there and may take part."""
        return self.control.alike - self._unfit

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.ring[1:] if rank not in self.control.joined]

    def refuse_ring(self, error: PlanError, before: tuple[int, ...]) -> None:
        """Raises ClusterError, after which the ranks that worked before go on without those that
        came to them, or more are waited for, if there are any."""
        if newcomers := before and set(self.ring).difference(before):
            self._unfit |= newcomers
            raise ClusterError(str(error)) from error
        if len(self.stages) < len(self._ranks):
            self._plans.refuse(self.ring, str(error))
            raise ClusterError(str(error)) from error

    def late(self) -> str | None:
        """None when all engines work, else one line that says what they are doing."""
        if self.missing:
            return f"waiting for rank {self.missing[0]}"
        return next((stage.doing for stage in self.stages if stage.state != "ready"), None)

    def silent(self) -> str | None:
        now = time.monotonic()
        return next((f"rank {s.rank}: silent" for s in self.stages if is_silent(s, now)), None)

    def tell_all(self, message: LoadAdapter) -> None:
        assert self._process is not None
        self._process.link.send(message)
        for rank in self.ring[1:]:
            self.control.send(rank, message)

    def send(self, message: Admit | Step) -> None:
        """To rank 0's engine."""
        assert self._process is not None
        self._process.link.send(message)


async def _cancelled(task: asyncio.Task[None]) -> None:
    # More than once: wait_for before Python 3.12 loses one that comes together with its result.
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
