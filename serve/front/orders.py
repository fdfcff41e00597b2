"""What rank 0 tells an engine before it runs: what to plan, then what to load. Pure."""

from typing import Any

from serve.core.config import Cluster, ServeConfig
from serve.core.plan import StagePlan


def plan_request(config: ServeConfig, cluster: Cluster, folder: str) -> dict[str, Any]:
    """For rank 0's engine. folder is where the model's config is."""
    return {
        "type": "plan",
        "model": folder,
        "num_ranks": cluster.num_ranks,
        "context": config.max_context,
        "concurrency": config.max_num_sequences,
        "memory": config.memory,
        "split": config.split,
        "kv_bits": config.kv_bits,
    }


def order(
    config: ServeConfig, cluster: Cluster, stage: StagePlan, nonce: int, copies: str
) -> dict[str, Any]:
    """For the engine of one rank, as serve.rank.worker.Order reads it. Paths are those of rank 0:
    other ranks have their own."""
    return {
        "type": "order",
        "rank": stage.rank,
        "hosts": list(cluster.hosts),
        "nonce": nonce,
        "model": str(config.model),
        "commit": config.revision,
        "cache_dir": config.cache_dir and str(config.cache_dir),
        "copies": copies,
        "layers": list(stage.layers),
        "kv_bits": config.kv_bits,
        "join_timeout": config.join_timeout,
    }
