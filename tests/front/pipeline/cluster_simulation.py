"""A cluster without processes: the real life cycle, requests and scheduler on a virtual clock.

Engines, parents and the launcher are played. What they do takes random times from a seed, and they
are killed, stopped, cut off and brought back at random. It is checked at every action that no two
lives of engines mix.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from serve.core.errors import BrigadeError, EngineError, PlanError
from serve.core.layouts import Link
from serve.core.messages import (
    Admit,
    Fault,
    FromEngine,
    Left,
    Loaded,
    Planned,
    Report,
    RingLost,
    Status,
)
from serve.core.plan import PlanRequest, StagePlan, even_split
from serve.core.types import Event as Answer
from serve.core.types import Sampling, StageState, Step
from serve.front.pipeline import actions, events
from serve.front.pipeline.generation import Generation
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.lifecycle import Lifecycle
from serve.front.pipeline.membership import Membership
from serve.front.pipeline.recovery import Interruption
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.states import State
from serve.front.pipeline.status import StageStatus
from serve.parent.control import Gone, Joined
from serve.parent.engines import Engines
from serve.rank.outbox import Outbox
from tests.configs import serve_config
from tests.front.pipeline.stage_model import StageModel, next_token, result_of

FACTS = {"mlx": "1"}
POISON = 1500  # no token of the model's own
STEP_SECONDS = 0.05
REPORT_SECONDS = 0.25


@dataclass
class PlayedEngine:
    """An engine process of one rank. order is the life whose order it has, None before that and
    after it has left its ring; then has_left is set. loaded_for is the ring for which it has loaded
    its layers. If it is stuck, it cannot leave its ring. If it is confused, it reports other
    positions than it holds."""

    rank: int
    order: int | None = None
    has_left: bool = False
    state: StageState = StageState.STARTING
    is_stopped: bool = False
    is_dead: bool = False
    is_stuck: bool = False
    is_confused: bool = False
    loaded_for: list[int] | None = None
    files: str = ""
    model: StageModel = field(default_factory=StageModel)

    @property
    def runs(self) -> bool:
        return not (self.is_dead or self.is_stopped)


@dataclass
class PlayedParent:
    """The parent of a rank above 0. It has one connection after the other. If it will return, it
    outlives the end of its connection, with its engine."""

    pid: int
    engine: PlayedEngine
    life: int = 0
    connection: int = 0
    is_connected: bool = True
    is_stopped: bool = False
    will_return: bool = False

    @property
    def can_speak(self) -> bool:
        """Whether rank 0 hears it, and takes what it says for a report of this life."""
        return self.is_connected and not self.is_stopped and self.life >= 0


@dataclass
class Asked:
    """A request, and its answers so far by sequence."""

    prompt: Prompt
    generation: Generation
    has_left: bool = False


class PlayedCluster:
    """min_ranks are what the model needs, by plan; roomy_ranks are what its caches need."""

    def __init__(
        self,
        seed: int,
        num_ranks: int = 3,
        min_ranks: int = 1,
        roomy_ranks: int = 1,
        is_launched: bool = False,
        **flags: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "max_restarts": 10**6,
            "join_timeout": 10.0,
            "return_timeout": 300.0,
            "load_timeout": 20.0,
            "stall_timeout": 5.0,
            "warms_up": False,
            "prefill_chunk": 8,
            "max_num_seqs": 8,
        }
        config = serve_config(**(settings | flags))
        self.chance = random.Random(seed)
        self.can_rewind = seed % 2 == 0
        self.now = 1000.0
        hosts = ["h"] * num_ranks
        self.membership = Membership(config, hosts, FACTS, is_launched=is_launched)
        self.lifecycle = Lifecycle(config, self.membership)
        engines = cast(Engines, self)  # Requests only send messages to them.
        self.requests = Requests(config, num_ranks, engines, clock=lambda: self.now)
        self.config, self.num_ranks = config, num_ranks
        self.min_ranks, self.roomy_ranks = min_ranks, roomy_ranks
        self.engine: PlayedEngine | None = None  # rank 0's
        self.parents: dict[int, PlayedParent] = {}
        self.facts: dict[int, dict[str, str]] = {}  # of ranks with others than rank 0's
        self.absent: set[int] = set()
        self.import_seconds: dict[int, float] = {}  # until a rank's next engine reads its order
        self.forgotten: list[tuple[int, bool]] = []
        self.asked: list[Asked] = []
        self.links: list[Link | None] = []  # of the plans that were asked for
        self.shown: list[tuple[StagePlan, ...]] = []  # plans
        self.warning = ""  # of the plans
        self.num_measured = 0
        self.measure_seconds = 0.0
        self.renew_seconds = 0.0
        self.silent: int | None = None  # a rank whose link cannot be measured
        self.shardings: dict[int, str] = {}  # of ranks with others than rank 0's
        self.states: Counter[State] = Counter()
        self.charged: list[float] = []  # when lives ended for which no request is to blame
        self.num_explained = 0
        self.failure: BrigadeError | None = None
        self.preparing: int | None = None
        self.ordered: list[int] = []
        self.logged: list[str] = []
        self.num_events = 0
        self.num_stays = 0
        self.num_kept_sequences = 0
        self.num_reloaded = 0  # engines that have stayed and got other layers
        self._broken_life = -1
        self.files = "1"  # the state of the model's files on all hosts
        self._is_replacing = False
        self._todo: list[Step] = []
        self._outbox = Outbox(self._todo.append)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._pids = itertools.count(100)
        self._inbox: list[events.Event] = []
        self.on(events.Begin())
        for rank in range(1, num_ranks):
            self.after(self.delay(), lambda rank=rank: self.join(rank))

    # --- time

    def delay(self, max_seconds: float = 0.5) -> float:
        return self.chance.choice([0.0, self.chance.uniform(0, max_seconds)])

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), do))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Whether the condition came true within a time."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            if until() or self.failure:
                return until()
            self.now, _, do = heapq.heappop(self._queue)
            do()
        self.now = max(self.now, end)
        return until()

    def on(self, event: events.Event) -> None:
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return
        while self._inbox:
            self.num_events += 1
            self.check_late_events_change_nothing()
            ready = self.lifecycle.on(self._inbox[0], self.now)
            assert ready.life == self.lifecycle.life
            assert ready.deadline == self.lifecycle.deadline
            for action in ready.actions:
                self.perform(action, ready.life)
            self.states[self.lifecycle.state] += 1
            del self._inbox[0]
        if (deadline := self.lifecycle.deadline) is not None:
            self.after(max(0.0, deadline - self.now), self.tick)

    def check_late_events_change_nothing(self) -> None:
        """Answers of an earlier life, and answers that nobody waits for."""
        lifecycle = self.lifecycle
        life = lifecycle.life - 1
        assert not lifecycle.is_current(life), "an answer of an earlier life is handed over"
        fault = Fault(EngineError.exit_code, "ended")
        late: list[events.Event] = [
            events.Heard(0, Report(life, Status(StageState.STARTING))),
            events.Heard(0, Report(life, Left(life))),
            events.NoRoom(life, "late"),
            events.Prepared(life),
            events.Broken(life, EngineError("late")),
            events.Interrupted(life, Interruption(1)),
            events.Probed(life, frozenset({1})),
            events.Heard(0, Report(life, fault)),
            events.Heard(1, Report(life, Status(StageState.READY))),
        ]
        if lifecycle.state is not State.PREPARING:
            late += [events.Prepared(life + 1), events.NoRoom(life + 1, "late")]
        if lifecycle.state is not State.HANDLING_FAULT:
            late += [
                events.Interrupted(life + 1, Interruption(0)),
                events.Probed(life + 1, frozenset()),
            ]
        before = lifecycle.state, lifecycle.deadline, self.membership.stages[-1].state
        answer = lifecycle.on(self.chance.choice(late), self.now)
        assert all(isinstance(action, actions.Log) for action in answer.actions)
        after = lifecycle.state, lifecycle.deadline, self.membership.stages[-1].state
        assert after == before

    def tick(self) -> None:
        deadline = self.lifecycle.deadline
        if deadline is not None and self.now >= deadline:
            self.on(events.Ticked(self.requests.waiting_seconds()))

    # --- actions

    def perform(self, action: actions.Action, life: int) -> None:
        match action:
            case actions.RenewEngine(0, _, keep):
                assert not self._is_replacing, "two engines of rank 0 at once"
                self._is_replacing = True
                if keep and self.engine and self.can_stay(self.engine):
                    self.after(self.delay(2.0), lambda: self.keep_engine(life))
                else:
                    self.replace_engine(life)
            case actions.MeasureLinks(ranks):
                assert not self.membership.missing, "a link to a rank that is not there"
                self.num_measured += 1
                parents = [self.parents[rank] for rank in ranks]
                seconds = self.measure_seconds or self.delay()
                self.after(seconds, lambda: self.measured(life, parents))
            case actions.AskForPlan(request, link, shard_counts):
                self.links.append(link)
                engine = self.engine
                if shard_counts:
                    request = replace(request, num_shards=shard_counts[0])
                self.after(self.delay(), lambda: self.plan(engine, life, request, link))
            case actions.ShowPlan(plans):
                self.shown.append(plans)
            case actions.RenewEngine(rank, _, keep):
                parent = self.parents[rank]
                over = parent.connection
                seconds = self.renew_seconds or self.delay()
                self.after(seconds, lambda: self.renew(rank, parent, over, life, keep))
            case actions.GiveOrders(plans, held):
                assert life not in self.ordered, "a life has one order"
                self.ordered.append(life)
                ring = [plan.rank for plan in plans]
                self._todo.clear()
                self._outbox = Outbox(self._todo.append)
                positions = self.requests.keep(held)
                for rank in ring:
                    engine = self.engine_of(rank)
                    self.after(self.delay(), lambda e=engine: self.obey(e, life, ring, positions))
            case actions.Prepare(changed_stages):
                self.prepare(life, list(changed_stages))
            case actions.Work():
                engines = [self.engine_of(rank) for rank in self.membership.ring]
                assert {e.order for e in engines if e and not e.is_dead} <= {life}
                self.preparing = None
                self.requests.resume()
            case actions.Interrupt():
                self.preparing = None
                self.interrupt(life)
            case actions.HalveChunks():
                self.requests.halve_chunks()
            case actions.HalveChunks():
                self.requests.halve_chunks()
            case actions.Probe(ranks):
                # Longer than a reason is looked for: a life is not judged before.
                self.after(1.0 + self.delay(1.0), lambda: self.probed(life, ranks))
            case actions.Disconnect(rank, _, is_silent):
                self.forget(rank, is_silent)
            case actions.Fail(error):
                self.failure = error
                self.requests.fail(error)
            case actions.Log(_, line):
                self.logged.append(line)

    def can_stay(self, engine: PlayedEngine) -> bool:
        """Whether an engine can leave its ring."""
        is_used = engine.order is not None or engine.has_left
        return engine.runs and not engine.is_stuck and is_used

    def leave_ring(self, engine: PlayedEngine, life: int) -> Left:
        self.num_stays += not engine.has_left
        engine.order, engine.state, engine.has_left = None, StageState.STARTING, True
        positions = {id: len(tokens) for id, tokens in engine.model.held.items()}
        if engine.is_confused:
            engine.is_confused = False
            for id, position in positions.items():
                positions[id] = max(0, position + self.chance.choice([-3, 0, 3]))
            positions[10**6] = 5
        return Left(life, positions)

    def keep_engine(self, life: int) -> None:
        """Rank 0's engine leaves its ring, unless it has ended or stopped meanwhile."""
        assert self.engine
        if not self.can_stay(self.engine):
            self.replace_engine(life)
            return
        self._is_replacing = False
        self.say(0, life, self.leave_ring(self.engine, life))

    def replace_engine(self, life: int) -> None:
        if self.engine:
            self.engine.is_dead = True
        self.after(self.delay(2.0), lambda: self.start_engine(life))

    def start_engine(self, life: int) -> None:
        self._is_replacing = False
        self.engine = PlayedEngine(0)
        self.say(0, life, Status(StageState.STARTING))

    def plan(
        self,
        engine: PlayedEngine | None,
        life: int,
        request: PlanRequest,
        link: Link | None,
    ) -> None:
        assert engine
        if engine is not self.engine or not engine.runs:
            return
        if request.num_ranks < self.min_ranks:
            self.say(0, life, Planned([], refusal="Too large."))
            return
        layers = even_split(12, request.num_stages)
        stages = []
        for rank in range(request.num_ranks):
            stage, shard = divmod(rank, request.num_shards)
            place = (stage, request.num_shards, shard)
            stages.append(StagePlan(rank, layers[stage], 0, 0, 10, 0, 0, 0.5, None, *place))
        self.say(0, life, Planned(stages, "Chosen." if link else "", self.warning))

    def measured(self, life: int, parents: list[PlayedParent]) -> None:
        """As ControlServer measures: the link of a parent that was lost meanwhile has no speed."""
        if not all(parent.is_connected for parent in parents):
            answer = events.LinksMeasured(life, None)
        elif self.silent is not None:
            answer = events.LinksMeasured(life, None, self.silent)
        else:
            answer = events.LinksMeasured(life, Link(0.0002, 1e9))
        self.on(answer)

    def renew(
        self,
        rank: int,
        parent: PlayedParent,
        connection: int,
        life: int,
        keep: bool,
    ) -> None:
        if parent is not self.parents[rank] or not parent.is_connected or parent.is_stopped:
            return
        if connection != parent.connection:
            return  # It was lost with the connection.
        if keep and self.can_stay(parent.engine):
            parent.life = life
            self.say(rank, life, self.leave_ring(parent.engine, life))
            return
        parent.engine.is_dead = True
        parent.engine = PlayedEngine(rank)
        parent.life = life
        self.say(rank, life, Status(StageState.STARTING))

    def obey(
        self,
        engine: PlayedEngine | None,
        life: int,
        ring: list[int],
        positions: dict[int, int],
    ) -> None:
        if engine is None or not engine.runs or engine is not self.engine_of(engine.rank):
            return
        if engine.rank and self.parents[engine.rank].life != life:
            return
        if seconds := self.import_seconds.pop(engine.rank, 0.0):
            self.after(seconds, lambda: self.obey(engine, life, ring, positions))
            return
        assert engine.order is None, "an engine that has an order gets another one"
        num_shards = self.membership.num_shards
        assert not engine.loaded_for or num_shards == 1, "an engine that has stayed gets shards"
        if engine.loaded_for and engine.loaded_for != ring:
            assert not positions, "a sequence goes on with keys and values of other layers"
            self.num_reloaded += 1
        if any(len(engine.model.held.get(id, ())) < num for id, num in positions.items()):
            self.kill(engine.rank)  # It refuses the order.
            return
        engine.order, engine.state, engine.has_left = life, StageState.JOINING, False
        kept = {id: tokens for id, tokens in engine.model.held.items() if id in positions}
        for id, position in positions.items():
            if id in self.requests.scheduler._live:
                tokens = self.requests.scheduler.sequence(id).tokens
                assert kept[id][:position] == tokens[:position], "it goes on after other tokens"
        engine.model = StageModel({id: kept[id][:position] for id, position in positions.items()})
        self.num_kept_sequences += len(positions)
        self.after(self.delay(), lambda: self.load(engine, life, ring))
        self.report(engine, life)

    def load(self, engine: PlayedEngine, life: int, ring: list[int]) -> None:
        """It joins the ring when all others have, and then loads."""
        others = [self.engine_of(rank) for rank in ring]
        if all(other and other.order == life for other in others):
            engine.state = StageState.LOADING
            if engine.loaded_for is None:
                engine.files = self.files
            elif engine.loaded_for != ring and engine.files != self.files:
                self.kill(engine.rank)
                return
            seconds = 0.0 if engine.loaded_for == ring else self.delay(3.0)
            self.after(seconds, lambda: self.loaded(engine, life, ring))
        elif engine.runs and engine.order == life:
            self.after(0.1, lambda: self.load(engine, life, ring))

    def loaded(self, engine: PlayedEngine, life: int, ring: list[int]) -> None:
        if engine.order == life:
            engine.state, engine.loaded_for = StageState.READY, ring

    def prepare(self, life: int, changed_stages: list[StageStatus]) -> None:
        assert self.preparing is None, "a life is prepared while another one is"
        if changed_stages:
            try:
                self.requests.settle(changed_stages)
            except PlanError as error:
                self.on(events.NoRoom(life, str(error)))
                return
        self.preparing = life
        # A late answer is one that comes after the fault that ends the life.
        self.after(self.delay(1.0), lambda: self.prepared(life))

    def prepared(self, life: int) -> None:
        if self.preparing == life or self.chance.random() < 0.3:
            self.on(events.Prepared(life))

    def interrupt(self, life: int) -> None:
        interruption = self.requests.interrupt()
        num_explained = interruption.num_explained
        self.num_explained += num_explained
        if num_explained:
            del self.charged[len(self.charged) - num_explained + 1 :]
        else:
            self.charged.append(self.now)
        self.after(self.delay(0.2), lambda: self.on(events.Interrupted(life, interruption)))

    def probed(self, life: int, ranks: frozenset[int]) -> None:
        parents = {rank: self.parents[rank] for rank in ranks}
        silent = {rank for rank, p in parents.items() if p.is_stopped or not p.is_connected}
        self.on(events.Probed(life, frozenset(silent)))

    def forget(self, rank: int, is_silent: bool) -> None:
        """As ControlServer and a launcher do it."""
        self.forgotten.append((rank, is_silent))
        back_seconds = 3.0 if is_silent else 1.0
        reason = f"Rank {rank} is silent."
        self.disconnect(rank, reason, back_seconds, will_return=not is_silent)

    # --- ranks

    def engine_of(self, rank: int) -> PlayedEngine | None:
        if not rank:
            return self.engine
        return self.parents[rank].engine if rank in self.parents else None

    def join(self, rank: int) -> None:
        parent = self.parents.get(rank)
        if rank in self.absent or (parent and parent.is_connected):
            return
        if parent and parent.will_return:
            parent.connection += 1
            parent.is_connected = True
        else:
            self.parents[rank] = PlayedParent(next(self._pids), PlayedEngine(rank))
        facts = self.facts.get(rank, FACTS)
        self.on(events.Heard(rank, Joined(self.parents[rank].pid, facts)))

    def disconnect(
        self,
        rank: int,
        reason: str,
        back_seconds: float,
        will_return: bool = False,
    ) -> None:
        """The connection of a parent ends. The parent joins again with its engine if it will
        return, and otherwise another one joins in its place."""
        parent = self.parents.get(rank)
        if parent and parent.is_connected:
            parent.is_connected = False
            parent.life = -1
            # A parent that is stopped is killed, and started again.
            parent.will_return = will_return and not parent.is_stopped
            parent.engine.is_dead |= not parent.will_return
            self.on(events.Heard(rank, Gone(reason)))
            self.after(back_seconds + self.delay(), lambda: self.join(rank))

    def say(self, rank: int, life: int, message: FromEngine) -> None:
        self.on(events.Heard(rank, Report(life, message)))

    def report(self, engine: PlayedEngine, life: int) -> None:
        """Four times a second, as long as the engine and its parent run."""
        if engine.is_dead or engine is not self.engine_of(engine.rank) or engine.order != life:
            return
        self.after(REPORT_SECONDS, lambda: self.report(engine, life))
        parent = self.parents.get(engine.rank)
        if engine.is_stopped or (parent and not parent.can_speak):
            return
        free_bytes = 1 << 30 if len(self.membership.ring) >= self.roomy_ranks else 0
        loaded = Loaded(
            *(0, None, 0, free_bytes, "any"),
            can_rewind=self.can_rewind,
            files=engine.files,
            sharding=self.shardings.get(engine.rank, "1"),
        )
        self.say(
            engine.rank,
            life,
            Status(engine.state, loaded=loaded if engine.state is StageState.READY else None),
        )

    # --- steps

    def send(self, message: Admit | Step) -> None:
        if isinstance(message, Step):
            assert self.lifecycle.is_working, "a step is sent while engines do not work"
            is_idle = not self._todo
            self._outbox.put(message)
            if is_idle and self._todo:
                life = self.lifecycle.life
                self.after(STEP_SECONDS, lambda: self.compute(life))

    def compute(self, life: int) -> None:
        """One step on all stages. A stage that is dead or stopped holds it up for good."""
        ring = self.membership.ring
        engines = [self.engine_of(rank) for rank in ring]
        if life == self._broken_life or life != self.lifecycle.life or not self._todo:
            return
        if not all(engine and engine.runs and engine.order == life for engine in engines):
            self.after(STEP_SECONDS * 10, lambda: self.compute(life))
            return
        step = self._todo.pop(0)
        if POISON in step.tokens:
            self._broken_life = life  # No rank gets a later step.
            self.kill(self.chance.choice(ring))
            return
        for engine in engines:
            assert engine
            engine.model.run(step)
        result = result_of(step, next_token)
        if step.sample:
            self._outbox.sampled(step, result.tokens, result.num_accepted)
        if self._todo:
            self.after(STEP_SECONDS, lambda: self.compute(life))
        was_idle = not self._todo
        self.requests.on_result(result)
        assert was_idle or self._todo

    # --- faults

    def kill(self, rank: int) -> None:
        engine = self.engine_of(rank)
        if engine is None or engine.is_dead:
            return
        engine.is_dead = True
        parent = self.parents.get(rank)
        life = parent.life if parent else self.lifecycle.life
        fault = Fault(EngineError.exit_code, f"The engine of rank {rank} ended by signal 9.")
        self.after(self.delay(0.2), lambda: self.say_of(rank, engine, life, fault))

    def say_of(self, rank: int, engine: PlayedEngine, life: int, fault: Fault) -> None:
        """What a dead engine's parent tells, if that is still its engine or was until just now."""
        parent = self.parents.get(rank)
        if parent and not parent.can_speak:
            return
        if not rank and engine is not self.engine:
            return  # Its reader is gone.
        self.say(rank, life, fault)

    def reset_link(self, rank: int) -> None:
        """The link from one rank to the next: both of them notice it, and one of them may hang."""
        ring = self.membership.ring
        if rank not in ring or len(ring) < 2:
            return
        self._break_ring(ring)
        ends = [rank, ring[ring.index(rank) - 1]]
        life = self.lifecycle.life
        for end in ends:
            if (engine := self.engine_of(end)) and engine.runs and engine.order == life:
                engine.is_stuck = self.chance.random() < 0.2
                self.after(self.delay(0.2), lambda e=engine: self.say_ring_lost(e, life))

    def confuse(self, rank: int) -> None:
        """Its link is lost, and it reports something wrong."""
        if engine := self.engine_of(rank):
            engine.is_confused = True
        self.reset_link(rank)

    def _break_ring(self, ring: tuple[int, ...]) -> None:
        """No step goes on. Some stages, the last rank's first, have run one whose result is lost,
        and some of these the one after it."""
        if self._broken_life == self.lifecycle.life:
            return
        self._broken_life = self.lifecycle.life
        num_stages = len(ring)
        for step in self._todo[:2]:
            num_stages = self.chance.randint(0, num_stages)
            for rank in ring[::-1][:num_stages]:
                engine = self.engine_of(rank)
                if engine and engine.runs and engine.order == self._broken_life:
                    engine.model.run(step)

    def say_ring_lost(self, engine: PlayedEngine, life: int) -> None:
        parent = self.parents.get(engine.rank)
        can_speak = parent is None or parent.can_speak
        if can_speak and engine.runs and engine is self.engine_of(engine.rank):
            self.say(engine.rank, life, RingLost(f"Rank {engine.rank}: its link broke."))

    def stop(self, rank: int) -> None:
        if engine := self.engine_of(rank):
            engine.is_stopped = True

    def stop_parent(self, rank: int) -> None:
        if rank in self.parents and self.parents[rank].is_connected:
            self.parents[rank].is_stopped = True

    def cut(self, rank: int) -> None:
        """The connection to a rank's parent breaks, which joins again with its engine."""
        reason = f"Rank {rank} is gone."
        self.disconnect(rank, reason, self.chance.uniform(1, 30), will_return=True)

    def lose(self, rank: int) -> None:
        self.disconnect(rank, f"Rank {rank} is gone.", back_seconds=self.chance.uniform(5, 60))

    def fault(self) -> None:
        """Any fault, of any rank."""
        other = self.chance.randrange(1, self.num_ranks)
        anyone = self.chance.randrange(self.num_ranks)
        faults: list[Callable[[], None]] = [
            *[lambda: self.kill(anyone)] * 4,
            *[lambda: self.reset_link(anyone)] * 3,
            lambda: self.stop(anyone),
            lambda: self.stop_parent(other),
            lambda: self.cut(other),
            lambda: self.lose(other),
        ]
        self.chance.choice(faults)()

    # --- requests

    def ask(self, length: int, max_tokens: int, num: int = 1, poison: bool = False) -> Asked:
        ids = [POISON] * length if poison else list(range(1, length + 1))
        prompt = Prompt(ids, max_tokens, (Sampling(temperature=0),) * num, frozenset())
        self.asked.append(Asked(prompt, self.requests.submit([prompt], 0, "")))
        return self.asked[-1]

    def ask_any(self, poison_share: float = 0.0) -> None:
        chance = self.chance
        is_poison = chance.random() < poison_share
        self.ask(chance.randint(1, 40), chance.randint(1, 60), chance.choice([1, 1, 2]), is_poison)
        if chance.random() < 0.1:
            self.after(self.delay(3.0), lambda asked=self.asked[-1]: self.leave(asked))

    def leave(self, asked: Asked) -> None:
        asked.has_left = True
        asked.generation.close()

    @property
    def is_quiet(self) -> bool:
        """Whether all requests have ended, and all ranks work."""
        is_idle = not self.requests.scheduler.num_running + self.requests.scheduler.num_waiting
        is_whole = len(self.membership.ring) == self.num_ranks and not self.membership.missing
        is_healthy = not any(parent.is_stopped for parent in self.parents.values())
        for rank in range(self.num_ranks):
            engine = self.engine_of(rank)
            is_healthy = is_healthy and engine is not None and engine.runs
        return is_idle and is_whole and is_healthy and self.lifecycle.is_working

    def check_answers(self) -> int:
        """Checks that each request has ended exactly once and that each token came once and in
        order. Returns how many requests ended with an error."""
        return sum(check_answer(asked) for asked in self.asked if not asked.has_left)


def check_answer(asked: Asked) -> bool:
    events: list[Answer | BrigadeError] = []
    while not asked.generation._events.empty():
        events.append(asked.generation._events.get_nowait())
    errors = [event for event in events if isinstance(event, BrigadeError)]
    if errors:
        assert len(errors) == 1, "a request ended twice"
        assert events[-1] is errors[0], "an answer went on after its error"
        return True
    for sequence in asked.generation._sequences:
        own = [e for e in events if isinstance(e, Answer) and e.sequence == sequence.id]
        start = len(asked.prompt.ids)
        places = range(start, start + asked.prompt.max_tokens)
        assert [event.token for event in own] == [next_token(sequence.id, p) for p in places]
        assert [bool(event.finish_reason) for event in own].count(True) == 1
        assert own[-1].finish_reason
    return False
