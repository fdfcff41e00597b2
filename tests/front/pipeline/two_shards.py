"""The requests of a server without engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from serve.core.config import ServeConfig
from serve.core.messages import Loaded, ToPrefixCache
from serve.core.plan import StagePlan
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.status import StageStatus
from serve.parent.engines import Engines


def two_shards(sent: list[ToPrefixCache]) -> Requests:
    """Requests for one stage of two shards. Messages to all ranks go to a list."""
    engines = cast(Engines, SimpleNamespace(send_to_all=sent.append))
    requests = Requests(ServeConfig(model=Path(), tensor_parallel_size="2"), 1, engines)
    stages = []
    for rank in range(2):
        plan = StagePlan(rank, (0, 4), 0, 0, 10, 0, 0, 0.5, None, num_shards=2, shard=rank)
        stages.append(StageStatus(rank, "h", plan, loaded=Loaded(0, None, 0, 10**6, "any")))
    requests.settle(stages)
    return requests
