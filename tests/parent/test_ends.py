"""Engines end by themselves, with code 0, whatever they are doing when their parent stops them."""

import asyncio
import logging
import signal
import time

import msgspec
import pytest

from serve.core.messages import Left, Order, Result, Status
from serve.core.types import Row, StageState, Step
from serve.parent import engine as engine_module
from serve.parent.engine import EngineProcess
from tests import models
from tests.rank.loops import ORDER

pytestmark = pytest.mark.anyio

KINDS = ["importing", "loading", "idle", "computing", "out of its ring"]
PROMPT = (5,) * 3000  # A step takes longer than noticing that the parent ends.


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Order:
    folder = tmp_path_factory.mktemp("ends")
    model = models.save(folder / "model", "llama")
    return msgspec.structs.replace(ORDER, model=str(model), copies=str(folder / "copies"))


async def until_state(engine: EngineProcess, state: StageState) -> None:
    while message := await engine.receive():
        if isinstance(message, Status) and message.state is state:
            return
    raise AssertionError("the engine has ended")


async def until_step(engine: EngineProcess) -> None:
    while message := await engine.receive():
        assert not isinstance(message, Result)
        if isinstance(message, Status) and message.activity and message.activity.step:
            return


async def reach(engine: EngineProcess, doing: str, order: Order) -> None:
    if doing == "importing":
        return
    engine.link.send(order)
    if doing == "loading":
        return
    await until_state(engine, StageState.READY)
    if doing == "computing":
        engine.link.send(Step(1, 9, (Row(1, 0, len(PROMPT)),), PROMPT, sample=False))
        await until_step(engine)
    elif doing == "out of its ring":
        reading = asyncio.create_task(until_left(engine))
        assert await engine.leave(1)
        await reading


async def until_left(engine: EngineProcess) -> None:
    while not isinstance(await engine.receive(), Left):
        continue


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the import of MLX alone may take longer than engines usually get, and
    reports may be late."""
    names = "_END_SECONDS", "_UNUSED_END_SECONDS", "_LEAVE_SECONDS", "_SILENT_SECONDS"
    for name in names:
        monkeypatch.setattr(engine_module, name, 100.0)


async def exit_code_at_end(doing: str, order: Order) -> int:
    engine = await EngineProcess.start()
    try:
        await reach(engine, doing, order)
    finally:
        await engine.stop()
    return await engine.wait()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("doing", KINDS)
async def test_an_engine_that_is_stopped_ends_with_code_0(
    doing: str, order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    assert await exit_code_at_end(doing, order) == 0
    assert "engine_killed" not in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("doing", KINDS)
async def test_none_of_a_hundred_engines_is_ended_by_a_signal(doing: str, order: Order) -> None:
    for _ in range(25):
        ends = [exit_code_at_end(doing, order) for _ in range(4)]
        assert await asyncio.gather(*ends) == [0, 0, 0, 0]


@pytest.mark.parametrize("seconds", [0.1, 100.0])
async def test_an_engine_that_cannot_end_is_killed_if_it_is_late_or_silent(
    seconds: float,
    order: Order,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system has stopped it, so it reports nothing either."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(engine_module, "_END_SECONDS", seconds)
    engine = await EngineProcess.start()
    await reach(engine, "idle", order)
    engine._process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    await engine.stop()
    assert await engine.wait() == -signal.SIGKILL
    assert time.monotonic() - started < 60, "its parent waited although it was silent"
    assert "event=engine_killed" in caplog.text
    assert "memory that it had wired" in caplog.text
