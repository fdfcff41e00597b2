"""`brigade plan`: who gets which layers, and what that takes, before anything is loaded."""

import gc
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from serve.cli.flags import parse
from serve.core.config import PlanConfig
from serve.core.plan import PlanRequest, StagePlan, format_bytes


def run(argv: Sequence[str]) -> int:
    gc.disable()  # A large model has 100,000 tensors, and this process ends soon.
    config = parse(PlanConfig, argv, "brigade plan", __doc__)
    # Imported here: a wrong flag should not wait for MLX.
    from serve.model.planning import make_plan

    request = PlanRequest(
        num_ranks=config.num_ranks,
        context=config.context,
        concurrency=config.concurrency,
        memory=config.memory,
        split=config.split,
        kv_bits=config.kv_bits,
    )
    folder = config.model
    if config.hub_id:
        from serve.hub.partial import pin

        folder = pin(config.hub_id, config.revision, config.cache_dir).folder
    plan = make_plan(folder, request)
    if config.json:
        print(json.dumps(plan.to_json(), indent=2))
        return 0
    table = plan_table(plan.stages)
    table.title = (
        f"{config.model.name}: {plan.num_layers} layers of {plan.model_type}, "
        f"{plan.demand.concurrency} x {plan.demand.context:,} tokens"
    )
    table.caption = f"{format_bytes(plan.hop_bytes_per_token)} for each token at each hop"
    Console().print(table)
    return 0


def plan_table(stages: Sequence[StagePlan]) -> Table:
    """One row a rank; step is its share of the time that a decode step takes in all."""
    table = Table(title_justify="left", caption_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("layers")
    for column in ("weights", "caches", "total", "memory", "to read", "step"):
        table.add_column(column, justify="right")
    for stage in stages:
        start, end = stage.layers
        table.add_row(
            str(stage.rank),
            f"[{start}, {end})",
            format_bytes(stage.weight_bytes),
            format_bytes(stage.cache_bytes),
            format_bytes(stage.total_bytes),
            format_bytes(stage.memory_bytes) if stage.memory_bytes else "",
            format_bytes(stage.fetch_bytes),
            f"{stage.step_share:.0%}",
        )
    return table
