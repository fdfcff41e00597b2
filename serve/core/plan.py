"""Who holds which layers, and what that costs. Pure; assignment is in reverse: rank 0
has the last layers, because it samples.

Costs come from serve.rank.costs, which knows models; here they are numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from serve.core.errors import PlanError, UsageError

LayerRange = tuple[int, int]

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer. fetch_bytes are its tensors in the checkpoint, weight_bytes those in
    memory. Of them expert_bytes belong to experts, of which a token uses expert_share.
    A sequence of n tokens holds cache_bytes + n * cache_bytes_per_token of caches, for
    max_cached_tokens at most."""

    weight_bytes: int
    fetch_bytes: int
    cache_bytes_per_token: int = 0
    cache_bytes: int = 0
    max_cached_tokens: int | None = None
    expert_bytes: int = 0
    expert_share: float = 1.0

    def caches(self, num_tokens: int) -> int:
        cached = min(num_tokens, self.max_cached_tokens or num_tokens)
        return self.cache_bytes + cached * self.cache_bytes_per_token

    def step_bytes(self, num_rows: int) -> float:
        """What a decode step of so many rows reads of the weights, which is what its
        time is made of while there are few rows."""
        used = min(1.0, self.expert_share * num_rows)
        return self.weight_bytes - self.expert_bytes * (1 - used)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """first is what else the rank with layer 0 holds (the embedding), last what rank 0
    holds (norm and head), shared what every rank does. tied is part of both first and
    last, and there once where both are. hop is what one token sends across a cut."""

    layers: tuple[LayerCost, ...]
    first: LayerCost
    last: LayerCost
    shared: LayerCost
    tied: LayerCost
    hop_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What is promised to clients: so many sequences of so many tokens at once."""

    context: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Bytes of one rank, and its share of the time that a decode step takes in all. A
    sequence holds cache_bytes_per_token for each token and at most cache_bytes_per_sequence
    besides, of layers that look back a limited way."""

    rank: int
    layers: LayerRange
    weight_bytes: int
    cache_bytes: int
    cache_bytes_per_token: int
    cache_bytes_per_sequence: int
    fetch_bytes: int
    step_share: float
    memory_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "StagePlan":
        return cls(**{**fields, "layers": tuple(fields["layers"])})


# --- splits


def even_split(num_layers: int, num_ranks: int) -> list[LayerRange]:
    """The layers [start, end) of each rank, rank 0 first.

    Sizes differ by one at most. The ranks with the lower numbers get the smaller
    shares, because rank 0 also has the head and samples.
    """
    check_num_ranks(num_layers, num_ranks)
    base, rest = divmod(num_layers, num_ranks)
    return split_of([base + (rank >= num_ranks - rest) for rank in range(num_ranks)], num_layers)


def split_of(sizes: Sequence[int], num_layers: int) -> list[LayerRange]:
    """The layers of each rank from their numbers, rank 0 first."""
    if min(sizes) < 1 or sum(sizes) != num_layers:
        raise PlanError(
            f"--split {','.join(map(str, sizes))} makes {sum(sizes)} layers, the model has "
            f"{num_layers}: give each rank one or more, {num_layers} in all."
        )
    ends = [num_layers - sum(sizes[:rank]) for rank in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def check_num_ranks(num_layers: int, num_ranks: int) -> None:
    if num_ranks > num_layers:
        raise PlanError(
            f"{num_ranks} ranks are more than the model's {num_layers} layers: "
            f"start at most {num_layers} ranks."
        )


def balanced_split(
    cost: ModelCost,
    num_ranks: int,
    demand: Demand,
    memory: Sequence[int] | None,
    forbidden: frozenset[int] = frozenset(),
) -> list[LayerRange]:
    """The split whose slowest stage is fastest, within the ranks' memory and without a
    cut before a forbidden layer. Among equals, the one with the smallest sum of squares.

    Raises PlanError with the numbers if no split fits.
    """
    num_layers = len(cost.layers)
    check_num_ranks(num_layers, num_ranks)
    sums = _Sums(cost, demand, num_ranks)
    # best[start]: (slowest, sum of squares, ranges) of the ranks so far for layers from start on.
    best: dict[int, tuple[float, float, list[LayerRange]]] = {num_layers: (0.0, 0.0, [])}
    for rank in range(num_ranks):
        left = num_ranks - rank - 1
        room = memory[rank] if memory else None
        following: dict[int, tuple[float, float, list[LayerRange]]] = {}
        for end, (slowest, squares, ranges) in best.items():
            for start in range(left, end) if left else [0]:
                if start in forbidden or (room and sums.memory(start, end) > room):
                    continue
                time = sums.time(start, end)
                found = (max(slowest, time), squares + time**2, [*ranges, (start, end)])
                if start not in following or found[:2] < following[start][:2]:
                    following[start] = found
        best = following
    if 0 not in best and not memory:
        raise PlanError(
            f"This model cannot be cut into {num_ranks} stages: no cut is possible before "
            f"layers {sorted(forbidden)}. Start fewer ranks."
        )
    if 0 not in best:
        raise _does_not_fit(cost, num_ranks, demand, memory)
    return best[0][2]


class _Sums:
    """Bytes in memory, and bytes read in a decode step, of any range of layers."""

    def __init__(self, cost: ModelCost, demand: Demand, num_ranks: int) -> None:
        def held(part: LayerCost) -> int:
            return part.weight_bytes + demand.concurrency * part.caches(demand.context)

        # A group has its part of the rows: as many groups run at once as there are ranks.
        num_rows = max(1, demand.concurrency // num_ranks)
        self._num_layers = len(cost.layers)
        self._memory = list(accumulate((held(layer) for layer in cost.layers), initial=0))
        self._time = list(accumulate((c.step_bytes(num_rows) for c in cost.layers), initial=0.0))
        self._first, self._last = held(cost.first), held(cost.last)
        self._shared = held(cost.shared)
        self._head_time = cost.last.weight_bytes

    def memory(self, start: int, end: int) -> int:
        first = self._first if start == 0 else 0
        last = self._last if end == self._num_layers else 0
        return self._memory[end] - self._memory[start] + self._shared + first + last

    def time(self, start: int, end: int) -> float:
        """The embedding is looked up, not read, so it costs memory and no time."""
        head = self._head_time if end == self._num_layers else 0
        return self._time[end] - self._time[start] + head


# --- costs of a split


def plan_stages(
    cost: ModelCost,
    ranges: Sequence[LayerRange],
    demand: Demand,
    memory: Sequence[int] | None = None,
) -> list[StagePlan]:
    """Raises PlanError if a stage does not fit into its rank's memory."""
    sums = _Sums(cost, demand, len(ranges))
    times = [sums.time(*layers) for layers in ranges]
    stages = [
        stage_plan(cost, rank, layers, demand, memory, times[rank] / sum(times))
        for rank, layers in enumerate(ranges)
    ]
    if not all(map(_fits, stages)):
        raise _does_not_fit(cost, len(ranges), demand, memory, stages)
    return stages


def stage_plan(
    cost: ModelCost,
    rank: int,
    layers: LayerRange,
    demand: Demand,
    memory: Sequence[int] | None,
    step_share: float = 0.0,
) -> StagePlan:
    is_first, is_last = layers[0] == 0, layers[1] == len(cost.layers)
    own = [*cost.layers[slice(*layers)], cost.shared]
    own += [cost.first] * is_first + [cost.last] * is_last
    twice = cost.tied if is_first and is_last else LayerCost(0, 0)
    return StagePlan(
        rank=rank,
        layers=layers,
        weight_bytes=sum(part.weight_bytes for part in own) - twice.weight_bytes,
        cache_bytes=demand.concurrency * sum(part.caches(demand.context) for part in own),
        cache_bytes_per_token=sum(p.cache_bytes_per_token for p in own if not p.max_cached_tokens),
        cache_bytes_per_sequence=sum(
            part.cache_bytes + (part.max_cached_tokens or 0) * part.cache_bytes_per_token
            for part in own
        ),
        fetch_bytes=sum(part.fetch_bytes for part in own) - twice.fetch_bytes,
        step_share=step_share,
        memory_bytes=memory[rank] if memory else None,
    )


def _fits(stage: StagePlan) -> bool:
    return stage.memory_bytes is None or stage.total_bytes <= stage.memory_bytes


def _does_not_fit(
    cost: ModelCost,
    num_ranks: int,
    demand: Demand,
    memory: Sequence[int] | None,
    stages: Sequence[StagePlan] | None = None,
) -> PlanError:
    whole = stage_plan(cost, 0, (0, len(cost.layers)), demand, None)
    room = format_bytes(sum(memory[:num_ranks])) if memory else "no limit"
    late = next((stage for stage in stages or () if not _fits(stage)), None)
    where = (
        f" Rank {late.rank} would need {format_bytes(late.total_bytes)} for layers "
        f"{late.layers[0]} to {late.layers[1] - 1}, it has {format_bytes(late.memory_bytes or 0)}."
        if late
        else ""
    )
    return PlanError(
        f"The model does not fit: {format_bytes(whole.weight_bytes)} of weights and "
        f"{format_bytes(whole.cache_bytes)} of caches for {demand.concurrency} sequences of "
        f"{demand.context} tokens, into {room} on {num_ranks} ranks.{where} Add ranks or memory, "
        "or promise a shorter context or fewer sequences."
    )


# --- amounts of memory, as people write them


def parse_memory(text: str, num_ranks: int, flag: str = "--memory") -> list[int]:
    """Bytes of each rank from "24GB" (the same for all) or "24GB,48GB"."""
    amounts = _amounts(text, flag)
    if len(amounts) not in (1, num_ranks):
        raise UsageError(
            f"{flag} {text} has {len(amounts)} amounts for {num_ranks} ranks: give one for each."
        )
    return amounts * num_ranks if len(amounts) == 1 else amounts


def memory_of(text: str, ranks: Iterable[int]) -> list[int]:
    """Bytes of some of the ranks for which parse_memory takes the text."""
    amounts = _amounts(text)
    return [amounts[rank if len(amounts) > 1 else 0] for rank in ranks]


def _amounts(text: str, flag: str = "--memory") -> list[int]:
    return [_parse_bytes(part, flag) for part in text.split(",")]


def _parse_bytes(text: str, flag: str) -> int:
    amount_text = text.strip().upper()
    number = amount_text.rstrip("KMGIB")
    try:
        amount = float(number) * _UNITS[amount_text[len(number) :]]
    except (ValueError, KeyError):
        raise UsageError(f"{flag} {text!r} is no amount: write such as 24GB or 16GiB.") from None
    if not 0 < amount < 2**60:
        raise UsageError(f"{flag} {text!r} is out of range: write such as 24GB.")
    return int(amount)


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def parse_split(text: str, num_layers: int, num_ranks: int) -> list[LayerRange]:
    """The layers of each rank from "20,12": rank 0's number first."""
    sizes = text.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(
            f"--split {text} is not a split: give auto, even, or the number of layers of each "
            "rank, rank 0's first, such as 20,12."
        )
    if len(sizes) != num_ranks:
        raise UsageError(
            f"--split {text} has {len(sizes)} numbers, and the number of ranks is {num_ranks}: "
            "give one number of layers for each rank, auto or even."
        )
    return split_of([int(size) for size in sizes], num_layers)
