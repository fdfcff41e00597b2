"""A plan for a model: measured costs, a split, and what each rank will hold. Loads
nothing and evaluates nothing."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serve.core.checkpoint import read_checkpoint
from serve.core.plan import (
    Demand,
    StagePlan,
    balanced_split,
    check_num_ranks,
    even_split,
    parse_memory,
    parse_split,
    plan_stages,
)
from serve.rank.costs import measure
from serve.rank.weights import build_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What `brigade plan` and `serve` are asked for. split is auto, even, or the number
    of layers of each rank; memory an amount, or one for each rank."""

    num_ranks: int
    context: int | None = None
    concurrency: int = 1
    memory: str | None = None
    split: str = "auto"


@dataclass(frozen=True, slots=True)
class Plan:
    model_type: str
    num_layers: int
    demand: Demand
    hop_bytes_per_token: int
    stages: list[StagePlan]

    def to_json(self) -> dict[str, Any]:
        head = {"model_type": self.model_type, "num_layers": self.num_layers}
        hop = {"hop_bytes_per_token": self.hop_bytes_per_token}
        stages = [{**stage.to_json(), "total_bytes": stage.total_bytes} for stage in self.stages]
        return {**head, **asdict(self.demand), **hop, "stages": stages}


def make_plan(folder: Path, request: PlanRequest) -> Plan:
    """Raises ModelError, PlanError or UsageError."""
    checkpoint = read_checkpoint(folder)
    check_num_ranks(checkpoint.num_layers, request.num_ranks)
    memory = parse_memory(request.memory, request.num_ranks) if request.memory else None
    cost = measure(build_model(folder), checkpoint)
    demand = Demand(request.context or checkpoint.max_context or 4096, request.concurrency)
    if request.split == "auto":
        ranges = balanced_split(cost, request.num_ranks, demand, memory)
    elif request.split == "even":
        ranges = even_split(len(cost.layers), request.num_ranks)
    else:
        ranges = parse_split(request.split, len(cost.layers), request.num_ranks)
    return Plan(
        checkpoint.model_type,
        len(cost.layers),
        demand,
        cost.hop_bytes_per_token,
        plan_stages(cost, ranges, demand, memory),
    )
