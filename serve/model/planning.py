"""Makes a plan for a model: measures its costs, splits it, and computes what each rank will hold.

Planning loads no weights and evaluates nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from serve.core.amounts import format_bytes
from serve.core.checkpoint import Checkpoint, read_checkpoint
from serve.core.errors import PlanError
from serve.core.plan import (
    MAX_DRAFT_ROWS,
    MAX_DRAFT_TOKENS,
    Demand,
    DraftSource,
    KvRoom,
    LayerRange,
    ModelCost,
    PlanRequest,
    StagePlan,
    balanced_split,
    check_num_ranks,
    check_room,
    count_stages,
    even_split,
    kv_budgets,
    kv_room,
    parse_split,
    plan_stages,
    room_for_tokens,
    stage_plan,
    with_slack,
)
from serve.model.costs import growing_values, measure
from serve.model.mtp import head_bytes
from serve.model.sharding import Divisions, Sharding, StandIn, shard, without_sums
from serve.model.stage import shows_hidden_states
from serve.model.trial import Crossing, Trial, crossings, named_arrays
from serve.model.weights import build_model, open_model

_MIN_DIVIDED_SHARE = 0.9  # the least divided share without a warning
_MIN_SHOWN_SHARE = 0.01

_Accept = Callable[[tuple[Crossing, ...]], bool]
"""Whether a cut that these arrays cross is good enough."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: its stages, and the room for keys and values (None if no limit of memory is given).
    divided_share is the share of the layers' weights that is divided among the shards."""

    model_type: str
    num_layers: int
    demand: Demand
    hop_bytes_per_token: int
    stages: list[StagePlan]
    room: KvRoom | None
    divided_share: float = 0.0

    @property
    def warning(self) -> str:
        """One sentence about layers that the shards cannot divide; "" if they divide them."""
        num_shards = self.stages[0].num_shards
        if num_shards == 1 or self.divided_share >= _MIN_DIVIDED_SHARE:
            return ""
        flag = f"--tensor-parallel-size {num_shards}"
        if self.divided_share < _MIN_SHOWN_SHARE:
            return (
                f"{flag} divides nothing of this model: every shard of a stage computes all of its "
                "layers, which is no faster than one rank. Use stages alone."
            )
        return (
            f"{flag} divides only {self.divided_share:.0%} of the weights of this model's layers: "
            "every shard of a stage holds and computes the others."
        )

    @property
    def kv_tokens(self) -> int | None:
        return self.room.num_tokens if self.room else None

    def to_json(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "num_layers": self.num_layers,
            "context": self.demand.context,
            "concurrency": self.demand.concurrency,
            "hop_bytes_per_token": self.hop_bytes_per_token,
            "kv_tokens": self.kv_tokens,
            "kv_sequences": self.room.num_sequences if self.room else None,
            "divided_share": round(self.divided_share, 3),
            "stages": [stage.to_json() for stage in self.stages],
        }


def make_plan(folder: Path, request: PlanRequest) -> Plan:
    """Plans the split of the model in a folder. Raises ModelError, PlanError or UsageError."""
    checkpoint = read_checkpoint(folder)
    num_stages = count_stages(request.num_ranks, request.num_shards)
    check_num_ranks(checkpoint.num_layers, num_stages)
    draft_bytes = _draft_bytes(request.draft) if request.draft else 0
    memory = _memory_for_model(request, draft_bytes)
    model = build_model(folder)
    if request.num_shards == 1:
        plan = _plan(model, checkpoint, request, memory)
    else:
        if not shows_hidden_states(model):
            raise PlanError(
                "--tensor-parallel-size does not work with this model, because the code that calls "
                "its layers also computes the logits: leave the option out.",
                code="no_shards",
            )
        whole_bytes = _layer_bytes(model)
        # Shard 0 has the largest part. The plan is the same for all shards of a stage.
        sharding = shard(model, StandIn(request.num_shards))
        own_bytes = _mean_layer_bytes(model, sharding, request.num_shards)
        with without_sums():
            plan = _plan(model, checkpoint, request, memory, sharding.divisions)
        saved_bytes = whole_bytes - own_bytes
        max_saved_bytes = whole_bytes - whole_bytes / request.num_shards
        plan = replace(plan, divided_share=saved_bytes / max_saved_bytes)
    return _with_draft(plan, draft_bytes)


def _layer_bytes(model: nn.Module) -> int:
    return sum(array.nbytes for array in _layer_arrays(model))


def _mean_layer_bytes(model: nn.Module, sharding: Sharding, num_shards: int) -> float:
    """Returns the bytes of all layers on a shard, as the mean of the shards. The model is the part
    of one shard."""
    num_bytes = 0.0
    for array in _layer_arrays(model):
        made = sharding.made.get(id(array))
        if made and made.division.is_partition:
            num_bytes += array.nbytes / made.division.share / num_shards
        else:
            num_bytes += array.nbytes
    return num_bytes


def _layer_arrays(model: nn.Module) -> Iterator[mx.array]:
    for layer in model.layers:
        for _, array in named_arrays(layer):
            yield array


def _draft_bytes(source: DraftSource) -> int:
    """Returns the memory that rank 0 needs for a draft model and for its keys and values."""
    opened = open_model(source.model, source.commit, source.cache_dir)
    folder = opened if isinstance(opened, Path) else opened.folder
    demand = Demand(MAX_DRAFT_TOKENS, MAX_DRAFT_ROWS)
    if source.is_head:
        return head_bytes(folder, demand)
    model = build_model(folder)
    checkpoint = read_checkpoint(folder)
    cost = measure(model, checkpoint)
    num_layers = len(cost.layers)
    whole = stage_plan(cost, 0, (0, num_layers), demand, None)
    cache_bytes = with_slack(whole.cache_bytes)
    return whole.weight_bytes + cache_bytes


def _with_draft(plan: Plan, draft_bytes: int) -> Plan:
    first, *others = plan.stages
    memory_bytes = first.memory_bytes
    if memory_bytes is not None:
        memory_bytes += draft_bytes
    first = replace(first, draft_bytes=draft_bytes, memory_bytes=memory_bytes)
    return replace(plan, stages=[first, *others])


def _plan(
    model: nn.Module,
    checkpoint: Checkpoint,
    request: PlanRequest,
    memory: list[int] | None,
    divisions: Divisions | None = None,
) -> Plan:
    cost = measure(model, checkpoint, request.kv_bits, divisions)
    context = request.context or checkpoint.max_context or 4096
    demand = Demand(context, request.concurrency)
    if request.min_tokens is None:
        demands = [demand]
    else:
        demands = demand.smaller(min(request.min_tokens, demand.tokens))
    if request.split == "auto":
        memory_of_stages = _smallest(memory, request.num_shards) if memory else None
        ranges = balance(model, cost, request.num_stages, demands, memory_of_stages)
    else:
        if request.split == "even":
            ranges = even_split(len(cost.layers), request.num_stages)
        else:
            num_layers = len(cost.layers)
            ranges = parse_split(request.split, num_layers, request.num_stages)
        trials = [Trial(model, list(model.layers), cached=True)]
        for start, _ in ranges:
            crossings(trials, start)  # Raises PlanError, which names possible cuts.
    # The time of a step depends on everything that may run, not on the minimum that must fit.
    full = plan_stages(cost, ranges, demand, num_shards=request.num_shards)
    shares = [stage.step_share for stage in full]
    fitting = plan_stages(cost, ranges, demands[-1], memory, request.num_shards)
    stages: list[StagePlan] = []
    for stage, share in zip(fitting, shares, strict=True):
        stages.append(replace(stage, step_share=share))
    return Plan(
        checkpoint.model_type,
        len(cost.layers),
        demand,
        cost.hop_bytes_per_token,
        stages,
        _room(request, stages, memory, demands[-1].tokens),
    )


def _smallest(memory: Sequence[int], num_shards: int) -> list[int]:
    """Returns the memory of each stage's smallest rank, which limits the stage, because its shards
    hold equal parts."""
    starts = range(0, len(memory), num_shards)
    return [min(memory[start : start + num_shards]) for start in starts]


def _memory_for_model(request: PlanRequest, draft_bytes: int) -> list[int] | None:
    memory = request.amounts("memory")
    if memory and memory[0] <= draft_bytes:
        needed = format_bytes(draft_bytes)
        raise PlanError(
            f"The draft model needs {needed} on rank 0, which may use only "
            f"{format_bytes(memory[0])}: choose a smaller one, or raise --memory.",
            code="no_memory",
        )
    if memory:
        memory[0] -= draft_bytes
    kept = request.amounts("adapter_memory")
    if memory and kept:
        pairs = zip(memory, kept, strict=True)
        return [amount - adapters for amount, adapters in pairs]
    return memory


def _room(
    request: PlanRequest,
    stages: Sequence[StagePlan],
    memory: Sequence[int] | None,
    needed: int,
) -> KvRoom | None:
    """Computes the room for keys and values. Raises PlanError if it is less than needed."""
    if memory is None:
        return None
    budgets = kv_budgets(stages, memory)
    if request.min_tokens is None:
        num_tokens = room_for_tokens(stages, budgets, request.concurrency)
        room = KvRoom(num_tokens, request.concurrency)
    else:
        room = kv_room(stages, budgets, request.concurrency)
    check_room(room.num_tokens, needed)
    return room


def balance(
    model: nn.Module,
    cost: ModelCost,
    num_ranks: int,
    demands: Sequence[Demand],
    memory: Sequence[int] | None,
) -> list[LayerRange]:
    """Returns the best split for the first demand that fits. This split has no impossible cuts and,
    if possible, no cuts that send the context's keys and values in each step."""
    layers = list(model.layers)
    trial = Trial(model, layers, cached=True)
    growing = growing_values(model, layers)

    def search(accept: _Accept, demand: Demand) -> list[LayerRange]:
        forbidden: frozenset[int] = frozenset()
        while True:
            # Only cuts of the best split are tried, because there may be a hundred others.
            ranges = balanced_split(cost, num_ranks, demand, memory, forbidden)
            bad = []
            for start, _ in ranges:
                if not _is_possible(trial, start, accept):
                    bad.append(start)
            if not bad:
                return ranges
            forbidden = forbidden.union(bad)

    def is_cheap(crossing: tuple[Crossing, ...]) -> bool:
        return not growing.intersection(crossing)

    for accept in (is_cheap, lambda _: True):
        for demand in demands:
            try:
                return search(accept, demand)
            except PlanError as error:
                reason = error
    raise reason


def _is_possible(
    trial: Trial,
    cut: int,
    accept: _Accept,
) -> bool:
    try:
        return accept(trial.crossing(cut))
    except PlanError:
        return False
