"""Nodes on machines of their own, which find each other by multicast."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from launcher.nodes import client
from tests.nodes.network import Network, network
from tests.nodes.running import RunningNode, running_node, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@contextmanager
def nodes_on_a_switch(num_nodes: int, folder: Path) -> Iterator[tuple[Network, list[RunningNode]]]:
    with network(num_nodes) as machines, ExitStack() as stack:
        yield (
            machines,
            [
                stack.enter_context(
                    running_node(f"m{number}", folder, namespace=machines.names[number])
                )
                for number in range(num_nodes)
            ],
        )


@pytest.mark.slow
def test_four_machines_find_each_other_and_again_after_their_addresses_have_changed(
    tmp_path: Path,
) -> None:
    with nodes_on_a_switch(4, tmp_path) as (machines, nodes):
        for node in nodes:
            wait_until(lambda node=node: len(node.states()) == 4)  # type: ignore[misc]
        first = nodes[0]
        for other in nodes[1:]:
            first.pair(other)
        for node in nodes:
            wait_until(lambda node=node: list(node.states().values()).count("paired") == 3)  # type: ignore[misc]
        for number in range(4):
            machines.plug(number, f"198.19.0.{100 + number}")
        # A node looks at its addresses every ten seconds.
        wait_until(
            lambda: "198.19.0.103" in first.ask(lambda: client.node_named(nodes[3].name).addresses)
        )
        first.ask(lambda: client.stop_launches(client.node_named(nodes[3].name)))


def test_a_machine_that_is_gone_is_away(tmp_path: Path) -> None:
    with nodes_on_a_switch(2, tmp_path) as (_, (one, two)):
        one.pair(two)
        two.stop()
        wait_until(lambda: one.states()[two.name] == "away")


@pytest.mark.slow
def test_idle_nodes_use_little_of_a_processor(tmp_path: Path) -> None:
    """The processor's clock counts, so a busy machine changes nothing. No other node is in this
    network."""
    with nodes_on_a_switch(2, tmp_path) as (_, (one, two)):
        one.pair(two)
        processes = [psutil.Process(node.process.pid) for node in (one, two)]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(60)
        for process, seconds in zip(processes, before, strict=True):
            assert (sum(process.cpu_times()[:2]) - seconds) / 60 < 0.001
