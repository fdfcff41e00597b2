"""The prefix cache on disk, as the requests of a server use it, without engines."""

from typing import Any

from serve.core.messages import ForgetPrefixFiles, PrefixFile, PrefixFiles, ToPrefixCache
from serve.front.parts.disk.part import DiskPrefixes
from serve.front.pipeline.requests import Requests
from tests.front.parts.disk.observing import state
from tests.front.pipeline.two_shards import two_shards


def report_files(requests: Requests, *ranks: int) -> None:
    for rank in ranks:
        files = PrefixFiles([PrefixFile("a", "root", 0, 16, 10)], 100, "digest")
        requests.on_message(rank, files)


def disk_state(requests: Requests) -> dict[str, Any]:
    (disk,) = (part for part in requests.scheduler.parts if isinstance(part, DiskPrefixes))
    return state(disk)


def test_prefixes_on_disk_are_used_only_if_all_shards_have_them() -> None:
    requests = two_shards([])
    report_files(requests, 0)
    requests.resume()
    assert disk_state(requests)["max_bytes"] == 0
    requests.interrupt()
    report_files(requests, 0, 1)
    requests.resume()
    assert disk_state(requests)["max_bytes"] == 200, "both are awaited"
    assert disk_state(requests)["num_files"] == 1


def test_clearing_prefixes_during_a_restart_clears_the_disks_after_the_restart() -> None:
    sent: list[ToPrefixCache] = []
    requests = two_shards(sent)
    requests.clear_prefixes()
    report_files(requests, 0, 1)
    requests.resume()
    assert disk_state(requests)["num_files"] == 0
    assert sent == [ForgetPrefixFiles(everything=True)]
    requests.interrupt()
    report_files(requests, 0, 1)
    requests.resume()
    assert disk_state(requests)["num_files"] == 1, "it is cleared only once"
