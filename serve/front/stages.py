"""What rank 0 knows of the stages: state, bytes, busy share, and their timeline.

Fed with the engines' status messages. Times are wall clock seconds of each host, so
that bars of different hosts are as true to each other as their clocks.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from serve.core.plan import StagePlan

_WINDOW_SECONDS = 10.0
_NUM_SPANS = 20_000
_SILENT_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Span:
    """One step on one stage, from the tensors' arrival to the result."""

    step: int
    group: int
    num_rows: int
    num_tokens: int
    start: float
    end: float

    @property
    def name(self) -> str:
        kind = "prefill" if self.num_tokens > self.num_rows else "decode"
        return f"{kind} group {self.group}" if self.num_rows else "drop"


@dataclass(slots=True)
class StageStatus:
    """One stage, as its engine last reported it."""

    rank: int
    host: str
    plan: StagePlan | None = None
    pid: int | None = None
    state: str = "starting"
    done: int = 0  # bytes of what it is fetching or loading,
    total: int = 0  # and of all that it has to
    bytes_owned: int = 0
    bytes_read: int | None = None
    bytes_fetched: int = 0
    num_steps: int = 0
    heard_at: float = 0.0
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_NUM_SPANS))
    _busy: deque[tuple[float, float]] = field(default_factory=deque)

    def update(self, message: dict[str, Any], now: float) -> None:
        self.state = message["state"]
        self.done, self.total = message.get("done", 0), message.get("total", 0)
        self.bytes_owned = message.get("bytes_owned", self.bytes_owned)
        self.bytes_read = message.get("bytes_read", self.bytes_read)
        self.bytes_fetched = message.get("bytes_fetched", self.bytes_fetched)
        self.num_steps, self.heard_at = message.get("num_steps", 0), now
        self.spans.extend(Span(*span) for span in message.get("spans", ()))
        self._busy.append((now, message.get("busy_seconds", 0.0)))
        while len(self._busy) > 2 and self._busy[1][0] < now - _WINDOW_SECONDS:
            self._busy.popleft()

    @property
    def busy_share(self) -> float:
        """The share of the last ten seconds that the stage was computing."""
        if len(self._busy) < 2:
            return 0.0
        (t0, busy0), (t1, busy1) = self._busy[0], self._busy[-1]
        return min(1.0, (busy1 - busy0) / (t1 - t0)) if t1 > t0 else 0.0

    @property
    def doing(self) -> str:
        percent = f" {self.done / self.total:.0%}" if self.total else ""
        return f"rank {self.rank}: {self.state}{percent}"

    def line(self) -> str:
        """For the log, key=value."""
        known = {
            "bytes_owned": self.bytes_owned,
            "bytes_read": self.bytes_read,
            "bytes_fetched": self.bytes_fetched,
        }
        read = " ".join(f"{key}={value}" for key, value in known.items() if value)
        layers = f"layers={self.plan.layers[0]}-{self.plan.layers[1] - 1} " if self.plan else ""
        return f"event=stage_{self.state} rank={self.rank} {layers}{read}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "layers": list(self.plan.layers) if self.plan else None,
            "state": self.state,
            "bytes_owned": self.bytes_owned,
            "bytes_read": self.bytes_read,
            "bytes_fetched": self.bytes_fetched,
            "busy_share": round(self.busy_share, 3),
        }


def is_silent(stage: StageStatus, now: float) -> bool:
    """Engines report four times a second, whatever they compute."""
    return stage.state == "ready" and now - stage.heard_at > _SILENT_SECONDS


def suspect(stages: list[StageStatus], now: float) -> StageStatus:
    """The stage that holds the others up when no step comes back: one that is silent,
    else the one that has done the fewest steps."""
    silent = [stage for stage in stages if now - stage.heard_at > _SILENT_SECONDS]
    return min(silent or stages, key=lambda stage: (stage.num_steps, -stage.rank))


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
