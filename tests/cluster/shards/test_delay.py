"""The layout that --tensor-parallel-size auto chooses for a link that delays every message."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.servers import Server, alone, serve_flags, started
from tests.cluster.shards.delayed_link import HERE, THERE, NoLinkError, delayed_link, in_space
from tests.ports import free_ports

DELAY_SECONDS = 0.001


@contextmanager
def two_hosts(folder: Path) -> Iterator[Server]:
    """Two ranks, the second of which is behind a link with a delay. Raises NoLinkError."""
    first, second, control, port = free_ports(4)
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"{HERE}:{first}"], [f"{THERE}:{second}"]]))
    variables = [f"MLX_HOSTFILE={hostfile}", f"BRIGADE_CONTROL={HERE}:{control}"]
    command = ["env", *variables, "BRIGADE_SECRET=s"]
    rank = alone(serve_flags(port))
    rank += ["--tensor-parallel-size", "auto"]
    with ExitStack() as stack:
        space = stack.enter_context(delayed_link(DELAY_SECONDS))
        far = [*in_space(space), *command, "MLX_RANK=1", *rank]
        stack.enter_context(started(far))
        near = [*command, "MLX_RANK=0", *rank]
        server = stack.enter_context(started(near, port))
        server.wait_until_ready()
        yield server


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_auto_layout_consists_of_stages_if_messages_take_a_millisecond(tmp_path: Path) -> None:
    """A token would wait for two messages in each of the 16 sums of eight layers."""
    try:
        with two_hosts(tmp_path) as server:
            pipeline = server.get("/admin/pipeline")
            text = server.text
    except NoLinkError as error:
        pytest.skip(str(error))
    places = [(stage["stage"], stage["shard"]) for stage in pipeline["stages"]]
    assert places == [(0, 0), (1, 0)]
    round_trip = re.search(r"event=layout .* round trip of ([0-9.]+) ms", text)
    assert round_trip, text
    assert float(round_trip[1]) > DELAY_SECONDS * 1000, "the delay was not measured"
