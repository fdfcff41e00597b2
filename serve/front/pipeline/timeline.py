"""The timeline of the stages' steps, as a Chrome trace.

Times are wall clock seconds of each host, so bars of different hosts line up as well as
their clocks do.
"""

from collections.abc import Iterator
from typing import Any

from serve.front.pipeline.status import StageStatus


def chrome_trace(stages: list[StageStatus], since: float) -> dict[str, Any]:
    """The steps since a time in the format of chrome://tracing and Perfetto: one row a
    stage, times in microseconds."""
    return {"traceEvents": [event for stage in stages for event in _events(stage, since)]}


def _events(stage: StageStatus, since: float) -> Iterator[dict[str, Any]]:
    if stage.plan is None:
        return
    start, end = stage.plan.layers
    label = f"rank {stage.rank}, layers {start} to {end - 1}"
    yield {"name": "process_name", "ph": "M", "pid": stage.rank, "args": {"name": label}}
    for span in stage.spans:
        if span.end >= since:
            yield {
                "name": span.name,
                "ph": "X",
                "pid": stage.rank,
                "tid": 0,
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"step": span.step, "rows": span.num_rows, "tokens": span.num_tokens},
            }
