"""Who is in the ring: which ranks have joined, and the plan that gives each its layers. Pure.

The life cycle asks this module when ranks come and go, and when rank 0's engine has made a plan.
Each answer is one value: the ring waits for something, is formed, or cannot be formed.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError, ClusterError, PlanError
from serve.core.facts import compare
from serve.core.layouts import Link, shard_counts
from serve.core.messages import Planned
from serve.core.plan import StagePlan
from serve.core.types import StageState
from serve.front.pipeline.actions import Action, AskForPlan, Log, MeasureLinks, ShowPlan, warning
from serve.front.pipeline.orders import plan_request, replan_request
from serve.front.pipeline.states import State
from serve.front.pipeline.status import StageStatus
from serve.parent.control import Joined


@dataclass(frozen=True, slots=True)
class NotYetFormed:
    """The ring is not formed yet. state says what it waits for, for at most these seconds."""

    state: State
    seconds: float
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Formed:
    """The ranks of the ring are there, and each has a plan."""

    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class CannotForm:
    """The cluster has to end."""

    error: BrigadeError
    actions: tuple[Action, ...] = ()


Outcome: TypeAlias = NotYetFormed | Formed | CannotForm
AnyOutcome = TypeVar("AnyOutcome", NotYetFormed | Formed, Outcome)


class Membership:
    """The ranks of a launch, and which of them take part. hosts gives the host of each rank; facts
    describe rank 0. is_launched says that `brigade launch` has started the ranks."""

    def __init__(
        self,
        config: ServeConfig,
        hosts: Sequence[str],
        facts: dict[str, str],
        *,
        is_launched: bool = False,
    ) -> None:
        self._config = config
        self._facts = facts
        self._is_launched = is_launched
        self.ranks = [StageStatus(rank, host) for rank, host in enumerate(hosts)]
        self.stages = list(self.ranks)  # the stages of the ranks that take part, in order
        self.joined: dict[int, Joined] = {}  # the other ranks that are there
        self.unfit: set[int] = set()  # ranks whose engines can never work with the others
        self.is_restart = False  # whether an earlier life has ended
        self._link: Link | None = None  # the slowest link, if it decides the layout
        self._choices: dict[tuple[int, ...], str] = {}  # the reason for the layout of each ring
        self._plans: dict[tuple[int, ...], list[StagePlan] | PlanError] = {}
        self._planned_ring: tuple[int, ...] = ()  # the ranks of the latest requested plan
        self._working_ring: tuple[int, ...] = ()  # the latest ring that worked

    # --- the ranks

    @property
    def ring(self) -> tuple[int, ...]:
        """The ranks that take part, in order."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def missing(self) -> list[int]:
        """The ranks that take part but have not joined."""
        return [rank for rank in self.ring if rank and rank not in self.joined]

    @property
    def fit(self) -> set[int]:
        """The other ranks that are there and may take part."""
        same = {rank for rank, hello in self.joined.items() if hello.facts == self._facts}
        return same - self.unfit

    @property
    def newcomers(self) -> set[int]:
        """The ranks that may take part but do not."""
        return self.fit.difference(self.ring)

    @property
    def num_shards(self) -> int:
        """The number of shards of each stage; 1 while it is not known."""
        plan = self.stages[0].plan
        if plan:
            return plan.num_shards
        return self._config.num_shards or 1

    def awaited(self) -> str | None:
        """Returns one line that says which rank is awaited, or None if all stages are ready."""
        if self.missing:
            return f"waiting for rank {self.missing[0]}"
        for stage in self.stages:
            if stage.state is not StageState.READY:
                return stage.doing
        return None

    def add(self, rank: int, hello: Joined) -> None:
        """Adds a rank that has joined. An unfit rank is now a new process, which may be fit."""
        self.joined[rank] = hello
        self.unfit.discard(rank)
        self.ranks[rank].pid = hello.pid

    def remove(self, rank: int) -> None:
        self.joined.pop(rank, None)

    # --- who takes part

    def begin(self) -> Outcome:
        """Decides the next step when rank 0's first engine is there."""
        if self._has_to_measure:
            return self.gather()  # Links are measured with all ranks.
        return self._ask_for_plan()

    def gather(self) -> Outcome:
        """Waits for the ranks of the ring."""
        if not self.missing:
            return self.decide()
        seconds = self._return_seconds
        if self._config.replan or not self.is_restart:
            return NotYetFormed(State.GATHERING, seconds)
        ranks = ",".join(map(str, self.missing))
        log = Log(logging.WARNING, f"event=waiting ranks={ranks} timeout={seconds:g}")
        return NotYetFormed(State.GATHERING, seconds, (log,))

    def decide(self) -> Outcome:
        """Decides the next step once the ranks of the ring have come or need not be awaited."""
        objection = self._objection()
        if self._config.replan and self.is_restart and self._plans:
            outcome = self.replan()
            return _after(warning("event=going_on", objection), outcome) if objection else outcome
        if objection:
            return CannotForm(objection)
        plan = self._plans.get(self.ring)
        if isinstance(plan, list):
            return self._follow(plan)
        if self._has_to_measure:
            return self._wait_for_engine(State.PLANNING, MeasureLinks(self.ring[1:]))
        return self._ask_for_plan()

    def _objection(self) -> ClusterError | None:
        """Returns the error of ranks that are missing or differ from rank 0, or None."""
        if not self.missing:
            others = {rank: self.joined[rank].facts for rank in sorted(self.joined)}
            return compare({0: self._facts, **others})
        seconds = self._return_seconds
        hint = " (--join-timeout)" if seconds == self._config.join_timeout else ""
        return ClusterError(
            f"Ranks {self.missing} did not join within {seconds:g} s: look at their logs{hint}.",
            code="missing_rank",
        )

    @property
    def _return_seconds(self) -> float:
        """How long ranks are awaited. Without --replan, lost ranks are awaited for longer, because
        no other rank can take their place."""
        if not self.is_restart:
            return self._config.start_patience(is_launched=self._is_launched)
        if self._config.replan:
            return self._config.join_timeout
        return self._config.constants.return_timeout

    def replan(self) -> NotYetFormed | Formed:
        """Divides the layers among the ranks that are there, if they have the memory. Their stages
        have at most as many shards as the user has chosen. With --tensor-parallel-size auto, the
        engine chooses again."""
        ring = self._planned_ring = (0, *sorted(self.fit))
        plan = self._plans.get(ring)
        if isinstance(plan, PlanError):
            return self._wait_for_more(plan)
        if plan is not None:
            return self._follow(plan)
        memory = [self.ranks[rank].memory_bytes for rank in ring]
        request = replan_request(self._config, ring, memory)
        counts = shard_counts(len(ring), self._config.num_shards or 1)
        return self._wait_for_engine(State.REPLANNING, AskForPlan(request, self._link, counts))

    @property
    def can_replan(self) -> bool:
        """Whether a rank has come since the latest plan was asked for."""
        return not self.fit.issubset(self._planned_ring)

    def _wait_for_more(self, error: PlanError) -> NotYetFormed | Formed:
        log = warning("event=waiting", error)
        if self.can_replan:  # A rank has come while the plan was made.
            return _after(log, self.replan())
        return NotYetFormed(State.TOO_FEW_RANKS, self._config.constants.return_timeout, (log,))

    # --- plans

    @property
    def _has_to_measure(self) -> bool:
        """Whether the first plan depends on the links between the ranks."""
        is_chosen = self._config.num_shards is not None or len(self.ring) == 1
        return not is_chosen and not self._plans

    def on_links_measured(self, link: Link | None, silent: int | None) -> Outcome:
        """Takes the slowest link. link is None if a rank was lost, or silent."""
        if link is None and (silent is None or self.missing):
            return self.gather()  # The links are measured again when the lost rank is back.
        if silent is not None:
            self._choices[self.ring] = (
                f"Layout {len(self.ring)} x 1 (stages x shards), because the link to rank {silent} "
                f"on {self.ranks[silent].host} could not be measured: its parent did not answer "
                "in time. To choose shards anyway, give --tensor-parallel-size a number."
            )
        self._link = link
        return self._ask_for_plan()

    def _ask_for_plan(self) -> NotYetFormed:
        """Asks for a plan of all ranks. If a link is known, the engine also chooses the layout."""
        self._planned_ring = self.ring
        request = plan_request(self._config, len(self.ring))
        return self._wait_for_engine(State.PLANNING, AskForPlan(request, self._link))

    def _wait_for_engine(self, state: State, action: Action) -> NotYetFormed:
        return NotYetFormed(state, self._config.constants.load_timeout, (action,))

    def on_planned(self, planned: Planned) -> Outcome:
        """Takes the plan that was asked for, or the reason why there is none."""
        if planned.refusal and self._plans:
            return self._wait_for_more(PlanError(planned.refusal))
        if planned.refusal:
            return CannotForm(PlanError(planned.refusal))
        ring = self._planned_ring
        is_first = not self._plans
        stages = zip(planned.stages, ring, strict=True)
        plan = [replace(stage, rank=rank) for stage, rank in stages]
        self._plans[ring] = plan
        if planned.choice:
            self._choices[ring] = planned.choice
        outcome = self.gather() if is_first else self._follow(plan)
        if planned.warning:
            return _after(warning("event=not_divided", planned.warning), outcome)
        return outcome

    def _follow(self, plan: Sequence[StagePlan]) -> Formed:
        """Gives each rank of a plan its stage, and shows people the changes."""
        if self.stages[0].plan and tuple(stage.rank for stage in plan) == self.ring:
            return Formed()
        self.stages = [self.ranks[planned.rank] for planned in plan]
        for stage, planned in zip(self.stages, plan, strict=True):
            stage.assign(planned)
        actions: list[Action] = [ShowPlan(tuple(plan))]
        choice = self._choices.get(self.ring)
        if choice:
            actions.insert(0, Log(logging.INFO, f"event=layout reason={json.dumps(choice)}"))
        return Formed(tuple(actions))

    # --- room for keys and values

    @property
    def has_room(self) -> bool:
        """Whether the ring is the latest one that worked, so that its stages have room."""
        return self.ring == self._working_ring

    def on_work(self) -> None:
        self._working_ring = self.ring

    def on_no_room(self, reason: str) -> BrigadeError:
        """Excludes the ranks that did not work before, or else this ring, so that more ranks are
        awaited. Returns the fault of this life."""
        newcomers = set(self.ring).difference(self._working_ring)
        if self._working_ring and newcomers:
            self.unfit |= newcomers
            return ClusterError(reason)
        if len(self.stages) < len(self.ranks):
            self._plans[self.ring] = PlanError(reason)
            return ClusterError(reason)
        return PlanError(reason)


def _after(log: Log, outcome: AnyOutcome) -> AnyOutcome:
    """Returns the outcome with a line of the log before its actions."""
    return replace(outcome, actions=(log, *outcome.actions))
