"""The actions that the life cycle of the engines has its driver perform.

An action that takes time is answered by one event, with the number of the same life.
"""

from dataclasses import dataclass
from typing import TypeAlias

from serve.core.errors import BrigadeError
from serve.core.layouts import Link
from serve.core.plan import PlanRequest, StagePlan


@dataclass(frozen=True, slots=True)
class ReplaceEngine:
    """Ends rank 0's engine process, if there is one, and starts another. With dump, the old one
    writes its stacks first. With keep, it stays if it leaves its ring in time. Answered by
    EngineStarted or EngineFailed."""

    life: int
    dump: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True)
class AskForPlan:
    """Asks rank 0's engine for a plan, as MakePlan says. It reports Planned or Fault."""

    request: PlanRequest
    link: Link | None = None
    shard_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasureLinks:
    """Measures the links from rank 0 to these ranks. Answered by LinksMeasured."""

    life: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RenewRank:
    """Does the same as ReplaceEngine on another rank, which reports STARTING or Left."""

    rank: int
    life: int
    dump: bool
    keep: bool


@dataclass(frozen=True, slots=True)
class GiveOrders:
    """Sends the engines of a ring their orders, which say what to load."""

    stages: tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Computes the room of the stages. Answered by Settled or NoRoom."""

    life: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Loads adapters and warms the engines up. Answered by Prepared or Broken."""

    life: int


@dataclass(frozen=True, slots=True)
class Work:
    """Lets the scheduler send steps. seconds is what the recovery took; None at the start."""

    life: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stops preparing and returns all requests to the queue. Answered by Interrupted."""

    life: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks parents for a sign of life. Answered by Probed."""

    life: int
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Forget:
    """Ends the connection of a rank. If is_silent, its launcher replaces its parent."""

    rank: int
    pid: int
    is_silent: bool


@dataclass(frozen=True, slots=True)
class ShowPlan:
    """Shows people the plan that the ranks follow from here on."""

    stages: tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True)
class ShowProgress:
    """Shows people that the stage of a rank has made progress."""

    rank: int


@dataclass(frozen=True, slots=True)
class Log:
    """Writes a line of the log at a level of `logging`."""

    level: int
    line: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Ends the cluster with this error."""

    error: BrigadeError


Action: TypeAlias = (
    ReplaceEngine
    | AskForPlan
    | MeasureLinks
    | RenewRank
    | GiveOrders
    | Settle
    | Prepare
    | Work
    | Interrupt
    | Probe
    | Forget
    | ShowPlan
    | ShowProgress
    | Log
    | Fail
)
