"""Assigns layers to ranks and computes the costs. All functions are pure.

Ranks get layers in reverse order: rank 0 gets the last layers, because it samples.
serve.model.costs measures the costs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from serve.core.amounts import format_bytes, parse_memory
from serve.core.errors import PlanError, UsageError

LayerRange = tuple[int, int]

# With padding and spare room, keys and values may take half as much memory again.
_SLACK = 3, 2  # a ratio of whole numbers (3 / 2), so that sums are exact
MAX_KV_TOKENS = 2**31 - 1
_SHRINKAGE = 4  # the factor between two demands that are tried one after the other
MIN_KV_TOKENS = 256  # Nothing starts with less room than this for keys and values.
MAX_DRAFT_ROWS = 8  # sequences whose keys and values the draft model holds at a time
MAX_DRAFT_TOKENS = 1024  # the most tokens that the draft model holds of a sequence


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer: the bytes of its tensors in the checkpoint (fetch_bytes) and in memory
    (weight_bytes). expert_bytes of the weights belong to experts, and a token uses the share
    expert_share of them. The caches of a sequence of n tokens take cache_bytes + n *
    cache_bytes_per_token; only the last max_cached_tokens count, if that is set."""

    weight_bytes: int
    fetch_bytes: int
    cache_bytes_per_token: int = 0
    cache_bytes: int = 0
    max_cached_tokens: int | None = None
    expert_bytes: int = 0
    expert_share: float = 1.0

    def caches(self, demand: "Demand") -> int:
        """Returns the bytes of caches that the demand needs, without slack."""
        if self.max_cached_tokens:
            growing = 0
        else:
            growing = demand.tokens * self.cache_bytes_per_token
        return demand.concurrency * self.fixed_caches(demand.context) + growing

    def fixed_caches(self, context: int) -> int:
        """Returns the largest size of a sequence's caches that do not grow with every token:
        states, and the keys and values of windows."""
        window = min(context, self.max_cached_tokens or 0)
        return self.cache_bytes + window * self.cache_bytes_per_token

    def step_bytes(self, num_rows: int) -> float:
        """Returns the bytes of weights that a decode step of num_rows rows reads. With few rows,
        they determine the time of the step."""
        return self.weight_bytes - _idle_bytes(self.expert_bytes, self.expert_share, num_rows)


def _idle_bytes(expert_bytes: int, expert_share: float, num_rows: int) -> float:
    """Returns the bytes of the experts that no row of a step uses, if each row chooses its experts
    independently."""
    return expert_bytes * (1 - expert_share) ** num_rows


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The cost of a model: its layers, and the weights outside of them. The rank with layer 0 also
    holds first (the embedding), rank 0 holds last (norm and head), and every rank holds shared.
    `tied` is part of both first and last, and held once. hop_bytes_per_token is the size of the
    hidden state that one token sends across a cut. head_bytes is the size of a head that shards can
    share, and logits_bytes the size of one token's logits; both are 0 for other heads."""

    layers: tuple[LayerCost, ...]
    first: LayerCost
    last: LayerCost
    shared: LayerCost
    tied: LayerCost
    hop_bytes_per_token: int
    head_bytes: int = 0
    logits_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """A demand for room: concurrency sequences at the same time, each of up to context tokens. If
    num_tokens is set, that many tokens must fit in all, otherwise every whole context."""

    context: int
    concurrency: int
    num_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return self.num_tokens or self.context * self.concurrency

    def smaller(self, min_tokens: int) -> "list[Demand]":
        """Returns this demand and ever smaller ones, the last for min_tokens tokens in total.
        Demands for fewer tokens have fewer sequences."""
        sizes = [self.tokens]
        while sizes[-1] > min_tokens:
            sizes.append(max(min_tokens, sizes[-1] // _SHRINKAGE))
        demands: list[Demand] = []
        for size in sizes:
            max_sequences = max(1, size // MIN_KV_TOKENS)
            concurrency = min(self.concurrency, max_sequences)
            demands.append(replace(self, num_tokens=size, concurrency=concurrency))
        return demands


@dataclass(frozen=True, slots=True)
class DraftSource:
    """The place of rank 0's draft model: a folder, or with a commit `org/name` on the hub. If
    is_head is set, the draft model is the prediction head of the model there."""

    model: str
    commit: str | None
    cache_dir: str | None
    is_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The settings of a plan, which `brigade plan` and `serve` take as flags. `split` is auto,
    even, or the number of layers of each stage. memory and adapter_memory are one amount for all
    ranks, or one for each. There must be room for context * concurrency tokens, or for min_tokens
    if that is set. num_shards ranks share the layers of each stage. Rank 0 also holds the draft
    model, if there is one."""

    num_ranks: int
    context: int | None = None
    concurrency: int = 1
    min_tokens: int | None = None
    memory: str | None = None
    adapter_memory: str | None = None
    split: str = "auto"
    kv_bits: int | None = None
    num_shards: int = 1
    draft: DraftSource | None = None

    @property
    def num_stages(self) -> int:
        return self.num_ranks // self.num_shards

    def amounts(self, name: str) -> list[int] | None:
        """Returns the bytes for each rank, from one of the two memory fields. Raises UsageError."""
        text = getattr(self, name)
        if text:
            return parse_memory(text, self.num_ranks, f"--{name.replace('_', '-')}")
        return None


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The layers and bytes of one rank, and its share of a decode step's time.

    num_shards ranks hold parts of the same layers, and this one is number `shard` of them. Stages
    are counted like ranks: stage 0 has the last layers. The bytes are those of the rank's own part.

    A sequence takes cache_bytes_per_token for each token and, in layers that look back a limited
    way, up to cache_bytes_per_sequence. cache_bytes is the sum for the demand, without slack.
    draft_bytes are the weights of the draft model and the memory for its keys and values. The last
    stage has ModelCost's head_bytes and logits_bytes. expert_bytes of the weights belong to
    experts, and a token uses expert_share of these.
    """

    rank: int
    layers: LayerRange
    weight_bytes: int
    cache_bytes: int
    cache_bytes_per_token: int
    cache_bytes_per_sequence: int
    fetch_bytes: int
    step_share: float
    memory_bytes: int | None
    stage: int = 0
    num_shards: int = 1
    shard: int = 0
    draft_bytes: int = 0
    head_bytes: int = 0
    logits_bytes: int = 0
    expert_bytes: int = 0
    expert_share: float = 1.0

    def step_bytes(self, num_rows: int) -> float:
        """Returns the bytes of weights that a decode step of num_rows rows reads."""
        return self.weight_bytes - _idle_bytes(self.expert_bytes, self.expert_share, num_rows)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + with_slack(self.cache_bytes) + self.draft_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes}


# --- splits


def even_split(num_layers: int, num_ranks: int) -> list[LayerRange]:
    """Returns the layers [start, end) of each rank, rank 0 first. Sizes differ by at most one.
    Lower ranks get the smaller shares, because rank 0 also has the head and samples."""
    check_num_ranks(num_layers, num_ranks)
    base, rest = divmod(num_layers, num_ranks)
    sizes = [base] * (num_ranks - rest) + [base + 1] * rest
    return split_of(sizes, num_layers)


def parse_split(text: str, num_layers: int, num_stages: int) -> list[LayerRange]:
    """Returns the layers of each stage, from "20,12": the number of rank 0's stage first."""
    sizes = text.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(
            f"--split {text} is not a split: give auto, even, or the number of layers of each "
            "stage, rank 0's first, such as 20,12.",
            code="malformed",
        )
    if len(sizes) != num_stages:
        stages = "is 1 stage" if num_stages == 1 else f"are {num_stages} stages"
        raise UsageError(
            f"--split {text} has {len(sizes)} numbers, but there {stages}: "
            "give one number of layers for each stage, auto or even.",
            code="wrong_count",
        )
    return split_of([int(size) for size in sizes], num_layers)


def split_of(sizes: Sequence[int], num_layers: int) -> list[LayerRange]:
    """Returns the layers [start, end) of each rank, from their numbers, rank 0 first."""
    if min(sizes) < 1 or sum(sizes) != num_layers:
        raise PlanError(
            f"--split {','.join(map(str, sizes))} makes {sum(sizes)} layers, the model has "
            f"{num_layers}: give each rank one or more, {num_layers} in all.",
            code="split_sum",
        )
    ends = [num_layers - sum(sizes[:rank]) for rank in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def check_num_ranks(num_layers: int, num_ranks: int) -> None:
    if num_ranks > num_layers:
        raise PlanError(
            f"{num_ranks} ranks are more than the model's {num_layers} layers: "
            f"start at most {num_layers} ranks.",
            code="too_many_ranks",
        )


def count_stages(num_ranks: int, num_shards: int) -> int:
    """Returns the number of stages of num_shards ranks each. Raises UsageError."""
    if num_ranks % num_shards:
        raise UsageError(
            f"--tensor-parallel-size {num_shards} does not divide the number of ranks: start "
            f"{num_shards} ranks, or a multiple of {num_shards}, not {num_ranks}.",
            code="uneven_ranks",
        )
    return num_ranks // num_shards


def balanced_split(
    cost: ModelCost,
    num_ranks: int,
    demand: Demand,
    memory: Sequence[int] | None,
    forbidden: frozenset[int] = frozenset(),
) -> list[LayerRange]:
    """Returns the split whose slowest stage is fastest, within the ranks' memory and without a cut
    before a forbidden layer. Of equally fast splits, the one with the smallest sum of squared times
    wins. Raises PlanError if none fits."""
    num_layers = len(cost.layers)
    check_num_ranks(num_layers, num_ranks)
    sums = _Sums(cost, demand, num_ranks)
    # best[start] is the best split of the layers from start on over the ranks so far.
    best: dict[int, _Split] = {num_layers: _Split(0.0, 0.0, [])}
    for rank in range(num_ranks):
        left = num_ranks - rank - 1
        room = memory[rank] if memory else None
        following: dict[int, _Split] = {}
        for end, split in best.items():
            starts = range(left, end) if left else [0]
            for start in starts:
                if start in forbidden or (room and sums.memory(start, end) > room):
                    continue
                longer = split.with_stage(start, end, sums.time(start, end))
                if start not in following or longer.is_better(following[start]):
                    following[start] = longer
        best = following
    if 0 not in best and not memory:
        raise PlanError(
            f"This model cannot be cut into {num_ranks} stages: no cut is possible before "
            f"layers {sorted(forbidden)}. Start fewer ranks.",
            code="no_cut",
        )
    if 0 not in best:
        raise _does_not_fit(cost, num_ranks, demand, memory)
    return best[0].ranges


class _Split(NamedTuple):
    slowest: float
    squares: float
    ranges: list[LayerRange]

    def with_stage(self, start: int, end: int, time: float) -> "_Split":
        return _Split(
            max(self.slowest, time),
            self.squares + time**2,
            [*self.ranges, (start, end)],
        )

    def is_better(self, other: "_Split") -> bool:
        return (self.slowest, self.squares) < (other.slowest, other.squares)


class _Sums:
    """The memory of any range of layers, and the bytes that a decode step reads of it."""

    def __init__(self, cost: ModelCost, demand: Demand, num_ranks: int) -> None:
        # There is a group for each rank, so each group has only a part of the rows.
        num_rows = max(1, demand.concurrency // num_ranks)
        self._cost = cost
        self._demand = demand
        self._num_layers = len(cost.layers)
        weights = [layer.weight_bytes for layer in cost.layers]
        caches = [layer.caches(demand) for layer in cost.layers]
        times = [layer.step_bytes(num_rows) for layer in cost.layers]
        self._weights = list(accumulate(weights, initial=0))
        self._caches = list(accumulate(caches, initial=0))
        self._time = list(accumulate(times, initial=0.0))
        self._head_time = cost.last.weight_bytes

    def memory(self, start: int, end: int) -> int:
        """Returns the total_bytes of the stage_plan of these layers, in constant time."""
        parts, twice = _outside_layers(self._cost, (start, end))
        weights = self._weights[end] - self._weights[start] - twice.weight_bytes
        weights += sum(part.weight_bytes for part in parts)
        caches = self._caches[end] - self._caches[start]
        caches += sum(part.caches(self._demand) for part in parts)
        return weights + with_slack(caches)

    def time(self, start: int, end: int) -> float:
        """Returns the bytes that a decode step of these layers reads. The embedding costs no time,
        because a lookup reads only some of its rows."""
        head = self._head_time if end == self._num_layers else 0
        return self._time[end] - self._time[start] + head


# --- costs of a split


def plan_stages(
    cost: ModelCost,
    ranges: Sequence[LayerRange],
    demand: Demand,
    memory: Sequence[int] | None = None,
    num_shards: int = 1,
) -> list[StagePlan]:
    """Plans every rank of a split. With several shards, cost is the cost on one shard, and each
    range of layers goes to num_shards ranks. Raises PlanError if a rank lacks memory."""
    sums = _Sums(cost, demand, len(ranges))
    times = [sums.time(*layers) for layers in ranges]
    stages: list[StagePlan] = []
    for number, (layers, time) in enumerate(zip(ranges, times, strict=True)):
        for shard in range(num_shards):
            rank = len(stages)
            plan = stage_plan(cost, rank, layers, demand, memory, time / sum(times))
            stages.append(replace(plan, stage=number, num_shards=num_shards, shard=shard))
    if not all(map(_fits, stages)):
        raise _does_not_fit(cost, len(stages), demand, memory, stages)
    return stages


def stage_plan(
    cost: ModelCost,
    rank: int,
    layers: LayerRange,
    demand: Demand,
    memory: Sequence[int] | None,
    step_share: float = 0.0,
) -> StagePlan:
    parts, twice = _outside_layers(cost, layers)
    start, end = layers
    own = [*cost.layers[start:end], *parts]
    growing = [part for part in own if not part.max_cached_tokens]
    weight_bytes = sum(part.weight_bytes for part in own)
    fetch_bytes = sum(part.fetch_bytes for part in own)
    is_last = end == len(cost.layers)
    expert_bytes = sum(part.expert_bytes for part in own)
    used_bytes = sum(part.expert_bytes * part.expert_share for part in own)
    return StagePlan(
        rank=rank,
        layers=layers,
        weight_bytes=weight_bytes - twice.weight_bytes,
        cache_bytes=sum(part.caches(demand) for part in own),
        cache_bytes_per_token=sum(part.cache_bytes_per_token for part in growing),
        cache_bytes_per_sequence=sum(part.fixed_caches(demand.context) for part in own),
        fetch_bytes=fetch_bytes - twice.fetch_bytes,
        step_share=step_share,
        memory_bytes=memory[rank] if memory else None,
        head_bytes=cost.head_bytes if is_last else 0,
        logits_bytes=cost.logits_bytes if is_last else 0,
        expert_bytes=expert_bytes,
        expert_share=used_bytes / expert_bytes if expert_bytes else 1.0,
    )


_NOTHING = LayerCost(0, 0)


def _outside_layers(cost: ModelCost, layers: LayerRange) -> tuple[list[LayerCost], LayerCost]:
    """Returns the costs of the parts that a stage holds besides its layers, and the cost of weights
    that two of these parts share and that are held once."""
    has_first = layers[0] == 0
    has_last = layers[1] == len(cost.layers)
    parts = [cost.shared]
    if has_first:
        parts.append(cost.first)
    if has_last:
        parts.append(cost.last)
    return parts, cost.tied if has_first and has_last else _NOTHING


def with_slack(cache_bytes: int) -> int:
    return -(-cache_bytes * _SLACK[0] // _SLACK[1])


# --- room for keys and values


def kv_budgets(stages: Sequence[StagePlan], memory: Sequence[int]) -> list[int]:
    """Returns the bytes of each stage for keys and values: its memory minus its weights."""
    return [m - stage.weight_bytes for m, stage in zip(memory, stages, strict=True)]


def room_for_tokens(
    stages: Sequence[StagePlan],
    kv_bytes: Sequence[int],
    concurrency: int,
) -> int:
    """Returns the number of tokens whose keys and values all stages can hold, each in its kv_bytes,
    beside the fixed caches of concurrency sequences. The number is negative if not even the fixed
    caches fit."""
    num_tokens = MAX_KV_TOKENS
    for stage, num_bytes in zip(stages, kv_bytes, strict=True):
        fixed = concurrency * stage.cache_bytes_per_sequence
        fitting = (_without_slack(num_bytes) - fixed) // max(1, stage.cache_bytes_per_token)
        num_tokens = min(num_tokens, fitting)
    return num_tokens


@dataclass(frozen=True, slots=True)
class KvRoom:
    """The number of tokens whose keys and values all stages can hold, for up to num_sequences
    sequences. The fixed caches of one more sequence take as much room as state_tokens tokens."""

    num_tokens: int
    num_sequences: int
    state_tokens: int = 0


def kv_room(
    stages: Sequence[StagePlan],
    kv_bytes: Sequence[int],
    max_sequences: int,
) -> KvRoom:
    """Computes the room for keys and values. Allows fewer than max_sequences sequences if their
    fixed caches would leave too little room. Raises PlanError if there is not enough even for
    one."""
    num_sequences = max_sequences
    tokens = room_for_tokens(stages, kv_bytes, num_sequences)
    while num_sequences > 1 and tokens < num_sequences * MIN_KV_TOKENS:
        if not any(stage.cache_bytes_per_sequence for stage in stages):
            break  # Fewer sequences would not free any memory.
        num_sequences -= 1
        tokens = room_for_tokens(stages, kv_bytes, num_sequences)
    check_room(tokens)
    state_tokens = _state_tokens(stages, kv_bytes, num_sequences, tokens)
    return KvRoom(tokens, num_sequences, state_tokens)


def _state_tokens(
    stages: Sequence[StagePlan],
    kv_bytes: Sequence[int],
    num_sequences: int,
    num_tokens: int,
) -> int:
    """Returns how many tokens take as much room as the fixed caches of one more sequence.
    num_tokens is the number of tokens that fill the room beside the fixed caches of num_sequences
    sequences. The largest number among the stages counts."""
    largest = 0
    for stage, num_bytes in zip(stages, kv_bytes, strict=True):
        fixed = stage.cache_bytes_per_sequence
        room = _without_slack(num_bytes) - num_sequences * fixed
        largest = max(largest, -(-fixed * num_tokens // max(1, room)))
    return largest


def _without_slack(num_bytes: int) -> int:
    return num_bytes * _SLACK[1] // _SLACK[0]


def check_room(num_tokens: int, needed: int = MIN_KV_TOKENS) -> None:
    """Raises PlanError if num_tokens, the room for keys and values, is less than needed."""
    if num_tokens < needed:
        raise PlanError(
            f"There is room for keys and values of {max(0, num_tokens):,} tokens, but "
            f"{needed:,} are needed: raise --memory or add ranks.",
            code="no_memory",
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
    room = "no limit"
    if memory:
        room = format_bytes(sum(memory[:num_ranks]))
    late = next((stage for stage in stages or () if not _fits(stage)), None)
    where = ""
    if late:
        available = format_bytes(late.memory_bytes or 0)
        where = (
            f" Rank {late.rank} would need {format_bytes(late.total_bytes)} for layers "
            f"{late.layers[0]} to {late.layers[1] - 1}, but has {available}."
        )
    return PlanError(
        f"The model does not fit into {room} on {num_ranks} rank{'s' * (num_ranks > 1)}: "
        f"it has {format_bytes(whole.weight_bytes)} of weights, and needs "
        f"{format_bytes(with_slack(whole.cache_bytes))} for keys and values of "
        f"{_described(demand)}.{where} {_remedy(demand, whole)}",
        code="no_memory",
    )


def _described(demand: Demand) -> str:
    if demand.num_tokens is None:
        return f"{demand.concurrency} x {demand.context:,} tokens"
    return f"at least {demand.tokens:,} tokens"


def _remedy(demand: Demand, whole: StagePlan) -> str:
    if demand.num_tokens is None:
        return "Raise --memory, add ranks, or lower --context or --concurrency."
    if whole.cache_bytes_per_sequence:
        return "Raise --memory, add ranks, or lower --max-model-len (of `brigade plan`: --context)."
    return "Raise --memory or add ranks."
