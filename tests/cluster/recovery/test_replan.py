"""Layers that change owner: engines that stay read only those that they lack."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from serve.core.checkpoint import read_checkpoint
from tests.cluster.recovery.test_links import Ranks, engine_pids
from tests.cluster.recovery.test_prefixes_on_disk import TEXT, ask, disk, wait_until_written
from tests.cluster.recovery.test_recovery import check_same, run_streams
from tests.cluster.servers import TINY_CHAT, Server, started
from tests.ports import free_ports

pytestmark = [pytest.mark.long, pytest.mark.uses("adapters", "disk")]

POET = TINY_CHAT.parent / "adapters" / "poet"
SMALL = 60_000  # bytes of headers, config and code; a layer has ten times as many


def layer_bytes() -> list[int]:
    """The bytes of each layer of the model."""
    checkpoint = read_checkpoint(TINY_CHAT)
    sizes = [0] * checkpoint.num_layers
    for name, tensor in checkpoint.tensors.items():
        words = name.split(".")
        if words[1] == "layers":
            sizes[int(words[2])] += tensor.num_bytes
    return sizes


class Cluster:
    """Three ranks that are started one by one. Rank 1 or 2 may be killed and started again."""

    def __init__(self, stack: ExitStack, ranks: Ranks) -> None:
        self.stack, self.ranks = stack, ranks
        self.others = {rank: self.start(rank) for rank in (1, 2)}
        self.server: Server = stack.enter_context(started(ranks.command(0), ranks.ports[-1]))
        self.server.wait_until_ready()

    def start(self, rank: int) -> Server:
        return self.stack.enter_context(started(self.ranks.command(rank)))

    def stages(self) -> dict[int, dict[str, Any]]:
        stages = self.server.get("/admin/pipeline")["stages"]
        return {stage["rank"]: stage for stage in stages}

    def engines(self) -> dict[int, int]:
        """The process id of each rank's engine."""
        pids: dict[int, int] = {}
        for rank, process in {0: self.server, **self.others}.items():
            if process.process.poll() is None:
                (pids[rank],) = engine_pids(process)
        return pids

    def wait_until_working(self, num_ranks: int, life: int) -> None:
        self.server.wait_for_log(f"event=ready num_ranks={num_ranks} .*\n.* life={life} ")

    def poem(self) -> str:
        """The answer of the adapter."""
        messages = [{"role": "user", "content": "How deep is the sea?"}]
        reply = self.server.client().chat.completions.create(
            model="poet",
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=40,
        )
        return reply.choices[0].message.content or ""


@contextmanager
def three_ranks(folder: Path, *flags: str) -> Iterator[Cluster]:
    own = ("--replan", "--join-timeout", "20", "--lora-modules", f"poet={POET}", *flags)
    with ExitStack() as stack:
        yield Cluster(stack, Ranks(folder, free_ports(5), [], own))


def check_kept(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> None:
    """Checks for each rank that was there before that it has read only the layers it lacked."""
    sizes = layer_bytes()
    for rank in before.keys() & after.keys():
        stage = after[rank]
        assert stage["has_stayed"]
        earlier = range(*before[rank]["layers"])
        own = range(*stage["layers"])
        kept = sum(sizes[layer] for layer in own if layer in earlier)
        new = sum(sizes[layer] for layer in own if layer not in earlier)
        assert stage["bytes_kept"] >= kept
        missing = stage["bytes_owned"] - stage["bytes_kept"]
        assert missing >= new
        if stage["bytes_read"] is not None:
            assert missing <= stage["bytes_read"] < missing + SMALL


@pytest.mark.usefixtures("patient_parents")
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", [1, 2])
def test_replanning_reads_only_layers_that_change_owner(tmp_path: Path, victim: int) -> None:
    """When a rank is lost for good, and again when it is back. No answer changes."""
    with three_ranks(tmp_path) as cluster:
        expected = run_streams(cluster.server)
        poem = cluster.poem()
        whole = cluster.stages()
        engines = cluster.engines()
        staying = {rank: pid for rank, pid in engines.items() if rank != victim}

        def lose() -> None:
            time.sleep(0.5)
            cluster.others[victim].process.kill()
            cluster.server.wait_for_log("event=going_on")

        check_same(run_streams(cluster.server, lose), expected)
        assert cluster.poem() == poem
        fewer = cluster.stages()
        assert fewer.keys() == staying.keys()
        check_kept(whole, fewer)
        assert cluster.engines() == staying

        def bring_back() -> None:
            time.sleep(0.5)
            cluster.others[victim] = cluster.start(victim)
            cluster.wait_until_working(3, 2)

        check_same(run_streams(cluster.server, bring_back), expected)
        assert cluster.poem() == poem
        again = cluster.stages()
        assert [stage["layers"] for stage in again.values()] == [
            stage["layers"] for stage in whole.values()
        ]
        check_kept(fewer, again)
        assert cluster.engines().items() >= staying.items()
        check_same(run_streams(cluster.server), expected)
        assert cluster.server.get("/admin/pipeline")["num_restarts"] == 2


@pytest.mark.usefixtures("patient_parents")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_stays_when_all_other_ranks_leave_and_when_they_return(tmp_path: Path) -> None:
    """It leaves a ring, works without one, and joins one again."""
    with three_ranks(tmp_path) as cluster:
        expected = run_streams(cluster.server)
        before = cluster.stages()
        engine = cluster.engines()[0]

        def lose() -> None:
            time.sleep(0.5)
            for other in cluster.others.values():
                other.process.kill()
            cluster.server.wait_for_log("event=going_on")

        check_same(run_streams(cluster.server, lose), expected)
        alone = cluster.stages()
        assert list(alone) == [0]
        check_kept(before, alone)
        cluster.others[1] = cluster.start(1)
        cluster.server.wait_for_log("event=ready num_ranks=2")
        check_same(run_streams(cluster.server), expected)
        assert cluster.engines()[0] == engine
        check_kept(alone, cluster.stages())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_prefixes_on_disk_are_reused_when_ranks_own_the_same_layers_again(tmp_path: Path) -> None:
    flags = ["--prefix-cache-dir", str(tmp_path / "kept"), "--prefix-cache-disk", "1GB"]
    with three_ranks(tmp_path, *flags) as cluster:
        server = cluster.server
        expected, _ = ask(server, TEXT)
        wait_until_written(server, 2)
        cluster.others[2].process.kill()
        server.wait_for_log("event=going_on")
        assert ask(server, TEXT) == (expected, 0)
        cluster.others[2] = cluster.start(2)
        cluster.wait_until_working(3, 2)
        assert ask(server, TEXT)[0] == expected
        assert disk(server)["num_reads"] == 1
