"""Compares the layouts of stages and shards that are possible for a model, without loading it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from serve.core.amounts import format_bytes
from serve.core.errors import PlanError
from serve.core.layouts import Forecast, Speeds, best, forecast
from serve.core.plan import PlanRequest
from serve.model.planning import Plan, make_plan

_MIN_DIVIDED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plans and forecasts of possible layouts such as "2 x 1", and why others are refused."""

    plans: dict[str, Plan]
    one_client: dict[str, Forecast]
    many_clients: dict[str, Forecast]
    refused: dict[str, str]
    speeds: Speeds

    @property
    def fastest(self) -> Forecast:
        """The layout that is fastest with many clients."""
        return best(list(self.many_clients.values()))

    @property
    def plan(self) -> Plan:
        return self.plans[self.fastest.layout]

    @property
    def choice(self) -> str:
        """One sentence that says which layout is the fastest, and from which figures."""
        fastest = self.fastest
        speeds: list[str] = []
        for layout, each in self.many_clients.items():
            speeds.append(f"{layout}: {each.tokens_per_second:.0f} tok/s")
        link = self.speeds.link
        fence = ""
        if self.speeds.fence_seconds:
            fence = f" and {self.speeds.fence_seconds * 1e3:.2f} ms for each sum besides the link"
        memory = format_bytes(self.speeds.memory_bytes_per_second)
        return (
            f"Layout {fastest.layout} (stages x shards), the fastest forecast for "
            f"{fastest.num_clients} clients ({', '.join(speeds)}), with a round trip of "
            f"{link.round_trip_seconds * 1e3:.2f} ms, {format_bytes(link.bytes_per_second)}/s "
            f"between ranks, {memory}/s from memory{fence}."
        )

    def to_json(self) -> dict[str, Any]:
        layouts: list[dict[str, Any]] = []
        for forecasts in (self.one_client, self.many_clients):
            layouts += [asdict(each) for each in forecasts.values()]
        return {"layouts": layouts, "refused_layouts": self.refused}


def compare(folder: Path, request: PlanRequest, speeds: Speeds) -> Comparison:
    """Plans and forecasts every layout of the request's ranks. Raises PlanError if none works."""
    found = Comparison({}, {}, {}, {}, speeds)
    for num_shards in range(1, request.num_ranks + 1):
        num_stages, rest = divmod(request.num_ranks, num_shards)
        if rest:
            continue
        layout = f"{num_stages} x {num_shards}"
        try:
            plan = make_plan(folder, replace(request, num_shards=num_shards))
        except PlanError as error:
            found.refused[layout] = str(error)
            continue
        hop_bytes = plan.hop_bytes_per_token
        clients = max(2, request.concurrency)
        found.plans[layout] = plan
        found.one_client[layout] = forecast(plan.stages, hop_bytes, 1, speeds)
        found.many_clients[layout] = forecast(plan.stages, hop_bytes, clients, speeds)
    if not found.plans:
        raise PlanError("; ".join(found.refused.values()))
    return found


def plan_with_fewer_shards(
    folder: Path,
    request: PlanRequest,
    shard_counts: Sequence[int],
) -> tuple[Plan, str]:
    """Plans with the first possible number of shards. If it is smaller than the request's, it must
    divide most of the weights. Returns the plan and, with shards, a sentence that says why. Raises
    PlanError with all reasons."""
    wanted = request.num_shards
    num_ranks = request.num_ranks
    if wanted == 1:
        return make_plan(folder, request), ""
    reasons: list[str] = []
    if wanted not in shard_counts:
        reasons.append(f"stages of {wanted} shards are not possible with {num_ranks} ranks.")
    for num_shards in shard_counts:
        try:
            plan = make_plan(folder, replace(request, num_shards=num_shards))
        except PlanError as error:
            reasons.append(f"with {num_shards} shards: {error}")
            continue
        if num_shards in (1, wanted) or plan.divided_share >= _MIN_DIVIDED_SHARE:
            layout = f"{num_ranks // num_shards} x {num_shards}"
            choice = f"Layout {layout} (stages x shards) for {num_ranks} ranks"
            reason = f", because {reasons[0]}" if reasons else "."
            return plan, choice + reason
        reasons.append(f"{num_shards} shards would divide {plan.divided_share:.0%} of the weights.")
    raise PlanError(" ".join(reasons))
