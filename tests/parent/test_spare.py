"""The spare engine process of a rank's parent, with a stand-in that has no MLX."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from serve.parent import engine, spare
from serve.parent.engine import EngineProcess
from serve.parent.spare import Spare

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(EngineProcess, "program", "tests.front.pipeline.standin_engine")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(spare, "_QUIET_SECONDS", 0.0)
    yield
    left = processes()
    for process in left:
        process.kill()
    assert not left


def processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # It ends just now.
            if EngineProcess.program in child.cmdline():
                found.append(child)
    return found


@asynccontextmanager
async def prepared() -> AsyncIterator[tuple[Spare, psutil.Process]]:
    """A spare, and its process."""
    own = Spare(is_on=True)
    own.prepare()
    async with asyncio.timeout(60):
        while not processes():
            await asyncio.sleep(0.01)
    try:
        yield own, processes()[0]
    finally:
        await own.close()


async def until_gone(own: Spare) -> None:
    """Waits until the spare's process has ended and asyncio knows it."""
    async with asyncio.timeout(60):
        while own._is_there:
            await asyncio.sleep(0.01)


async def num_open_files(own: Spare) -> int:
    """The number of this process's open files, once the spare has started."""
    assert own._starting
    await own._starting
    return psutil.Process().num_fds()


async def test_a_spare_engine_can_be_taken_only_once() -> None:
    async with prepared() as (own, process):
        own.prepare()
        first = await own.take()
        second = await own.take()
        assert first.pid == process.pid != second.pid
        await first.stop()
        await second.stop()


async def test_a_spare_engine_stays_if_the_task_that_takes_it_is_cancelled() -> None:
    own = Spare(is_on=True)
    own.prepare()
    while not own._is_there:
        await asyncio.sleep(0)
    taking = asyncio.create_task(own.take())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait({taking})
    assert taking.cancelled()
    assert own._is_there
    await own.close()
    assert not processes()


async def test_a_spare_engine_is_given_to_only_one_of_two_tasks_that_take_it() -> None:
    async with prepared() as (own, process):
        first, second = await asyncio.gather(own.take(), own.take())
        assert process.pid in (first.pid, second.pid)
        assert first.pid != second.pid
        await first.stop()
        await second.stop()


async def test_a_spare_engine_that_was_killed_is_not_taken() -> None:
    async with prepared() as (own, process):
        process.kill()
        await until_gone(own)
        taken = await own.take()
        assert taken.pid != process.pid
        assert taken.is_alive
        await taken.stop()


async def test_a_spare_engine_that_was_killed_leaves_no_connection_when_another_engine_starts() -> (
    None
):
    async with prepared() as (own, process):
        num_open = await num_open_files(own)
        for _ in range(3):
            process.kill()
            await until_gone(own)
            async with asyncio.timeout(60):
                own.prepare()
                while not own._is_there:
                    await asyncio.sleep(0.01)
            assert await num_open_files(own) <= num_open
            (process,) = processes()


async def test_a_spare_engine_that_cannot_start_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    own = Spare(is_on=True)
    own.prepare()
    async with asyncio.timeout(60):
        while "event=no_spare_engine" not in caplog.text:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert caplog.text.count("event=no_spare_engine") == 1
    await own.close()


async def test_no_spare_engine_starts_if_it_is_turned_off() -> None:
    own = Spare(is_on=False)
    own.prepare()
    await asyncio.sleep(0.1)
    assert not processes()
    await own.close()


async def test_an_engine_process_that_has_stopped_gets_no_time_to_leave_its_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that reports gets the whole time."""
    monkeypatch.setattr(engine, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(engine, "_FIRST_WORD_SECONDS", 0.2)
    monkeypatch.setattr(engine, "_LEAVE_SECONDS", 60.0)
    process = await EngineProcess.start()
    psutil.Process(process.pid).suspend()
    try:
        assert await asyncio.wait_for(process.leave(1), 60) is None
    finally:
        await process.stop()
