"""The base of the life cycle: its state, its deadline, the ranks, and the actions that it asks
for."""

import json
import logging
from collections.abc import Sequence

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError, ClusterError, PlanError
from serve.core.layouts import Link, shard_counts
from serve.core.messages import Planned
from serve.core.plan import StagePlan
from serve.core.types import StageState
from serve.front.pipeline import actions, events
from serve.front.pipeline.events import LastFault, State
from serve.front.pipeline.orders import replan_request
from serve.front.pipeline.status import StageStatus
from serve.parent.restarts import Judgement, Restarts
from serve.parent.roster import Roster

# Without a sign of a parent, which waits until its engine leaves its ring or ends (15 s, see
# serve.parent.engine), and starts another one. While the engine computes, the parent sends signs.
RENEW_SECONDS = 20.0


class Machine:
    """A state machine. `deadline` is the time at which `Ticked` is due, or None. `number` counts
    the lives before this one. hosts has the host of each rank; facts are those of rank 0.
    is_launched says that `brigade launch` has started the ranks."""

    def __init__(
        self,
        config: ServeConfig,
        hosts: Sequence[str],
        facts: dict[str, str],
        *,
        is_launched: bool = False,
    ) -> None:
        self._config = config
        self._is_launched = is_launched
        self.roster = Roster(facts)
        self.ranks = [StageStatus(rank, host) for rank, host in enumerate(hosts)]
        self.stages = list(self.ranks)  # of the ranks that take part, in order
        self.state = State.PLANNING
        self.deadline: float | None = None
        self.number = 0
        self.last_fault: LastFault | None = None
        self._link: Link | None = None  # the slowest one, if the layout is chosen by it
        self._choices: dict[tuple[int, ...], str] = {}  # why layouts were chosen, by their ring
        self.has_worked = False
        self.recovery_seconds = 0.0
        self._plans: dict[tuple[int, ...], list[StagePlan] | PlanError] = {}
        self._tried: tuple[int, ...] = ()  # the ranks of the latest plan
        self._settled: tuple[int, ...] = ()  # the latest ring with room for keys and values
        self._restarts = Restarts(config.constants.max_restarts, config.constants.restart_window)
        self._reason: BrigadeError | None = None
        self._has_engine = False
        self._recovering_since: float | None = None
        self._pause_seconds = 0.0
        self._gather_until = 0.0
        self._judgement = Judgement(was_working=False)
        # After a stall, the ranks whose engines are stuck, and None after other faults.
        self._stuck: frozenset[int] | None = None
        self._keeps_engines = False  # whether engines of the previous life may stay
        self._now = 0.0
        self._actions: list[actions.Action] = []

    @property
    def is_working(self) -> bool:
        """Whether the engines get steps."""
        return self.state is State.WORKING

    @property
    def ring(self) -> tuple[int, ...]:
        """The ranks that take part, in order."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def missing(self) -> list[int]:
        """The ranks that take part and have not joined."""
        return self.roster.missing(self.ring)

    @property
    def num_shards(self) -> int:
        """The number of shards of each stage; 1 while it is not known."""
        plan = self.stages[0].plan
        if plan:
            return plan.num_shards
        return self._config.num_shards or 1

    @property
    def _return_seconds(self) -> float:
        """How long ranks are awaited. Without --replan, lost ranks are awaited for longer, because
        no other rank can take their place."""
        config = self._config
        if not self.number:
            return config.start_patience(is_launched=self._is_launched)
        if config.replan:
            return config.join_timeout
        return config.constants.return_timeout

    @property
    def _have_stayed(self) -> bool:
        """Whether engines have outlived the latest fault, and hold layers."""
        return any(stage.has_stayed for stage in self.ranks)

    def is_current(self, life: int) -> bool:
        """Whether a message of this life still counts."""
        return life == self.number and self.state not in events.OVER

    def late(self) -> str | None:
        """Returns one line that says which rank is awaited, or None if all stages are ready."""
        if self.missing:
            return f"waiting for rank {self.missing[0]}"
        return next(
            (stage.doing for stage in self.stages if stage.state is not StageState.READY), None
        )

    def _is_outdated(self, answer: events.Answer) -> bool:
        """Whether the life or the state to which an answer belongs is over."""
        expected = events.EXPECTED_IN.get(type(answer), self.state)
        return answer.life != self.number or self.state is not expected

    def _enter(self, state: State, seconds: float | None = None) -> None:
        """Changes the state. The deadline is after this many seconds, if any."""
        self.state = state
        self.deadline = None if seconds is None else self._now + seconds

    def _fail(self, error: BrigadeError) -> None:
        """Ends the life cycle for this reason."""
        self.last_fault = LastFault(str(error), self._now)
        self._enter(State.FAILED)
        self._do(actions.Fail(error))

    def _log(self, level: int, line: str) -> None:
        self._do(actions.Log(level, line))

    def _warn(self, line: str, reason: BrigadeError | str) -> None:
        self._log(logging.WARNING, f"{line} reason={json.dumps(str(reason))}")

    def _do(self, action: actions.Action) -> None:
        self._actions.append(action)

    def _log_awaited(self) -> None:
        """Logs which ranks have to return. Nothing is logged about ranks that have never joined."""
        if self.missing and self.number and not self._config.replan:
            ranks = ",".join(map(str, self.missing))
            timeout = f"{self._return_seconds:g}"
            self._log(logging.WARNING, f"event=waiting ranks={ranks} timeout={timeout}")

    def _not_gathered(self) -> ClusterError:
        """Returns the error that names the ranks that have not joined in time."""
        seconds = self._return_seconds
        hint = " (--join-timeout)" if seconds == self._config.join_timeout else ""
        return ClusterError(
            f"Ranks {self.missing} did not join within {seconds:g} s: look at their logs{hint}.",
            code="missing_rank",
        )

    @property
    def _patience_seconds(self) -> float:
        """The seconds without progress of any stage after which the state is late."""
        match self.state:
            case State.STARTING:
                return RENEW_SECONDS
            # The ring can only form when every engine has imported MLX and said that it joins.
            case State.JOINING if not any(
                stage.state is StageState.STARTING for stage in self.stages
            ):
                return self._config.join_timeout
            case _:
                return self._config.constants.load_timeout

    def _no_progress(self, stage: StageStatus, seconds: float) -> ClusterError:
        """Returns the error for a stage without progress. seconds is how long it has had none."""
        _, what = events.AWAITED[self.state]
        return ClusterError(
            f"Rank {stage.rank} on {stage.host} did not {what}: it made no progress for "
            f"{seconds:g} s, look at its log."
        )

    def _choice_without(self, silent: int) -> str:
        """Returns why no layout was chosen: this rank's link could not be measured."""
        return (
            f"Layout {len(self.ring)} x 1 (stages x shards), because the link to rank {silent} on "
            f"{self.ranks[silent].host} could not be measured: its parent did not answer in time. "
            "To choose shards anyway, give --tensor-parallel-size a number."
        )

    def _ask_to_replan(self, ring: tuple[int, ...]) -> None:
        """Asks for a plan of the ranks that are there. Their stages have at most as many shards as
        the user has chosen. With --tensor-parallel-size auto, the engine chooses again."""
        known = [self.ranks[rank].memory_bytes for rank in ring]
        request = replan_request(self._config, ring, known)
        counts = shard_counts(len(ring), self._config.num_shards or 1)
        self._enter(State.REPLANNING, self._config.constants.load_timeout)
        self._do(actions.AskForPlan(request, self._link, counts))

    def _note_choice(self, ring: tuple[int, ...], planned: Planned) -> None:
        """Notes why the layout of a ring was chosen, and logs which layers cannot be divided."""
        if planned.choice:
            self._choices[ring] = planned.choice
        if planned.warning:
            self._warn("event=not_divided", planned.warning)

    def _show_plan(self, plan: Sequence[StagePlan]) -> None:
        """Shows the plan that the ranks follow from here on, below the reason for its layout."""
        if self.ring in self._choices:
            self._log(logging.INFO, f"event=layout reason={json.dumps(self._choices[self.ring])}")
        self._do(actions.ShowPlan(tuple(plan)))

    def _late_stages(self) -> list[StageStatus]:
        states, _ = events.AWAITED[self.state]
        return [stage for stage in self.stages if stage.state not in states]

    def _plans_of_stages(self) -> tuple[StagePlan, ...]:
        """Returns the plan of each stage, and notes the processes of their parents."""
        plans: list[StagePlan] = []
        for stage in self.stages:
            assert stage.plan is not None
            plans.append(stage.plan)
            if stage.rank in self.roster.joined:
                stage.pid = self.roster.joined[stage.rank].pid
        return tuple(plans)

    def _forget(self, rank: int, is_silent: bool) -> None:
        if rank in self.roster.joined:
            self._do(actions.Forget(rank, self.roster.joined[rank].pid, is_silent))

    def _probe(self, stages: Sequence[StageStatus], even_if_it_answers: bool = False) -> None:
        """Finds out which parents hang, before they are asked for new engines."""
        ranks = frozenset(stage.rank for stage in stages) & self.roster.joined.keys()
        if ranks and self.state is State.JUDGING:
            self._judgement.is_probing = True
            if even_if_it_answers:
                self._judgement.let_go = ranks
            self._do(actions.Probe(self.number, ranks))

    def _renew_engines(self) -> None:
        """Has every rank find an engine that is in no ring. Engines that worked until the fault
        stay if they can, and the others are replaced. After a stall, those that are stuck are
        replaced, or all if none is: then it is not known what went wrong."""
        stuck, self._stuck = self._stuck, None
        is_stalled = stuck is not None
        is_explained = stuck is None or bool(stuck)
        can_stay = self.num_shards == 1  # The layers of shards use MLX's group.
        self._keeps_engines = self._judgement.was_working and can_stay and is_explained
        self._judgement.was_working = False
        staying: set[int] = set()
        if self._keeps_engines:
            staying.update(range(len(self.ranks)))
            staying.difference_update(stuck or ())
        for stage in self.ranks:
            self._renew_rank(stage, is_stalled, stage.rank in staying)
        self._do(actions.ReplaceEngine(self.number, is_stalled, 0 in staying))

    def _renew_rank(self, stage: StageStatus, dump: bool = False, keep: bool = False) -> None:
        stage.renew()
        if stage.rank in self.roster.joined:
            self._do(actions.RenewRank(stage.rank, self.number, dump, keep))
