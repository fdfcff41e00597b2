"""The events that move the life cycle of the engines from one state to the next.

Some events answer an action and carry the number of the action's life.
"""

from dataclasses import dataclass
from typing import TypeAlias

from serve.core.errors import BrigadeError
from serve.core.layouts import Link
from serve.core.messages import Report
from serve.front.pipeline.recovery import Interruption
from serve.front.pipeline.states import State
from serve.parent.control import Gone, Joined


@dataclass(frozen=True, slots=True)
class Begin:
    """The cluster is to start."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A rank has joined, is gone or, also on rank 0, passes on a message of its engine."""

    rank: int
    message: Joined | Gone | Report


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an action of a life. It changes nothing once that life is over."""

    life: int


@dataclass(frozen=True, slots=True)
class LinksMeasured(Answer):
    """The slowest link from rank 0 to another rank was measured. link is None if the measurement
    failed: because of the rank `silent`, whose parent did not answer in time, or because a rank was
    lost (then `silent` is None, too)."""

    link: Link | None
    silent: int | None = None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Rank 0's engine process cannot be ended, or no new one can be started."""

    error: BrigadeError


@dataclass(frozen=True, slots=True)
class NoRoom(Answer):
    """The stages do not even have room for a short sequence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Prepared(Answer):
    """The stages have room for sequences, and the engines have their adapters and are warm."""


@dataclass(frozen=True, slots=True)
class Broken(Answer):
    """Rank 0 has failed to prepare this life."""

    error: BrigadeError


@dataclass(frozen=True, slots=True)
class Interrupted(Answer):
    """The requests wait."""

    result: Interruption


@dataclass(frozen=True, slots=True)
class Probed(Answer):
    """The parents of these ranks did not answer."""

    silent: frozenset[int]


# Answers that count only in one state. In any other state such an answer comes too late.
EXPECTED_IN: dict[type[Answer], State] = {
    LinksMeasured: State.PLANNING,
    NoRoom: State.PREPARING,
    Prepared: State.PREPARING,
    Interrupted: State.HANDLING_FAULT,
    Probed: State.HANDLING_FAULT,
}


@dataclass(frozen=True, slots=True)
class Ticked:
    """The deadline has passed. Steps have been under way for waiting_seconds without a result."""

    waiting_seconds: float


@dataclass(frozen=True, slots=True)
class Close:
    """The server ends, whatever its state."""


Event: TypeAlias = (
    Begin
    | Heard
    | LinksMeasured
    | EngineFailed
    | NoRoom
    | Prepared
    | Broken
    | Interrupted
    | Probed
    | Ticked
    | Close
)
