"""Drives the life cycle of the engines: turns what happens into events, and performs the actions.

The decisions are made in `serve.front.pipeline.lifecycle`. The driver owns rank 0's engine process,
the connections to the other ranks, tasks and timers.
"""

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from serve.core.config import Cluster, ServeConfig
from serve.core.errors import BrigadeError, ClusterError, EngineError, PlanError, UnavailableError
from serve.core.folder import own_folder
from serve.core.layouts import Link
from serve.core.messages import (
    AdapterRead,
    AdapterRefused,
    Fault,
    Left,
    LoadAdapter,
    MakePlan,
    PrefixFiles,
    PrefixFileWritten,
    PrefixRead,
    PrepareSpare,
    Renew,
    Report,
    Result,
    Start,
    ToEngine,
    ToPrefixCache,
)
from serve.core.plan import StagePlan
from serve.front.adapters.loader import AdapterLoader
from serve.front.pipeline import actions, events
from serve.front.pipeline.lifecycle import Lifecycle
from serve.front.pipeline.orders import order
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.status import StageStatus
from serve.parent.control import ControlServer, Heard, Identity, engine_ended
from serve.parent.engine import EngineProcess
from serve.parent.spare import Spare

_logger = logging.getLogger(__name__)


class StartView(Protocol):
    """Shows people the progress of the start."""

    def planned(self, stages: list[StagePlan]) -> None: ...

    def progressed(self, stage: StageStatus) -> None: ...

    def loaded(self, stages: list[StageStatus], room: int) -> None:
        """Notes for how many tokens the stages have room for keys and values."""

    def warming_up(self, done: int, total: int) -> None:
        """Takes how much of the warm-up is done. total is 0 when it is over."""

    def ready(self) -> None: ...


class Driver:
    """Runs the engines for requests and adapters. folder has the model's config."""

    def __init__(
        self,
        config: ServeConfig,
        cluster: Cluster,
        folder: Path,
        lifecycle: Lifecycle,
        requests: Requests,
        adapters: AdapterLoader,
        view: StartView,
    ) -> None:
        self._config, self._cluster, self._folder = config, cluster, folder
        self._lifecycle, self._requests, self._adapters = lifecycle, requests, adapters
        self._view = view
        mine = Identity.of_cluster(cluster, lifecycle.roster.facts, os.getpid())
        self._control = ControlServer(mine, self.hear)
        self._copies = own_folder()
        self._process: EngineProcess | None = None
        self._spare = Spare(config.constants.keeps_spare_engine)
        self._reading: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[events.Event] = deque()
        self._is_taking = False
        self._timer: asyncio.TimerHandle | None = None
        self._loaded = asyncio.Event()  # The engines can read adapters.
        self.failure: asyncio.Future[BrigadeError] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        """Starts to listen for the other ranks. Raises AddressError."""
        if self._cluster.control:
            await self._control.listen(self._cluster.control)

    def start(self) -> None:
        """Starts the engines in the background."""
        self.on(events.Begin())

    async def close(self) -> None:
        """Ends the engines of all ranks. Raises EngineError if one does not end."""
        self.on(events.Close())
        for task in (*self._tasks, self._preparing, self._reading):
            if task:
                await cancelled(task)
        async with AsyncExitStack() as stack:  # All are closed, even if one raises.
            stack.callback(self._copies.cleanup)
            stack.push_async_callback(self._spare.close)
            if self._process:
                stack.push_async_callback(self._process.stop)
            await self._control.close()

    async def until_loaded(self) -> None:
        """Waits until engines accept messages. Raises UnavailableError if they never did."""
        if not self._lifecycle.has_worked and (late := self._lifecycle.late()):
            raise UnavailableError(f"The cluster is not ready ({late}): try again later.")
        await self._loaded.wait()

    def send(self, message: ToEngine) -> None:
        """Sends a message to rank 0's engine."""
        assert self._process is not None
        self._process.link.send(message)

    def tell_all(self, message: LoadAdapter | ToPrefixCache) -> None:
        """Sends a message to the engines of all ranks that take part."""
        self.send(message)
        for rank in self._lifecycle.ring[1:]:
            self._control.send(rank, message)

    # --- events

    def hear(self, rank: int, heard: Heard) -> None:
        """Hands an answer of this life to the part that asked, and all else to the life cycle."""
        with self._failing_by_bugs():
            match heard:
                case Report(life, AdapterRead() | AdapterRefused() as answer):
                    if self._lifecycle.is_current(life):
                        self._adapters.on_answer(rank, answer)
                case Report(life, PrefixFiles() | PrefixRead() | PrefixFileWritten() as answer):
                    if self._lifecycle.is_current(life):
                        self._requests.on_prefix_cache(rank, answer)
                case _:
                    self.on(events.Heard(rank, heard))

    def on(self, event: events.Event) -> None:
        """Performs the actions that follow from an event. An event that an action causes waits."""
        self._events.append(event)
        if self._is_taking:
            return
        self._is_taking = True
        with self._failing_by_bugs():
            while self._events:
                taken = self._events.popleft()
                for action in self._lifecycle.on(taken, time.monotonic()):
                    self._perform(action)
        self._is_taking = False
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if (deadline := self._lifecycle.deadline) is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self.on(events.Ticked(self._requests.waiting_seconds()))

    # --- actions

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.ReplaceEngine(life, dump, keep):
                self._spawn(self._replace_engine(life, dump, keep))
            case actions.AskForPlan(request, link, shard_counts):
                self.send(MakePlan(str(self._folder), request, link, shard_counts))
            case actions.MeasureLinks(life, ranks):
                self._spawn(self._measure_links(life, ranks))
            case actions.RenewRank(rank, life, dump, keep):
                self._control.send(rank, Renew(life, dump, keep))
            case actions.GiveOrders(stages):
                self._give_orders(stages)
            case actions.Settle(life):
                self._settle(life)
            case actions.Prepare(life):
                self._preparing = asyncio.create_task(self._prepare(life))
            case actions.Work(life, seconds):
                self._work(life, seconds)
            case actions.Interrupt(life):
                self._interrupt(life)
            case actions.Probe(life, ranks):
                self._spawn(self._probe(life, ranks))
            case actions.Forget(rank, pid, is_silent):
                if is_silent:  # `brigade launch` reads this line, and replaces the process.
                    _logger.warning("event=rank_silent rank=%d pid=%d", rank, pid)
                self._control.forget(rank)
            case actions.ShowPlan(stages):
                self._view.planned(list(stages))
            case actions.ShowProgress(rank):
                self._view.progressed(self._lifecycle.ranks[rank])
            case actions.Log(level, line):
                _logger.log(level, "%s", line)
            case actions.Fail(error):
                self._fail(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._run_reporting(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_reporting(self, work: Coroutine[Any, Any, None]) -> None:
        with self._failing_by_bugs():  # The life cycle would wait forever.
            await work

    async def _replace_engine(self, life: int, dump: bool, keep: bool) -> None:
        if dump and self._process:
            await self._process.dump()
        if keep and self._process and (left := await self._process.leave(life)):
            self.on(events.EngineStarted(life, left))
            return
        try:
            if self._reading:
                await cancelled(self._reading)
            if self._process:
                await self._process.stop()
            self._process = await self._spare.take()
        except EngineError as error:
            self.on(events.EngineFailed(error))
            return
        self._reading = asyncio.create_task(self._read(self._process, life))
        self.on(events.EngineStarted(life))

    async def _read(self, process: EngineProcess, life: int) -> None:
        """Reads the messages of rank 0's engine until it ends."""
        has_said_why = False
        try:
            while message := await process.receive():
                if isinstance(message, Result):
                    self._requests.on_result(message)
                    continue
                if isinstance(message, Left):
                    life = message.life
                    continue
                has_said_why |= isinstance(message, Fault)
                self.hear(0, Report(life, message))
        except Exception as error:  # The top of the task: nobody else would report it.
            self.on(events.Broken(life, _as_fault(error)))
            return
        if not has_said_why:
            self.on(events.Heard(0, Report(life, engine_ended(0, await process.wait()))))

    def _give_orders(self, stages: tuple[StagePlan, ...]) -> None:
        """Sends the orders with a new nonce, so that no engine of an older ring can join."""
        nonce = secrets.randbits(31)
        ring = tuple(stage.rank for stage in stages)
        adapters = self._adapters.wanted_versions()
        positions = self._requests.keep(
            [stage.stays.positions or {} for stage in self._lifecycle.stages]
        )
        for stage in stages:
            message = replace(
                order(self._config, self._cluster, ring, stage, nonce, self._copies.name),
                adapters=adapters,
                positions=positions,
            )
            if stage.rank:
                self._control.send(stage.rank, Start(message))
            else:
                self._lifecycle.ranks[0].pid = os.getpid()
                self.send(message)

    def _settle(self, life: int) -> None:
        stages = self._lifecycle.stages
        try:
            room = self._requests.settle(stages)
        except PlanError as error:
            self.on(events.NoRoom(life, str(error)))
            return
        self._view.loaded(stages, room.num_tokens)
        self.on(events.Settled(life))

    async def _prepare(self, life: int) -> None:
        try:
            await self._adapters.restore()
            self._loaded.set()
            if not self._lifecycle.has_worked:
                await self._adapters.load_at_start()
            versions = self._adapters.registry.loaded_versions()
            await self._requests.warm_up(versions, self._view.warming_up)
        except Exception as error:  # The top of the task: nobody else would report it.
            self.on(events.Broken(life, _as_fault(error)))
        else:
            self.on(events.Prepared(life))

    def _work(self, life: int, seconds: float | None) -> None:
        self._requests.resume()
        self._spare.prepare()
        for rank in self._lifecycle.ring[1:]:
            self._control.send(rank, PrepareSpare())
        num_ranks = len(self._lifecycle.ring)
        _logger.info("event=ready num_ranks=%d url=%s", num_ranks, self._config.url)
        if seconds is None:
            self._view.ready()
        else:
            _logger.info("event=recovered life=%d seconds=%.2f", life, seconds)

    def _interrupt(self, life: int) -> None:
        if self._preparing and not self._preparing.done():
            # It is cancelled first, so that it does not report errors that the fault has caused.
            self._spawn(self._interrupt_preparing(self._preparing, life))
        else:
            self._interrupt_work(life)

    async def _interrupt_preparing(self, preparing: "asyncio.Task[None]", life: int) -> None:
        await cancelled(preparing)
        self._interrupt_work(life)

    def _interrupt_work(self, life: int) -> None:
        self._loaded.clear()
        num_explained = self._requests.interrupt()
        self._adapters.interrupt()
        self.on(events.Interrupted(life, num_explained))

    async def _probe(self, life: int, ranks: frozenset[int]) -> None:
        ordered = sorted(ranks)
        answers = await asyncio.gather(*(self._control.answers(rank) for rank in ordered))
        both = zip(ordered, answers, strict=True)
        silent = frozenset(rank for rank, has_answered in both if not has_answered)
        self.on(events.Probed(life, silent))

    async def _measure_links(self, life: int, ranks: Sequence[int]) -> None:
        links: list[Link] = []
        for rank in ranks:  # One after the other, so that they do not share a link.
            try:
                link = await self._control.measure(rank)
            except ClusterError:  # on_message has said which rank is gone, and why.
                self.on(events.LinksMeasured(life, None))
                return
            if link is None:
                self.on(events.LinksMeasured(life, None, rank))
                return
            links.append(link)
        slowest = Link(
            max(link.round_trip_seconds for link in links),
            min(link.bytes_per_second for link in links),
        )
        self.on(events.LinksMeasured(life, slowest))

    def _fail(self, error: BrigadeError) -> None:
        """Ends every request with the reason, which is also the command's last line."""
        if self.failure.done():
            return
        _logger.error("event=failed exit_code=%d", error.exit_code)
        self.failure.set_result(error)
        self._adapters.fail(error)
        self._loaded.set()
        self._requests.fail(error)

    @contextmanager
    def _failing_by_bugs(self) -> Iterator[None]:
        """Reports whatever is raised, and ends the cluster."""
        try:
            yield
        except Exception as error:  # Nobody else would report it.
            _logger.error("event=bug", exc_info=error)
            self._fail(EngineError(f"{type(error).__name__}: {error}"))


def _as_fault(error: Exception) -> BrigadeError:
    if isinstance(error, BrigadeError):
        return error
    _logger.error("event=bug", exc_info=error)
    return BrigadeError(f"{type(error).__name__}: {error}")


async def cancelled(task: "asyncio.Task[None]") -> None:
    """Cancels a task until it has ended. Once may not be enough: before Python 3.12, wait_for loses
    a cancellation that comes together with its result."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
