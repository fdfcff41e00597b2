"""`brigade plan`: show which rank gets which layers and how much memory it needs, without loading
anything."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.table import Table

from serve.cli.flags import parse
from serve.cli.old_flags import current
from serve.cli.output import StandardOutput
from serve.core.amounts import format_bytes
from serve.core.checkpoint import read_checkpoint
from serve.core.config import (
    DEFAULT_NUM_SEQUENCES,
    DRAFT_MODEL_HELP,
    FIRST_HEADING,
    KV_BITS_HELP,
    MEMORY_HELP,
    SPLIT_HELP,
    TENSOR_PARALLEL_HELP,
    ModelSource,
    check_ranges,
    check_revision,
    draft_on_hub,
    flag,
)
from serve.core.errors import UsageError
from serve.core.layouts import Speeds, parse_link, parse_num_shards
from serve.core.plan import (
    MIN_KV_TOKENS,
    Demand,
    DraftSource,
    PlanRequest,
    StagePlan,
    with_slack,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(ModelSource):
    """The flags of `brigade plan`."""

    num_ranks: int = flag("number of ranks", short=("-n",), min=1, heading=FIRST_HEADING)
    context: int | None = flag(
        "tokens of each sequence, prompt and answer (default: the model's context)",
        None,
        min=1,
        max=10**9,
        heading="what to plan",
    )
    concurrency: int | None = flag(
        "number of sequences that must fit at the same time (default with --context: 1)",
        None,
        min=1,
    )
    memory: str | None = flag(MEMORY_HELP, None)
    split: str = flag(SPLIT_HELP, "auto")
    kv_bits: int | None = flag(KV_BITS_HELP, None, among=(4, 8))
    tensor_parallel_size: str | None = flag(
        f"{TENSOR_PARALLEL_HELP}; auto: the fastest layout, by --link (default: 1, or auto with "
        "--explain)",
        None,
        metavar="T",
    )
    explain: bool = flag("compare the layouts of stages and shards; needs --link", False)
    link: str | None = flag(
        "round trip in milliseconds and MB/s of the slowest link between ranks, as `brigade "
        "doctor` reports them: 0.2,1100",
        None,
        metavar="MS,MB/S",
    )
    memory_speed: float | None = flag(
        "GB/s at which the ranks read their memory (default: measured on this machine)",
        None,
        min=0.001,
        max=10**6,
        metavar="GB/S",
    )
    sum: float | None = flag(
        "milliseconds that each sum between shards takes besides the link, because a GPU waits for "
        "the CPU: about 0.2 on a Mac (default: measured on this machine)",
        None,
        min=0.0,
        max=1000,
        metavar="MS",
    )
    draft_model: str | None = flag(
        f"{DRAFT_MODEL_HELP} (default: none)",
        None,
        metavar="M|mtp",
    )
    json: bool = flag("print the plan as JSON", False)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_revision(self.model, self.revision)
        parse_num_shards(self.tensor_parallel_size or "1")
        if self.compares and self.link is None:
            raise UsageError(
                "--explain and --tensor-parallel-size auto need --link MS,MB/S, such as "
                "--link 0.2,1100: `brigade doctor --hostfile hosts.json` measures both.",
                code="needs_flag",
            )
        if not self.compares and (self.link or self.memory_speed or self.sum is not None):
            raise UsageError(
                "--link, --memory-speed and --sum are for --explain and --tensor-parallel-size "
                "auto.",
                code="needs_flag",
            )

    @property
    def compares(self) -> bool:
        """Whether to compare all layouts of stages and shards instead of planning one."""
        return self.explain or self.tensor_parallel_size == "auto"

    @property
    def plans_fastest(self) -> bool:
        """Whether to plan the fastest layout, because the flags name no layout."""
        return self.compares and self.tensor_parallel_size in (None, "auto")

    @property
    def is_promise(self) -> bool:
        """Whether all sequences must fit with their whole context. Otherwise less room is enough,
        and requests wait while the room is full, as in `serve`."""
        return self.context is not None or self.concurrency is not None


def run(argv: Sequence[str]) -> int:
    gc.disable()  # A large model has 100,000 tensors, and this process ends soon.
    config = parse(PlanConfig, current("plan", argv, PlanConfig), "brigade plan", __doc__)
    # Imported here: a wrong flag should not wait for MLX.
    from serve.model.models_only import import_models_only

    import_models_only()
    from serve.cli.layouts import layout_notes, layout_table
    from serve.model.layouts import Comparison, compare
    from serve.model.planning import make_plan
    from serve.rank.speeds import fence_seconds, memory_speed

    folder = config.model
    if config.hub_id:
        from serve.hub.partial import pin

        folder = pin(config.hub_id, config.revision, config.cache_dir).folder
    concurrency = config.concurrency or (1 if config.is_promise else DEFAULT_NUM_SEQUENCES)
    request = PlanRequest(
        num_ranks=config.num_ranks,
        context=config.context,
        concurrency=concurrency,
        min_tokens=None if config.is_promise else MIN_KV_TOKENS,
        memory=config.memory,
        split=config.split,
        kv_bits=config.kv_bits,
        draft=_draft_source(config, folder),
    )
    if not config.plans_fastest:
        request = replace(request, num_shards=int(config.tensor_parallel_size or 1))
    link = parse_link(config.link) if config.link else None
    comparison: Comparison | None = None
    if link:
        speed = config.memory_speed * 1e9 if config.memory_speed else memory_speed()
        fence = fence_seconds() if config.sum is None else config.sum / 1e3
        comparison = compare(folder, request, Speeds(speed, link, fence))
    if comparison and config.plans_fastest:
        plan = comparison.plan
    else:
        plan = make_plan(folder, request)
    if config.json:
        compared = comparison.to_json() if comparison else {}
        print(json.dumps(plan.to_json() | compared, indent=2))
        return 0
    if comparison and config.explain:
        print_table(layout_table(comparison))
        for line in layout_notes(comparison):
            print(line)
        print(f"\nThe plan with --tensor-parallel-size {plan.stages[0].num_shards}:")
    layers = f"{plan.num_layers} layers of {plan.model_type}"
    print_table(plan_table(plan.stages, config.is_promise), f"{config.model.name}: {layers}")
    if comparison and config.tensor_parallel_size == "auto":
        print(comparison.choice)
    promise = plan.demand if config.is_promise else None
    if plan.warning:
        print(plan.warning)
    for line in _notes(plan.stages, plan.kv_tokens, promise, plan.hop_bytes_per_token):
        print(line)
    return 0


def _draft_source(config: PlanConfig, folder: Path) -> DraftSource | None:
    if config.draft_model == "mtp":
        return DraftSource(str(folder), None, None, is_head=True)
    if config.draft_model in (None, "none"):
        return None
    on_hub = draft_on_hub(config.draft_model)
    if on_hub is None:
        read_checkpoint(Path(config.draft_model), "--draft-model")
        return DraftSource(config.draft_model, None, None)
    repo, revision = on_hub
    from serve.hub.partial import pin

    cache_dir = str(config.cache_dir) if config.cache_dir else None
    commit = pin(repo, revision, config.cache_dir).snapshot.commit
    return DraftSource(repo, commit, cache_dir)


def _notes(
    stages: Sequence[StagePlan],
    kv_tokens: int | None,
    promise: Demand | None,
    hop_bytes: int,
) -> Iterator[str]:
    if promise:
        yield (
            f"The memory holds keys and values of {promise.concurrency} x "
            f"{promise.context:,} tokens, and of half as many to spare."
        )
    if kv_tokens is None:
        per_token = with_slack(max(stage.cache_bytes_per_token for stage in stages))
        yield f"A token's keys and values take up to {format_bytes(per_token)} on a rank."
        yield "Give --memory to see how many tokens fit."
    else:
        yield f"There is room for keys and values of {kv_tokens:,} tokens."
    if len(stages) > 1:
        yield f"Each token sends {format_bytes(hop_bytes)} from rank to rank."


def plan_table(stages: Sequence[StagePlan], has_promise: bool = False) -> Table:
    """Returns a table with a row for each rank. The last column is its share of a decode step."""
    has_limit = any(stage.memory_bytes for stage in stages)
    columns: dict[str, Callable[[StagePlan], str]] = {
        "rank": lambda stage: str(stage.rank),
    }
    if any(stage.num_shards > 1 for stage in stages):
        columns["stage"] = lambda stage: str(stage.stage)
        columns["shard"] = lambda stage: str(stage.shard)
    columns |= {
        "layers": lambda stage: f"{stage.layers[0]}-{stage.layers[1] - 1}",
        "weights": lambda stage: format_bytes(stage.weight_bytes),
    }
    if any(stage.draft_bytes for stage in stages):
        columns["draft\nmodel"] = lambda stage: format_bytes(stage.draft_bytes)
    if has_promise:
        columns["KV cache"] = lambda stage: format_bytes(with_slack(stage.cache_bytes))
        columns["total"] = lambda stage: format_bytes(stage.total_bytes)
    if has_limit:
        columns["--memory"] = lambda stage: format_bytes(stage.memory_bytes or 0)
    columns["reads from\nfiles"] = lambda stage: format_bytes(stage.fetch_bytes)
    columns["share of\nstep time"] = lambda stage: f"{stage.step_share:.0%}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for stage in stages:
        table.add_row(*(cell(stage) for cell in columns.values()))
    return table


def print_table(table: Table, title: str = "") -> None:
    """Prints a table without the spaces that pad the ends of its lines."""
    output = StandardOutput(highlight=False)
    if title:
        output.print(title)
    with output.capture() as captured:
        output.print(table)
    for line in captured.get().splitlines():
        output.out(line.rstrip(), highlight=False)
