"""A plan for a model: measured costs, a split, and what each rank will hold. Loads
nothing and evaluates nothing."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from serve.core.checkpoint import read_checkpoint
from serve.core.errors import PlanError
from serve.core.plan import (
    Demand,
    LayerRange,
    ModelCost,
    PlanRequest,
    StagePlan,
    balanced_split,
    check_num_ranks,
    even_split,
    parse_memory,
    parse_split,
    plan_stages,
)
from serve.model.costs import growing_values, measure
from serve.model.trial import Crossing, Trial, crossings
from serve.model.weights import build_model


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
    model = build_model(folder)
    cost = measure(model, checkpoint, request.kv_bits)
    demand = Demand(request.context or checkpoint.max_context or 4096, request.concurrency)
    if request.split == "auto":
        ranges = balance(model, cost, request.num_ranks, demand, memory)
    else:
        ranges = (
            even_split(len(cost.layers), request.num_ranks)
            if request.split == "even"
            else parse_split(request.split, len(cost.layers), request.num_ranks)
        )
        trials = [Trial(model, list(model.layers), cached=True)]
        for start, _ in ranges:
            crossings(trials, start)  # Raises PlanError, which names possible cuts.
    return Plan(
        checkpoint.model_type,
        len(cost.layers),
        demand,
        cost.hop_bytes_per_token,
        plan_stages(cost, ranges, demand, memory),
    )


def balance(
    model: nn.Module,
    cost: ModelCost,
    num_ranks: int,
    demand: Demand,
    memory: Sequence[int] | None,
) -> list[LayerRange]:
    """The best split without impossible cuts and, if there is one, without cuts that
    would send the whole context's keys and values in each step."""
    layers = list(model.layers)
    trial, growing = Trial(model, layers, cached=True), growing_values(model, layers)

    def search(accept: Callable[[tuple[Crossing, ...]], bool]) -> list[LayerRange]:
        forbidden: frozenset[int] = frozenset()
        while True:
            # Only cuts that are wanted get a trial: there may be a hundred.
            ranges = balanced_split(cost, num_ranks, demand, memory, forbidden)
            bad = {start for start, _ in ranges if not _is_possible(trial, start, accept)}
            if not bad:
                return ranges
            forbidden |= bad

    try:
        return search(lambda crossing: not growing.intersection(crossing))
    except PlanError:
        return search(lambda _: True)


def _is_possible(trial: Trial, at: int, accept: Callable[[tuple[Crossing, ...]], bool]) -> bool:
    try:
        return accept(trial.crossing(at))
    except PlanError:
        return False
