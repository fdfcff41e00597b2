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
from serve.core.types import Step, SumCounts
from serve.front.drafts.step_cost import StepCost

_WINDOW_SECONDS = 10.0
_NUM_SPANS = 20_000
_NUM_LOGGED_STEPS = 4096
_NEW_SHARE = 0.1  # of the latest step in a running mean
_NEW_CHUNK_SHARE = 0.4
_SILENT_SECONDS = 1.5
_NUM_COMPARED_REPORTS = 64
_SAME_CLOCK_SECONDS = 0.1


@dataclass(slots=True)
class Pace:
    """The running means of a stage's step times, in seconds; None before the first step. A prefill
    step takes as long as a decode step, which reads the weights, and prefill_seconds_per_token more
    for each token. draft_cost is that of a token of the draft model by the number of rows, and
    reading_seconds_per_token the time in which it reads a token of the text."""

    decode_seconds: float | None = None
    prefill_seconds_per_token: float | None = None
    num_decode_steps: int = 0
    decode_cost: StepCost = field(default_factory=StepCost)
    draft_cost: StepCost = field(default_factory=StepCost)
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
            elif span.num_rows:
                self.decode_cost.note(span.num_tokens, seconds)
                self.num_decode_steps += 1
                if not span.num_drafts or self.decode_seconds is None:
                    self.decode_seconds = _mean(self.decode_seconds, seconds)

    def _note_draft(self, span: Span, seconds: float) -> None:
        if span.num_drafts:
            self.draft_cost.note(span.num_rows, seconds / span.num_drafts)
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
    """Converts the times of a host's monotonic clock to those of rank 0's."""

    def __init__(self) -> None:
        self._differences: deque[float] = deque(maxlen=_NUM_COMPARED_REPORTS)

    def note(self, sent_at: float, now: float) -> None:
        """Compares the clocks: a report was sent at sent_at on the host's clock and arrived now."""
        self._differences.append(now - sent_at)

    def convert(self, spans: list[Span]) -> list[Span]:
        # Each difference also has the time that the report took. It is least in the smallest one.
        offset = min(self._differences)
        if 0 <= offset < _SAME_CLOCK_SECONDS:  # An engine on rank 0's host has the same clock.
            return spans
        return [moved(span, offset) for span in spans]


@dataclass(slots=True)
class StageStatus:
    """The status of one stage, as its engine last reported it."""

    rank: int
    host: str
    plan: StagePlan | None = None
    pid: int | None = None
    has_stayed: bool = False  # whether its engine outlived the latest fault
    num_stays: int = 0  # faults that engines of this rank have outlived
    # What the engine held of each sequence, in tokens, when it left its ring.
    positions: Mapping[int, int] = field(default_factory=dict)
    state: str = "starting"
    done: int = 0  # bytes fetched or loaded so far
    total: int = 0  # bytes to fetch or load in all
    bytes_owned: int = 0
    bytes_read: int | None = None
    bytes_fetched: int = 0
    bytes_kept: int = 0  # those of bytes_owned that its engine had in memory already
    free_bytes: int = 0
    objection: str | None = None  # the reason why its engine cannot outlive a fault
    files: str = ""  # identifies the model's files as the engine has read them
    sharding: str = ""  # identifies how the engine has divided the layers among shards
    logits_bytes_per_token: int = 0  # on rank 0, which has the head
    scoring_bytes: int = 0  # further bytes that scoring a prompt takes
    hidden_size: int = 0
    shared_head_tokens: int = 0  # steps of up to as many tokens share the head among shards
    reuse: str = "none"
    can_rewind: bool = False
    is_causal: bool = True  # whether tokens fed together give the same logits as one by one
    draft_bytes: int = 0  # the weights of the draft model on rank 0
    kv_bytes: int = 0
    adapter_bytes: int = 0
    num_hops: int = 0
    hop_seconds: float = 0.0
    sums: SumCounts | None = None  # between the shards of this stage
    busy_seconds: float = 0.0
    num_steps: int = 0
    # The ranks (from, to) of the hop whose tensor has not arrived yet.
    waits_on: tuple[int, int] | None = None
    step: int | None = None  # the step that the stage is computing
    pace: Pace = field(default_factory=Pace)
    heard_at: float = 0.0
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_NUM_SPANS))
    clock: RemoteClock = field(default_factory=RemoteClock)
    num_spans: int = 0  # since the server started, including those no longer in spans
    _busy: deque[tuple[float, float]] = field(default_factory=deque)

    def update(self, status: Status, ring: Sequence[int], now: float) -> None:
        """Takes over the values of a report. ring has the ranks that take part, in order. now is a
        time of the monotonic clock."""
        self.state = status.state
        self.done = status.done
        self.total = status.total
        self.heard_at = now
        if status.loaded:
            self._note_loaded(status.loaded)
        if status.activity:
            self._note_activity(status.activity, ring, now)
        self._busy.append((now, self.busy_seconds))
        while len(self._busy) > 2:
            second_time, _ = self._busy[1]
            if second_time >= now - _WINDOW_SECONDS:
                break
            self._busy.popleft()

    def _note_loaded(self, loaded: Loaded) -> None:
        self.files = loaded.files
        self.sharding = loaded.sharding
        self.objection = loaded.objection
        self.bytes_owned = loaded.bytes_owned
        self.bytes_read = loaded.bytes_read
        self.bytes_fetched = loaded.bytes_fetched
        self.bytes_kept = loaded.bytes_kept
        self.free_bytes = loaded.free_bytes
        self.reuse = loaded.reuse
        self.can_rewind = loaded.can_rewind
        self.is_causal = loaded.is_causal
        self.draft_bytes = loaded.draft_bytes
        if loaded.draft_bytes and not self.pace.draft_cost.is_known:
            self.pace.draft_cost.note(1, loaded.draft_seconds)
        self.logits_bytes_per_token = loaded.logits_bytes_per_token
        self.scoring_bytes = loaded.scoring_bytes
        self.hidden_size = loaded.hidden_size
        self.shared_head_tokens = loaded.shared_head_tokens

    def _note_activity(self, activity: Activity, ring: Sequence[int], now: float) -> None:
        self.busy_seconds = activity.busy_seconds
        self.num_steps = activity.num_steps
        self.adapter_bytes = activity.adapter_bytes
        self.num_hops = activity.num_hops
        self.hop_seconds = activity.hop_seconds
        self.sums = activity.sums
        self.step = activity.step
        self.waits_on = None
        if activity.waits_on:
            source, target = activity.waits_on
            self.waits_on = ring[source], ring[target]
        if activity.kv_bytes is not None:
            self.kv_bytes = activity.kv_bytes
        self.clock.note(activity.sent_at, now)
        self.spans.extend(self.clock.convert(activity.spans))
        self.num_spans += len(activity.spans)
        self.pace.update(activity.spans)

    def assign(self, plan: StagePlan) -> None:
        """Gives the stage a plan for another ring. What its engine holds of sequences belongs to
        its earlier layers, so no sequence can go on with it."""
        self.plan = plan
        self.pace = Pace()
        self.positions = {}

    def renew(self) -> None:
        """Resets the status: the engine has been ended or leaves its ring."""
        self.state = "renewing"
        self.has_stayed = False
        self.positions = {}
        self.done = 0
        self.total = 0
        self.kv_bytes = 0
        self.adapter_bytes = 0
        self.num_steps = 0
        self.waits_on = None
        self.step = None
        self._busy.clear()
        self.clock = RemoteClock()  # The host may have been started again.

    def stay(self, positions: Mapping[int, int]) -> None:
        """Notes that the engine has left its ring and waits for an order, as a new one would."""
        self.state = "starting"
        self.positions = positions
        self.has_stayed = True
        self.num_stays += 1

    @property
    def memory_bytes(self) -> int:
        """The memory for weights, keys and values when the stage was loaded, with that of the draft
        model; 0 before that."""
        if not self.free_bytes:
            return 0
        draft_bytes = self.plan.draft_bytes if self.plan else 0
        return self.free_bytes + self.bytes_owned + draft_bytes

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

    @property
    def doing(self) -> str:
        """The state as text, with the progress of loading."""
        if not self.total:
            return f"rank {self.rank}: {self.state}"
        share = self.done / self.total
        return f"rank {self.rank}: {self.state} {share:.0%}"

    def line(self) -> str:
        """Returns the status as one line of the log, key=value. Only a stage that is ready has
        byte counts: before that, they are those of an earlier engine."""
        words = [f"event=stage_{self.state}", f"rank={self.rank}"]
        if self.plan:
            start, end = self.plan.layers
            words.append(f"layers={start}-{end - 1}")
            if self.plan.num_shards > 1:
                words.append(f"shard={self.plan.shard}")
        counts = {
            "bytes_owned": self.bytes_owned,
            "bytes_read": self.bytes_read,
            "bytes_fetched": self.bytes_fetched,
            "bytes_kept": self.bytes_kept,
            "shared_head_tokens": self.shared_head_tokens,
        }
        if self.state == "ready":
            words += [f"{key}={value}" for key, value in counts.items() if value]
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "stage": self.plan.stage if self.plan else None,
            "shard": self.plan.shard if self.plan else None,
            "host": self.host,
            "pid": self.pid,
            "cannot_stay": self.objection,
            "has_stayed": self.has_stayed,
            "num_stays": self.num_stays,
            "layers": list(self.plan.layers) if self.plan else None,
            "state": self.state,
            "bytes_done": self.done,
            "bytes_total": self.total,
            "bytes_owned": self.bytes_owned,
            "bytes_read": self.bytes_read,
            "bytes_fetched": self.bytes_fetched,
            "bytes_kept": self.bytes_kept,
            "busy_share": round(self.busy_share, 3),
            "busy_seconds": round(self.busy_seconds, 3),
            "decode_seconds": self.pace.decode_seconds and round(self.pace.decode_seconds, 5),
            "kv_bytes": self.kv_bytes,
            "adapter_bytes": self.adapter_bytes,
            "num_hops": self.num_hops,
            "hop_seconds": round(self.hop_seconds, 5),
            "all_reduce": self.sums and self.sums.to_json(),
            "shared_head_tokens": self.shared_head_tokens,
        }


def first_shards(stages: Sequence[StageStatus]) -> list[StageStatus]:
    """Returns the first shard of each stage. It stands for the others, which compute the same steps
    at the same time."""
    return [stage for stage in stages if stage.plan is None or stage.plan.shard == 0]


def shard_disagreement(stages: Sequence[StageStatus]) -> PlanError | None:
    """Returns the error that names two shards of a stage whose layers are divided differently, or
    None. Sums match only by their order, so such shards would compute wrong results without any
    error."""
    first: dict[int, StageStatus] = {}
    for stage in stages:
        assert stage.plan is not None
        other = first.setdefault(stage.plan.stage, stage)
        if stage.sharding != other.sharding:
            return PlanError(
                f"Rank {other.rank} on {other.host} and rank {stage.rank} on {stage.host} divide "
                f"the layers of their stage differently ({other.sharding} and {stage.sharding}), "
                "because their processors round differently: use hosts of the same kind for the "
                "shards of a stage, or leave out --tensor-parallel-size."
            )
    return None


def is_silent(stage: StageStatus, now: float) -> bool:
    """Whether the engine of a stage has stopped reporting. Engines report four times a second,
    whatever they compute."""
    return stage.state == "ready" and now - stage.heard_at > _SILENT_SECONDS


def stuck_ranks(stages: Sequence[StageStatus], now: float) -> frozenset[int]:
    """Returns the ranks whose engines are silent, wait for a tensor that does not arrive, or do not
    finish a step. The others wait for a step, so they can leave their ring at once."""
    stuck: set[int] = set()
    for stage in stages:
        is_busy = stage.step is not None or stage.waits_on is not None
        if is_busy or is_silent(stage, now):
            stuck.add(stage.rank)
    return frozenset(stuck)


def stall_cause(stages: list[StageStatus], now: float) -> str:
    """Returns the rank or hop that delays the others: a silent rank, or else a hop whose tensors do
    not arrive, or else a rank that is computing, or else the rank that has finished the fewest
    steps."""
    for stage in stages:
        silent_seconds = now - stage.heard_at
        if silent_seconds > _SILENT_SECONDS:
            return f"rank {stage.rank} on {stage.host} has been silent for {silent_seconds:.1f} s"
    for stage in stages:
        if stage.waits_on:
            source, target = stage.waits_on
            return f"the hop from rank {source} to rank {target} is stuck"

    def lag(stage: StageStatus) -> tuple[bool, int, int]:
        is_idle = stage.step is None
        return is_idle, stage.num_steps, -stage.rank

    behind = min(stages, key=lag)
    doing = "is behind" if behind.step is None else f"does not finish step {behind.step}"
    return f"rank {behind.rank} on {behind.host} {doing}"


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
    """The span of one step on a stage, and the ids of the sequences that it computed. The spans of
    a stage are numbered from 1."""

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
    """Returns the spans of each stage that end after `since` and have a higher number than numbers
    has for its rank, the latest first. Times are those of rank 0's monotonic clock."""
    found: list[StageSpan] = []
    for stage in stages:
        number = stage.num_spans
        for span in reversed(stage.spans):
            if number <= numbers.get(stage.rank, 0) or span.end < since:
                break
            found.append(StageSpan(stage.rank, number, span, log.sequences(span.step)))
            number -= 1
    return found


def chrome_trace(stages: list[StageStatus], since: float, offset: float) -> dict[str, Any]:
    """Returns the steps that end after `since`, in the format of chrome://tracing and Perfetto: one
    row for each stage, times in microseconds. offset is what turns a time of the monotonic clock
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
    for span in stage.spans:
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
