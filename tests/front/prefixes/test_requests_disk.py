"""The prefix cache on disk, as the requests of a server use it, without engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from serve.core.config import ServeConfig
from serve.core.messages import ForgetPrefixFiles, Loaded, PrefixFile, PrefixFiles, ToPrefixCache
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


def report_files(requests: Requests, *ranks: int) -> None:
    for rank in ranks:
        files = PrefixFiles([PrefixFile("a", "root", 0, 16, 10)], 100, "digest")
        requests.on_prefix_cache(rank, files)


def test_requests_use_prefixes_on_disk_only_if_all_shards_have_them() -> None:
    requests = two_shards([])
    report_files(requests, 0)
    requests.resume()
    assert requests.disk_state()["max_bytes"] == 0
    requests.interrupt()
    report_files(requests, 0, 1)
    requests.resume()
    assert requests.disk_state()["max_bytes"] == 200, "both are awaited"
    assert requests.disk_state()["num_files"] == 1


def test_requests_clear_the_disks_after_a_restart_that_was_under_way() -> None:
    sent: list[ToPrefixCache] = []
    requests = two_shards(sent)
    requests.clear_prefixes()
    report_files(requests, 0, 1)
    requests.resume()
    assert requests.disk_state()["num_files"] == 0
    assert sent == [ForgetPrefixFiles(everything=True)]
    requests.interrupt()
    report_files(requests, 0, 1)
    requests.resume()
    assert requests.disk_state()["num_files"] == 1, "it is cleared only once"
