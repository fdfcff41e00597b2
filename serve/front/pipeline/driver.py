"""Drives the front end: hands each message of the engines to its receiver, and performs the
reactions.

`serve.front.pipeline.lifecycle` makes the decisions about the engines. The driver owns the clock,
and the tasks that take time.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from serve.core.config import Cluster, ServeConfig
from serve.core.errors import BrigadeError, EngineError, PlanError
from serve.core.folder import own_folder
from serve.core.messages import MakePlan, Renew, Report
from serve.core.plan import StagePlan
from serve.front.adapters.loader import AdapterLoader
from serve.front.pipeline import actions, events
from serve.front.pipeline.lifecycle import Lifecycle
from serve.front.pipeline.orders import order
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.status import StageStatus
from serve.parent.control import Heard
from serve.parent.engines import Engines

_logger = logging.getLogger(__name__)


class StartView(Protocol):
    """Shows people the progress of the start."""

    def planned(self, stages: list[StagePlan]) -> None: ...

    def progressed(self, stage: StageStatus) -> None: ...

    def loaded(self, stages: list[StageStatus], room: int) -> None:
        """Shows for how many tokens the stages have room."""

    def warming_up(self, done: int, total: int) -> None:
        """Shows how much of the warm-up is done. total is 0 when it is over."""

    def ready(self) -> None: ...


class Receiver(Protocol):
    """Takes the messages of some types that the engines of a life send."""

    @property
    def hears(self) -> tuple[type, ...]:
        """The types of the messages that the receiver takes."""

    def on_message(self, rank: int, message: Any) -> None:
        """Takes a message from a rank's engine."""


class Driver:
    """Runs the engines for requests and adapters. folder contains the model's config."""

    def __init__(
        self,
        config: ServeConfig,
        cluster: Cluster,
        folder: Path,
        engines: Engines,
        lifecycle: Lifecycle,
        requests: Requests,
        adapters: AdapterLoader,
        view: StartView,
    ) -> None:
        self._config, self._cluster, self._folder = config, cluster, folder
        self._engines, self._lifecycle = engines, lifecycle
        self._requests, self._adapters = requests, adapters
        self._view = view
        receivers: list[Receiver] = [requests, adapters]
        self._receivers = {kind: each for each in receivers for kind in each.hears}
        self._copies = own_folder()
        self._preparing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[events.Event] = deque()
        self._is_performing = False
        self._timer: asyncio.TimerHandle | None = None
        self.failure: asyncio.Future[BrigadeError] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        """Starts to listen for the other ranks. Raises AddressError."""
        await self._engines.listen(self.hear)

    def start(self) -> None:
        """Starts the engines in the background."""
        self.on(events.Begin())

    async def close(self) -> None:
        """Ends the engines of all ranks. Raises EngineError if one does not end."""
        self.on(events.Close())
        for task in (*self._tasks, self._preparing):
            if task:
                await cancelled(task)
        async with AsyncExitStack() as stack:  # Copies are removed even if `close` raises.
            stack.callback(self._copies.cleanup)
            await self._engines.close()

    # --- messages and events

    def hear(self, rank: int, heard: Heard) -> None:
        """Hands a message of this life to its receiver, and any other to the life cycle."""
        with self._failing_by_bugs():
            if isinstance(heard, Report) and (to := self._receivers.get(type(heard.message))):
                if self._lifecycle.is_current(heard.life):
                    to.on_message(rank, heard.message)
            else:
                self.on(events.Heard(rank, heard))

    def on(self, event: events.Event) -> None:
        """Performs the reaction to an event. An event that an action causes waits its turn."""
        self._events.append(event)
        if self._is_performing:
            return
        self._is_performing = True
        with self._failing_by_bugs():
            while self._events:
                ready = self._lifecycle.on(self._events.popleft(), time.monotonic())
                for action in ready.actions:
                    self._perform(action, ready.life)
                self._set_timer(ready.deadline)
        self._is_performing = False

    def _set_timer(self, deadline: float | None) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self.on(events.Ticked(self._requests.waiting_seconds()))

    # --- actions

    def _perform(self, action: actions.Action, life: int) -> None:
        match action:
            case actions.RenewEngine(rank, dump, keep):
                self._renew_engine(rank, Renew(life, dump, keep))
            case actions.AskForPlan(request, link, shard_counts):
                self._engines.send(MakePlan(str(self._folder), request, link, shard_counts))
            case actions.MeasureLinks(ranks):
                self._spawn(self._measure_links(life, ranks))
            case actions.GiveOrders(plans, held):
                self._give_orders(plans, held)
            case actions.Prepare(changed_stages, is_first_start):
                preparing = self._prepare(life, list(changed_stages), is_first_start)
                self._preparing = asyncio.create_task(preparing)
            case actions.Work(seconds):
                self._work(life, seconds)
            case actions.Interrupt():
                self._interrupt(life)
            case actions.HalveChunks():
                self._requests.halve_chunks()
            case actions.Probe(ranks):
                self._spawn(self._probe(life, sorted(ranks)))
            case actions.Disconnect(rank, pid, is_silent):
                if is_silent:  # `brigade launch` reads this line, and replaces the process.
                    _logger.warning("event=rank_silent rank=%d pid=%d", rank, pid)
                self._engines.disconnect(rank)
            case actions.ShowPlan(plans):
                self._view.planned(list(plans))
            case actions.ShowProgress(stage):
                self._view.progressed(stage)
            case actions.Log(level, line):
                _logger.log(level, "%s", line)
            case actions.Fail(error):
                self._fail(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._run_reporting(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_reporting(self, work: Coroutine[Any, Any, None]) -> None:
        with self._failing_by_bugs():  # Otherwise the life cycle would wait forever.
            await work

    def _renew_engine(self, rank: int, message: Renew) -> None:
        if rank:
            self._engines.renew(rank, message)
        else:
            self._spawn(self._renew_own_engine(message))

    async def _renew_own_engine(self, message: Renew) -> None:
        try:
            await self._engines.renew_own(message)
        except EngineError as error:
            self.on(events.EngineFailed(error))

    def _give_orders(
        self,
        plans: Sequence[StagePlan],
        held: Sequence[Mapping[int, int]],
    ) -> None:
        """Sends the orders with a new nonce, so that no engine of an older ring can join."""
        nonce = secrets.randbits(31)
        ring = tuple(plan.rank for plan in plans)
        adapters = self._adapters.wanted_versions()
        positions = self._requests.keep(held)
        orders = [
            order(self._config, self._cluster, ring, plan, nonce, self._copies.name)
            for plan in plans
        ]
        self._engines.give_orders(
            [replace(each, adapters=adapters, positions=positions) for each in orders]
        )

    async def _prepare(
        self,
        life: int,
        changed_stages: list[StageStatus],
        is_first_start: bool,
    ) -> None:
        try:
            if changed_stages:
                room = self._requests.settle(changed_stages)
                self._view.loaded(changed_stages, room.num_tokens)
            await self._adapters.restore()
            self._adapters.resume()
            if is_first_start:
                await self._adapters.load_at_start()
            versions = self._adapters.registry.loaded_versions()
            await self._requests.warm_up(versions, self._view.warming_up)
        except PlanError as error:
            self.on(events.NoRoom(life, str(error)))
        except BrigadeError as error:
            self.on(events.Broken(life, error))
        except Exception as error:  # The top of the task: nobody else would report it.
            self.on(events.Broken(life, _as_bug(error)))
        else:
            self.on(events.Prepared(life))

    def _work(self, life: int, seconds: float | None) -> None:
        self._requests.resume()
        self._engines.prepare_spares()
        num_ranks = len(self._engines.ring)
        _logger.info("event=ready num_ranks=%d url=%s", num_ranks, self._config.url)
        if seconds is None:
            self._view.ready()
        else:
            _logger.info("event=recovered life=%d seconds=%.2f", life, seconds)

    def _interrupt(self, life: int) -> None:
        if self._preparing and not self._preparing.done():
            # The preparation is cancelled first, so that it reports no error that the fault caused.
            self._spawn(self._interrupt_preparing(self._preparing, life))
        else:
            self._interrupt_work(life)

    async def _interrupt_preparing(self, preparing: "asyncio.Task[None]", life: int) -> None:
        await cancelled(preparing)
        self._interrupt_work(life)

    def _interrupt_work(self, life: int) -> None:
        interruption = self._requests.interrupt()
        self._adapters.interrupt()
        self.on(events.Interrupted(life, interruption))

    async def _probe(self, life: int, ranks: Sequence[int]) -> None:
        self.on(events.Probed(life, await self._engines.silent_of(ranks)))

    async def _measure_links(self, life: int, ranks: Sequence[int]) -> None:
        link, silent = await self._engines.slowest_link(ranks)
        self.on(events.LinksMeasured(life, link, silent))

    def _fail(self, error: BrigadeError) -> None:
        """Ends every request with the reason, which is also the command's last line."""
        if self.failure.done():
            return
        _logger.error("event=failed exit_code=%d", error.exit_code)
        self.failure.set_result(error)
        self._adapters.fail(error)
        self._requests.fail(error)

    @contextmanager
    def _failing_by_bugs(self) -> Iterator[None]:
        """Reports whatever is raised, and ends the cluster."""
        try:
            yield
        except Exception as error:  # Nobody else would report it.
            self._fail(_as_bug(error))


def _as_bug(error: Exception) -> BrigadeError:
    """Logs where an unexpected exception came from, and returns an error that names it."""
    _logger.error("event=bug", exc_info=error)
    return BrigadeError(f"{type(error).__name__}: {error}")


async def cancelled(task: "asyncio.Task[None]") -> None:
    """Cancels a task until it has ended. One cancellation may not be enough: before Python 3.12,
    wait_for loses one that comes together with its result."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
