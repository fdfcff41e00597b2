"""Computes the capacity of the stages: the tokens that fit in memory, the prompt tokens that fit
beside decoding, and a better split of the layers."""

from dataclasses import dataclass
from statistics import fmean

from serve.core.amounts import memory_of
from serve.core.config import ServeConfig
from serve.core.plan import KvRoom, kv_budgets, kv_room
from serve.front.pipeline.chunks import MAX_CHUNK_SHARE, MIN_CHUNK, max_chunks_between_steps
from serve.front.pipeline.status import StageStatus
from serve.front.prefixes.index import PrefixIndex

# The time that a chunk of a long prompt may take without --max-inter-token, in decode steps. With
# 2.2, tokens take 2.1 times as long meanwhile, on two or more stages.
_CHUNK_BY_DECODE = 2.2
# A single stage runs one chunk for each decode step. A smaller chunk would mostly read weights.
_CHUNK_BY_DECODE_ALONE = 1.6
# The time that a chunk may take while nobody decodes, even if _WAIT_SECONDS allow less. A tenth of
# this time is spent on reading the weights.
_CHUNK_WITHOUT_DECODING = 10.0  # times a decode step
_WAIT_SECONDS = 1.0  # how long chunks of other prompts may delay a new prompt
_MIN_CHUNK_BESIDE_DECODING = 8
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
    chunks = []  # the chunk for each stage whose speed is known
    for stage, seconds in zip(stages, decode_seconds, strict=True):
        seconds_per_token = stage.pace.prefill_seconds_per_token
        if not seconds or not seconds_per_token:
            continue
        if max_inter_token is None:
            chunk_seconds = by_decode * seconds
        else:
            chunk_seconds = _chunk_seconds(decode_seconds, num_groups, max_inter_token)
        # Reading the weights takes as long as in a decode step.
        seconds_of_tokens = chunk_seconds - seconds
        num_tokens = int(seconds_of_tokens / seconds_per_token)
        chunks.append(max(_MIN_CHUNK_BESIDE_DECODING, num_tokens))
    smallest = min(chunks, default=_UNKNOWN_CHUNK)
    return max(1, min(max_tokens, smallest))


def chunk_without_decoding(stages: list[StageStatus], max_tokens: int) -> int:
    """Returns the number of tokens that a prefill step may have while no sequence decodes.

    A new prompt waits for the steps under way, one for each stage, and then follows the last of
    them through the other stages: in all, for 2P - 1 steps on P stages. A chunk at the end of a
    long context takes longer, so it is smaller.
    """
    wait_seconds = _WAIT_SECONDS / (2 * len(stages) - 1)
    chunks = [max_tokens]
    for stage in stages:
        pace = stage.pace
        if pace.decode_seconds and pace.prefill_seconds_per_token:
            chunk_seconds = max(wait_seconds, _CHUNK_WITHOUT_DECODING * pace.decode_seconds)
            seconds_of_tokens = chunk_seconds - pace.decode_seconds
            num_tokens = int(seconds_of_tokens / pace.prefill_seconds_per_token)
            chunks.append(max(MIN_CHUNK, num_tokens))
    return min(chunks)


def _chunk_seconds(
    decode_seconds: list[float],
    num_groups: int,
    max_inter_token: float,
) -> float:
    """Returns how long a prefill step may take on a stage so that tokens come at most
    max_inter_token seconds apart."""
    num_stages = len(decode_seconds)
    slowest = max(decode_seconds)
    num_chunks = max_chunks_between_steps(num_stages)
    # Between two tokens of a row, the row passes all stages, or all groups take a turn, whichever
    # takes longer. The chunks come on top.
    token_seconds = max(sum(decode_seconds), num_groups * slowest)
    spare_seconds = max_inter_token - token_seconds
    by_turns = spare_seconds / num_chunks
    # A decode step right behind the chunks waits for them on every stage.
    num_waits = num_stages + num_chunks - 1
    by_stages = (max_inter_token - slowest) / num_waits
    return min(by_turns, by_stages)


def room_under_limits(
    stages: list[StageStatus],
    config: ServeConfig,
    max_chunk: int,
) -> KvRoom:
    """Computes the room for keys and values, as a plan does, but no more than the memory that is
    free while a prompt is scored in chunks of max_chunk tokens. Raises PlanError if the room is
    less than the minimum."""
    ranks = [stage.rank for stage in stages]
    plans = [stage.plan for stage in stages if stage.plan]
    adapters = [0] * len(ranks)
    if config.adapter_memory:
        adapters = memory_of(config.adapter_memory, ranks)
    beside_scoring = [_free_beside_scoring(stage, max_chunk) for stage in stages]
    free = _less(beside_scoring, adapters)
    budgets = free
    if config.memory:
        memory = _less(memory_of(config.memory, ranks), adapters)
        memory = _less(memory, [plan.draft_bytes for plan in plans])
        pairs = zip(kv_budgets(plans, memory), free, strict=True)
        budgets = [min(pair) for pair in pairs]
    return kv_room(plans, budgets, config.max_num_seqs)


def kept_bytes(kept: PrefixIndex, stages: list[StageStatus]) -> int:
    """Returns the bytes that the prefix cache takes on all stages, without padding."""
    plans = [stage.plan for stage in stages if stage.plan]
    bytes_per_token = sum(plan.cache_bytes_per_token for plan in plans)
    bytes_per_sequence = sum(plan.cache_bytes_per_sequence for plan in plans)
    return kept.num_bytes(bytes_per_token, bytes_per_sequence)


def _less(amounts: list[int], kept: list[int]) -> list[int]:
    """Subtracts the reserved bytes of each rank from its amount."""
    pairs = zip(amounts, kept, strict=True)
    return [amount - own for amount, own in pairs]


def _free_beside_scoring(stage: StageStatus, prefill_chunk: int) -> int:
    """Returns the bytes that are free while a prompt is scored in chunks of this size."""
    num_tokens = int(MAX_CHUNK_SHARE * prefill_chunk)
    logits_bytes = num_tokens * stage.loaded.logits_bytes_per_token
    return stage.loaded.free_bytes - logits_bytes - stage.loaded.scoring_bytes


def better_split(stages: list[StageStatus]) -> list[int] | None:
    """Returns the number of layers for each rank that would make the slowest stage faster, by the
    measured times of decode steps. Returns None while the times are unknown, and if there is
    nothing to gain."""
    if len(stages) < 2:
        return None
    if not all(stage.pace.num_decode_steps >= _WARM_STEPS for stage in stages):
        return None
    seconds = [stage.pace.decode_seconds or 0.0 for stage in stages]
    layers = [stage.plan.layers for stage in stages if stage.plan]
    num_layers = [end - start for start, end in layers]
    costs = _stage_costs(num_layers, seconds)
    best = _fastest_split(costs, sum(num_layers))
    slowest = max(cost.seconds(num) for cost, num in zip(costs, best, strict=True))
    is_worthwhile = slowest < _WORTHWHILE * max(seconds)
    return best if is_worthwhile else None


@dataclass(frozen=True, slots=True)
class _StageCost:
    """The time that a decode step takes on a rank: for each layer, and for the head on rank 0."""

    layer_seconds: float
    head_seconds: float = 0.0

    def seconds(self, num_layers: int) -> float:
        return self.head_seconds + num_layers * self.layer_seconds


def _stage_costs(num_layers: list[int], seconds: list[float]) -> list[_StageCost]:
    """Derives the cost of each rank from the seconds of its decode steps."""
    pairs = zip(seconds, num_layers, strict=True)
    layer_seconds = [stage_seconds / num for stage_seconds, num in pairs]
    # Rank 0 has the head too. Its layers take about as long as other ranks' layers.
    mean_of_others = fmean(layer_seconds[1:])
    first_layer_seconds = min(layer_seconds[0], mean_of_others)
    head_seconds = seconds[0] - num_layers[0] * first_layer_seconds
    first = _StageCost(first_layer_seconds, head_seconds)
    return [first, *map(_StageCost, layer_seconds[1:])]


def _fastest_split(costs: list[_StageCost], num_layers: int) -> list[int]:
    """Returns the numbers of layers, at least 1, with which the slowest rank is fastest."""
    split = [1] * len(costs)
    for _ in range(num_layers - len(costs)):
        # The next layer goes to the rank that would be the fastest with one more layer.
        pairs = zip(costs, split, strict=True)
        with_one_more = [cost.seconds(num + 1) for cost, num in pairs]
        fastest = with_one_more.index(min(with_one_more))
        split[fastest] += 1
    return split
