"""Two nodes for all tests that leave them as they are: paired, and with no launch."""

from collections.abc import Iterator

import pytest

from tests.nodes.running import RunningNode, running_node


@pytest.fixture(scope="session")
def pair_of_nodes(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunningNode, RunningNode]]:
    folder = tmp_path_factory.mktemp("nodes")
    with running_node("one", folder) as one:
        joins = ["--join", f"127.0.0.1:{one.port}"]
        with running_node("two", folder, joins) as two:
            two.pair(one)
            yield one, two
