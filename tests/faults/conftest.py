"""One two-rank cluster for all cases but those of clients that let it wait. They have a server that
gives half a second where others give ten."""

from collections.abc import Callable, Iterator

import httpx2
import pytest

from tests.cluster.conftest import mlx_lm_answer  # noqa: F401
from tests.cluster.servers import Server, alone, quick, running
from tests.faults.cases import GOOD

TIMEOUTS = quick(header_timeout=0.5, body_timeout=0.5)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Server]:
    with running(2) as server:
        yield server


@pytest.fixture(scope="session")
def impatient() -> Iterator[Server]:
    """Not for good requests: a busy machine may need half a second to send one."""
    with running(1, TIMEOUTS, launch=alone) as server:
        yield server


@pytest.fixture(scope="session")
def http(cluster: Server) -> Iterator[httpx2.Client]:
    """A connection for each request. Made once, because to load certificates takes longer than to
    answer."""
    no_keeping = httpx2.Limits(max_keepalive_connections=0)
    with httpx2.Client(base_url=cluster.url, limits=no_keeping) as client:
        yield client


@pytest.fixture(scope="session")
def right_answer(mlx_lm_answer: Callable[..., str]) -> str:  # noqa: F811
    return mlx_lm_answer(GOOD["messages"][0]["content"], max_tokens=GOOD["max_tokens"])
