"""The parent of a rank above 0, with engines and a connection to rank 0 that tests play."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serve.core.config import Address, Cluster, ServeConfig
from serve.core.errors import ClusterError
from serve.core.messages import Fault, FromEngine, Left, Renew, Report, Status, Stop, ToRank
from serve.core.types import StageState
from serve.parent import control as control_module
from serve.parent import own_engine as own_engine_module
from serve.parent.control import ControlServer, Identity
from serve.parent.engine import EngineProcess
from serve.parent.link import Link
from serve.parent.member import _Member, run_member
from serve.parent.own_engine import EnginePhase
from tests.configs import serve_config
from tests.errors import fails
from tests.ports import free_ports

pytestmark = pytest.mark.anyio

KEEP = Renew(1, dump=False, keep=True)
FAULT = Fault(7, "It has a bug.")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parents give no sign of life while an engine leaves its ring. One test sets another time."""
    monkeypatch.setattr(own_engine_module, "_SIGN_SECONDS", 60.0)


class PlayedEngine:
    """An engine process. It leaves its ring when a test says so. One that ends is alive until it is
    stopped, as a process is for some milliseconds."""

    is_alive = True

    def __init__(self) -> None:
        self.messages: asyncio.Queue[FromEngine | None] = asyncio.Queue()
        self.may_leave = asyncio.Event()
        self.is_ending = False
        self.num_dumps = 0

    def end(self, last: Fault | None) -> None:
        """Ends the engine with a report of the reason, or without one."""
        self.is_ending = True
        self.messages.put_nowait(last)

    async def receive(self) -> FromEngine | None:
        return await self.messages.get()

    async def leave(self, life: int) -> Left | None:
        if self.is_ending:
            return None
        await self.may_leave.wait()
        left = Left(life, {5: 9})
        self.messages.put_nowait(left)
        await asyncio.sleep(0)
        return left

    async def dump(self) -> None:
        self.num_dumps += 1

    async def stop(self) -> None:
        self.is_alive = False

    async def wait(self) -> int:
        return -9


class PlayedSpare:
    def __init__(self, engines: list[PlayedEngine]) -> None:
        self.engines = engines

    async def take(self) -> EngineProcess:
        self.engines.append(PlayedEngine())
        return cast(EngineProcess, self.engines[-1])

    async def close(self) -> None: ...


class PlayedControl:
    """A connection to rank 0."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[ToRank | None] = asyncio.Queue()
        self.sent: list[Any] = []
        self.is_closed = False

    async def receive(self) -> ToRank | None:
        return await self.messages.get()

    def send(self, message: Any) -> None:
        if not self.is_closed:
            self.sent.append(message)

    async def close(self) -> None:
        self.is_closed = True


class Played:
    """A member, the engines that it has had, and the latest connection to rank 0."""

    def __init__(self) -> None:
        config = ServeConfig(model=Path("."))
        self.member = _Member(config, Cluster(1, 2, ("h",) * 2), "")
        self.engines: list[PlayedEngine] = []
        self.member._engine.spare = cast(Any, PlayedSpare(self.engines))
        self.control = PlayedControl()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Has the member serve rank 0 until Stop."""
        self.control = PlayedControl()
        control = cast(Link[ToRank], self.control)
        serving = asyncio.create_task(self.member.serve(control))
        await self.until(lambda: bool(self.engines))
        try:
            yield
        finally:
            self.control.messages.put_nowait(Stop())
            assert await asyncio.wait_for(serving, 60)

    async def until(self, is_so: Any) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0)

    async def renew(self, message: Renew) -> None:
        """Has the member renew its engine, and waits until it has said so."""
        num_sent = len(self.control.sent)
        self.control.messages.put_nowait(message)
        await self.until(lambda: self.said(num_sent) & {"Left", "starting"})

    def said(self, start: int = 0) -> set[str]:
        """Returns the kinds of the reports, and the states of statuses, from one on."""
        words: set[str] = set()
        for message in self.control.sent[start:]:
            assert isinstance(message, Report)
            report = message.message
            words.add(report.state if isinstance(report, Status) else type(report).__name__)
        return words

    def give_order(self) -> None:
        """As if the engine had an order."""
        self.member._engine.phase = EnginePhase.BUSY

    async def leave_ring(self) -> None:
        self.give_order()
        self.engines[0].may_leave.set()
        await self.renew(KEEP)
        assert self.said() == {"Left"}


async def test_a_new_engine_is_not_asked_for_its_stacks() -> None:
    """The signal ended it if it had not imported MLX yet."""
    played = Played()
    async with played.connected():
        await played.renew(Renew(1, dump=True, keep=False))
        (engine,) = played.engines
        assert engine.num_dumps == 0
        played.give_order()
        await played.renew(Renew(2, dump=True, keep=False))
        assert engine.num_dumps == 1
        assert len(played.engines) == 2


async def test_a_new_engine_that_has_reported_a_fault_is_replaced() -> None:
    """Its process may live for some more milliseconds, and nobody reported its end."""
    played = Played()
    async with played.connected():
        played.engines[0].end(FAULT)
        await played.until(lambda: "Fault" in played.said())
        await played.renew(KEEP)
        assert len(played.engines) == 2


@pytest.mark.parametrize("last", [FAULT, None])
async def test_an_engine_that_ends_after_leaving_its_ring_is_replaced(
    last: Fault | None,
) -> None:
    played = Played()
    async with played.connected():
        await played.leave_ring()
        played.engines[0].end(last)
        await played.until(lambda: "Fault" in played.said())
        await played.renew(KEEP)
        assert len(played.engines) == 2


async def test_a_new_connection_is_told_that_the_engine_has_left_its_ring() -> None:
    played = Played()
    async with played.connected():
        await played.leave_ring()
    async with played.connected():
        await played.renew(Renew(4, dump=False, keep=True))
        assert played.control.sent == [Report(4, Left(4, {5: 9}))]
    assert len(played.engines) == 1


async def test_reports_of_a_computing_engine_stop_once_it_has_left_its_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 would wait for an engine that is leaving."""
    monkeypatch.setattr(own_engine_module, "_SIGN_SECONDS", 0.001)
    played = Played()
    async with played.connected():
        played.give_order()
        played.control.messages.put_nowait(KEEP)
        await played.until(lambda: len(played.control.sent) > 3)
        assert set(map(repr, played.control.sent)) == {repr(Report(1, Status(StageState.LEAVING)))}
        played.engines[0].may_leave.set()
        await played.until(lambda: "Left" in played.said())
        await asyncio.sleep(0.05)
        assert played.control.sent[-1] == Report(1, Left(1, {5: 9}))


@pytest.mark.parametrize("leash", [None, 0])
async def test_a_launched_rank_waits_for_rank_0_as_long_as_a_start_may_take(
    monkeypatch: pytest.MonkeyPatch, leash: int | None
) -> None:
    """With a short --join-timeout, a busy machine ended the launch at its first start. A rank that
    is started by hand may be alone."""
    seconds = itertools.count(0.0, 10.0)
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(control_module, "time", clock)
    monkeypatch.setattr(own_engine_module, "Spare", lambda _: PlayedSpare([]))
    address = Address("127.0.0.1", free_ports(1)[0])
    cluster = Cluster(1, 2, ("h",) * 2, (address,), "secret", leash)
    config = serve_config(join_timeout=30.0, load_timeout=1e6)
    running = asyncio.create_task(run_member(config, cluster, {}))
    if leash is None:
        with fails(ClusterError, "unreachable", match="30 s"):
            await running
        return
    await asyncio.wait({running}, timeout=1.0)
    rank_0 = ControlServer(Identity(0, 2, "secret", {}, 1), lambda *_: None)
    await rank_0.listen(address)
    async with asyncio.timeout(60):
        while not rank_0.joined:
            await asyncio.sleep(0.01)
    await rank_0.close()
    await running
