"""The states of the engines' life cycle, and the events that move it from one state to the next.

Some events answer an action and carry the number of its life.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from serve.core.errors import BrigadeError
from serve.core.layouts import Link
from serve.core.messages import Left, Report
from serve.core.types import StageState
from serve.parent.control import Gone, Joined


class State(Enum):
    """The states of a cluster. Faults are judged from PAUSING on; before that they are noted."""

    PLANNING = "rank 0's engine starts and plans"
    GATHERING = "the ranks of the ring join"
    REPLANNING = "rank 0's engine plans for the ranks that are there"
    LACKING = "the model does not fit the ranks that are there"
    PAUSING = "engines that failed to start wait before they try again"
    STARTING = "every rank gets an engine that is in no ring"
    JOINING = "the engines join the ring"
    LOADING = "the engines load their layers"
    PREPARING = "the engines load adapters and warm up"
    WORKING = "the engines get steps"
    JUDGING = "after a fault: the reason is determined, and requests return to the queue"
    RENEWING = "rank 0's engine leaves its ring or is replaced"
    FAILED = "the cluster cannot continue"
    CLOSED = "the server has ended"


# Faults are noted in these states, and judged when the ranks are there.
NOTED = {
    State.PLANNING,
    State.GATHERING,
    State.REPLANNING,
    State.LACKING,
    State.RENEWING,
}
OVER = {State.FAILED, State.CLOSED}
# For states that wait for all stages: the states of a stage that count as done, and the words for
# what a late rank has not done.
AWAITED = {
    State.STARTING: ({StageState.STARTING}, "start an engine"),
    State.JOINING: (
        {StageState.FETCHING, StageState.LOADING, StageState.READY},
        "join the ring",
    ),
    State.LOADING: ({StageState.READY}, "load its layers"),
}


@dataclass(frozen=True, slots=True)
class LastFault:
    """The reason of the latest fault, and the monotonic time when it was reported."""

    reason: str
    time: float


@dataclass(frozen=True, slots=True)
class Begin:
    """The cluster is to start."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A rank has joined, is gone, or passes on a message of its engine. Rank 0 only does that."""

    rank: int
    message: Joined | Gone | Report


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an action of a life. It changes nothing once that life is over."""

    life: int


@dataclass(frozen=True, slots=True)
class EngineStarted(Answer):
    """Rank 0's engine waits for an order: a new one, or one that has left its ring."""

    left: Left | None = None


@dataclass(frozen=True, slots=True)
class LinksMeasured(Answer):
    """The slowest link from rank 0 to another rank was measured. link is None if this failed:
    because of the rank `silent`, whose parent did not answer in time, or because a rank was lost
    (then silent is None, too)."""

    link: Link | None
    silent: int | None = None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Rank 0's engine process cannot be ended, or no new one can be started."""

    error: BrigadeError


@dataclass(frozen=True, slots=True)
class Settled(Answer):
    """The stages have room for the sequences of this server."""


@dataclass(frozen=True, slots=True)
class NoRoom(Answer):
    """The stages do not even have room for a short sequence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Prepared(Answer):
    """The engines have their adapters and are warm."""


@dataclass(frozen=True, slots=True)
class Broken(Answer):
    """Rank 0 has failed to prepare this life, or to read from its engine."""

    error: BrigadeError


@dataclass(frozen=True, slots=True)
class Interrupted(Answer):
    """The requests wait. One that was given up has caused num_explained faults; else it is 0."""

    num_explained: int


@dataclass(frozen=True, slots=True)
class Probed(Answer):
    """The parents of these ranks did not answer."""

    silent: frozenset[int]


# Answers that count only in one state. In any other state they come too late.
EXPECTED_IN: dict[type[Answer], State] = {
    LinksMeasured: State.PLANNING,
    Settled: State.PREPARING,
    NoRoom: State.PREPARING,
    Prepared: State.PREPARING,
    Interrupted: State.JUDGING,
    Probed: State.JUDGING,
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
    | EngineStarted
    | LinksMeasured
    | EngineFailed
    | Settled
    | NoRoom
    | Prepared
    | Broken
    | Interrupted
    | Probed
    | Ticked
    | Close
)
