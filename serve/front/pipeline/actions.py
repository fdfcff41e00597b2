"""The actions that the life cycle of the engines asks its driver to perform.

An action that takes time is answered by one event, with the number of the same life.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from serve.core.errors import BrigadeError
from serve.core.layouts import Link
from serve.core.plan import PlanRequest, StagePlan
from serve.front.pipeline.status import StageStatus


@dataclass(frozen=True, slots=True)
class RenewEngine:
    """Makes a rank get an engine that is in no ring, as Renew says. The engine reports STARTING or
    Left. If rank 0 gets none, EngineFailed follows."""

    rank: int
    dump: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True)
class AskForPlan:
    """Asks rank 0's engine for a plan, as MakePlan says. The engine reports Planned or Fault."""

    request: PlanRequest
    link: Link | None = None
    shard_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasureLinks:
    """Measures the links from rank 0 to these ranks. Answered by LinksMeasured."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveOrders:
    """Sends the engines of a ring their orders, which say what to load. positions has, for each
    stage, the number of tokens of each sequence that its engine still holds."""

    plans: tuple[StagePlan, ...]
    positions: tuple[Mapping[int, int], ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Computes the room of stages that have changed, loads adapters and warms the engines up.
    Answered by Prepared, NoRoom or Broken."""

    changed_stages: tuple[StageStatus, ...]
    is_first_start: bool


@dataclass(frozen=True, slots=True)
class Work:
    """Lets the scheduler send steps. seconds is the duration of the recovery; None at the start."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stops preparing and returns all requests to the queue. Answered by Interrupted."""


@dataclass(frozen=True, slots=True)
class HalveChunks:
    """Makes later chunks of prompts smaller than the chunks that Interrupt has stopped."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks parents for a sign of life. Answered by Probed."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Ends the connection of a rank. If is_silent, its launcher replaces its parent."""

    rank: int
    pid: int
    is_silent: bool


@dataclass(frozen=True, slots=True)
class ShowPlan:
    """Shows people the plan that the ranks follow from here on."""

    plans: tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True)
class ShowProgress:
    """Shows people that a stage has made progress."""

    stage: StageStatus


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
    RenewEngine
    | AskForPlan
    | MeasureLinks
    | GiveOrders
    | Prepare
    | Work
    | Interrupt
    | HalveChunks
    | Probe
    | Disconnect
    | ShowPlan
    | ShowProgress
    | Log
    | Fail
)


@dataclass(frozen=True, slots=True)
class Reaction:
    """The reaction to an event: the actions of a life, to be performed in this order, and the time
    of the monotonic clock at which the next Ticked is due, or None."""

    life: int
    actions: tuple[Action, ...]
    deadline: float | None


def warning(line: str, reason: BrigadeError | str) -> Log:
    return Log(logging.WARNING, f"{line} reason={json.dumps(str(reason))}")
