"""Builds the orders of rank 0 to an engine: what to plan, then what to load. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from serve.core.amounts import memory_of
from serve.core.config import Cluster, ServeConfig, draft_on_hub
from serve.core.messages import Order
from serve.core.plan import MIN_KV_TOKENS, DraftSource, PlanRequest, StagePlan

_CONVERSATION_TOKENS = 4096


def plan_request(config: ServeConfig, num_ranks: int) -> PlanRequest:
    """Makes the request for a plan over all ranks of a launch."""
    num_shards = config.num_shards or 1
    draft = _draft_source(config)
    return PlanRequest(
        num_ranks=num_ranks,
        context=config.max_model_len,
        concurrency=config.max_num_seqs,
        min_tokens=MIN_KV_TOKENS,
        memory=config.memory,
        adapter_memory=config.adapter_memory,
        split=config.split,
        kv_bits=config.kv_bits,
        num_shards=num_shards,
        draft=draft,
    )


def replan_request(
    config: ServeConfig,
    ranks: Sequence[int],
    known: Sequence[int],
) -> PlanRequest:
    """Makes the request for a plan over these ranks, whose memory must hold the weights and one
    conversation. `known` gives the measured memory of each rank in bytes, or 0 if it is unknown."""
    memory = _of_ranks(config.memory, ranks)
    if memory is None and all(known):
        memory = _amounts_text(known)
    adapter_memory = _of_ranks(config.adapter_memory, ranks)
    # A list of layer counts was meant for the first plan's ranks.
    split = "even" if config.split == "even" else "auto"
    request = plan_request(config, len(ranks))
    return replace(
        request,
        min_tokens=_CONVERSATION_TOKENS,
        memory=memory,
        adapter_memory=adapter_memory,
        split=split,
    )


def order(
    config: ServeConfig,
    cluster: Cluster,
    ring: Sequence[int],
    stage: StagePlan,
    nonce: int,
    copies: str,
) -> Order:
    """Makes the order for the engine of one rank. ring lists the ranks that take part, in order.
    Paths and addresses are those of rank 0; other ranks replace them with their own."""
    rank = stage.rank
    place = ring.index(rank)
    hosts = tuple(cluster.hosts[each] for each in ring)
    cache_dir = _path_text(config.cache_dir)
    prefix_dir = _path_text(config.prefix_cache_dir)
    prefix_bytes = memory_of(config.prefix_cache_disk, [rank])
    draft = _draft_source(config) if rank == 0 else None
    return Order(
        rank=place,
        ring=tuple(ring),
        hosts=hosts,
        addresses=cluster.addresses,
        nonce=nonce,
        model=str(config.model),
        commit=config.revision,
        cache_dir=cache_dir,
        copies=copies,
        layers=stage.layers,
        kv_bits=config.kv_bits,
        # Other engines may still be importing MLX.
        join_timeout=config.constants.load_timeout + config.join_timeout,
        num_shards=stage.num_shards,
        prefix_dir=prefix_dir,
        prefix_bytes=prefix_bytes[0],
        draft=draft,
        draft_bytes=stage.draft_bytes,
    )


def _draft_source(config: ServeConfig) -> DraftSource | None:
    """Returns where rank 0 finds its draft model, or None without one."""
    cache_dir = _path_text(config.cache_dir)
    match config.draft_model:
        case None | "none":
            return None
        case "mtp":
            return DraftSource(str(config.model), config.revision, cache_dir, is_head=True)
        case draft_model:
            repo, commit = draft_on_hub(draft_model) or (draft_model, None)
            return DraftSource(repo, commit, cache_dir)


def _of_ranks(amounts: str | None, ranks: Sequence[int]) -> str | None:
    """Returns the amounts of these ranks, from a flag with the amounts of all ranks."""
    if amounts is None:
        return None
    own = memory_of(amounts, ranks)
    return _amounts_text(own)


def _amounts_text(amounts: Sequence[int]) -> str:
    """Writes bytes as a flag for memory has them: 8000KB,16000KB."""
    words = [f"{amount // 1000}KB" for amount in amounts]
    return ",".join(words)


def _path_text(path: Path | None) -> str | None:
    return str(path) if path else None
