"""Forecasts the time and memory of a schedule from a measured probe of each rank, and computes
the utilisation from measured times. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serve.core.messages import Probe
from serve.tune.layout import Layout
from serve.tune.schedule import OpCost, PipelineOp, Schedule, simulate


class OpRecord(NamedTuple):
    """The measurements of an op: its start and end without waiting, in seconds since the run
    began, and the bytes of memory before it, after it, and at its peak."""

    op: PipelineOp
    start: float
    end: float
    before: int
    after: int
    peak: int


class OpSpan(NamedTuple):
    """The time of an op, in seconds since its rank began the update."""

    kind: str
    micro_batch: int
    stage: int
    start: float
    end: float


def spans(records: Sequence[OpRecord]) -> list[OpSpan]:
    return [OpSpan(*record.op, record.start, record.end) for record in records]


class OpSeconds:
    """The mean time of each kind of op, for each stage on a rank."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], float] = defaultdict(float)
        self._counts: dict[tuple[int, str], int] = defaultdict(int)

    def add(self, records: Iterable[OpRecord]) -> None:
        for record in records:
            key = record.op.stage, record.op.kind
            seconds = record.end - record.start
            self._sums[key] += seconds
            self._counts[key] += 1

    def means(self) -> list[tuple[int, str, float]]:
        means = []
        for (stage, kind), total in self._sums.items():
            mean = total / self._counts[stage, kind]
            means.append((stage, kind, mean))
        return means


def utilisation(schedule: Schedule, means: Iterable[tuple[int, str, float]]) -> float:
    """Returns the utilisation of a schedule whose ops take the mean times of OpSeconds."""
    seconds: dict[int, dict[str, float]] = defaultdict(dict)
    for stage, kind, mean in means:
        seconds[stage][kind] = mean
    costs = []
    for stage in range(len(seconds)):
        by_kind = seconds[stage]
        cost = OpCost(*(by_kind.get(kind, 0.0) for kind in "FBW"))
        costs.append(cost)
    timeline = simulate(schedule, costs)
    return timeline.utilisation


def probe_of(
    records: Sequence[OpRecord],
    base: int,
    gradients: int,
    updated: int,
    *,
    clips: bool,
    sums: bool = False,
) -> Probe:
    """Returns the bytes and times of a rank's largest micro-batch. `updated` is the number of
    bytes that an update allocates before it frees the arrays that it replaces. `clips` says
    that gradients are clipped, and `sums` that they are summed over replicas."""
    seconds = OpSeconds()
    seconds.add(records)
    forwards = [record for record in records if record.op.kind == "F"]
    held = max(record.after - record.before for record in forwards)
    extra = {kind: _max_extra(records, kind) for kind in "FBW"}
    extra["update"] = updated
    if clips:
        extra["update"] += gradients
    if sums:
        # A sum over replicas holds another replica's gradients, and the result.
        extra["update"] = max(extra["update"], 2 * gradients)
    return Probe(base, gradients, held, extra, seconds.means())


def _max_extra(records: Sequence[OpRecord], kind: str) -> int:
    """Returns the most bytes that an op of this kind allocated."""
    of_kind = [record for record in records if record.op.kind == kind]
    extra = [record.peak - record.before for record in of_kind]
    return max(extra, default=0)


def peak_bytes(probe: Probe, num_in_flight: int, *, adds_up: bool = True) -> int:
    """Returns the peak memory in bytes when num_in_flight micro-batches are held at once. adds_up
    says that an update has several micro-batches, so the sums of gradients are held too."""
    sums = probe.gradients if adds_up else 0
    before_forward = max(0, num_in_flight - 1) * probe.held
    before_backward = num_in_flight * probe.held
    # The gradients of the first micro-batch become the sums.
    new_gradients = max(0, probe.extra["W"] - sums)
    in_forward = sums + before_forward + probe.extra["F"]
    in_backward = sums + before_backward + probe.extra["B"]
    in_weights = sums + before_backward + new_gradients
    in_update = probe.gradients + probe.extra["update"]
    return probe.base + max(in_forward, in_backward, in_weights, in_update)


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """The forecast of a run. in_flight and peak_bytes hold one number for each rank."""

    utilisation: float
    in_flight: list[int]
    peak_bytes: list[int]


def forecast(schedule: Schedule, probes: Sequence[Probe], layout: Layout) -> TrainingForecast:
    """Makes the forecast of a schedule from the probes of all ranks, rank 0's first. The first
    pipeline's times stand for the others'."""
    by_place = schedule.in_flight[::-1]
    in_flight = [by_place[layout.place(rank)] for rank in range(layout.num_ranks)]
    means = [mean for rank in layout.pipeline(0) for mean in probes[rank].means]
    expected = utilisation(schedule, means)
    adds_up = schedule.shape.num_micro_batches > 1
    peaks = []
    for probe, num_in_flight in zip(probes, in_flight, strict=True):
        peak = peak_bytes(probe, num_in_flight, adds_up=adds_up)
        peaks.append(peak)
    return TrainingForecast(expected, in_flight, peaks)
