"""The requests of a server, without engines."""

from pathlib import Path

from serve.core.config import ServeConfig
from serve.core.messages import PrefixFiles
from serve.core.plan import StagePlan
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.status import StageStatus


def test_requests_use_prefixes_on_disk_only_if_all_shards_have_them() -> None:
    config = ServeConfig(model=Path(), tensor_parallel=2)
    requests = Requests(
        config,
        1,
        send=lambda message: None,
        adapter_name=lambda version: None,
        send_to_all=lambda message: None,
        adapter_contents=lambda version: None,
    )
    stages = []
    for rank in range(2):
        plan = StagePlan(rank, (0, 4), 0, 0, 10, 0, 0, 0.5, None, num_shards=2)
        stages.append(StageStatus(rank, "h", plan, free_bytes=10**6, reuse="any"))
    requests.settle(stages)
    requests.on_prefix_cache(0, PrefixFiles([], 100))
    requests.resume()
    assert requests.disk_state()["max_bytes"] == 0
    requests.interrupt()
    for rank in range(2):
        requests.on_prefix_cache(rank, PrefixFiles([], 100))
    requests.resume()
    assert requests.disk_state()["max_bytes"] == 200, "both are awaited"
