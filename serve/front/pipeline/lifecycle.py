"""The life of the engines: they start, join a ring, load and work until a fault. Pure.

A state machine that answers each event with one `Reaction`. All engines live together, and the
ranks' parents outlive a life, with the sequences and connections that they hold. Engines that can
leave a ring in time outlive it too. `serve.front.pipeline.membership` decides who is in the ring.
docs/design/lifecycle.md shows the states.
"""

import logging

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError, ClusterError, EngineError, ModelError, from_exit_code
from serve.core.messages import Fault, FromEngine, Left, Planned, Report, RingLost, Status
from serve.core.plan import StagePlan
from serve.core.types import StageState
from serve.front.pipeline import actions, events
from serve.front.pipeline.actions import Action, Reaction, warning
from serve.front.pipeline.membership import CannotForm, Membership, NotYetFormed, Outcome
from serve.front.pipeline.recovery import LastFault, Recovery
from serve.front.pipeline.states import FORMING, OVER, State
from serve.front.pipeline.status import StageStatus, shard_disagreement
from serve.front.pipeline.watch import (
    AWAITED,
    WATCH_SECONDS,
    Alarm,
    late_alarm,
    late_stages,
    patience_seconds,
    stall_alarm,
)
from serve.parent.control import Gone, Joined
from serve.parent.restarts import may_pass

# How long a cluster that has no restart left waits for all engines to say how they ended.
_LAST_WORD_SECONDS = 5.0


class Lifecycle:
    """The life cycle of the engines of all ranks. life is the number of lives before this one."""

    def __init__(self, config: ServeConfig, membership: Membership) -> None:
        self._config = config
        self.membership = membership
        self.state = State.PLANNING
        self.life = 0
        self.deadline: float | None = None
        self.has_worked = False
        self.recovery = Recovery(config)
        self._pause_seconds = 0.0
        self._now = 0.0
        self._actions: list[Action] = []

    @property
    def is_working(self) -> bool:
        """Whether the engines get steps."""
        return self.state is State.WORKING

    def is_current(self, life: int) -> bool:
        """Whether a message of this life still counts."""
        return life == self.life and self.state not in OVER

    # --- events

    def on(self, event: events.Event, now: float) -> Reaction:
        """Returns the reaction to an event. `now` is a time of the monotonic clock."""
        if self.state not in OVER:
            self._now = now
            self._on(event)
        collected = tuple(self._actions)
        self._actions.clear()
        return Reaction(self.life, collected, self.deadline)

    def _on(self, event: events.Event) -> None:
        if isinstance(event, events.Answer) and self._is_outdated(event):
            return
        match event:
            case events.Begin():
                self._renew_engine(self.membership.ranks[0])
            case events.Heard(rank, message):
                self._on_heard(rank, message)
            case events.LinksMeasured(_, link, silent):
                self._form(self.membership.on_links_measured(link, silent))
            case events.EngineFailed(error):
                self._fail(error)
            case events.NoRoom(_, reason):
                self._on_fault(self.membership.on_no_room(reason))
            case events.Prepared():
                self._work()
            case events.Broken(_, error):
                self._on_fault(error)
            case events.Interrupted(_, interruption):
                self.recovery.judgement.interruption = interruption
                self._judge()
            case events.Probed(_, silent):
                self._on_probed(silent)
            case events.Ticked(waiting_seconds):
                if self.deadline is not None and self._now >= self.deadline:
                    self._on_tick(waiting_seconds)
            case events.Close():
                self._enter(State.CLOSED)

    def _is_outdated(self, answer: events.Answer) -> bool:
        """Whether the life or the state to which an answer belongs is over."""
        expected = events.EXPECTED_IN.get(type(answer), self.state)
        return answer.life != self.life or self.state is not expected

    def _on_heard(self, rank: int, message: Joined | Gone | Report) -> None:
        match message:
            case Joined():
                self._on_joined(rank, message)
            case Gone(reason):
                self._on_gone(rank, reason)
            case Report(life, Fault(exit_code, reason, code)):
                self._on_reported_fault(rank, life, from_exit_code(exit_code, reason, code))
            case Report(life, report):
                if life == self.life:
                    self._on_report(self.membership.ranks[rank], report)

    def _on_joined(self, rank: int, hello: Joined) -> None:
        membership = self.membership
        membership.add(rank, hello)
        if self.state is not State.HANDLING_FAULT:  # Later, all engines are renewed.
            self._renew_engine(membership.ranks[rank], keep=self.recovery.may_keep_engines)
        if self.state is State.GATHERING and not membership.missing:
            self._form(membership.decide())
        elif self.state is State.TOO_FEW_RANKS and membership.can_replan:
            self._form(membership.replan())

    def _on_gone(self, rank: int, reason: str) -> None:
        self.membership.remove(rank)
        self._do(warning(f"event=rank_gone rank={rank}", reason))
        if rank not in self.membership.ring or self.state in FORMING:
            return  # A rank that is awaited may come and go.
        if self.state in (State.PAUSING, State.STARTING):
            self._form(self.membership.gather())  # The other ranks lose nothing.
        else:
            self._on_fault(ClusterError(reason))
            self._on_last_word(rank)

    def _on_reported_fault(self, rank: int, life: int, error: BrigadeError) -> None:
        """Takes a fault. Faults of engines that were ended count only if no restart helps."""
        is_planner = rank == 0 and life == self.life
        if is_planner and self.state is State.PLANNING:
            self._fail(error)
            return
        self._do(warning(f"event=fault rank={rank}", error))
        if rank and self._config.replan and self.has_worked and not may_pass(error):
            self.membership.unfit.add(rank)  # The other ranks have a model that works.
            error = ClusterError(str(error))
        is_of_ring = life == self.life and rank in self.membership.ring
        if is_of_ring or not may_pass(error):
            self._on_fault(error)
        if is_of_ring:
            self._on_last_word(rank)
        if is_planner and self.state in (State.REPLANNING, State.TOO_FEW_RANKS):
            self._end_life()  # Without this engine there is no plan to wait for.

    def _on_report(self, stage: StageStatus, message: FromEngine) -> None:
        is_planning = self.state in (State.PLANNING, State.REPLANNING)
        match message:
            case Status():
                self._on_status(stage, message)
            case RingLost(reason):
                self._on_ring_lost(stage.rank, ClusterError(reason))
            case Left():
                stage.stay(message.positions)
                line = f"event=engine_stayed rank={stage.rank} life={self.life}"
                self._do(actions.Log(logging.INFO, line))
                self._on_progress(stage)
            case Planned() if is_planning and not stage.rank:
                self._form(self.membership.on_planned(message))
            case _:
                name = type(message).__name__
                self._on_fault(ClusterError(f"Rank {stage.rank} sent an unexpected {name}."))
                self._disconnect(stage.rank, is_silent=False)

    def _on_status(self, stage: StageStatus, status: Status) -> None:
        state, done, files = stage.state, stage.latest.done, stage.loaded.files
        stage.update(status, self.membership.ring, self._now)
        if files and files != stage.loaded.files and self._have_engines_stayed:
            reason = f"The model's files on rank {stage.rank} have changed: all ranks read them."
            self._on_fault(ClusterError(reason))
        if stage.state is not state:
            self._do(actions.Log(logging.INFO, stage.line()))
        # A parent repeats LEAVING as a sign that it still waits for a step to end.
        has_changed = stage.state is not state or stage.latest.done != done
        if has_changed or stage.state is StageState.LEAVING:
            self._do(actions.ShowProgress(stage))
            self._on_progress(stage)

    def _on_progress(self, stage: StageStatus) -> None:
        has_planner = stage.rank == 0 and stage.state is StageState.STARTING
        if self.state in AWAITED:
            # The time counts from the last progress of any stage: a download may take hours.
            self._await_stages(self.state)
        elif has_planner and self.state is State.PLANNING:
            self._form(self.membership.begin())
        elif has_planner and self.state is State.RENEWING:
            self._form(self.membership.gather())

    def _on_tick(self, waiting_seconds: float) -> None:
        match self.state:
            case State.PLANNING | State.REPLANNING:
                self._on_plan_overdue()
            case State.GATHERING:
                self._form(self.membership.decide())
            case State.TOO_FEW_RANKS:
                self._fail(ClusterError("No other rank came in time."))
            case State.PAUSING:
                self._start()
            case State.STARTING | State.JOINING | State.LOADING:
                self._alarm(late_alarm(self.state, self.membership.stages, self._config))
            case State.WORKING:
                self._watch(waiting_seconds)
            case State.HANDLING_FAULT:
                self._judge()
            case State.PREPARING | State.RENEWING | State.FAILED | State.CLOSED:
                pass  # The other states have no deadline.

    def _on_plan_overdue(self) -> None:
        """Gives up on a plan. If the engine has planned this model before, it hangs; otherwise the
        model is wrong."""
        what = f"No plan was made within {self._config.constants.load_timeout:g} s"
        if self.state is State.PLANNING:
            self._fail(ModelError(f"{what}: does config.json match the weights?"))
            return
        self._on_fault(EngineError(f"{what}: the engine of rank 0 hangs."))
        self._end_life(stuck=frozenset({0}))

    # --- from new engines to working ones

    def _form(self, outcome: Outcome) -> None:
        """Performs the next step for the ring. A fault that waited for these ranks is handled
        now."""
        is_gathered = not isinstance(outcome, NotYetFormed) or outcome.state is not State.GATHERING
        if isinstance(outcome, CannotForm):
            self._actions += outcome.actions
            self._fail(outcome.error)
        elif self.recovery.reason and is_gathered:
            self._end_life()
        elif isinstance(outcome, NotYetFormed):
            self._enter(outcome.state, outcome.seconds)
            self._actions += outcome.actions
        else:
            self._actions += outcome.actions
            self._enter(State.PAUSING, self._pause_seconds)
            if not self._pause_seconds:
                self._start()

    def _start(self) -> None:
        if self.membership.missing:  # A rank of the ring was lost meanwhile.
            self._form(self.membership.gather())
        else:
            self._await_stages(State.STARTING)

    def _await_stages(self, state: State) -> None:
        """Waits until every stage has done what the state waits for (AWAITED)."""
        stages = self.membership.stages
        self._enter(state, patience_seconds(state, stages, self._config))
        if late_stages(state, stages):
            return
        match state:
            case State.STARTING:
                self._give_orders()
            case State.JOINING:
                self._await_stages(State.LOADING)
            case _:
                self._on_loaded()

    def _give_orders(self) -> None:
        # By now, every engine that has stayed has reported it.
        if self.membership.num_shards > 1 and self._have_engines_stayed:
            reason = "The new layout has shards: all engines are replaced."
            self.recovery.add(ClusterError(reason), self._now)
            self._renew()
            return
        stages = self.membership.stages
        plans = tuple(_plan_of(stage) for stage in stages)
        positions = tuple(stage.stays.positions or {} for stage in stages)
        self._await_stages(State.JOINING)
        self._do(actions.GiveOrders(plans, positions))

    def _on_loaded(self) -> None:
        error = shard_disagreement(self.membership.stages)
        if error:
            self._on_fault(error)
            return
        self._enter(State.PREPARING)
        changed = () if self.membership.has_room else tuple(self.membership.stages)
        self._do(actions.Prepare(changed, is_first_start=not self.has_worked))

    def _work(self) -> None:
        self.has_worked = True
        self.membership.on_work()
        have_all_stayed = all(stage.has_stayed for stage in self.membership.stages)
        seconds = self.recovery.end(have_all_stayed, self._now)
        self._enter(State.WORKING, 0.0)
        self._do(actions.Work(seconds))

    # --- faults of engines that work

    def _watch(self, waiting_seconds: float) -> None:
        """Notices silent ranks, ranks that have returned, and steps that do not come back."""
        assert self.deadline is not None
        has_stood_still = self._now - self.deadline > WATCH_SECONDS
        self.deadline = self._now + WATCH_SECONDS
        if has_stood_still:
            return  # This process itself was stopped: it has to read its messages first.
        timeout = self._config.constants.stall_timeout
        alarm = stall_alarm(self.membership.stages, waiting_seconds, timeout, self._now)
        newcomers = self.membership.newcomers
        if alarm:
            self._alarm(alarm)
        # The last restart is reserved for a real fault.
        elif newcomers and self.recovery.num_restarts_left(self._now) > 1:
            reason = f"Ranks {sorted(newcomers)} are back: the layers are redistributed."
            self._on_fault(ClusterError(reason))

    def _alarm(self, alarm: Alarm) -> None:
        """Ends a life, and finds out which parents hang before they are asked for new engines."""
        self._on_fault(alarm.error, alarm.stuck)
        ranks = frozenset(alarm.suspects) & self.membership.joined.keys()
        if ranks and self.state is State.HANDLING_FAULT:
            self.recovery.judgement.is_probing = True
            if alarm.disconnects:
                self.recovery.judgement.let_go = ranks
            self._do(actions.Probe(ranks))

    def _on_ring_lost(self, rank: int, error: ClusterError) -> None:
        """Takes the report of an engine whose ring broke."""
        self._do(warning(f"event=fault rank={rank}", error))
        was_working = self.is_working
        self._on_fault(error)
        if was_working and not self.recovery.num_restarts_left(self._now):
            # The cluster ends and is to say why. On a busy host, an engine's end may be known late.
            self.deadline = self._now + _LAST_WORD_SECONDS
        self._on_last_word(rank)

    def _on_last_word(self, rank: int) -> None:
        """Takes note that an engine has reported its end or the loss of its ring, or that its rank
        is gone. Once this holds for all engines, no better reason will come."""
        if self.state is not State.HANDLING_FAULT:
            return
        have_spoken = self.recovery.judgement.have_spoken
        have_spoken.add(rank)
        if have_spoken.issuperset(self.membership.ring):
            self.deadline = self._now
            self._judge()

    # --- from one life to the next

    def _on_fault(self, error: BrigadeError, stuck: frozenset[int] | None = None) -> None:
        """Takes the reason of a fault, which ends the life if the engines have orders. After a
        stall, `stuck` holds the ranks whose engines are stuck."""
        self.recovery.add(error, self._now)
        if self.state not in FORMING and self.state is not State.HANDLING_FAULT:
            self._end_life(stuck)

    def _end_life(self, stuck: frozenset[int] | None = None) -> None:
        seconds = self.recovery.begin(self.is_working, stuck, self._now)
        self._enter(State.HANDLING_FAULT, seconds)
        self._do(actions.Interrupt())

    def _on_probed(self, silent: frozenset[int]) -> None:
        judgement = self.recovery.judgement
        judgement.is_probing = False
        for rank in sorted(silent | judgement.let_go):
            self._disconnect(rank, rank in silent)
        self._judge()

    def _disconnect(self, rank: int, is_silent: bool) -> None:
        if rank in self.membership.joined:
            pid = self.membership.joined[rank].pid
            self._do(actions.Disconnect(rank, pid, is_silent))

    def _judge(self) -> None:
        """Decides whether there is another life, once every fact for the decision is known."""
        if self.deadline is not None and self._now < self.deadline:
            return
        self.deadline = None
        if not self.recovery.judgement.is_complete:
            return
        can_do_without = self._config.replan and self.has_worked
        is_rank_dispensable = can_do_without and bool(self.membership.missing)
        if self.recovery.may_halve_chunks:
            self._do(actions.HalveChunks())
        try:
            self._pause_seconds = self.recovery.pause_seconds(is_rank_dispensable, self._now)
        except BrigadeError as error:
            self._fail(error)
        else:
            self._renew()

    def _renew(self) -> None:
        """Begins the next life. Every rank gets an engine that is in no ring: its present engine if
        that can leave its ring, or else a new one. The requests, which Interrupt has returned to
        the queue, wait there until the engines work."""
        self.life += 1
        self.membership.is_restart = True
        is_stall = self.recovery.judgement.stuck is not None
        reason = self.recovery.renew(self.membership.num_shards)
        self._do(warning(f"event=recovering life={self.life}", reason))
        self._enter(State.RENEWING)
        for stage in self.membership.ranks:
            self._renew_engine(stage, is_stall, self.recovery.may_keep(stage.rank))

    def _renew_engine(self, stage: StageStatus, dump: bool = False, keep: bool = False) -> None:
        stage.renew()
        if stage.rank == 0 or stage.rank in self.membership.joined:
            self._do(actions.RenewEngine(stage.rank, dump, keep))

    @property
    def _have_engines_stayed(self) -> bool:
        """Whether engines have outlived the latest fault, and hold layers."""
        return any(stage.has_stayed for stage in self.membership.ranks)

    def _fail(self, error: BrigadeError) -> None:
        """Ends the life cycle for this reason."""
        self.recovery.last_fault = LastFault(str(error), self._now)
        self._enter(State.FAILED)
        self._do(actions.Fail(error))

    def _enter(self, state: State, seconds: float | None = None) -> None:
        """Changes the state. The deadline, if any, is after this many seconds."""
        self.state = state
        self.deadline = None if seconds is None else self._now + seconds

    def _do(self, action: Action) -> None:
        self._actions.append(action)


def _plan_of(stage: StageStatus) -> StagePlan:
    assert stage.plan is not None
    return stage.plan
