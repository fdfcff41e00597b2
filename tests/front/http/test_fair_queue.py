"""Slow work in turn by client: bounded, the smallest first, and urgent work before the rest."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from serve.core.config import ServeConfig
from serve.core.errors import OverloadedError, RequestError, UnavailableError
from serve.front.http.admission import Keys
from serve.front.http.fair_queue import FairQueue
from tests.errors import fails

pytestmark = pytest.mark.anyio

MAX_WAITING = 8


class Works:
    """Work that waits until the test lets it go, and records its order."""

    def __init__(self, num_threads: int = 1) -> None:
        self.queue = FairQueue("works", num_threads, MAX_WAITING)
        self.order: list[str] = []
        self.may_end = threading.Event()

    def _work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.order.append(name)
            assert self.may_end.wait(60)
            return name

        return run

    def send(self, name: str, size: int = 1, is_urgent: bool = True) -> "asyncio.Task[str]":
        """The name's first letter is the client."""
        running = self.queue.run(name[0], size, self._work(name), is_urgent)
        return asyncio.create_task(running)

    async def until_begun(self, num: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.order) < num:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)

    async def finish(self, *tasks: "asyncio.Task[str]") -> list[str]:
        """Lets all work go, and returns the order in which it began."""
        self.may_end.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        return self.order


async def test_clients_take_turns_in_the_queue() -> None:
    works = Works()
    tasks = [works.send(f"a{n}") for n in range(5)]
    await works.until_begun(1)
    tasks += [works.send(name) for name in ("b0", "b1", "c0")]
    await asyncio.sleep(0)
    assert await works.finish(*tasks) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


async def test_the_smallest_work_of_a_client_runs_first() -> None:
    works = Works()
    tasks = [works.send("a0", 9)]
    await works.until_begun(1)
    tasks += [works.send(f"a{size}", size) for size in (300, 20, 5000)]
    await asyncio.sleep(0)
    assert await works.finish(*tasks) == ["a0", "a20", "a300", "a5000"]


async def test_urgent_work_of_all_clients_runs_before_other_work() -> None:
    works = Works()
    tasks = [works.send("a0", is_urgent=False)]
    await works.until_begun(1)
    tasks += [works.send(name, is_urgent=False) for name in ("a1", "b1", "c1")]
    tasks += [works.send(name, size=9) for name in ("a2", "a3", "b2")]
    await asyncio.sleep(0)
    assert await works.finish(*tasks) == ["a0", "b2", "a2", "a3", "c1", "b1", "a1"]


async def test_each_client_has_at_most_one_thread_at_a_time() -> None:
    works = Works(num_threads=2)
    greedy = [works.send(f"a{n}") for n in range(5)]
    await works.until_begun(1)
    assert works.order == ["a0"], "one thread is left for others"
    other = works.send("b0")
    await works.until_begun(2)
    assert works.order == ["a0", "b0"]
    await works.finish(*greedy, other)


async def test_a_full_queue_refuses_work_of_the_client_with_the_most_waiting_work() -> None:
    works = Works()
    first = works.send("b0")
    await works.until_begun(1)
    others = [works.send(f"a{n}", size=n) for n in range(MAX_WAITING)]
    await asyncio.sleep(0)
    late = works.send("b1", size=1000, is_urgent=False)
    with pytest.raises(OverloadedError) as refused:
        await asyncio.wait_for(others[-1], 60)
    assert (refused.value.http_status, refused.value.code) == (429, "queue_full")
    smaller = works.send("a", size=0)
    with pytest.raises(OverloadedError):
        await asyncio.wait_for(others[-2], 60)
    order = await works.finish(first, late, smaller, *others[:-2])
    assert "b1" in order
    assert len(order) == MAX_WAITING + 1
    assert await works.queue.run("a", 1, lambda: 5) == 5, "there is room again"


async def test_waiting_work_of_clients_that_left_is_removed() -> None:
    works = Works()
    running, waiting = works.send("a0"), works.send("a1")
    await works.until_begun(1)
    for task in (running, waiting):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    after = works.send("b0")
    await asyncio.sleep(0.02)
    assert works.order == ["a0"], "its thread works on, and is not given away"
    assert await works.finish(after) == ["a0", "b0"]


async def test_an_error_in_work_of_a_client_that_left_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_fail = threading.Event()

    def fail() -> None:
        assert may_fail.wait(60)
        raise ValueError("nobody asks")

    queue = FairQueue("works", 1, 1)
    left = asyncio.ensure_future(queue.run("a", 1, fail))
    await asyncio.sleep(0.02)
    left.cancel()
    may_fail.set()
    assert await queue.run("b", 1, lambda: 5) == 5
    assert not caplog.records


async def test_closing_the_queue_ends_waiting_work_with_an_error() -> None:
    works = Works()
    begun = works.send("a0")
    await works.until_begun(1)
    waiting = [works.send("a1"), works.send("b0")]
    await asyncio.sleep(0)
    works.queue.close()
    waiting.append(works.send("c0"))
    for task in waiting:
        with fails(UnavailableError, "unavailable"):
            await asyncio.wait_for(task, 60)
    assert await works.finish(begun) == ["a0"]


async def test_an_error_in_queued_work_is_raised() -> None:
    def refuse() -> None:
        raise RequestError("no")

    with fails(RequestError, "invalid_value"):
        await FairQueue("works", 1, 1).run("a", 1, refuse)


def test_a_client_is_identified_by_a_valid_key_or_by_its_address() -> None:
    """A client that makes up keys beside its own is still one client."""

    config = ServeConfig(model=Path("."), api_key=("right", "other"))
    keys = Keys(config)

    def client(*headers: tuple[bytes, bytes]) -> str:
        return keys.client_of({"headers": list(headers), "client": ("10.0.0.7", 5)})

    right = client((b"authorization", b"Bearer right"))
    assert right == client((b"x-api-key", b"right"))
    assert right == client((b"authorization", b"Bearer right"), (b"x-api-key", b"made up"))
    assert right != client((b"authorization", b"Bearer other"))
    assert "right" not in right
    assert client((b"authorization", b"Bearer made up")) == "10.0.0.7"
