"""The star of parents over real sockets: who may join, and what rank 0 hears."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from launcher.process import free_ports
from serve.core import wire
from serve.core.config import Address
from serve.core.errors import AddressError, ClusterError, DisagreementError
from serve.parent.control import Hello, Hub, join, raise_if_error

HELLO = Hello(rank=0, num_ranks=3, secret="sésame", facts={"mlx": "1"}, pid=10)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


@asynccontextmanager
async def hub() -> AsyncIterator[tuple[Hub, Address, list[tuple[int, dict[str, Any]]]]]:
    heard: list[tuple[int, dict[str, Any]]] = []
    address = Address("127.0.0.1", free_ports(1)[0])
    centre = Hub(HELLO, lambda rank, message: heard.append((rank, message)))
    await centre.listen(address)
    try:
        yield centre, address, heard
    finally:
        await centre.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


async def test_all_ranks_join_in_any_order() -> None:
    async with hub() as (centre, address, heard):
        waiting = asyncio.create_task(centre.wait_for_all(5))
        links = [await join(address, replace(HELLO, rank=rank, pid=rank), 5) for rank in (2, 1)]
        await waiting
        assert centre.missing() == []
        assert centre.pid(2) == 2
        centre.send(1, {"type": "start"})
        assert await links[1].receive_json() == {"type": "start"}
        links[0].send_json({"type": "status", "state": "loading"})
        await until(lambda: bool(heard))
        assert heard == [(2, {"type": "status", "state": "loading"})]
        for link in links:
            await link.close()


async def test_ranks_that_differ_are_told_apart() -> None:
    async with hub() as (centre, address, _):
        others = {1: {"mlx": "1"}, 2: {"mlx": "2", "config.json": "x"}}
        hellos = [replace(HELLO, rank=rank, facts=own) for rank, own in others.items()]
        links = [await join(address, hello, 5) for hello in hellos]
        with pytest.raises(DisagreementError, match="rank 2 has 2") as caught:
            await centre.wait_for_all(5)
        assert caught.value.rows == {
            "mlx": {0: "1", 1: "1", 2: "2"},
            "config.json": {0: "-", 1: "-", 2: "x"},
        }
        for link in links:
            await link.close()


async def test_a_missing_rank_is_named() -> None:
    async with hub() as (centre, address, _):
        link = await join(address, replace(HELLO, rank=1), 5)
        with pytest.raises(ClusterError, match=r"Ranks \[2\] did not join within 0\.3 s"):
            await centre.wait_for_all(0.3)
        await link.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"secret": "other"}, "another launch"),
        ({"secret": ""}, "another launch"),
        ({"num_ranks": 4}, "rank 1 of 4, not of 3"),
        ({"rank": 3}, "rank 3 of 3"),
        ({"rank": 0}, "rank 0 of 3"),
        ({"facts": None}, "has no facts"),
        ({"rank": True}, "has no rank"),
        ({"pid": None}, "has no pid"),
    ],
)
async def test_a_wrong_rank_is_told_why(change: dict[str, Any], reason: str) -> None:
    async with hub() as (centre, address, _):
        link = await join(address, replace(HELLO, **{"rank": 1, **change}), 5)
        message = await link.receive_json()
        assert message is not None
        with pytest.raises(ClusterError, match=reason):
            raise_if_error(message)
        assert centre.missing() == [1, 2]
        await link.close()


async def test_a_rank_cannot_come_twice() -> None:
    async with hub() as (centre, address, _):
        first = await join(address, replace(HELLO, rank=1), 5)
        await until(lambda: centre.missing() == [2])
        second = await join(address, replace(HELLO, rank=1), 5)
        message = await second.receive_json()
        assert message is not None
        assert "there is a rank 1 already" in message["reason"]
        await first.close()
        await second.close()


async def broken_frame(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET / HTTP/1.1\r\n\r\n")


async def not_a_hello(writer: asyncio.StreamWriter) -> None:
    writer.write(wire.json_frame({"type": "hello", "rank": [1], "secret": None}))


async def nothing(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("say", [broken_frame, not_a_hello, nothing])
async def test_a_stranger_disturbs_nobody(
    say: Callable[[asyncio.StreamWriter], Awaitable[None]],
) -> None:
    async with hub() as (centre, address, heard):
        _, writer = await asyncio.open_connection(address.host, address.port)
        await say(writer)
        await writer.drain() if not writer.is_closing() else None
        links = [await join(address, replace(HELLO, rank=rank), 5) for rank in (1, 2)]
        await centre.wait_for_all(5)
        assert heard == []
        writer.close()
        for link in links:
            await link.close()


@pytest.mark.parametrize("last_words", [b"", b"nonsense", wire.frame(wire.Kind.JSON, b"[]")])
async def test_a_rank_that_goes_is_an_error(last_words: bytes) -> None:
    async with hub() as (centre, address, heard):
        link = await join(address, replace(HELLO, rank=1), 5)
        await until(lambda: centre.missing() == [2])
        link.send(last_words)
        await link.close()
        await until(lambda: bool(heard))
        rank, message = heard[0]
        assert rank == 1
        assert message["type"] == "error"
        assert message["exit_code"] == ClusterError.exit_code


async def test_closing_says_stop() -> None:
    async with hub() as (centre, address, heard):
        link = await join(address, replace(HELLO, rank=1), 5)
        await until(lambda: centre.missing() == [2])
        await centre.close()
        assert await link.receive_json() == {"type": "stop"}
        assert await link.receive_json() is None
        assert heard == []
        await link.close()


async def test_a_port_in_use_is_one_clear_error() -> None:
    async with hub() as (_, address, _heard):
        with pytest.raises(AddressError, match="is another cluster running there"):
            await Hub(HELLO, lambda *_: None).listen(address)


async def test_nobody_there() -> None:
    address = Address("127.0.0.1", free_ports(1)[0])
    with pytest.raises(ClusterError, match="did rank 0 start"):
        await join(address, replace(HELLO, rank=1), 0.2)
