"""The capacity of the stages: tokens in memory, prompt tokens beside decoding, layers."""

from serve.core.config import ServeConfig
from serve.core.plan import KvRoom, kv_budgets, kv_room, memory_of
from serve.front.pipeline.chunks import LONGEST_CHUNK
from serve.front.pipeline.status import StageStatus
from serve.front.prefixes.index import PrefixIndex

# A chunk of a long prompt may take so many times what a decode step does. With it a round of
# two stages and two groups, for which a stream waits, is 2.2 times as long.
_CHUNK_BY_DECODE = 2.4
_CHUNK_BY_DECODE_ALONE = 1.6  # on one stage there is one chunk for each decode step
_MIN_CHUNK = 8
_UNKNOWN_CHUNK = 32
_WARM_STEPS = 200
_WORTHWHILE = 0.95


def chunk_beside_decoding(stages: list[StageStatus], max_tokens: int) -> int:
    """How many tokens a prefill step may have for streams to keep their pace."""
    by_decode = _CHUNK_BY_DECODE if len(stages) > 1 else _CHUNK_BY_DECODE_ALONE
    known = []
    for stage in stages:
        per_token = stage.pace.prefill_seconds_per_token
        if stage.pace.decode_seconds and per_token:
            known.append(stage.pace.decode_seconds / per_token)
    chunk = _UNKNOWN_CHUNK
    if known:
        chunk = max(_MIN_CHUNK, int((by_decode - 1) * min(known)))
    return max(1, min(max_tokens, chunk))


def token_cost(stages: list[StageStatus]) -> float | None:
    """The cost of one more token in a decode step, as a share of a step with one token. None as
    long as a stage has not decoded."""
    costs = [stage.pace.decode_cost for stage in stages]
    seconds = sum(cost.seconds(1) for cost in costs)
    if not seconds or not all(cost.is_known for cost in costs):
        return None
    return sum(cost.seconds_per_token for cost in costs) / seconds


def room_under_limits(stages: list[StageStatus], config: ServeConfig) -> KvRoom:
    """The room of all stages under the flags, as a plan has it; without a limit, what is free
    counts. Scoring a prompt needs memory too, which is left free unless --kv-memory decides.
    Raises PlanError if that is less than has to be."""
    ranks = [stage.rank for stage in stages]
    plans = [stage.plan for stage in stages if stage.plan]
    memory = _amounts(config.memory, ranks)
    kv_memory = _amounts(config.kv_memory, ranks)
    adapters = _amounts(config.adapter_memory, ranks) or [0] * len(ranks)
    if memory:
        memory = _less(memory, adapters)
    beside_scoring = [_free_beside_scoring(stage, config.prefill_chunk) for stage in stages]
    free = _less(beside_scoring, adapters)
    budgets = kv_budgets(plans, memory, kv_memory) or free
    if memory and not kv_memory:
        budgets = [min(pair) for pair in zip(budgets, free, strict=True)]
    return kv_room(plans, budgets, config.max_num_sequences)


def kept_bytes(kept: PrefixIndex, stages: list[StageStatus]) -> int:
    """The bytes of all stages that the prefix cache takes, without padding."""
    plans = [stage.plan for stage in stages if stage.plan]
    return kept.num_bytes(
        sum(plan.cache_bytes_per_token for plan in plans),
        sum(plan.cache_bytes_per_sequence for plan in plans),
    )


def _amounts(flag: str | None, ranks: list[int]) -> list[int] | None:
    """The bytes that a flag gives each rank, None without the flag."""
    return memory_of(flag, ranks) if flag else None


def _less(amounts: list[int], kept: list[int]) -> list[int]:
    pairs = zip(amounts, kept, strict=True)
    return [amount - own for amount, own in pairs]


def _free_beside_scoring(stage: StageStatus, prefill_chunk: int) -> int:
    """The bytes that are free while a prompt is scored in chunks of so many tokens. Only then is
    there more than one row of logits for a sequence."""
    num_tokens = int(LONGEST_CHUNK * prefill_chunk)
    return stage.free_bytes - num_tokens * stage.logits_bytes_per_token - stage.scoring_bytes


def better_split(stages: list[StageStatus]) -> list[int] | None:
    """Layers of each rank that would make the slowest stage faster, from what decode steps
    really took; None as long as nothing is known, or nothing to gain."""
    plans = [stage.plan for stage in stages if stage.plan]
    is_warm = all(stage.pace.num_decode_steps >= _WARM_STEPS for stage in stages)
    if len(stages) < 2 or len(plans) < len(stages) or not is_warm:
        return None
    counts = [plan.layers[1] - plan.layers[0] for plan in plans]
    seconds = [stage.pace.decode_seconds or 0.0 for stage in stages]
    layer_seconds = [t / n for t, n in zip(seconds, counts, strict=True)]
    # Rank 0 has the head as well. Its layers take about as long as those of others.
    mean_of_others = sum(layer_seconds[1:]) / (len(stages) - 1)
    layer_seconds[0] = min(layer_seconds[0], mean_of_others)
    head_seconds = seconds[0] - counts[0] * layer_seconds[0]

    def stage_seconds(rank: int, num_layers: int) -> float:
        head = head_seconds if rank == 0 else 0.0
        return head + num_layers * layer_seconds[rank]

    best = [1] * len(stages)
    for _ in range(sum(counts) - len(stages)):
        with_one_more = [stage_seconds(rank, num + 1) for rank, num in enumerate(best)]
        fastest = with_one_more.index(min(with_one_more))
        best[fastest] += 1
    slowest = max(stage_seconds(rank, num) for rank, num in enumerate(best))
    return best if slowest < _WORTHWHILE * max(seconds) else None
