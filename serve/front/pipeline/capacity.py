"""Computes the capacity of the stages: the tokens that fit in memory, the prompt tokens that fit
beside decoding, and a better split of the layers."""

from serve.core.config import ServeConfig
from serve.core.plan import KvRoom, kv_budgets, kv_room, memory_of
from serve.front.drafts.model_guesses import ModelCosts
from serve.front.pipeline.chunks import MAX_CHUNK_SHARE, max_chunks_between_steps
from serve.front.pipeline.status import StageStatus
from serve.front.prefixes.index import PrefixIndex

# The time that a chunk of a long prompt may take without --max-inter-token, in decode steps. With
# 2.2, a token takes 2.1 times as long as before on two or more stages.
_CHUNK_BY_DECODE = 2.2
# One stage has one chunk for each decode step. A smaller one would mostly read weights.
_CHUNK_BY_DECODE_ALONE = 1.6
_UNKNOWN_READING_COST = 0.1  # of a token that the draft model reads, in its guesses
_MIN_CHUNK = 8
_UNKNOWN_CHUNK = 32
_WARM_STEPS = 200
_WORTHWHILE = 0.95


def chunk_beside_decoding(
    stages: list[StageStatus],
    num_groups: int,
    max_tokens: int,
    max_inter_token: float | None = None,
) -> int:
    """Returns the number of tokens that a prefill step may have while streams keep their pace:
    at most max_inter_token seconds between two tokens, or about twice the usual time."""
    decode_seconds = [stage.pace.decode_seconds or 0.0 for stage in stages]
    by_decode = _CHUNK_BY_DECODE if len(stages) > 1 else _CHUNK_BY_DECODE_ALONE
    chunks = []  # of each stage, as far as its speed is known
    for stage, seconds in zip(stages, decode_seconds, strict=True):
        seconds_per_token = stage.pace.prefill_seconds_per_token
        if not seconds or not seconds_per_token:
            continue
        if max_inter_token is None:
            chunk_seconds = by_decode * seconds
        else:
            chunk_seconds = _chunk_seconds(decode_seconds, num_groups, max_inter_token)
        # Reading the weights takes as long as in a decode step.
        num_tokens = (chunk_seconds - seconds) / seconds_per_token
        chunks.append(max(_MIN_CHUNK, int(num_tokens)))
    return max(1, min([max_tokens, *chunks] if chunks else [max_tokens, _UNKNOWN_CHUNK]))


def _chunk_seconds(
    decode_seconds: list[float],
    num_groups: int,
    max_inter_token: float,
) -> float:
    """Returns how long a prefill step may take on a stage for tokens to be at most max_inter_token
    seconds apart."""
    num_stages = len(decode_seconds)
    slowest = max(decode_seconds)
    num_chunks = max_chunks_between_steps(num_stages)
    # Between two tokens of a row, it passes all stages, or all groups take a turn, whichever takes
    # longer. The chunks come on top.
    token_seconds = max(sum(decode_seconds), num_groups * slowest)
    by_turns = (max_inter_token - token_seconds) / num_chunks
    # A decode step right behind the chunks waits for them on every stage.
    by_stages = (max_inter_token - slowest) / (num_stages + num_chunks - 1)
    return min(by_turns, by_stages)


def token_cost(stages: list[StageStatus]) -> float | None:
    """Returns the time that one more token takes in a decode step, as a share of a step with one
    token. Returns None until every stage has decoded."""
    costs = [stage.pace.decode_cost for stage in stages]
    seconds = sum(cost.seconds(1) for cost in costs)
    if not seconds or not all(cost.is_known for cost in costs):
        return None
    return sum(cost.seconds_per_token for cost in costs) / seconds


def draft_model_costs(stages: list[StageStatus]) -> ModelCosts | None:
    """Returns what the draft model costs, or None if there is none. Until its times are known, it
    is expected to be faster than the model by the size of its weights."""
    draft_bytes = stages[0].draft_bytes
    if not draft_bytes:
        return None
    pace = stages[0].pace
    seconds = sum(stage.pace.decode_cost.seconds(1) for stage in stages)
    if seconds and pace.draft_cost.is_known:
        guess = pace.draft_cost.seconds(1) / seconds
    else:
        guess = draft_bytes / sum(stage.bytes_owned for stage in stages)
    if seconds and pace.reading_seconds_per_token is not None:
        reading = pace.reading_seconds_per_token / seconds
    else:
        reading = _UNKNOWN_READING_COST * guess
    return ModelCosts(guess, reading)


def room_under_limits(stages: list[StageStatus], config: ServeConfig) -> KvRoom:
    """Computes the room for keys and values, as a plan does. Without a limit, all free memory
    counts, minus what scoring a prompt needs (unless --kv-memory decides). Raises PlanError if
    the room is less than the minimum."""
    ranks = [stage.rank for stage in stages]
    plans = [stage.plan for stage in stages if stage.plan]
    memory = _amounts(config.memory, ranks)
    kv_memory = _amounts(config.kv_memory, ranks)
    adapters = _amounts(config.adapter_memory, ranks) or [0] * len(ranks)
    if memory:
        memory = _less(memory, adapters)
    beside_scoring = [_free_beside_scoring(stage, config.prefill_chunk) for stage in stages]
    free = _less(beside_scoring, adapters)
    if memory:
        memory = _less(memory, [plan.draft_bytes for plan in plans])
    budgets = kv_budgets(plans, memory, kv_memory) or free
    if memory and not kv_memory:
        pairs = zip(budgets, free, strict=True)
        budgets = [min(pair) for pair in pairs]
    return kv_room(plans, budgets, config.max_num_sequences)


def kept_bytes(kept: PrefixIndex, stages: list[StageStatus]) -> int:
    """Returns the bytes that the prefix cache takes on all stages, without padding."""
    plans = [stage.plan for stage in stages if stage.plan]
    return kept.num_bytes(
        sum(plan.cache_bytes_per_token for plan in plans),
        sum(plan.cache_bytes_per_sequence for plan in plans),
    )


def _amounts(flag: str | None, ranks: list[int]) -> list[int] | None:
    """Returns the bytes that a flag gives each rank, or None without the flag."""
    if flag:
        return memory_of(flag, ranks)
    return None


def _less(amounts: list[int], kept: list[int]) -> list[int]:
    pairs = zip(amounts, kept, strict=True)
    return [amount - own for amount, own in pairs]


def _free_beside_scoring(stage: StageStatus, prefill_chunk: int) -> int:
    """Returns the bytes that are free while a prompt is scored in chunks of this size. Only
    scoring has more than one row of logits for a sequence."""
    num_tokens = int(MAX_CHUNK_SHARE * prefill_chunk)
    logits_bytes = num_tokens * stage.logits_bytes_per_token
    return stage.free_bytes - logits_bytes - stage.scoring_bytes


def better_split(stages: list[StageStatus]) -> list[int] | None:
    """Returns the number of layers for each rank that would make the slowest stage faster, by the
    measured times of decode steps. Returns None while these are unknown, and if there is nothing
    to gain."""
    plans = [stage.plan for stage in stages if stage.plan]
    is_warm = all(stage.pace.num_decode_steps >= _WARM_STEPS for stage in stages)
    if len(stages) < 2 or len(plans) < len(stages) or not is_warm:
        return None
    ranges = [plan.layers for plan in plans]
    counts = [end - start for start, end in ranges]
    seconds = [stage.pace.decode_seconds or 0.0 for stage in stages]
    pairs = zip(seconds, counts, strict=True)
    layer_seconds = [of_stage / num_layers for of_stage, num_layers in pairs]
    # Rank 0 has the head too. Its layers take about as long as those of other ranks.
    mean_of_others = sum(layer_seconds[1:]) / (len(stages) - 1)
    layer_seconds[0] = min(layer_seconds[0], mean_of_others)
    head_seconds = seconds[0] - counts[0] * layer_seconds[0]

    def stage_seconds(rank: int, num_layers: int) -> float:
        own_layers = num_layers * layer_seconds[rank]
        if rank == 0:
            return head_seconds + own_layers
        return own_layers

    best = [1] * len(stages)
    for _ in range(sum(counts) - len(stages)):
        with_one_more = [stage_seconds(rank, num + 1) for rank, num in enumerate(best)]
        fastest = with_one_more.index(min(with_one_more))
        best[fastest] += 1
    slowest = max(stage_seconds(rank, num) for rank, num in enumerate(best))
    is_worthwhile = slowest < _WORTHWHILE * max(seconds)
    return best if is_worthwhile else None
