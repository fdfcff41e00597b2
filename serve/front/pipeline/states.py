"""The states of a cluster."""

from enum import Enum


class State(Enum):
    """What a cluster waits for, or does."""

    PLANNING = "rank 0's engine starts and plans"
    GATHERING = "the ranks of the ring join"
    REPLANNING = "rank 0's engine plans for the ranks that are there"
    TOO_FEW_RANKS = "the model does not fit the ranks that are there"
    PAUSING = "engines that failed to start wait before they try again"
    STARTING = "every rank gets an engine that is in no ring"
    JOINING = "the engines join the ring"
    LOADING = "the engines load their layers"
    PREPARING = "the engines load adapters and warm up"
    WORKING = "the engines get steps"
    HANDLING_FAULT = "after a fault: the reason is determined, and requests return to the queue"
    RENEWING = "rank 0's engine leaves its ring or is replaced"
    FAILED = "the cluster cannot continue"
    CLOSED = "the server has ended"


# In these states the ring is formed. A lost rank is awaited, and a fault waits for the ranks.
FORMING = {
    State.PLANNING,
    State.GATHERING,
    State.REPLANNING,
    State.TOO_FEW_RANKS,
    State.RENEWING,
}
OVER = {State.FAILED, State.CLOSED}
