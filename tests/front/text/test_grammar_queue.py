"""Checks of grammars: in turn by client, bounded, and never before those that are known."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from serve.core.config import ServeConfig
from serve.core.errors import OverloadedError, RequestError
from serve.front.http.admission import Keys
from serve.front.text import grammar_queue
from serve.front.text.grammar_queue import GrammarQueue

pytestmark = pytest.mark.anyio


class Checks:
    """Work that waits until the test lets it go, and notes its order."""

    def __init__(self) -> None:
        self.queue = GrammarQueue()
        self.order: list[str] = []
        self.may_end = threading.Event()

    def work(self, name: str) -> Callable[[], None]:
        def run() -> None:
            self.order.append(name)
            assert self.may_end.wait(10)

        return run

    def send(self, client: str, name: str, size: int = 1) -> "asyncio.Task[None]":
        return asyncio.create_task(self.queue.run(client, size, self.work(name)))

    async def until_begun(self, num: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.order) < num:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)


async def test_queue_gives_each_client_one_thread() -> None:
    checks = Checks()
    greedy = [checks.send("greedy", f"g{n}") for n in range(10)]
    await checks.until_begun(1)
    assert checks.order == ["g0"], "one thread is left for others"
    other = checks.send("other", "o")
    await checks.until_begun(2)
    assert checks.order == ["g0", "o"]
    checks.may_end.set()
    await asyncio.wait_for(asyncio.gather(*greedy, other), 10)


async def test_queue_takes_clients_in_turn_and_short_grammars_first() -> None:
    checks = Checks()
    tasks = [checks.send("a", "a-first", 9), checks.send("b", "b-first", 9)]
    await checks.until_begun(2)
    tasks += [checks.send("a", f"a{size}", size) for size in (5, 1, 3)]
    tasks += [checks.send("c", "c1", 1), checks.send("d", "d9", 9)]
    await asyncio.sleep(0.02)
    checks.may_end.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert [name for name in checks.order if name.startswith("a")] == ["a-first", "a1", "a3", "a5"]
    assert checks.order.index("d9") < checks.order.index("a3")


async def test_queue_refuses_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "_MAX_WAITING_OF_CLIENT", 3)
    monkeypatch.setattr(grammar_queue, "_MAX_WAITING", 5)
    checks = Checks()
    tasks = [checks.send("a", "a") for _ in range(4)]
    await checks.until_begun(1)
    with pytest.raises(OverloadedError) as caught:
        await checks.queue.run("a", 1, checks.work("a"))
    assert (caught.value.http_status, caught.value.code) == (429, "grammar_queue_full")
    tasks += [checks.send("b", "b") for _ in range(3)]
    await checks.until_begun(2)
    with pytest.raises(OverloadedError):
        await checks.queue.run("c", 1, checks.work("c"))
    checks.may_end.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    await checks.queue.run("c", 1, checks.work("c"))


async def test_queue_forgets_those_who_leave() -> None:
    checks = Checks()
    running, waiting = checks.send("a", "running"), checks.send("a", "waiting")
    await checks.until_begun(1)
    for task in (running, waiting):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    after = checks.send("a", "after")
    await asyncio.sleep(0.02)
    assert checks.order == ["running"], "its thread works on, and is not given away"
    checks.may_end.set()
    await asyncio.wait_for(after, 10)
    assert checks.order == ["running", "after"]
    assert not checks.queue._waiting


async def test_queue_lets_known_grammars_pass() -> None:
    checks, order = Checks(), []
    tasks = [checks.send(client, client) for client in "abc"]
    await checks.until_begun(2)
    await asyncio.wait_for(checks.queue.run_known(lambda: order.append("known")), 5)
    assert order == ["known"]
    checks.may_end.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)


async def test_queue_raises_what_the_check_does() -> None:
    def refuse() -> None:
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        await GrammarQueue().run("a", 1, refuse)


def test_client_is_the_key_that_counts_or_the_address() -> None:
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
