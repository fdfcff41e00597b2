"""Limits of bodies, clients that leave, and who may make admin calls."""

import asyncio
from typing import Any

import pytest

from serve.front import guard
from serve.front.replies import StatusError

pytestmark = pytest.mark.anyio


def receiver(*messages: dict[str, Any]) -> guard.Receive:
    """Gives the messages out, then nothing for ever."""
    left = list(messages)

    async def receive() -> guard.Message:
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    return receive


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


LEFT = {"type": "http.disconnect"}


async def status_of(headers: guard.Headers, receive: guard.Receive) -> int:
    with pytest.raises(StatusError) as raised:
        await guard.read_body(headers, receive)
    return raised.value.http_status


async def test_a_body_comes_in_parts() -> None:
    receive = receiver(part(b"ab"), part(b""), part(b"c", more=False))
    assert await guard.read_body([], receive) == b"abc"


async def test_the_largest_body_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_BODY_BYTES", 4)
    headers = [(b"content-length", b"4")]
    assert await guard.read_body(headers, receiver(part(b"1234", more=False))) == b"1234"


async def test_an_announced_size_is_refused_before_reading() -> None:
    async def receive() -> guard.Message:
        raise AssertionError("read")

    for size in (str(guard.MOST_BODY_BYTES + 1), "9" * 5000):
        assert await status_of([(b"content-length", size.encode())], receive) == 413


async def test_a_size_that_was_not_announced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_BODY_BYTES", 4)
    assert await status_of([], receiver(part(b"12"), part(b"345"))) == 413


async def test_a_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.02)
    assert await status_of([], receiver(part(b"12"))) == 408


async def test_a_client_that_leaves_in_its_body() -> None:
    assert await status_of([], receiver(part(b"12"), LEFT)) == guard.CLIENT_LEFT


async def test_work_is_done_while_the_client_stays() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    assert await guard.unless_gone(receiver(), work()) == 5


async def test_what_work_raises_is_raised() -> None:
    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await guard.unless_gone(receiver(), work())


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(StatusError):
        await guard.unless_gone(receiver(part(b"", more=False), LEFT), work())
    assert cancelled


def scope(client: tuple[str, int] | None, *headers: bytes) -> guard.Scope:
    return {"client": client, "headers": [(name, b"127.0.0.1") for name in headers]}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_this_host_may_ask(host: str) -> None:
    guard.check_local(scope((host, 5)))


@pytest.mark.parametrize(
    "given",
    [
        scope(("10.0.0.1", 5)),
        scope(("::ffff:10.0.0.1", 5)),
        scope(("fe80::1%eth0", 5)),
        scope(("localhost.example", 5)),
        scope(None),
        scope(("127.0.0.1", 5), b"x-forwarded-for"),
        scope(("127.0.0.1", 5), b"forwarded"),
    ],
)
def test_others_may_not(given: guard.Scope) -> None:
    with pytest.raises(StatusError) as raised:
        guard.check_local(given)
    assert raised.value.http_status == 403
