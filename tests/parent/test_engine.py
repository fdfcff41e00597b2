"""Engine processes that cannot be started."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serve.core.errors import EngineError
from serve.parent.engine import EngineProcess

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def another_descriptor() -> int | None:
    try:
        return os.dup(0)
    except OSError:  # There are too many already.
        return None


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Lets this process open only `count` more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        while (descriptor := another_descriptor()) is not None:
            taken.append(descriptor)
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@pytest.mark.parametrize("num_free", [0, 2])  # Two are enough for the connection to the engine.
async def test_engine_process_says_that_it_cannot_start_without_descriptors(num_free: int) -> None:
    with free_descriptors(num_free), pytest.raises(EngineError, match="Too many open files"):
        await EngineProcess.start()
