"""Finds the rank that delays the others: it is late, it is stuck in a step, or it is silent. Pure.

(`serve.front.pipeline.fault_blame` decides which request may have crashed the engines.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serve.core.config import ServeConfig
from serve.core.errors import ClusterError
from serve.core.types import StageState
from serve.front.pipeline.states import State
from serve.front.pipeline.status import StageStatus

WATCH_SECONDS = 0.5  # the pause between two looks at engines that work
# How long a parent may be silent: it waits until its engine leaves its ring or ends (15 s, see
# serve.parent.engine), and starts another. While the engine computes, the parent sends signs.
RENEW_SECONDS = 20.0
_SILENT_SECONDS = 1.5
# By state that waits for all stages: the stage states that count as done, and the words for the
# task that a late rank has not finished.
AWAITED = {
    State.STARTING: ({StageState.STARTING}, "start an engine"),
    State.JOINING: (
        {StageState.FETCHING, StageState.LOADING, StageState.READY},
        "join the ring",
    ),
    State.LOADING: ({StageState.READY}, "load its layers"),
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """A fault that no rank has reported. `stuck` holds the ranks whose engines are stuck, or None
    if all are to be replaced anyway. The parents of suspects may hang: they are probed, and with
    disconnects they have to join again even if they answer."""

    error: ClusterError
    stuck: frozenset[int] | None = None
    suspects: tuple[int, ...] = ()
    disconnects: bool = False


# --- ranks that are late


def late_stages(state: State, stages: Sequence[StageStatus]) -> list[StageStatus]:
    """Returns the stages for which a state still waits."""
    done, _ = AWAITED[state]
    return [stage for stage in stages if stage.state not in done]


def patience_seconds(state: State, stages: Sequence[StageStatus], config: ServeConfig) -> float:
    """Returns how many seconds may pass without progress of any stage."""
    if state is State.STARTING:
        return RENEW_SECONDS
    states = [stage.state for stage in stages]
    if state is State.JOINING and StageState.STARTING not in states:
        return config.join_timeout
    # The ring can only form when every engine has imported MLX and said that it joins.
    return config.constants.load_timeout


def late_alarm(state: State, stages: Sequence[StageStatus], config: ServeConfig) -> Alarm:
    """Names the stage that has made no progress for too long."""
    late = late_stages(state, stages)
    # Other ranks may only be waiting for an engine that is still starting.
    stage = next((stage for stage in late if stage.state is StageState.STARTING), late[0])
    _, what = AWAITED[state]
    seconds = patience_seconds(state, stages, config)
    error = ClusterError(
        f"Rank {stage.rank} on {stage.host} did not {what}: it made no progress for "
        f"{seconds:g} s, look at its log."
    )
    if stage.state in (StageState.RENEWING, StageState.LEAVING):
        return Alarm(error, suspects=(stage.rank,), disconnects=True)  # The parent hangs.
    return Alarm(error)


# --- engines that work


def stall_alarm(
    stages: Sequence[StageStatus],
    waiting_seconds: float,
    timeout: float,
    now: float,
) -> Alarm | None:
    """Returns an alarm if no step has come back for longer than timeout (a stopped rank breaks no
    connection), or if a parent has stopped while its engine still works."""
    if waiting_seconds > timeout:
        reason = (
            f"No step came back for {timeout:g} s: {stall_cause(stages, now)}, look at its log."
        )
        silent = tuple(stage.rank for stage in stages if is_silent(stage, now))
        return Alarm(ClusterError(reason), stuck_ranks(stages, now), silent)
    for stage in stages:
        if now - stage.timeline.heard_at > timeout + 2 * WATCH_SECONDS:
            error = ClusterError(f"Rank {stage.rank} on {stage.host} is silent.")
            return Alarm(error, stuck_ranks(stages, now), (stage.rank,), disconnects=True)
    return None


def is_silent(stage: StageStatus, now: float) -> bool:
    """Whether a stage's engine has stopped reporting. Engines report even while they compute."""
    return stage.state is StageState.READY and now - stage.timeline.heard_at > _SILENT_SECONDS


def stuck_ranks(stages: Sequence[StageStatus], now: float) -> frozenset[int]:
    """Returns the ranks whose engines are silent, wait for a tensor that does not arrive, or do not
    finish a step. Other engines wait for a step, so they can leave their ring at once."""
    stuck: set[int] = set()
    for stage in stages:
        activity = stage.activity
        is_busy = activity.step is not None or activity.waits_on is not None
        if is_busy or is_silent(stage, now):
            stuck.add(stage.rank)
    return frozenset(stuck)


def stall_cause(stages: Sequence[StageStatus], now: float) -> str:
    """Returns the rank or hop that delays the others: a silent rank, or else a hop whose tensors do
    not arrive, or else a rank that is computing, or else the rank that has finished the fewest
    steps."""
    for stage in stages:
        silent_seconds = now - stage.timeline.heard_at
        if silent_seconds > _SILENT_SECONDS:
            return f"rank {stage.rank} on {stage.host} has been silent for {silent_seconds:.1f} s"
    for stage in stages:
        if stage.activity.waits_on:
            source, target = stage.activity.waits_on
            return f"the hop from rank {source} to rank {target} is stuck"

    def lag(stage: StageStatus) -> tuple[bool, int, int]:
        is_idle = stage.activity.step is None
        return is_idle, stage.activity.num_steps, -stage.rank

    behind = min(stages, key=lag)
    step = behind.activity.step
    doing = "is behind" if step is None else f"does not finish step {step}"
    return f"rank {behind.rank} on {behind.host} {doing}"
