"""What all tests share."""

import functools
import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import httpcore2
import httpx2
import hypothesis
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

# Programs under test are to find signals as in a terminal, also when tests run under nohup or in
# the background of a script, which ignores the keys of a terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each call of httpx2.get makes a TLS context, which takes 20 ms. Tests that wait for a server make
# thousands of such calls, and none of them uses https, so all can share one context.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# By default httpx2 gives up after 5 seconds, and a busy machine may need longer for any answer.
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx2._config.DEFAULT_TIMEOUT_CONFIG, phase, 60.0)

# An example takes as long as a busy machine needs for it, and so does making one.
hypothesis.settings.register_profile(
    "brigade", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("brigade")

# Until all tests are collected (see pytest_collection_finish): there is no garbage before.
gc.disable()

# The tests that start clusters, in two halves. A half runs on one worker, so that its files can
# share fixtures that keep a cluster running.
CLUSTERS = {
    "clusters": ("tests/cluster/",),
    "more clusters": (
        "tests/agents/test_agents",
        "tests/balancer",
        "tests/faults",
        "tests/hub/test_serve",
        "tests/launch",
        "tests/page/test_page",
        "tests/test_",
    ),
}


def scope_of(nodeid: str) -> str:
    """Returns the group of a test. A group runs on one worker, one test after the other: it is a
    half of the tests that start clusters, or another test file."""
    for name, prefixes in CLUSTERS.items():
        if nodeid.startswith(prefixes):
            return name
    return nodeid.partition("::")[0]


class FilesAndClusters(LoadScopeScheduling):
    """Distributes groups of tests to workers. Tests of clusters mostly wait, so two of them at a
    time keep two cores busy, and more would be too slow for their deadlines."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesAndClusters:
    config.option.loadscopereorder = False  # Keep the order of pytest_collection_modifyitems.
    return FilesAndClusters(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", help="leave out tests of a part that has been removed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files that cannot even be imported without a part: those in folders of its
    name, and those of which all tests use it."""
    name = config.getoption("--without")
    if not name:
        return None
    if collection_path.is_dir():
        return (collection_path.parent.name, collection_path.name) == ("parts", name) or None
    is_test = collection_path.suffix == ".py" and collection_path.is_file()
    marks = r"^pytestmark = (\[[^]]*\]|.*)"
    found = re.search(marks, collection_path.read_text(), re.M) if is_test else None
    return bool(found and re.search(rf'\buses\([^)]*"{name}"', found[1])) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that use a part that has been removed. Puts the longest groups first, so
    that no worker ends long after the others."""
    without = config.getoption("--without")
    items[:] = [item for item in items if without not in _parts_of(item)]
    # The workers of pytest-xdist collect tests on their own and must find the same names.
    with_address = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if with_address:
        raise pytest.UsageError(f"tests are named by an address in memory: {with_address[:3]}")
    long = {scope_of(item.nodeid) for item in items if item.get_closest_marker("long")}
    first = [*CLUSTERS, *sorted(long - CLUSTERS.keys())]
    place = {scope: number for number, scope in enumerate(first)}
    items.sort(key=lambda item: place.get(scope_of(item.nodeid), len(first)))


def _parts_of(item: pytest.Item) -> list[str]:
    return [name for mark in item.iter_markers("uses") for name in mark.args]


def pytest_collection_finish() -> None:
    """Hides from the garbage collector what was imported and collected. It is so much that each
    collection of garbage in a test, or by an engine that loads a model, would take a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def full_disk() -> Iterator[BinaryIO]:
    """A file on which every write fails for lack of room."""
    device = Path("/dev/full")
    if not device.is_char_device():
        pytest.skip("this system has no /dev/full")
    # Not `open`, which makes a plain file where there is no device.
    with os.fdopen(os.open(device, os.O_WRONLY), "wb") as disk:
        yield disk
