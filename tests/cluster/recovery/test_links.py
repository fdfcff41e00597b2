"""Bad links between ranks, and a whole rank that goes: nothing is lost, no token changes.

The ranks are started one by one, as on two hosts: each has its own hostfile, in which the other
is behind a proxy.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.cluster.recovery.proxy import Proxy
from tests.cluster.recovery.test_recovery import check_same, run_streams
from tests.cluster.servers import TINY_CHAT, Server, alone, gone, quick, serve_flags, started
from tests.ports import free_ports

pytestmark = pytest.mark.long


@dataclass
class Ranks:
    """proxies are before the rank of that number, if any; the last two ports are rank 0's. Other
    ranks reach the first of these through control_proxy, if there is one."""

    folder: Path
    ports: list[int]
    proxies: list[Proxy]
    flags: tuple[str, ...]
    model: Path = TINY_CHAT
    control_proxy: Proxy | None = None

    def command(self, rank: int, secret: str = "s") -> list[str]:
        *ring, control, http = self.ports
        ports = [proxy.port for proxy in self.proxies] or list(ring)
        ports[rank] = ring[rank]
        if rank and self.control_proxy:
            control = self.control_proxy.port
        hostfile = self.folder / f"hosts-{rank}.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        variables = [f"MLX_RANK={rank}", f"MLX_HOSTFILE={hostfile}"]
        variables.append(f"BRIGADE_CONTROL=127.0.0.1:{control}")
        flags = serve_flags(http, self.model, *self.flags)
        return ["env", *variables, f"BRIGADE_SECRET={secret}", *alone(flags)]

    def hold_links(self, seconds: float) -> None:
        """Lets nothing pass between the ranks for some seconds."""
        for proxy in self.proxies:
            proxy.freeze()
        time.sleep(seconds)
        for proxy in self.proxies:
            proxy.thaw()


@contextmanager
def two_ranks(folder: Path, *flags: str) -> Iterator[tuple[Ranks, Server, Server]]:
    ports = free_ports(4)
    with ExitStack() as stack:
        *proxies, control_proxy = [Proxy(port) for port in ports[:3]]
        for proxy in (*proxies, control_proxy):
            stack.callback(proxy.close)
        ranks = Ranks(folder, ports, proxies, flags, control_proxy=control_proxy)
        other = stack.enter_context(started(ranks.command(1)))
        server = stack.enter_context(started(ranks.command(0), ports[3]))
        server.wait_until_ready()
        yield ranks, server, other


def num_restarts(server: Server) -> int:
    return int(server.get("/admin/pipeline")["num_restarts"])


@pytest.mark.slow
def test_a_slow_link_changes_no_token_and_a_broken_link_is_replaced(tmp_path: Path) -> None:
    with two_ranks(tmp_path, quick(stall_timeout=3, max_restarts=9)) as (ranks, server, _):
        expected = run_streams(server)
        assert sum(proxy.num_bytes for proxy in ranks.proxies) > 1000, "the ring goes elsewhere"
        for delay_seconds in (0.005, 0.05):
            for proxy in ranks.proxies:
                proxy.delay_seconds = delay_seconds
            check_same(run_streams(server), expected)
        assert num_restarts(server) == 0
        for proxy in ranks.proxies:
            proxy.delay_seconds = 0.0

        def reset() -> None:
            time.sleep(0.7)
            for proxy in ranks.proxies:
                proxy.reset()

        check_same(run_streams(server, reset), expected)
        assert num_restarts(server) == 1, server.text

        def freeze() -> None:
            time.sleep(0.7)
            began = time.monotonic()
            for proxy in ranks.proxies:
                proxy.freeze()
            while num_restarts(server) == 1:
                assert time.monotonic() - began < 3 + 10, "a stuck link is not noticed"
                time.sleep(0.05)
            for proxy in ranks.proxies:
                proxy.thaw()

        check_same(run_streams(server, freeze), expected)
        assert "No step came back for 3 s: the hop from rank 1 to rank 0 is stuck" in server.text
        assert num_restarts(server) == 2


@pytest.mark.usefixtures("patient_parents")
@pytest.mark.slow
def test_a_reset_link_makes_no_engine_reload_and_loses_no_token(tmp_path: Path) -> None:
    """Every engine stays, with the keys and values of every sequence that runs. A link also carries
    the connection between the parents, which may break with the ring or by itself."""
    with two_ranks(tmp_path, quick(max_restarts=9)) as (ranks, server, other):
        expected = run_streams(server)
        engines = engine_pids(server, other)
        num_running: list[int] = []

        def reset(links: list[Proxy]) -> None:
            time.sleep(0.7)
            num_running.append(server.get("/admin/pipeline")["num_running"])
            for proxy in links:
                proxy.reset()

        assert ranks.control_proxy
        ring, control = ranks.proxies, [ranks.control_proxy]
        for number, links in enumerate((ring, control, [*ring, *control], [*control, *ring])):
            check_same(run_streams(server, partial(reset, links)), expected)
            assert num_restarts(server) == number + 1, server.text
            assert engine_pids(server, other) == engines, server.text + other.text
            stages = server.get("/admin/pipeline")["stages"]
            assert [stage["num_stays"] for stage in stages] == [number + 1] * 2
            stayed = re.findall(r"event=sequences_stayed sequences=(\d+) tokens=\d+", server.text)
            assert len(stayed) == number + 1
            # One may have ended, or begun to decode, between the question and the reset.
            assert abs(num_running[-1] - int(stayed[-1])) <= 2


def engine_pids(*ranks: Server) -> list[int]:
    """The process ids of the engines of ranks that were started one by one."""
    family = [process for rank in ranks for process in rank.family()]
    return [process.pid for process in family if "serve.rank.worker" in process.cmdline()]


@pytest.mark.slow
def test_a_whole_rank_that_is_killed_and_started_again_changes_no_token(tmp_path: Path) -> None:
    """Parent and engine are killed; whoever started the rank starts it again."""
    with two_ranks(tmp_path) as (ranks, server, other), ExitStack() as stack:
        expected = run_streams(server)

        def replace() -> None:
            time.sleep(0.7)
            family = other.family()
            psutil.Process(other.process.pid).kill()
            assert gone(family[1:], 60), "the engine outlives its parent"
            server.wait_for_log("event=rank_gone rank=1")
            impostor = stack.enter_context(started(ranks.command(1, secret="x")))
            assert impostor.process.wait(60) == 6
            assert "it belongs to another launch" in impostor.text
            stack.enter_context(started(ranks.command(1)))

        streams = run_streams(server, replace)
        check_same(streams, expected)
        assert num_restarts(server) == 1


def test_a_rank_that_does_not_return_ends_the_cluster_with_the_reason(tmp_path: Path) -> None:
    with two_ranks(tmp_path, quick(return_timeout=3)) as (_, server, other):
        other.process.kill()
        server.wait_for_log("event=rank_gone rank=1")
        assert server.process.wait(60) == 6
        assert r"Ranks [1] did not join within 3 s" in server.text


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_layers_are_redistributed_when_ranks_are_lost_and_when_they_return(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, free_ports(5), [], ("--replan", "--join-timeout", "20"))

    def layers() -> dict[int, list[int]]:
        stages = server.get("/admin/pipeline")["stages"]
        return {stage["rank"]: stage["layers"] for stage in stages}

    with ExitStack() as stack:
        others = [stack.enter_context(started(ranks.command(rank))) for rank in (1, 2)]
        server = stack.enter_context(started(ranks.command(0), ranks.ports[-1]))
        server.wait_until_ready()
        expected, whole = run_streams(server), layers()

        def lose_one() -> None:
            time.sleep(0.5)
            others[0].process.kill()
            server.wait_for_log("event=going_on")

        check_same(run_streams(server, lose_one), expected)
        assert sorted(layers()) == [0, 2]
        check_same(run_streams(server, others[1].process.kill), expected)
        assert list(layers()) == [0]

        def bring_back() -> None:
            time.sleep(0.3)
            for rank in (1, 2):
                stack.enter_context(started(ranks.command(rank)))

        check_same(run_streams(server, bring_back), expected)
        server.wait_for_log(r"event=ready num_ranks=3 .*\n.* event=recovered life=[3-9]")
        assert layers() == whole
        check_same(run_streams(server), expected)
