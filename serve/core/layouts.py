"""Forecasts how fast a layout of stages and shards decodes, from bytes and measured speeds. Pure.

A decode step of few rows takes as long as reading the weights that it uses. Stages read their
weights one after the other, shards at the same time. In each layer, a stage's shards add up their
results twice, which takes time on the link. The shards of the last stage also share the head, if
that saves more time than gathering the logits takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serve.core.errors import UsageError
from serve.core.plan import StagePlan

_SUMS_PER_LAYER = 2  # a sum after the attention, and one after the rest of the layer
_MAX_GATHER_SHARE = 0.5  # the most time to gather logits, as a share of the time saved


@dataclass(frozen=True, slots=True)
class Link:
    """The link between two ranks, as `brigade doctor` measures it."""

    round_trip_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """Returns the time from the start of sending to the arrival of the last byte."""
        return self.round_trip_seconds / 2 + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Speeds:
    """The measured speeds of memory and links in a cluster of equal ranks. Each sum and hop takes
    fence_seconds more, in which a GPU and the CPU, which sends and adds, wait for each other."""

    memory_bytes_per_second: float
    link: Link
    fence_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast for one layout. sum_seconds is the part of step_seconds that goes into sums;
    both are times of one step through all stages, for num_clients rows in all."""

    num_stages: int
    num_shards: int
    num_clients: int
    step_seconds: float
    sum_seconds: float
    tokens_per_second: float
    weight_bytes: int  # on the rank with the largest weights

    @property
    def layout(self) -> str:
        return f"{self.num_stages} x {self.num_shards}"


def forecast(
    stages: Sequence[StagePlan],
    hop_bytes_per_token: int,
    num_clients: int,
    speeds: Speeds,
) -> Forecast:
    """Forecasts a layout. stages lists the plan of every rank; hop_bytes_per_token is the size of
    one token's hidden state. Clients are divided among as many groups as there are stages."""
    first = [stage for stage in stages if stage.shard == 0]
    num_stages = len(first)
    num_shards = len(stages) // num_stages
    num_rows = max(1, num_clients // num_stages)
    hidden_bytes = hop_bytes_per_token * num_rows
    sum_seconds = _sum_seconds(hidden_bytes, num_shards, speeds)
    times: list[float] = []
    all_sums = 0.0
    for stage in first:
        start, end = stage.layers
        sums = _SUMS_PER_LAYER * (end - start) * sum_seconds
        reading = stage.step_bytes(num_rows) / speeds.memory_bytes_per_second
        times.append(reading - _saved_by_sharing_head(stage, num_rows, speeds) + sums)
        all_sums += sums
    hops = 0.0
    if num_stages > 1:
        hops = num_stages * (speeds.link.seconds(hidden_bytes) + speeds.fence_seconds)
    step_seconds = sum(times) + hops
    # Each group waits until its step has passed all stages, and until other groups had their turns.
    num_groups = min(num_stages, num_clients)
    turn_seconds = max(step_seconds, num_groups * max(times))
    return Forecast(
        num_stages=num_stages,
        num_shards=num_shards,
        num_clients=num_clients,
        step_seconds=step_seconds,
        sum_seconds=all_sums,
        tokens_per_second=num_clients / turn_seconds,
        weight_bytes=max(stage.weight_bytes for stage in stages),
    )


def _saved_by_sharing_head(stage: StagePlan, num_rows: int, speeds: Speeds) -> float:
    """Returns the time that the shards of a stage save if they share its head. It is 0 if the stage
    has no head, or if gathering the logits would take too long."""
    if not stage.head_bytes or stage.num_shards == 1:
        return 0.0
    bytes_of_others = stage.head_bytes * (1 - 1 / stage.num_shards)
    saved = bytes_of_others / speeds.memory_bytes_per_second
    logits_bytes = stage.logits_bytes
    limit = max_tokens_of_shared_head(saved, logits_bytes, stage.num_shards, speeds.link)
    if num_rows > limit:
        return 0.0
    return saved - _gather_seconds(num_rows * logits_bytes, stage.num_shards, speeds.link)


def _sum_seconds(num_bytes: int, num_shards: int, speeds: Speeds) -> float:
    """Returns the time of one sum around a ring of T shards. Every shard sends a T-th of the
    numbers T - 1 times while they are added up, and T - 1 times to pass on the results."""
    if num_shards == 1:
        return 0.0
    num_messages = 2 * (num_shards - 1)
    return num_messages * speeds.link.seconds(num_bytes / num_shards) + speeds.fence_seconds


def _gather_seconds(num_bytes: float, num_shards: int, link: Link) -> float:
    """Returns the time of passing equal parts around a ring until every shard has all num_bytes."""
    return (num_shards - 1) * link.seconds(num_bytes / num_shards)


def max_tokens_of_shared_head(
    saved_seconds: float,
    logits_bytes: int,
    num_shards: int,
    link: Link,
) -> int:
    """Returns the largest number of tokens in a step for which the shards of the last stage compute
    the logits together. saved_seconds is the time that this saves in a step of one token; longer
    steps save no less. Gathering the logits, logits_bytes for each token, may take at most half of
    the saved time."""
    fixed_seconds = _gather_seconds(0, num_shards, link)
    seconds_per_token = _gather_seconds(logits_bytes, num_shards, link) - fixed_seconds
    seconds_left = _MAX_GATHER_SHARE * saved_seconds - fixed_seconds
    return max(0, int(seconds_left / seconds_per_token))


def best(forecasts: Sequence[Forecast]) -> Forecast:
    """Returns the fastest layout. Of equally fast layouts, the one with the fewest shards wins."""
    return max(forecasts, key=lambda each: (each.tokens_per_second, -each.num_shards))


def parse_num_shards(text: str) -> int | None:
    """Reads --tensor-parallel-size: a number of shards, or None for auto. Raises UsageError."""
    if text == "auto":
        return None
    if not text.isdecimal() or not int(text):
        raise UsageError(
            f"--tensor-parallel-size {text} is not a number of ranks: give 1 or more, or auto.",
            code="malformed",
        )
    return int(text)


def shard_counts(num_ranks: int, num_shards: int) -> tuple[int, ...]:
    """Returns how many shards each stage can have if num_ranks ranks are divided into equal stages:
    all possible numbers up to num_shards, the largest first."""
    counts = range(min(num_ranks, num_shards), 0, -1)
    return tuple(count for count in counts if num_ranks % count == 0)


def check_layout(num_shards: int | None, split: str) -> None:
    """Raises UsageError if --split does not work with this number of shards."""
    if num_shards is None and split not in ("auto", "even"):
        raise UsageError(
            "--split with numbers of layers needs a number of stages: give "
            "--tensor-parallel-size a number instead of auto.",
            code="needs_flag",
        )


def parse_link(text: str) -> Link:
    """Reads a round trip in milliseconds and MB/s from "0.2,1100". Raises UsageError."""
    try:
        milliseconds, megabytes = map(float, text.split(","))
    except ValueError:
        milliseconds = megabytes = 0.0
    if not (0 < milliseconds < 1e5 and 0 < megabytes < 1e7):
        raise UsageError(
            f"--link {text!r} is not a link: give its round trip in milliseconds and its MB/s, as "
            "`brigade doctor` reports them, such as 0.2,1100.",
            code="malformed",
        )
    return Link(milliseconds / 1e3, megabytes * 1e6)
