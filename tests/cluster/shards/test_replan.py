"""Stages with shards whose ranks are lost for good: the others form another layout, and no token of
an answer changes."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.recovery.test_links import Ranks
from tests.cluster.recovery.test_recovery import check_same, run_streams
from tests.cluster.servers import READY_SECONDS, Server, quick, started
from tests.ports import free_ports

Places = dict[int, tuple[int, int]]
"""The stage and the shard of each rank."""

NUM_STREAMS = 3
WHOLE: Places = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}


def places(server: Server) -> Places:
    stages = server.get("/admin/pipeline")["stages"]
    return {stage["rank"]: (stage["stage"], stage["shard"]) for stage in stages}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tensor_parallel", ["2", "auto"])
def test_shards_form_another_layout_when_ranks_are_lost_and_when_they_return(
    tmp_path: Path, tensor_parallel: str
) -> None:
    """2 x 2, then 3 x 1 without rank 1, then 1 x 2 without rank 2, and 2 x 2 again. The processes
    of a lost rank are killed, and nothing starts it until the end."""
    layout = ("--tensor-parallel-size", tensor_parallel, "--replan")
    limits = ("--join-timeout", "20", quick(max_restarts=20))
    ranks = Ranks(tmp_path, free_ports(6), [], layout + limits)
    is_fixed = tensor_parallel == "2"

    def check_streams(disturb: Callable[[], None]) -> None:
        check_same(run_streams(server, disturb, NUM_STREAMS), expected)

    with ExitStack() as stack:
        others = {rank: stack.enter_context(started(ranks.command(rank))) for rank in (1, 2, 3)}
        server = stack.enter_context(started(ranks.command(0), ranks.ports[-1]))
        server.wait_until_ready()
        whole = places(server)
        assert whole == WHOLE or not is_fixed
        expected = run_streams(server, num_streams=NUM_STREAMS)

        check_streams(others[1].process.kill)
        assert places(server) == {0: (0, 0), 2: (1, 0), 3: (2, 0)} or not is_fixed
        assert sorted(places(server)) == [0, 2, 3]

        check_streams(others[2].process.kill)
        assert places(server) == {0: (0, 0), 3: (0, 1)} or not is_fixed
        assert sorted(places(server)) == [0, 3]

        def bring_back() -> None:
            for rank in (1, 2):
                stack.enter_context(started(ranks.command(rank)))

        check_streams(bring_back)
        server.wait_for_log(r"event=ready num_ranks=4 .*\n.* event=recovered", READY_SECONDS)
        assert places(server) == whole
        assert "event=layout" in server.text
