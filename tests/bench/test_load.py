"""Loops and their client, against a server with known delays."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from statistics import mean

import pytest

from serve.bench.client import ChatClient, connected
from serve.bench.config import BenchConfig, Level
from serve.bench.load import LoadGenerator, closed_loop, open_loop, poisson_arrivals
from serve.bench.records import RequestRecord, summarise
from serve.core.errors import AddressError, UsageError
from tests.bench.sse_server import (
    FIRST_SECONDS,
    GAP_SECONDS,
    TEMPLATE_TOKENS,
    Clock,
    streaming,
)
from tests.errors import fails

CHAT = [{"role": "user", "content": "How are you?"}]
Question = Callable[[ChatClient], Awaitable[RequestRecord]]


def ask(url: str, max_tokens: int = 5) -> RequestRecord:
    async def run() -> RequestRecord:
        async with connected(url, None, None, 60.0) as server:
            return await server.chat(CHAT, max_tokens)

    return asyncio.run(run())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the client measures with."""
    clock = Clock()
    monkeypatch.setattr("serve.bench.client.perf_counter", clock)
    return clock


def test_measured_times_equal_the_delays_of_the_server(clock: Clock) -> None:
    with streaming(clock=clock) as (url, state):
        record = ask(url, 10)
    assert record.error is None
    assert (record.tokens, len(record.times), record.text) == (10, 10, " word" * 10)
    assert record.prompt_tokens == 3 + TEMPLATE_TOKENS
    # The first event is a role without text: that is no first token.
    assert record.times[0] - record.start == pytest.approx(FIRST_SECONDS)
    assert record.gaps == pytest.approx([GAP_SECONDS] * 9)
    assert state.bodies == [
        {
            "model": "made-up",
            "messages": CHAT,
            "max_tokens": 10,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("busy", "HTTP 429: the queue is full"),
        ("error", "a rank was lost"),
        ("cut", "the stream ended without [DONE]"),
    ],
)
def test_a_failed_request_is_recorded_with_its_reason(fault: str, reason: str) -> None:
    with streaming(fault=fault) as (url, _):
        assert ask(url).error == reason


def test_an_unreachable_server_is_reported_in_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with fails(AddressError, "address"):
            ask(url)


def test_a_server_without_models_is_reported_in_one_line() -> None:
    with streaming() as (url, _), fails(UsageError, "model_not_found"):
        ask(f"{url}/other")


class Resetting:
    """Takes connections and resets the first `count`; the rest get an empty stream."""

    def __init__(self, count: int) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, args=(count,))
        self.thread.start()

    def run(self, count: int) -> None:
        answer = b"data: [DONE]\n\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
        for i in range(2):
            connection, _ = self.listening.accept()
            with connection:
                connection.recv(65536)
                if i < count:
                    # Closing with 0 seconds to linger sends a reset.
                    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                else:
                    connection.sendall(head.encode() + answer)
                    return

    async def ask(self) -> RequestRecord:
        import httpx2

        async with httpx2.AsyncClient(base_url=f"{self.url}/v1") as http:
            return await ChatClient(http, "m").chat(CHAT, 1)


@pytest.mark.parametrize(
    ("resets", "error"), [(1, None), (2, "refused or reset before the answer began")]
)
def test_a_request_whose_connection_is_reset_is_tried_again_and_recorded(
    resets: int, error: str | None
) -> None:
    """mlx_lm.server resets some of 16 connections that come at once."""
    server = Resetting(resets)
    record = asyncio.run(server.ask())
    server.thread.join(60)
    server.listening.close()
    assert record.reconnected
    assert record.error == error


def run_level(url: str, level: Level, **flags: object) -> list[RequestRecord]:
    config = BenchConfig(url=(url,), **flags)  # type: ignore[arg-type]

    async def run() -> list[RequestRecord]:
        records: list[RequestRecord] = []
        async with connected(url, None, None, 60.0) as server:
            target = await LoadGenerator.calibrated(config, server)
            await target.run(level, 0, records.append)
        return records

    return asyncio.run(run())


def test_a_closed_loop_keeps_the_given_number_of_requests_running() -> None:
    with streaming(num_held=3) as (url, state):
        records = run_level(url, Level(3, False), requests=9, max_tokens=12)
    assert len(records) == 9
    assert state.most_running == 3
    assert {record.prompt_tokens for record in records} == {66}
    prompts = [body["messages"][0]["content"] for body in state.bodies]
    assert len(set(prompts)) == len(prompts) == 2 + 3 + 9  # lengths, warm-up, measured


def test_rates_count_tokens_and_latencies_count_chunks(clock: Clock) -> None:
    with streaming(tokens_per_chunk=4, clock=clock) as (url, _):
        summary = summarise([run_level(url, Level(1, False), requests=4, max_tokens=40)])
    seconds = 4 * (FIRST_SECONDS + 9 * GAP_SECONDS)
    assert (summary.tokens, summary.chunks, summary.errors) == (160, 40, {})
    assert summary.tokens_per_second == pytest.approx(160 / seconds)
    assert summary.itl_p50_seconds == pytest.approx(GAP_SECONDS)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with streaming(num_held=20) as (url, state):
        records = run_level(url, Level(100, True), requests=20, max_tokens=10)
    assert [record.error for record in records] == [None] * 20
    assert state.most_running == 20


def test_failures_while_warming_up_are_recorded() -> None:
    with streaming(fault="busy") as (url, _):
        records = run_level(url, Level(1, False), requests=1)
    assert [record.error for record in records] == [
        "warm-up: HTTP 429: the queue is full",
        "HTTP 429: the queue is full",
    ]


def test_arrivals_follow_a_poisson_process_drawn_from_a_seed() -> None:
    times = poisson_arrivals(5.0, 4000, seed=1)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0
    assert mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    # Of exponential gaps, a share of 1/e is longer than the mean.
    assert mean(gap > 1 / 5 for gap in gaps) == pytest.approx(0.368, abs=0.03)
    assert times == poisson_arrivals(5.0, 4000, seed=1) != poisson_arrivals(5.0, 4000, seed=2)


def test_clients_and_arrivals_start_at_the_planned_times() -> None:
    """Without a server: clients start one after the other, arrivals at their times."""

    async def run() -> tuple[list[float], list[float]]:
        began = time.monotonic()
        starts: list[float] = []

        async def note(_: str) -> RequestRecord:
            starts.append(time.monotonic() - began)
            await asyncio.sleep(0.2)
            return RequestRecord(0, 0)

        await closed_loop(note, ["a"] * 4, 4, lambda _: None)
        closed = starts[:]
        began = time.monotonic()
        await open_loop(note, ["a"] * 3, [0.0, 0.05, 0.15], lambda _: None)
        return closed, starts[4:]

    closed, opened = asyncio.run(run())
    # A busy machine makes them later, never sooner.
    for starts, wanted in ((closed, [0.0, 0.02, 0.04, 0.06]), (opened, [0.0, 0.05, 0.15])):
        assert len(starts) == len(wanted)
        assert all(start > due - 0.005 for start, due in zip(starts, wanted, strict=True))
