"""Limits of bodies, and clients that leave."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from serve.core.constants import Constants
from serve.front.http import middleware
from serve.front.http.access import CLIENT, Access, ErrorFormat, Policy
from serve.front.http.record import AccessRecord
from serve.front.http.replies import StatusError

pytestmark = pytest.mark.anyio


def receiver(*messages: dict[str, Any]) -> middleware.Receive:
    """Returns the messages, and then waits forever."""
    left = list(messages)

    async def receive() -> middleware.Message:
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    return receive


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


LEFT = {"type": "http.disconnect"}


JSON = (b"content-type", b"application/json")


def scope(
    *headers: tuple[bytes, bytes], policy: Policy = CLIENT, **limits: Any
) -> middleware.Scope:
    return {
        "headers": [JSON, *headers],
        middleware.LIMITS: Constants(**limits),
        middleware.PACE: asyncio.Lock(),
        middleware.POLICY: policy,
        middleware.RECORD: AccessRecord("id", "POST"),
    }


async def status_of(scope: middleware.Scope, receive: middleware.Receive) -> int:
    with pytest.raises(StatusError) as raised:
        await middleware.read_body(scope, receive)
    return raised.value.http_status


async def unread() -> middleware.Message:
    raise AssertionError("read")


async def test_a_body_sent_in_parts_is_joined() -> None:
    receive = receiver(part(b"ab"), part(b""), part(b"c", more=False))
    assert await middleware.read_body(scope(), receive) == b"abc"


async def test_a_body_of_the_largest_allowed_size_is_read() -> None:
    body = b"1" * 1024
    given = scope((b"content-length", b"1024"), max_body_bytes=1024)
    assert await middleware.read_body(given, receiver(part(body, more=False))) == body


async def test_a_content_length_above_the_limit_is_refused_before_reading() -> None:
    for size in (str(Constants().max_body_bytes + 1), "9" * 5000):
        assert await status_of(scope((b"content-length", size.encode())), unread) == 413


async def test_a_body_above_the_limit_is_refused_without_a_content_length() -> None:
    receive = receiver(part(b"1" * 512), part(b"1" * 513))
    assert await status_of(scope(max_body_bytes=1024), receive) == 413


async def test_bodies_too_large_to_parse_on_the_event_loop_are_refused() -> None:
    """Parsing megabytes there would stop all streams for seconds."""
    size = middleware.MAX_JOINED_BYTES
    announced = (b"content-length", str(size + 1).encode())
    assert await status_of(scope(announced), unread) == 413
    assert await status_of(scope(), receiver(part(b"1" * size), part(b"1", more=False))) == 413
    assert (
        await middleware.read_body(scope(), receiver(part(b"1" * size, more=False))) == b"1" * size
    )


async def test_the_event_loop_receives_only_one_part_of_large_bodies_in_a_tick() -> None:
    """Between the parts the loop serves others, however many bodies there are."""
    loop = asyncio.get_running_loop()
    ticks: list[int] = []
    now = 0

    def tick() -> None:
        nonlocal now
        now += 1
        if now < 1000:
            loop.call_soon(tick)

    async def read(given: middleware.Scope) -> int:
        left = [part(b"1" * middleware.MAX_FREE_BYTES)] + [part(b"1" * 1000) for _ in range(10)]
        left.append(part(b"1", more=False))

        async def receive() -> middleware.Message:
            if len(left) <= 10:
                ticks.append(now)  # A part that the pace let through.
            return left.pop(0)

        return sum(map(len, await middleware.read_parts(given, receive)))

    given = scope()
    tick()
    sizes = await asyncio.gather(*(read(given) for _ in range(20)))
    assert sizes == [middleware.MAX_FREE_BYTES + 10_001] * 20
    assert len(ticks) == 200
    assert max(Counter(ticks).values()) == 1


async def test_a_body_that_arrives_too_slowly_is_refused() -> None:
    assert await status_of(scope(body_timeout=0.05), receiver(part(b"12"))) == 408


async def test_a_client_that_leaves_while_it_sends_a_body_gets_status_499() -> None:
    assert await status_of(scope(), receiver(part(b"12"), LEFT)) == middleware.CLIENT_LEFT


@pytest.mark.parametrize(
    "content_type", [b"application/json", b"Application/JSON; charset=utf-8", b"application/json;"]
)
async def test_content_types_of_json_are_accepted(content_type: bytes) -> None:
    given = scope((b"content-type", content_type))
    assert await middleware.read_body(given, receiver(part(b"x", more=False))) == b"x"


@pytest.mark.parametrize(
    "header",
    [
        (b"content-type", b""),
        (b"content-type", b"text/plain"),
        (b"content-type", b"application/jsonp"),
        (b"content-type", b"application/x-www-form-urlencoded"),
        (b"content-encoding", b"gzip"),
    ],
)
async def test_a_body_with_another_content_type_is_not_read(header: tuple[bytes, bytes]) -> None:
    assert await status_of(scope(header), unread) == 415


async def test_a_body_without_a_content_type_is_not_read() -> None:
    assert await status_of({**scope(), "headers": []}, unread) == 415


OLLAMA = Policy(Access.CLIENT, ErrorFormat.OLLAMA)
FORM = (b"content-type", b"application/x-www-form-urlencoded")


@pytest.mark.parametrize("headers", [[], [FORM], [(b"content-type", b"text/plain")]])
async def test_clients_of_ollama_may_leave_out_the_content_type(
    headers: list[tuple[bytes, bytes]],
) -> None:
    given = {**scope(policy=OLLAMA), "headers": headers}
    assert await middleware.read_body(given, receiver(part(b"x", more=False))) == b"x"


@pytest.mark.parametrize(
    "header",
    [
        (b"origin", b"https://evil.example"),
        (b"origin", b"null"),
        (b"sec-fetch-site", b"cross-site"),
        (b"sec-fetch-site", b"same-origin"),
    ],
)
async def test_browsers_must_send_the_content_type_even_to_ollama_calls(
    header: tuple[bytes, bytes],
) -> None:
    """They send forms and text to any server without asking it first."""
    for headers in ([header], [header, FORM]):
        given = {**scope(policy=OLLAMA), "headers": headers}
        assert await status_of(given, unread) == 415
    assert await middleware.read_body(
        scope(header, policy=OLLAMA), receiver(part(b"x", more=False))
    )


async def test_compressed_bodies_are_not_read_in_ollama_calls() -> None:
    given = scope((b"content-encoding", b"gzip"), policy=OLLAMA)
    assert await status_of(given, unread) == 415


async def test_work_for_a_client_that_stays_is_finished() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    assert await middleware.unless_gone(receiver(), work()) == 5


async def test_an_error_in_work_for_a_client_is_raised() -> None:
    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await middleware.unless_gone(receiver(), work())


async def test_work_for_a_client_that_leaves_is_cancelled() -> None:
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(StatusError):
        await middleware.unless_gone(receiver(part(b"", more=False), LEFT), work())
    assert cancelled
