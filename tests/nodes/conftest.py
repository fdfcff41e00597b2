"""Two nodes for all tests that leave them as they are: paired, and with no launch. And machines
that have only their caches, and a hub that all of them can reach."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub.conftest import home, hub, repo
from tests.nodes.machines import Machines
from tests.nodes.running import RunningNode, running_node

__all__ = ["home", "hub", "machines", "offline", "pair_of_nodes", "repo"]


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


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    made = Machines(tmp_path / "machines", monkeypatch)
    yield made
    made.close()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
