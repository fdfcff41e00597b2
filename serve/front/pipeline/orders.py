"""Builds the orders of rank 0 to an engine: what to plan, then what to load. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from serve.core.config import Cluster, ServeConfig
from serve.core.messages import Order
from serve.core.plan import MIN_KV_TOKENS, DraftSource, PlanRequest, StagePlan, memory_of

_CONVERSATION_TOKENS = 4096


def plan_request(config: ServeConfig, num_ranks: int) -> PlanRequest:
    """Makes the request for a plan over all ranks of a launch."""
    return PlanRequest(
        num_ranks=num_ranks,
        context=config.max_context,
        concurrency=config.max_num_sequences,
        min_tokens=MIN_KV_TOKENS,
        memory=config.memory,
        kv_memory=config.kv_memory,
        adapter_memory=config.adapter_memory,
        split=config.split,
        kv_bits=config.kv_bits,
        num_shards=config.num_shards or 1,
        draft=_draft_source(config),
    )


def _draft_source(config: ServeConfig) -> DraftSource | None:
    cache_dir = str(config.cache_dir) if config.cache_dir else None
    if config.mtp:
        return DraftSource(str(config.model), config.revision, cache_dir, is_head=True)
    if config.draft_model is None:
        return None
    return DraftSource(str(config.draft_model), config.draft_revision, cache_dir)


def replan_request(
    config: ServeConfig,
    ranks: Sequence[int],
    known: Sequence[int],
) -> PlanRequest:
    """Makes the request for a plan over these ranks, whose memory must hold the weights and one
    conversation. known has the measured memory of each rank in bytes, or 0 if it is unknown."""
    memory = _of_ranks(config.memory, ranks)
    if memory is None and all(known):
        memory = _text(known)
    request = plan_request(config, len(ranks))
    return replace(
        request,
        min_tokens=_CONVERSATION_TOKENS,
        memory=memory,
        kv_memory=_of_ranks(config.kv_memory, ranks),
        adapter_memory=_of_ranks(config.adapter_memory, ranks),
        split="even" if config.split == "even" else "auto",
    )


def _of_ranks(amounts: str | None, ranks: Sequence[int]) -> str | None:
    """The amounts of these ranks alone, out of a flag that has those of all ranks."""
    if amounts is None:
        return None
    own = memory_of(amounts, ranks)
    return _text(own)


def _text(amounts: Sequence[int]) -> str:
    words = [f"{amount // 1000}KB" for amount in amounts]
    return ",".join(words)


def order(
    config: ServeConfig,
    cluster: Cluster,
    ring: Sequence[int],
    stage: StagePlan,
    nonce: int,
    copies: str,
) -> Order:
    """Makes the order for the engine of one rank. ring has the ranks that take part, in order.
    Paths and addresses are those of rank 0; other ranks replace them by their own."""
    hosts = [cluster.hosts[rank] for rank in ring]
    addresses = [list(of_rank) for of_rank in cluster.addresses]
    return Order(
        rank=ring.index(stage.rank),
        ring=tuple(ring),
        hosts=tuple(hosts),
        addresses=addresses,
        nonce=nonce,
        model=str(config.model),
        commit=config.revision,
        cache_dir=str(config.cache_dir) if config.cache_dir else None,
        copies=copies,
        layers=stage.layers,
        kv_bits=config.kv_bits,
        join_timeout=config.join_timeout,
        num_shards=stage.num_shards,
        prefix_dir=str(config.prefix_cache_dir) if config.prefix_cache_dir else None,
        prefix_bytes=memory_of(config.prefix_cache_disk, [stage.rank])[0],
        draft=None if stage.rank else _draft_source(config),
        draft_bytes=stage.draft_bytes,
    )
