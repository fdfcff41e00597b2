"""Engine processes that start, that cannot be started, or whose start is cancelled."""

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from serve.core.errors import EngineError
from serve.parent.engine import EngineProcess
from tests.errors import fails

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
async def test_an_engine_process_says_that_it_cannot_start_without_descriptors(
    num_free: int,
) -> None:
    with free_descriptors(num_free), fails(EngineError, "engine", match="Too many open files"):
        await EngineProcess.start()


async def test_an_engine_process_whose_start_is_cancelled_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was cancelled between the start of the process and that of the connection to it."""
    monkeypatch.setattr(EngineProcess, "program", "tests.front.pipeline.standin_engine")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    this = psutil.Process()
    num_open, children = this.num_fds(), set(this.children())
    num_cancelled = 0
    for num_turns in range(100):
        starting = asyncio.create_task(EngineProcess.start())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled():
            await starting.result().stop()
            break
        num_cancelled += 1
        assert set(this.children()) <= children
    assert num_cancelled > 3
    # Closed connections let go of their descriptors in the next turns.
    async with asyncio.timeout(60):
        while this.num_fds() > num_open:
            await asyncio.sleep(0.01)


async def test_an_engine_process_does_not_get_the_signals_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They broke an engine that was still importing MLX, with a traceback, and its rank ended with
    code 7. This process gets them when the engine has started."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    engine, other = await asyncio.gather(EngineProcess.start(), EngineProcess.start())
    os.kill(engine.pid, signal.SIGINT)
    os.kill(other.pid, signal.SIGTERM)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for each in (engine, other):
        await each.link.close()  # It ends when it looks for its order.
        assert await each.wait() == 0
