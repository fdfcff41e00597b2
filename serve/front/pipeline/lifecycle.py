"""The life cycle of the engines: a state machine that takes events and answers with actions. Pure.

All engines join a ring, work and leave it together, and this period is a life. The ranks' parents
outlive it, with the sequences and connections that they hold, and so do engines that can leave a
ring in time. docs/design/lifecycle.md shows the states. The caller has the clock, performs the
actions in order, and sends `Ticked` when `deadline` has passed.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from serve.core.errors import (
    BrigadeError,
    ClusterError,
    EngineError,
    ModelError,
    PlanError,
    from_exit_code,
)
from serve.core.layouts import Link
from serve.core.messages import (
    Fault,
    FromEngine,
    Left,
    Planned,
    Report,
    RingLost,
    Status,
)
from serve.core.plan import StagePlan
from serve.core.types import StageState
from serve.front.pipeline import actions, events
from serve.front.pipeline.events import LastFault, State
from serve.front.pipeline.machine import Machine
from serve.front.pipeline.orders import plan_request
from serve.front.pipeline.status import (
    StageStatus,
    is_silent,
    shard_disagreement,
    stall_cause,
    stuck_ranks,
)
from serve.parent.control import Gone, Joined
from serve.parent.restarts import Judgement, better_reason, may_pass, reason_seconds

WATCH_SECONDS = 0.5


class Lifecycle(Machine):
    """The life cycle of the engines of all ranks."""

    # --- events

    def on(self, event: events.Event, now: float) -> list[actions.Action]:
        """Returns the actions that follow from an event. now is a time of the monotonic clock."""
        if self.state not in events.OVER:
            self._now = now
            self._take(event)
        collected, self._actions = self._actions, []
        return collected

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.Answer) and self._is_outdated(event):
            return
        match event:
            case events.Begin():
                self._do(actions.ReplaceEngine(self.number))
            case events.Heard(rank, message):
                self._on_heard(rank, message)
            case events.EngineStarted(_, left):
                self._on_engine_started(left)
            case events.LinksMeasured(_, link, silent):
                self._on_links_measured(link, silent)
            case events.EngineFailed(error):
                self._fail(error)
            case events.Settled():
                self._settled = self.ring
                self._do(actions.Prepare(self.number))
            case events.NoRoom(_, reason):
                self._on_no_room(PlanError(reason))
            case events.Prepared():
                self._work()
            case events.Broken(_, error):
                self._fault(error)
            case events.Interrupted(_, num_explained):
                self._judgement.num_explained = num_explained
                self._judge()
            case events.Probed(_, silent):
                self._on_probed(silent)
            case events.Ticked(waiting_seconds):
                if self.deadline is not None and self._now >= self.deadline:
                    self._on_tick(waiting_seconds)
            case events.Close():
                self._enter(State.CLOSED)

    def _on_heard(self, rank: int, message: Joined | Gone | Report) -> None:
        match message:
            case Joined():
                self._on_joined(rank, message)
            case Gone(reason):
                self._on_gone(rank, reason)
            case Report(life, Fault(exit_code, reason)):
                self._on_reported_fault(rank, life, from_exit_code(exit_code, reason))
            case Report(life, report):
                if life == self.number:
                    self._on_report(rank, report)

    def _on_joined(self, rank: int, hello: Joined) -> None:
        self.roster.joined[rank] = hello
        self.roster.unfit.discard(rank)
        if self.state is not State.JUDGING:  # After that, the engines of all ranks are renewed.
            self._renew_rank(self.ranks[rank], keep=self._keeps_engines)
        if self.state is State.GATHERING:
            self._check_gathered()
        elif self.state is State.LACKING:
            self._check_more()

    def _on_gone(self, rank: int, reason: str) -> None:
        self.roster.joined.pop(rank, None)
        self._warn(f"event=rank_gone rank={rank}", reason)
        if rank not in self.ring or self.state in events.NOTED:
            return  # A rank that is awaited may come and go.
        if self.state in (State.PAUSING, State.STARTING):
            self._gather()  # No engine has an order yet, so nothing is lost for the others.
        else:
            self._fault(ClusterError(reason))

    def _on_reported_fault(self, rank: int, life: int, error: BrigadeError) -> None:
        """Takes a fault. Those of engines that were ended count only if no restart helps."""
        is_planning = self.state in (State.PLANNING, State.REPLANNING)
        if not rank and life == self.number:
            self._has_engine = False
            if is_planning:
                self._on_no_plan(error)
                return
        self._warn(f"event=fault rank={rank}", error)
        if rank and self._config.replan and self.has_worked and not may_pass(error):
            self.roster.unfit.add(rank)  # The other ranks have a model that works.
            error = ClusterError(str(error))
        if (life == self.number and rank in self.ring) or not may_pass(error):
            self._fault(error)
        if self.state is State.LACKING and not rank and life == self.number:
            self._pause()

    def _on_report(self, rank: int, message: FromEngine) -> None:
        is_planning = self.state in (State.PLANNING, State.REPLANNING)
        match message:
            case Status():
                self._on_status(self.ranks[rank], message)
            case RingLost(reason):
                self._on_ring_lost(rank, ClusterError(reason))
            case Left():
                self._on_left(self.ranks[rank], message)
            case Planned(refusal=refusal) if refusal and is_planning and not rank:
                self._on_no_plan(PlanError(refusal))
            case Planned() if is_planning and not rank:
                self._on_plan(message)
            case _ if is_planning and not rank:
                name = type(message).__name__
                self._fail(ClusterError(f"The engine answered {name} instead of a plan."))
            case _:
                self._fault(
                    ClusterError(f"Rank {rank} sent an unexpected {type(message).__name__}.")
                )
                self._forget(rank, is_silent=False)

    def _on_ring_lost(self, rank: int, error: ClusterError) -> None:
        """Takes the report of an engine whose ring broke. Once all have reported it, all of them
        live, so no better reason is to come."""
        self._warn(f"event=fault rank={rank}", error)
        self._fault(error)
        if self.state is State.JUDGING:
            self._judgement.without_ring.add(rank)
            if self._judgement.without_ring.issuperset(self.ring):
                self.deadline = self._now
                self._judge()

    def _on_status(self, stage: StageStatus, status: Status) -> None:
        before = stage.state, stage.latest.done
        files = stage.loaded.files
        stage.update(status, self.ring, self._now)
        if files and files != stage.loaded.files and self._have_stayed:
            reason = f"The model's files on rank {stage.rank} have changed: all ranks read them."
            self._fault(ClusterError(reason))
        if stage.state != before[0]:
            self._log(logging.INFO, stage.line())
        # A parent repeats LEAVING as a sign that it still waits for a step to end.
        if (stage.state, stage.latest.done) == before and stage.state is not StageState.LEAVING:
            return
        self._do(actions.ShowProgress(stage.rank))
        if self.state in events.AWAITED:
            # The time counts from the last progress of any stage: a download may take hours.
            self.deadline = self._now + self._patience_seconds
            self._check_stages()

    def _on_left(self, stage: StageStatus, left: Left) -> None:
        """Notes that an engine has outlived a fault, and what it holds."""
        stage.stay(left.positions)
        self._log(logging.INFO, f"event=engine_stayed rank={stage.rank} life={self.number}")
        if self.state in events.AWAITED:
            self._check_stages()

    def _on_tick(self, waiting_seconds: float) -> None:
        match self.state:
            case State.PLANNING | State.REPLANNING:
                self._on_plan_overdue(
                    f"No plan was made within {self._config.constants.load_timeout:g} s"
                )
            case State.GATHERING:
                self._on_gathered(self._not_gathered())
            case State.LACKING:
                self._fail(ClusterError("No other rank came in time."))
            case State.PAUSING:
                self._start()
            case State.STARTING | State.JOINING | State.LOADING:
                self._on_late()
            case State.WORKING:
                self._watch(waiting_seconds)
            case State.JUDGING:
                self._judge()
            case State.PREPARING | State.RENEWING | State.FAILED | State.CLOSED:
                pass  # They have no deadline.

    # --- who takes part

    def _on_engine_started(self, left: Left | None) -> None:
        self._has_engine = True
        match self.state:
            case State.PLANNING:
                if self._config.num_shards is None and len(self.ring) > 1:
                    self._gather()  # The links can be measured only then.
                else:
                    self._ask_for_plan()
            case State.RENEWING:
                self.stages[0].latest = Status(StageState.STARTING)
                if left:
                    self._on_left(self.stages[0], left)
                self._gather()
            case State.LACKING:
                self._check_more()
            case _:
                pass  # The other states do not wait for the engine.

    def _on_links_measured(self, link: Link | None, silent: int | None) -> None:
        if link is None and (silent is None or self.missing):
            self._gather()  # The links are measured again when the lost rank is back.
            return
        if silent is not None:
            self._choices[self.ring] = self._choice_without(silent)
        self._link = link
        self._ask_for_plan()

    def _ask_for_plan(self) -> None:
        """Asks for a plan of all ranks. If a link is known, the engine also chooses the layout."""
        self._tried = self.ring
        self._enter(State.PLANNING, self._config.constants.load_timeout)
        self._do(actions.AskForPlan(plan_request(self._config, len(self.ring)), self._link))

    def _on_plan(self, planned: Planned) -> None:
        ring = self._tried
        self._note_choice(ring, planned)
        stages = zip(planned.stages, ring, strict=True)
        plan = [replace(stage, rank=rank) for stage, rank in stages]
        self._plans[ring] = plan
        if self.state is State.PLANNING:
            self._gather()
        else:
            self._follow(plan)

    def _on_no_plan(self, error: BrigadeError) -> None:
        """Decides what follows when rank 0's engine has made no plan."""
        if self.state is State.PLANNING or not isinstance(error, PlanError | EngineError):
            self._fail(error)
        elif isinstance(error, PlanError):
            self._lack(error)
        else:
            self._reason = error
            self._pause()

    def _on_plan_overdue(self, what: str) -> None:
        """Gives up on a plan. While ranks are replanned, the engine hangs, because it has planned
        this model before; otherwise the model is wrong."""
        if self.state is State.REPLANNING:
            self._stuck = frozenset({0})
            self._on_no_plan(EngineError(f"{what}: the engine of rank 0 hangs."))
        else:
            self._fail(ModelError(f"{what}: does config.json match the weights?"))

    def _gather(self) -> None:
        """Waits for the ranks of the ring."""
        self._log_awaited()
        self._enter(State.GATHERING, self._return_seconds)
        self._check_gathered()

    def _check_gathered(self) -> None:
        if not self.missing:
            self._on_gathered(self.roster.disagreement())

    def _on_gathered(self, error: ClusterError | None) -> None:
        if self._plans and self.number and self._config.replan:
            if error:
                self._warn("event=going_on", error)
            self._gather_until = self._now + self._config.constants.return_timeout
            self._replan()
        elif error:
            self._fail(error)
        else:
            plan = self._plans.get(self.ring)
            assert not isinstance(plan, PlanError)
            if plan is not None:
                self._follow(plan)
            elif self._reason is not None:
                self._pause()  # The engine that has to plan may have ended.
            else:
                self._enter(State.PLANNING, self._config.constants.load_timeout)
                self._do(actions.MeasureLinks(self.number, self.ring[1:]))

    def _replan(self) -> None:
        """Divides the layers among the ranks that are there, if they have the memory."""
        there = (0, *sorted(self.roster.fit))
        # Either rank 0's engine has ended, which is another fault, or a fault was noted.
        if not self._has_engine or self._reason is not None:
            self._pause()
            return
        plan = self._plans.get(there)
        self._tried = there
        if isinstance(plan, PlanError):
            self._lack(plan)
        elif plan is not None:
            self._follow(plan)
        else:
            self._ask_to_replan(there)

    def _lack(self, error: PlanError) -> None:
        """Waits for more ranks, with a new engine where the old one has ended."""
        self._warn("event=waiting", error)
        self._enter(State.LACKING, self._gather_until - self._now)
        if not self._has_engine:
            self._do(actions.ReplaceEngine(self.number))
        self._check_more()  # A rank may have come while the plan was made.

    def _check_more(self) -> None:
        if self._has_engine and self.roster.fit.difference(self._tried):
            self._replan()

    def _follow(self, plan: Sequence[StagePlan]) -> None:
        if self.stages[0].plan is None or tuple(stage.rank for stage in plan) != self.ring:
            self.stages = [self.ranks[planned.rank] for planned in plan]
            for stage, planned in zip(self.stages, plan, strict=True):
                stage.assign(planned)
            self._show_plan(plan)
        self._pause()

    def _on_no_room(self, error: PlanError) -> None:
        """Continues with the ranks that worked before, or waits for more ranks."""
        newcomers = set(self.ring).difference(self._settled) if self._settled else set()
        if newcomers:
            self.roster.unfit |= newcomers
            self._fault(ClusterError(str(error)))
        elif len(self.stages) < len(self.ranks):
            self._plans[self.ring] = error
            self._fault(ClusterError(str(error)))
        else:
            self._fault(error)

    # --- from new engines to working ones

    def _pause(self) -> None:
        """Begins a life, or judges the faults that were noted before it."""
        self._enter(State.PAUSING, self._pause_seconds)
        if self._reason is not None:
            self._end_life()
        elif not self._pause_seconds:
            self._start()

    def _start(self) -> None:
        if self.missing:  # A rank was lost while others were planned with.
            self._gather()
            return
        self._await_stages(State.STARTING)

    def _await_stages(self, state: State) -> None:
        self._enter(state)
        self.deadline = self._now + self._patience_seconds
        self._check_stages()

    def _check_stages(self) -> None:
        if self._late_stages():
            return
        match self.state:
            case State.STARTING:
                self._give_orders()
            case State.JOINING:
                self._await_stages(State.LOADING)
            case State.LOADING:
                self._on_loaded()
            case _:
                pass  # The other states do not wait for all stages.

    def _on_loaded(self) -> None:
        error = shard_disagreement(self.stages)
        if error:
            self._fault(error)
            return
        self._enter(State.PREPARING)
        if self.ring == self._settled:
            self._do(actions.Prepare(self.number))
        else:
            self._do(actions.Settle(self.number))

    def _give_orders(self) -> None:
        # By now, every engine that has stayed has said so.
        if self.num_shards > 1 and self._have_stayed:
            self._renew(ClusterError("The new layout has shards: all engines are replaced."))
            return
        plans = self._plans_of_stages()
        self._await_stages(State.JOINING)
        self._do(actions.GiveOrders(plans))

    def _on_late(self) -> None:
        # The others may only be waiting for an engine that still starts.
        stage = min(self._late_stages(), key=lambda stage: stage.state is not StageState.STARTING)
        error = self._no_progress(stage, self._patience_seconds)
        # A parent that does not react has to join again.
        does_not_react = stage.state in (StageState.RENEWING, StageState.LEAVING)
        self._fault(error)
        if does_not_react:
            self._probe([stage], even_if_it_answers=True)

    def _work(self) -> None:
        seconds = None
        if self._recovering_since is not None:
            seconds = self._now - self._recovering_since
            self.recovery_seconds += seconds
        self._recovering_since = None
        self.has_worked = True
        have_all_stayed = all(stage.has_stayed for stage in self.stages)
        self._restarts.note_ready(self._now, have_all_stayed)
        self._enter(State.WORKING, 0.0)
        self._do(actions.Work(self.number, seconds))

    def _watch(self, waiting_seconds: float) -> None:
        """Notices three things: steps that do not come back (a stopped rank breaks no connection),
        ranks that have returned, and silent ranks."""
        assert self.deadline is not None
        has_stood_still = self._now - self.deadline > WATCH_SECONDS
        self.deadline = self._now + WATCH_SECONDS
        if has_stood_still:
            return  # This process itself was stopped: it has to read its messages first.
        timeout = self._config.constants.stall_timeout
        newcomers = self.roster.fit - set(self.ring)
        if waiting_seconds > timeout:
            self._on_stall(timeout)
        # The last restart is reserved for a real fault.
        elif newcomers and self._restarts.num_left(self._now) > 1:
            reason = f"Ranks {sorted(newcomers)} are back: the layers are redistributed."
            self._fault(ClusterError(reason))
        else:
            self._look_for_silence(timeout + 2 * WATCH_SECONDS)

    def _on_stall(self, timeout: float) -> None:
        self._stuck = stuck_ranks(self.stages, self._now)
        cause = stall_cause(self.stages, self._now)
        silent = [stage for stage in self.stages if is_silent(stage, self._now)]
        reason = f"No step came back for {timeout:g} s: {cause}, look at its log."
        self._fault(ClusterError(reason))
        self._probe(silent)

    def _look_for_silence(self, patience_seconds: float) -> None:
        """Notices a parent that has stopped while its engine still works."""
        silent = [
            stage for stage in self.stages if self._now - stage.timeline.heard_at > patience_seconds
        ]
        if silent:
            self._stuck = stuck_ranks(self.stages, self._now)
            self._fault(ClusterError(f"Rank {silent[0].rank} on {silent[0].host} is silent."))
            self._probe(silent[:1], even_if_it_answers=True)

    # --- from one life to the next

    def _fault(self, error: BrigadeError) -> None:
        reason = better_reason(self._reason, error)
        if reason is not self._reason:
            self._reason = reason
            self.last_fault = LastFault(str(error), self._now)
        if self.state not in events.NOTED and self.state is not State.JUDGING:
            self._end_life()

    def _end_life(self) -> None:
        was_working = self.is_working
        if self._recovering_since is None:
            self._recovering_since = self._now
        self._judgement = Judgement(was_working)
        has_clients = was_working and self._restarts.num_left(self._now) > 0
        self._enter(State.JUDGING, reason_seconds(self._reason, has_clients))
        self._do(actions.Interrupt(self.number))

    def _on_probed(self, silent: frozenset[int]) -> None:
        self._judgement.is_probing = False
        for rank in sorted(silent | self._judgement.let_go):
            self._forget(rank, rank in silent)
        self._judge()

    def _judge(self) -> None:
        """Decides whether there is another life, once everything is known that this depends on."""
        judgement, reason = self._judgement, self._reason
        assert reason is not None
        if self.deadline is not None and self._now < self.deadline:
            return
        self.deadline = None
        if judgement.is_probing or judgement.num_explained is None:
            return
        num_explained = judgement.num_explained
        if self._config.replan and self.has_worked and self.missing:
            num_explained = max(1, num_explained)  # A lost rank, which the others can do without.
        try:
            self._pause_seconds = self._restarts.wait_seconds(
                reason,
                judgement.was_working,
                self._now,
                num_explained,
            )
        except BrigadeError as error:
            self._fail(error)
        else:
            self._renew(reason)

    def _renew(self, reason: BrigadeError) -> None:
        """Begins the next life, for this reason. Every rank finds an engine that is in no ring: its
        own if that can leave its ring, or else another one. The requests, which Interrupt has
        returned to the queue, wait there until the engines work."""
        self.number += 1
        self._warn(f"event=recovering life={self.number}", reason)
        self._reason = None
        self._has_engine = False
        self._enter(State.RENEWING)
        self._renew_engines()
