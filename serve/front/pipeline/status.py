"""The status of each stage, as its engine last reported it: state, bytes, busy share and speed.

Fed with the engines' status messages. Times are seconds of rank 0's monotonic clock: hosts' clocks
differ, so the times in a report are converted when it arrives.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve.core.errors import PlanError
from serve.core.messages import Activity, Loaded, Span, Status
from serve.core.plan import StagePlan
from serve.core.sections import AdapterMemory, DraftCosts, MemoryUse, SharedHeadLimit
from serve.core.types import StageState, Step
from serve.front.pipeline.step_cost import StepCost

_WINDOW_SECONDS = 10.0
_NUM_SPANS = 20_000
_NUM_LOGGED_STEPS = 4096
_NEW_SHARE = 0.1  # the weight of the latest step in a running mean
_NEW_CHUNK_SHARE = 0.4
_CONTEXT_UNIT = 2000  # in tokens: StepCost's first guess is then about right for 8 B parameters
_NUM_COMPARED_REPORTS = 64
_SAME_CLOCK_SECONDS = 0.1


@dataclass(slots=True)
class Pace:
    """The running means of a stage's step times, in seconds; None before the first step. A prefill
    step takes as long as a decode step, which reads the weights, and prefill_seconds_per_token more
    for each token. draft_cost is the time of the draft model for one token, by the number of rows,
    and reading_seconds_per_token its time to read one token of the text."""

    decode_seconds: float | None = None
    prefill_seconds_per_token: float | None = None
    num_decode_steps: int = 0
    decode_cost: StepCost = field(default_factory=StepCost)
    draft_cost: StepCost = field(default_factory=StepCost)
    _context_cost: StepCost = field(default_factory=StepCost)  # the cost of a prompt's token
    reading_seconds_per_token: float | None = None

    def update(self, spans: list[Span]) -> None:
        for span in spans:
            seconds = span.end - span.start
            if span.is_draft:
                self._note_draft(span, seconds)
            elif span.num_tokens > span.num_rows + span.num_drafts:
                seconds_of_tokens = max(0.0, seconds - (self.decode_seconds or 0.0))
                # Later chunks of a prompt take longer, because they attend to more tokens. A large
                # share of the latest chunk follows this quickly.
                self.prefill_seconds_per_token = _mean(
                    self.prefill_seconds_per_token,
                    seconds_of_tokens / span.num_tokens,
                    _NEW_CHUNK_SHARE,
                )
                self._context_cost.add_step(
                    span.context / _CONTEXT_UNIT,
                    seconds_of_tokens / span.num_tokens,
                )
            elif span.num_rows:
                self.decode_cost.add_step(span.num_tokens, seconds)
                self.num_decode_steps += 1
                if not span.num_drafts or self.decode_seconds is None:
                    self.decode_seconds = _mean(self.decode_seconds, seconds)

    def prefill_seconds_after(self, context: int) -> float | None:
        """Returns the time of one more token of a prompt after this many others; None before the
        first step."""
        if not self._context_cost.is_known:
            return None
        return self._context_cost.seconds(context / _CONTEXT_UNIT)

    def _note_draft(self, span: Span, seconds: float) -> None:
        if span.num_drafts:
            self.draft_cost.add_step(span.num_rows, seconds / span.num_drafts)
        else:
            self.reading_seconds_per_token = _mean(
                self.reading_seconds_per_token,
                seconds / span.num_tokens,
            )


def _mean(before: float | None, value: float, new_share: float = _NEW_SHARE) -> float:
    if before is None:
        return value
    return before + new_share * (value - before)


class RemoteClock:
    """Converts times of a host's monotonic clock to times of rank 0's."""

    def __init__(self) -> None:
        self._differences: deque[float] = deque(maxlen=_NUM_COMPARED_REPORTS)

    def note(self, sent_at: float, now: float) -> None:
        """Compares the clocks: a report was sent at sent_at on the host's clock and arrived now."""
        self._differences.append(now - sent_at)

    def convert(self, spans: list[Span]) -> list[Span]:
        # Each difference includes the time that its report took, so the smallest is the most exact.
        offset = min(self._differences)
        if 0 <= offset < _SAME_CLOCK_SECONDS:  # An engine on rank 0's host has the same clock.
            return spans
        return [moved(span, offset) for span in spans]


NOTHING_LOADED = Loaded(bytes_owned=0, bytes_read=None, bytes_fetched=0, free_bytes=0, reuse="none")

NO_ACTIVITY = Activity(
    busy_seconds=0.0,
    num_steps=0,
    num_hops=0,
    hop_seconds=0.0,
    waits_on=None,
    step=None,
    kv_bytes=0,
    spans=[],
    sent_at=0.0,
)


@dataclass(slots=True)
class Timeline:
    """The times in the reports of a rank's engines. heard_at is the time of the latest report.
    num_spans counts the spans since the server started; spans holds the latest of them."""

    heard_at: float = 0.0
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_NUM_SPANS))
    num_spans: int = 0
    _clock: RemoteClock = field(default_factory=RemoteClock)
    _busy: deque[tuple[float, float]] = field(default_factory=deque)  # (time, busy seconds)

    def take_spans(self, activity: Activity, now: float) -> None:
        """Adds the spans of a report that arrived now."""
        self._clock.note(activity.sent_at, now)
        self.spans.extend(self._clock.convert(activity.spans))
        self.num_spans += len(activity.spans)

    def note_busy(self, now: float, busy_seconds: float) -> None:
        """Adds the seconds for which the engine has computed until now."""
        self.heard_at = now
        self._busy.append((now, busy_seconds))
        while len(self._busy) > 2:
            second_time, _ = self._busy[1]
            if second_time >= now - _WINDOW_SECONDS:
                break
            self._busy.popleft()

    def renew(self) -> None:
        """Prepares for the reports of another engine, perhaps after a restart of its host."""
        self._busy.clear()
        self._clock = RemoteClock()

    @property
    def busy_share(self) -> float:
        """The share of the last ten seconds in which the stage was computing."""
        if len(self._busy) < 2:
            return 0.0
        first_time, first_busy = self._busy[0]
        last_time, last_busy = self._busy[-1]
        seconds = last_time - first_time
        if seconds <= 0:
            return 0.0
        return min(1.0, (last_busy - first_busy) / seconds)


@dataclass(slots=True)
class Stays:
    """The number of faults that engines of a rank have outlived. positions maps each sequence to
    the number of tokens that the engine held when it left its ring. It is None if the engine did
    not outlive the latest fault."""

    num: int = 0
    positions: Mapping[int, int] | None = None


@dataclass(slots=True)
class StageStatus:
    """The status of one stage, as its engine last reported it. `latest` is that report; `loaded`
    and activity are the latest that a report contained. activity has no spans, its waits_on names
    ranks of the launch, and its kv_bytes are never None."""

    rank: int
    host: str
    plan: StagePlan | None = None
    pid: int | None = None
    latest: Status = Status(StageState.STARTING)
    loaded: Loaded = NOTHING_LOADED
    activity: Activity = NO_ACTIVITY
    stays: Stays = field(default_factory=Stays)
    pace: Pace = field(default_factory=Pace)
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def state(self) -> StageState:
        return self.latest.state

    def update(self, status: Status, ring: Sequence[int], now: float) -> None:
        """Takes over a report. ring lists the ranks that take part; `now` is monotonic."""
        self.latest = status
        if status.loaded:
            self._note_loaded(status.loaded)
        if status.activity:
            self._note_activity(status.activity, ring, now)
        self.timeline.note_busy(now, self.activity.busy_seconds)

    def _note_loaded(self, loaded: Loaded) -> None:
        self.loaded = loaded
        draft = loaded.section(DraftCosts)
        if draft and not self.pace.draft_cost.is_known:
            self.pace.draft_cost.add_step(1, draft.guess_seconds)

    def _note_activity(self, activity: Activity, ring: Sequence[int], now: float) -> None:
        waits_on = None
        if activity.waits_on:
            source, target = activity.waits_on
            waits_on = ring[source], ring[target]
        kv_bytes = activity.kv_bytes
        if kv_bytes is None:
            kv_bytes = self.activity.kv_bytes
        self.activity = msgspec.structs.replace(
            activity, waits_on=waits_on, kv_bytes=kv_bytes, spans=[]
        )
        self.timeline.take_spans(activity, now)
        self.pace.update(activity.spans)

    def assign(self, plan: StagePlan) -> None:
        """Gives the stage a plan for another ring. The engine's keys and values belong to its
        earlier layers, so no sequence can continue with them."""
        self.plan = plan
        self.pace = Pace()
        if self.has_stayed:
            self.stays.positions = {}

    def renew(self) -> None:
        """Resets the status: the engine has been ended or leaves its ring."""
        self.latest = Status(StageState.RENEWING)
        self.stays.positions = None
        self.activity = msgspec.structs.replace(
            self.activity, kv_bytes=0, num_steps=0, waits_on=None, step=None, sections=()
        )
        self.timeline.renew()

    def stay(self, positions: Mapping[int, int]) -> None:
        """Called when the engine has left its ring and waits for an order, as a new one would."""
        self.latest = Status(StageState.STARTING)
        self.stays.positions = positions
        self.stays.num += 1

    @property
    def has_stayed(self) -> bool:
        """Whether its engine outlived the latest fault."""
        return self.stays.positions is not None

    @property
    def memory_bytes(self) -> int:
        """The memory for weights, draft model, keys and values; 0 until the stage is loaded."""
        if not self.loaded.free_bytes:
            return 0
        draft_bytes = self.plan.draft_bytes if self.plan else 0
        return self.loaded.free_bytes + self.loaded.bytes_owned + draft_bytes

    @property
    def doing(self) -> str:
        """The state as text, with the progress of loading."""
        if not self.latest.total:
            return f"rank {self.rank}: {self.state}"
        share = self.latest.done / self.latest.total
        return f"rank {self.rank}: {self.state} {share:.0%}"

    def line(self) -> str:
        """Returns the status as one line of the log. Bytes are known once the stage is ready."""
        words = [f"event=stage_{self.state}", f"rank={self.rank}"]
        if self.plan:
            start, end = self.plan.layers
            words.append(f"layers={start}-{end - 1}")
            if self.plan.num_shards > 1:
                words.append(f"shard={self.plan.shard}")
        if self.state is StageState.READY:
            counts = {
                "bytes_owned": self.loaded.bytes_owned,
                "bytes_read": self.loaded.bytes_read,
                "bytes_fetched": self.loaded.bytes_fetched,
                "bytes_from_neighbours": self.loaded.bytes_from_neighbours,
                "bytes_kept": self.loaded.bytes_kept,
                "shared_head_tokens": self._shared_head_tokens,
            }
            words += [f"{name}={value}" for name, value in counts.items() if value]
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        loaded, activity = self.loaded, self.activity
        return {
            "rank": self.rank,
            "stage": self.plan.stage if self.plan else None,
            "shard": self.plan.shard if self.plan else None,
            "host": self.host,
            "pid": self.pid,
            "cannot_stay": loaded.objection,
            "has_stayed": self.has_stayed,
            "num_stays": self.stays.num,
            "layers": list(self.plan.layers) if self.plan else None,
            "state": self.state.value,
            "bytes_done": self.latest.done,
            "bytes_total": self.latest.total,
            "bytes_owned": loaded.bytes_owned,
            "bytes_read": loaded.bytes_read,
            "bytes_fetched": loaded.bytes_fetched,
            "bytes_from_neighbours": loaded.bytes_from_neighbours,
            "bytes_kept": loaded.bytes_kept,
            "busy_share": round(self.timeline.busy_share, 3),
            "busy_seconds": round(activity.busy_seconds, 3),
            "decode_seconds": self.pace.decode_seconds and round(self.pace.decode_seconds, 5),
            "kv_bytes": activity.kv_bytes,
            "adapter_bytes": self._adapter_bytes,
            "memory": self.memory and self.memory.to_json(),
            "num_hops": activity.num_hops,
            "hop_seconds": round(activity.hop_seconds, 5),
            "all_reduce": activity.sums and activity.sums.to_json(),
            "shared_head_tokens": self._shared_head_tokens,
        }

    @property
    def memory(self) -> MemoryUse | None:
        """The memory of the rank, once its engine has reported it."""
        return self.activity.section(MemoryUse)

    @property
    def _adapter_bytes(self) -> int:
        memory = self.activity.section(AdapterMemory)
        return memory.num_bytes if memory else 0

    @property
    def _shared_head_tokens(self) -> int:
        limit = self.loaded.section(SharedHeadLimit)
        return limit.max_tokens if limit else 0


def first_shards(stages: Sequence[StageStatus]) -> list[StageStatus]:
    """Returns the first shard of each stage. The others compute the same steps."""
    return [stage for stage in stages if stage.plan is None or stage.plan.shard == 0]


def shard_disagreement(stages: Sequence[StageStatus]) -> PlanError | None:
    """Returns the error that names two shards of a stage whose layers are divided differently, or
    None. Shards match their sums only by order, so shards that differ would compute wrong results
    without any error."""
    first: dict[int, StageStatus] = {}
    for stage in stages:
        assert stage.plan is not None
        other = first.setdefault(stage.plan.stage, stage)
        if stage.loaded.sharding != other.loaded.sharding:
            return PlanError(
                f"Rank {other.rank} on {other.host} and rank {stage.rank} on {stage.host} divide "
                f"the layers of their stage differently ({other.loaded.sharding} and "
                f"{stage.loaded.sharding}), "
                "because their processors round differently: use hosts of the same kind for the "
                "shards of a stage, or leave out --tensor-parallel-size."
            )
    return None


# --- the timeline


def moved(span: Span, seconds: float) -> Span:
    """Returns the span with both times later by `seconds`."""
    return msgspec.structs.replace(
        span,
        start=span.start + seconds,
        end=span.end + seconds,
    )


class StepLog:
    """Remembers which sequences the latest steps computed."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def note(self, step: Step) -> None:
        if not step.rows:
            return
        self._sequences[step.number] = tuple(row.sequence for row in step.rows)
        if len(self._sequences) > _NUM_LOGGED_STEPS:
            self._sequences.popitem(last=False)

    def sequences(self, step: int) -> tuple[int, ...]:
        """Returns the ids of the sequences that a step computes; none if the step is too old."""
        return self._sequences.get(step, ())


@dataclass(frozen=True, slots=True)
class StageSpan:
    """The span of a step on a stage, numbered from 1, and the sequences that it computed."""

    rank: int
    number: int
    span: Span
    sequences: tuple[int, ...]


def spans_after(
    stages: Sequence[StageStatus],
    numbers: Mapping[int, int],
    since: float,
    log: StepLog,
) -> list[StageSpan]:
    """Returns the spans that end after `since`, the latest first. For each rank, only spans with a
    higher number than its entry in numbers count. Times are of rank 0's monotonic clock."""
    found: list[StageSpan] = []
    for stage in stages:
        number = stage.timeline.num_spans
        for span in reversed(stage.timeline.spans):
            if number <= numbers.get(stage.rank, 0) or span.end < since:
                break
            found.append(StageSpan(stage.rank, number, span, log.sequences(span.step)))
            number -= 1
    return found


def chrome_trace(stages: list[StageStatus], since: float, offset: float) -> dict[str, Any]:
    """Returns the steps that end after `since`, in the format of chrome://tracing and Perfetto: one
    row for each stage, times in microseconds. Adding offset turns a time of the monotonic clock
    into seconds since 1970."""
    trace: list[dict[str, Any]] = []
    for stage in stages:
        trace += _events(stage, since, offset)
    return {"traceEvents": trace}


def _events(stage: StageStatus, since: float, offset: float) -> Iterator[dict[str, Any]]:
    if stage.plan is None:
        return
    start, end = stage.plan.layers
    label = f"rank {stage.rank}, layers {start} to {end - 1}"
    if stage.plan.num_shards > 1:
        label += f", shard {stage.plan.shard}"
    yield {
        "name": "process_name",
        "ph": "M",
        "pid": stage.rank,
        "args": {"name": label},
    }
    for span in stage.timeline.spans:
        if span.end >= since:
            arguments: dict[str, float] = {
                "step": span.step,
                "rows": span.num_rows,
                "tokens": span.num_tokens,
                "drafts": span.num_drafts,
            }
            if span.sum_seconds is not None:
                arguments["all_reduce_seconds"] = round(span.sum_seconds, 6)
            yield {
                "name": span.name,
                "ph": "X",
                "pid": stage.rank,
                "tid": 0,
                "ts": (span.start + offset) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": arguments,
            }
