"""The star of parents over real sockets: who may join, and what rank 0 hears."""

import asyncio
import contextlib
import itertools
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from serve.core.config import Address
from serve.core.errors import AddressError, ClusterError
from serve.core.messages import (
    Challenge,
    Fault,
    FromRank,
    Hello,
    Ping,
    Pong,
    Refused,
    Renew,
    Report,
    Status,
    Stop,
    ToRank,
    Welcome,
)
from serve.core.types import StageState
from serve.core.wire import frame
from serve.parent import control, pings
from serve.parent.control import ControlServer, Gone, Heard, Identity, Joined, join
from serve.parent.link import Link
from tests.errors import fails
from tests.ports import free_ports

RENEW = Renew(1, dump=False)
MINE = Identity(rank=0, num_ranks=3, secret="sésame", facts={"mlx": "1"}, pid=10)
JOINED = Joined(MINE.pid, MINE.facts)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit is reached because the machine is busy. Tests of limits set their own."""
    monkeypatch.setattr(control, "_HELLO_SECONDS", 60.0)
    monkeypatch.setattr(control, "_PONG_SECONDS", 60.0)
    monkeypatch.setattr(pings, "_MAX_SECONDS", 60.0)


@asynccontextmanager
async def control_server(
    mine: Identity = MINE, port: int = 0
) -> AsyncIterator[tuple[ControlServer, Address, list[tuple[int, dict[str, Any]]]]]:
    heard: list[tuple[int, Heard]] = []
    address = Address("127.0.0.1", port or free_ports(1)[0])
    centre = ControlServer(mine, lambda rank, message: heard.append((rank, message)))
    await centre.listen(address)
    try:
        yield centre, address, heard
    finally:
        await centre.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_ranks_can_join_in_any_order() -> None:
    async with control_server() as (centre, address, heard):
        links = [await join(address, replace(MINE, rank=rank, pid=rank), 5) for rank in (2, 1)]
        assert centre.joined == {1, 2}
        centre.send(1, RENEW)
        assert await links[1].receive() == RENEW
        links[0].send(Report(3, Status(StageState.LOADING)))
        await until(lambda: len(heard) == 3)
        joined = [(rank, Joined(rank, MINE.facts)) for rank in (2, 1)]
        assert heard == [*joined, (2, Report(3, Status(StageState.LOADING)))]
        for link in links:
            await link.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"secret": "other"}, "another launch"),
        ({"secret": ""}, "another launch"),
        ({"num_ranks": 4}, "rank 1 of 4, not of 3"),
        ({"rank": 3}, "rank 3 of 3"),
        ({"rank": 0}, "rank 0 of 3"),
        ({"facts": None}, "cannot be read .*facts|cannot be read .*object"),
        ({"rank": True}, "cannot be read .*int"),
        ({"pid": None}, "cannot be read .*int"),
    ],
)
async def test_a_rank_that_is_refused_gets_the_reason(change: dict[str, Any], reason: str) -> None:
    async with control_server() as (centre, address, _):
        with fails(ClusterError, "rank_refused", match=reason):
            await join(address, replace(MINE, **{"rank": 1, **change}), 5)
        assert centre.joined == set()


async def greeting_of(address: Address) -> Hello:
    """What rank 1 says when it joins."""
    spoken: list[FromRank | None] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link: Link[FromRank] = Link(reader, writer, FromRank)
        link.send(Challenge("n"))
        spoken.append(await link.receive())
        await link.close()

    server = await asyncio.start_server(listen, address.host, address.port)
    async with server:
        with fails(ClusterError, "other_launch"):
            await join(address, replace(MINE, rank=1), 5)
    (hello,) = spoken
    assert isinstance(hello, Hello)
    return hello


async def test_the_secret_is_never_sent_and_a_greeting_works_only_once() -> None:
    hello = await greeting_of(Address("127.0.0.1", free_ports(1)[0]))
    assert MINE.secret not in str(hello)
    assert MINE.secret not in repr(MINE)
    async with control_server() as (centre, address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        link: Link[ToRank] = Link(reader, writer, ToRank)
        assert isinstance(await link.receive(), Challenge)
        link.send(hello)
        answer = await link.receive()
        assert isinstance(answer, Refused)
        assert "another launch" in answer.reason
        assert centre.joined == set()
        await link.close()


@pytest.mark.parametrize("answer", [Welcome(""), Welcome("00"), Stop()])
async def test_a_rank_does_not_believe_a_false_rank_0(answer: ToRank) -> None:
    address = Address("127.0.0.1", free_ports(1)[0])

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link: Link[FromRank] = Link(reader, writer, FromRank)
        link.send(Challenge("n"))
        await link.receive()
        link.send(answer)
        assert await link.receive() is None, "it believed it"
        await link.close()

    async with await asyncio.start_server(listen, address.host, address.port):
        with fails(ClusterError, "other_launch"):
            await join(address, replace(MINE, rank=1), 5)


async def test_a_rank_that_has_left_can_join_again() -> None:
    async with control_server() as (centre, address, heard):
        link = await join(address, replace(MINE, rank=1), 5)
        await link.close()
        await until(lambda: len(heard) == 2)
        centre.send(1, RENEW)  # into the void
        link = await join(address, replace(MINE, rank=1, pid=77), 5)
        await until(lambda: centre.joined == {1})
        assert heard[-1] == (1, Joined(77, MINE.facts))
        await link.close()


async def test_a_rank_that_is_connected_cannot_join_again() -> None:
    async def live(link: Link[ToRank]) -> None:
        while message := await link.receive():
            assert message == Ping()
            link.send(Pong())

    async with control_server() as (centre, address, heard):
        first = await join(address, replace(MINE, rank=1), 5)
        living = asyncio.create_task(live(first))
        again = [join(address, replace(MINE, rank=1), 5) for _ in range(3)]
        for error in await asyncio.gather(*again, return_exceptions=True):
            assert isinstance(error, ClusterError)
            assert "there is a rank 1 already" in str(error)
        assert heard == [(1, JOINED)]
        await first.close()
        await living


async def test_a_rank_that_joins_again_replaces_its_silent_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that lost its power says no goodbye."""
    monkeypatch.setattr(control, "_PONG_SECONDS", 0.1)
    async with control_server() as (centre, address, heard):
        silent = await join(address, replace(MINE, rank=1, pid=1), 5)
        fresh = await join(address, replace(MINE, rank=1, pid=2), 5)
        await until(lambda: len(heard) == 3)
        gone = Gone("Rank 1 on 127.0.0.1 is silent.")
        first, second = (Joined(pid, MINE.facts) for pid in (1, 2))
        assert heard == [(1, first), (1, gone), (1, second)]
        centre.send(1, RENEW)
        assert await fresh.receive() == RENEW
        await silent.close()
        await fresh.close()


async def test_callers_without_a_secret_cannot_replace_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "_PONG_SECONDS", 0.1)
    strangers = replace(MINE, secret="")
    async with control_server(strangers) as (_, address, _heard):
        silent = await join(address, replace(strangers, rank=1), 5)
        with fails(ClusterError, "rank_refused", match="rank 1 already"):
            await join(address, replace(strangers, rank=1), 5)
        await silent.close()


async def broken_frame(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET / HTTP/1.1\r\n\r\n")


async def not_a_hello(writer: asyncio.StreamWriter) -> None:
    writer.write(frame(Pong()))


async def nothing(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("say", [broken_frame, not_a_hello, nothing])
async def test_connections_of_strangers_disturb_no_rank(
    say: Callable[[asyncio.StreamWriter], Awaitable[None]],
) -> None:
    async with control_server() as (centre, address, heard):
        _, writer = await asyncio.open_connection(address.host, address.port)
        await say(writer)
        await writer.drain() if not writer.is_closing() else None
        links = [await join(address, replace(MINE, rank=rank), 5) for rank in (1, 2)]
        assert centre.joined == {1, 2}
        assert [message for _, message in heard] == [JOINED, JOINED]
        writer.close()
        for link in links:
            await link.close()


async def test_a_greeting_that_is_too_large_is_refused_before_it_is_received() -> None:
    async with control_server() as (_, address, _heard):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        link: Link[ToRank] = Link(reader, writer, ToRank)
        assert isinstance(await link.receive(), Challenge)
        header = frame(Pong())[:-1]
        writer.write(header[:3] + (control.MAX_HELLO_BYTES + 1).to_bytes(4, sys.byteorder))
        answer = await link.receive()
        assert isinstance(answer, Refused)
        assert str(control.MAX_HELLO_BYTES) in answer.reason
        await link.close()


async def test_a_rank_that_has_joined_may_send_large_messages() -> None:
    async with control_server() as (_, address, heard):
        link = await join(address, replace(MINE, rank=1), 5)
        report = Report(0, Fault(1, "reason " * control.MAX_HELLO_BYTES))
        link.send(report)
        await until(lambda: len(heard) == 2)
        assert heard[1] == (1, report)
        await link.close()


async def test_many_strangers_use_few_connections_and_keep_no_rank_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "MAX_STRANGERS", 3)
    async with control_server() as (centre, address, _):
        strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(4)]
        for reader, _writer in strangers[:3]:
            assert await reader.read(1)  # challenged
        reader, _writer = strangers[3]
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read(1) == b""
        for _reader, writer in strangers:
            writer.close()
        link = await join(address, replace(MINE, rank=1), 5)
        await until(lambda: centre.joined == {1})
        await link.close()


@pytest.mark.parametrize("last_words", [b"", b"nonsense", frame(Stop())])
async def test_a_rank_that_disconnects_is_reported(last_words: bytes) -> None:
    async with control_server() as (centre, address, heard):
        link = await join(address, replace(MINE, rank=1), 5)
        await until(lambda: centre.joined == {1})
        link._writer.write(last_words)
        await link.close()
        await until(lambda: len(heard) == 2)
        rank, message = heard[1]
        assert rank == 1
        assert isinstance(message, Gone)
        assert message.reason


async def test_closing_the_server_sends_a_stop_message_to_the_ranks() -> None:
    async with control_server() as (centre, address, heard):
        link = await join(address, replace(MINE, rank=1), 5)
        await until(lambda: centre.joined == {1})
        await centre.close()
        assert await link.receive() == Stop()
        assert await link.receive() is None
        assert heard == [(1, JOINED)]
        await link.close()


async def test_a_port_in_use_is_reported_in_one_clear_error() -> None:
    async with control_server() as (_, address, _heard):
        with fails(AddressError, "address"):
            await ControlServer(MINE, lambda *_: None).listen(address)


async def test_joining_fails_if_nobody_listens() -> None:
    address = Address("127.0.0.1", free_ports(1)[0])
    with fails(ClusterError, "unreachable"):
        await join(address, replace(MINE, rank=1), 0.2)


async def test_joining_is_tried_again_if_a_forwarder_closes_the_connection_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ssh -L does, and the forwarding of a container's ports."""
    num_calls = 0
    # Each call takes a second.
    clock = SimpleNamespace(monotonic=lambda: float(num_calls))
    monkeypatch.setattr(control, "time", clock)

    async def forward(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_calls
        num_calls += 1
        writer.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        with fails(ClusterError, "unreachable", match="closed at once"):
            await join(address, replace(MINE, rank=1), 3)
    assert num_calls == 4


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """As of a rank 0 that is stopped: the system takes connections, and nobody answers."""
    monkeypatch.setattr(control, "_HELLO_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as listening:
        yield listening


async def test_joining_is_tried_again_if_rank_0_is_suspended(silent: socket.socket) -> None:
    """It was taken for another program, and the rank ended with the whole launch."""
    address = Address("127.0.0.1", silent.getsockname()[1])
    joining = asyncio.create_task(join(address, replace(MINE, rank=1), 1000))
    await asyncio.wait({joining}, timeout=0.6)
    silent.close()
    async with control_server(port=address.port) as (centre, _, _heard):
        link = await joining
        await until(lambda: centre.joined == {1})
        await link.close()


async def test_joining_fails_if_nobody_answers(silent: socket.socket) -> None:
    address = Address("127.0.0.1", silent.getsockname()[1])
    with fails(ClusterError, "unreachable", match=r"0.3 s \(nobody answers\)"):
        await join(address, replace(MINE, rank=1), 0.3)


@pytest.fixture
def hasty_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds pass whenever the clock of rank 1 is read."""
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


@pytest.mark.usefixtures("hasty_clock")
async def test_joining_waits_for_a_rank_0_that_starts_late() -> None:
    """After the long start of rank 0 on a busy machine, one more delay ended the launch."""
    port = free_ports(1)[0]
    joining = asyncio.create_task(join(Address("127.0.0.1", port), replace(MINE, rank=1), 35, 1e6))
    await asyncio.wait({joining}, timeout=1.0)
    with socket.create_server(("127.0.0.1", port)) as busy:
        connection, _ = await asyncio.to_thread(busy.accept)
        connection.close()
    async with control_server(port=port) as (centre, _, _heard):
        link = await joining
        await until(lambda: centre.joined == {1})
        await link.close()


@pytest.mark.usefixtures("hasty_clock")
async def test_joining_is_given_up_if_rank_0_never_listens() -> None:
    address = Address("127.0.0.1", free_ports(1)[0])
    with fails(ClusterError, "unreachable", match="50 s"):
        await join(address, replace(MINE, rank=1), 5, 50)


async def test_joining_is_tried_again_as_soon_as_a_host_has_power_again(
    silent: socket.socket,
) -> None:
    """A single attempt that lasted minutes would notice its return only after minutes."""
    address = Address("127.0.0.1", silent.getsockname()[1])
    silent.listen(0)
    # The system accepts only one or two: to the others it is as if nobody were there.
    lost = [socket.socket() for _ in range(3)]
    for each in lost:
        each.setblocking(False)
        each.connect_ex(("127.0.0.1", address.port))
    async with asyncio.timeout(60):
        with fails(ClusterError, "unreachable", match="nobody answers"):
            await join(address, replace(MINE, rank=1), 0.3)
    for each in lost:
        each.close()


async def test_the_measured_speed_of_a_link_depends_on_pongs_and_not_on_reports() -> None:
    async with control_server() as (centre, address, _):
        link = await join(address, replace(MINE, rank=1, pid=1), 5)

        async def answer() -> None:
            while isinstance(await link.receive(), Ping):
                link.send(Report(0, Status(StageState.STARTING)))
                await asyncio.sleep(0.02)
                link.send(Pong())

        answering = asyncio.create_task(answer())
        measured = await centre.measure(1)
        assert measured
        assert measured.round_trip_seconds >= 0.01
        assert measured.bytes_per_second > 0
        await link.close()
        await answering


async def test_measuring_a_link_to_a_silent_rank_gives_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pings, "_MAX_SECONDS", 0.05)
    async with control_server() as (centre, address, _):
        link = await join(address, replace(MINE, rank=1, pid=1), 5)
        assert await centre.measure(1) is None
        await link.close()


@pytest.mark.parametrize("is_back", [False, True])
async def test_measuring_a_link_to_a_lost_rank_ends_at_once(is_back: bool) -> None:
    """Also if it is back by then: it would wait for answers of the old connection."""
    async with control_server() as (centre, address, heard):
        link = await join(address, replace(MINE, rank=1, pid=1), 5)
        measuring = asyncio.create_task(centre.measure(1))
        assert await link.receive() == Ping()
        centre.disconnect(1)
        if is_back:
            other = await join(address, replace(MINE, rank=1, pid=1), 5)
        with pytest.raises(ClusterError):
            await asyncio.wait_for(measuring, 60)
        if is_back:
            await other.close()
        await until(lambda: not centre.joined)
        with pytest.raises(ClusterError):
            await centre.measure(1)
        await link.close()
