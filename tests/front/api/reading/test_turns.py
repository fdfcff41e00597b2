"""Turns of large bodies: by client, those that the model answers first, and bounded."""

import asyncio
from contextlib import suppress

import pytest

from serve.core.errors import OverloadedError
from serve.front.api.reading.turns import MAX_SMALL_BYTES, MAX_WAITING, Turns

pytestmark = pytest.mark.anyio

LARGE = MAX_SMALL_BYTES + 1


class Bodies:
    """Bodies in one queue, and the order in which they had their turns."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.order: list[str] = []

    async def _read(self, name: str, is_answered: bool, num_bytes: int) -> None:
        await self.turns.begin(name[0], is_answered, num_bytes)
        self.order.append(name)

    def send(
        self, name: str, is_answered: bool = True, num_bytes: int = LARGE
    ) -> "asyncio.Task[None]":
        """The name's first letter is the client."""
        return asyncio.create_task(self._read(name, is_answered, num_bytes))

    async def run(self) -> list[str]:
        """Ends each turn until none begins."""
        for _ in range(2 * MAX_WAITING):
            await asyncio.sleep(0)
            self.turns.end()
        await asyncio.sleep(0)
        return self.order


async def test_turns_go_round_the_clients() -> None:
    bodies = Bodies()
    tasks = [bodies.send(f"a{n}") for n in range(6)]
    await asyncio.sleep(0)
    tasks += [bodies.send(name) for name in ("b0", "b1", "c0")]
    assert await bodies.run() == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4", "a5"]
    await asyncio.gather(*tasks)


async def test_turns_of_a_client_go_by_size() -> None:
    bodies = Bodies()
    tasks = [bodies.send("a0")]
    await asyncio.sleep(0)
    tasks += [bodies.send(f"a{size}", num_bytes=size) for size in (300, 20, 5000)]
    assert await bodies.run() == ["a0", "a20", "a300", "a5000"]
    await asyncio.gather(*tasks)


async def test_turns_of_bodies_that_are_answered_come_before_all_others() -> None:
    bodies = Bodies()
    tasks = [bodies.send("a0", is_answered=False)]
    await asyncio.sleep(0)
    tasks += [bodies.send(name, is_answered=False) for name in ("a1", "b1", "c1")]
    tasks += [bodies.send(name, num_bytes=9) for name in ("a2", "a3", "b2")]
    assert await bodies.run() == ["a0", "b2", "a2", "a3", "c1", "b1", "a1"]
    await asyncio.gather(*tasks)


async def test_turns_are_refused_to_the_client_with_the_most_bodies() -> None:
    bodies = Bodies()
    first = bodies.send("b0")
    await asyncio.sleep(0)
    others = [bodies.send(f"a{n}", num_bytes=LARGE + n) for n in range(MAX_WAITING)]
    small = [bodies.send(f"c{n}", num_bytes=MAX_SMALL_BYTES) for n in range(3)]
    await asyncio.sleep(0)
    late = bodies.send("b1", is_answered=False, num_bytes=1 << 20)
    with pytest.raises(OverloadedError) as refused:
        await asyncio.wait_for(others[-1], 10)
    assert refused.value.code == "queue_full"
    order = await bodies.run()
    assert "b1" in order
    assert len(order) == MAX_WAITING + 4
    await asyncio.gather(first, late, *small, *others[:-1])


async def test_turns_pass_over_clients_that_left() -> None:
    bodies = Bodies()
    first = bodies.send("a0")
    await asyncio.sleep(0)
    left, next_one = bodies.send("b0"), bodies.send("c0")
    at_its_turn = bodies.send("d0")
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    bodies.turns.end()
    await asyncio.sleep(0)
    bodies.turns.end()
    at_its_turn.cancel()  # Its turn has begun, and it does not know that yet.
    with suppress(asyncio.CancelledError):
        await at_its_turn
    again = bodies.send("e0")
    await asyncio.sleep(0)
    assert bodies.order == ["a0", "c0", "e0"], "the turn was given back"
    await asyncio.gather(first, next_one, again)
