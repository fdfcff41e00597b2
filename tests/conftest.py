"""What all tests share."""

import signal

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

# Programs under test are to find signals as in a terminal, also when tests run under nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

RANKS = (
    "tests/agents/test_agents",
    "tests/cluster",
    "tests/faults",
    "tests/hub/test_serve",
    "tests/launch",
    "tests/page/test_page",
    "tests/test_",
)


class FilesAndRanks(LoadScopeScheduling):
    """A file is one worker's, and all that start clusters are the same worker's: two at a time
    would wait for each other on few cores."""

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if nodeid.startswith(RANKS) else nodeid.partition("::")[0]


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesAndRanks:
    return FilesAndRanks(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The workers of pytest-xdist collect tests on their own and must find the same names."""
    with_address = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if with_address:
        raise pytest.UsageError(f"tests are named by an address in memory: {with_address[:3]}")
