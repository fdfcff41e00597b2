"""Names the rank or the hop that holds the others up when no step comes back.

Which request ends the engines is decided elsewhere: `serve.front.pipeline.fault_blame`.
"""

from serve.front.pipeline.status import StageStatus

_SILENT_SECONDS = 1.5


def is_silent(stage: StageStatus, now: float) -> bool:
    """Whether the engine of a stage has stopped reporting. Engines report four times a second,
    whatever they compute."""
    return stage.state == "ready" and now - stage.heard_at > _SILENT_SECONDS


def stall_cause(stages: list[StageStatus], now: float) -> str:
    """The rank or hop that holds the others up: a silent rank, else a hop whose tensors do not
    arrive, else the rank that is computing, else the rank that has finished the fewest steps."""
    for stage in stages:
        if (silent_seconds := now - stage.heard_at) > _SILENT_SECONDS:
            return f"rank {stage.rank} on {stage.host} is silent since {silent_seconds:.1f} s"
    for stage in stages:
        if stage.waits_on:
            source, target = stage.waits_on
            return f"the hop from rank {source} to rank {target} is stuck"
    behind = min(stages, key=lambda stage: (stage.step is None, stage.num_steps, -stage.rank))
    doing = "is behind" if behind.step is None else f"does not finish step {behind.step}"
    return f"rank {behind.rank} on {behind.host} {doing}"
