"""Two clusters for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.balancer.clusters import Clusters


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    running = Clusters()
    try:
        running.start(0)
        running.start(1)
        yield running
    finally:
        running.close()
