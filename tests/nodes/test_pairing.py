"""The exchange that pairs two machines, attacked from both sides and from in between."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from launcher.nodes.messages import (
    Conversation,
    FromNode,
    NodeError,
    PairingProof,
    PairingReply,
    PairingStart,
    Refusal,
    ToNode,
)
from launcher.nodes.pairing import MAX_PAUSE_SECONDS, Codes, answer_pairing, pair

KEYS = ("ssh-ed25519 client", "ssh-ed25519 node")


class Writer:
    """The writing end of a stream in memory."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def write(self, data: bytes) -> None:
        self._reader.feed_data(data)


def conversations() -> tuple[Conversation, Conversation]:
    """Returns the ends of the machine that connects and of the node."""
    to_node, to_client = asyncio.StreamReader(), asyncio.StreamReader()
    client = Conversation(to_client, Writer(to_node), FromNode)
    return client, Conversation(to_node, Writer(to_client), ToNode)


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Machines:
    """A node with a code, and what happens when a machine pairs with it."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.codes = Codes(self.clock)

    async def meet(
        self,
        code: str,
        client_sees: tuple[str, str] = KEYS,
        node_sees: tuple[str, str] = KEYS,
    ) -> tuple[Any, Any]:
        """Returns the outcome of both sides: the node's name and True, or errors."""
        client, node = conversations()
        own, theirs = client_sees
        return tuple(
            await asyncio.gather(
                pair(client, code, lambda element: PairingStart("c", 1, element), own, theirs),
                self.answer(node, node_sees),
                return_exceptions=True,
            )
        )

    async def answer(self, node: Conversation, keys: tuple[str, str] = KEYS) -> bool:
        start = await node.hear(PairingStart, 5.0)
        client_key, node_key = keys
        return await answer_pairing(node, self.codes, start, "n", node_key, client_key)


def run(test: Callable[[Machines], Coroutine[Any, Any, None]]) -> None:
    async def begin() -> None:
        await test(Machines())

    asyncio.run(begin())


def test_the_right_code_pairs_and_is_used_up() -> None:
    async def test(machines: Machines) -> None:
        code = machines.codes.code
        assert await machines.meet(code) == ("n", True)
        assert machines.codes.pause_seconds() == 0.0
        assert machines.codes.code != code

    run(test)


def test_a_wrong_code_is_refused_on_both_sides() -> None:
    async def test(machines: Machines) -> None:
        wrong = f"{(int(machines.codes.code) + 1) % 1_000_000:06d}"
        error, is_right = await machines.meet(wrong)
        assert "code is wrong" in str(error)
        assert is_right is False

    run(test)


def test_a_machine_in_between_with_keys_of_its_own_fails_although_the_code_is_right() -> None:
    async def test(machines: Machines) -> None:
        code = machines.codes.code
        evil = "ssh-ed25519 evil"
        # It passes every message on: each side sees the key of the one in between.
        error, is_right = await machines.meet(code, (KEYS[0], evil), (evil, KEYS[1]))
        assert isinstance(error, NodeError)
        assert is_right is False

    run(test)


def test_pauses_grow_and_the_code_changes_after_three_wrong_tries() -> None:
    async def test(machines: Machines) -> None:
        first = machines.codes.code
        pauses = []
        for number in range(12):
            error, is_right = await machines.meet("wrong")
            assert is_right is False
            pauses.append(machines.codes.pause_seconds())
            refused, _ = await machines.meet(machines.codes.code)  # The right code, but too early.
            assert "try again in" in str(refused)
            machines.clock.seconds += pauses[-1]
            if number == 1:
                assert machines.codes.code == first
        assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
        assert pauses[-1] == MAX_PAUSE_SECONDS
        assert machines.codes.code != first
        assert await machines.meet(machines.codes.code) == ("n", True)

    run(test)


def test_parallel_tries_do_not_each_get_one() -> None:
    async def test(machines: Machines) -> None:
        outcomes = await asyncio.gather(*(machines.meet("wrong") for _ in range(20)))
        refusals = [str(error) for error, _ in outcomes]
        assert sum("code is wrong" in refusal for refusal in refusals) == 1
        assert sum("no pairing now" in refusal for refusal in refusals) == 19

    run(test)


def test_a_peer_that_hangs_up_has_used_its_try() -> None:
    async def test(machines: Machines) -> None:
        client, node = conversations()
        client.say(PairingStart("c", 1, b"A" + bytes(32)))
        answering = asyncio.create_task(machines.answer(node))
        node._reader.feed_eof()  # type: ignore[attr-defined]
        with pytest.raises(NodeError):
            await answering
        assert machines.codes.pause_seconds() == 1.0
        assert not machines.codes.is_busy

    run(test)


def test_the_messages_of_an_earlier_pairing_prove_nothing() -> None:
    async def test(machines: Machines) -> None:
        heard: list[Any] = []
        client, node = conversations()
        say = client.say

        def note(message: Any) -> None:
            heard.append(message)
            say(message)

        client.say = note  # type: ignore[method-assign]
        code = machines.codes.code
        await asyncio.gather(
            pair(client, code, lambda element: PairingStart("c", 1, element), *KEYS),
            machines.answer(node),
        )
        machines.codes.code = code  # Even if the code had not changed.
        client, node = conversations()
        answering = asyncio.create_task(machines.answer(node))
        client.say(heard[0])
        await client.hear(PairingReply, 5.0)
        client.say(heard[1])
        with pytest.raises(NodeError, match="code is wrong"):
            await client.hear(PairingProof, 5.0)
        assert await answering is False

    run(test)


def test_a_node_that_does_not_know_the_code_cannot_pretend_that_it_does() -> None:
    """A stranger that answers instead of the node sends the proof back that it got."""

    async def test(machines: Machines) -> None:
        client, node = conversations()

        async def pretend() -> None:
            start = await node.hear(PairingStart, 5.0)
            node.say(PairingReply("n", b"B" + start.element[1:]))
            node.say(await node.hear(PairingProof, 5.0))

        pairing = pair(client, "123456", lambda element: PairingStart("c", 1, element), *KEYS)
        error, _ = await asyncio.gather(pairing, pretend(), return_exceptions=True)
        assert isinstance(error, NodeError)

    run(test)


def test_random_messages_pair_nobody() -> None:
    """Every message is of the right form, because others are refused before the exchange."""
    chance = random.Random(0)

    async def test(machines: Machines) -> None:
        for _ in range(300):
            client, node = conversations()
            size = chance.choice([0, 1, 31, 32, 33, 200])
            side = chance.choice([b"A", b"B", b"S", b""])
            client.say(PairingStart("c", 1, side + chance.randbytes(size)))
            client.say(PairingProof(chance.randbytes(chance.choice([0, 32]))))
            try:
                is_right = await machines.answer(node)
            except NodeError:
                is_right = False
            assert not is_right
            machines.clock.seconds += MAX_PAUSE_SECONDS

    run(test)


def test_lines_that_are_no_messages_are_refused() -> None:
    async def test(_: Machines) -> None:
        for line in (b"{}\n", b"\xff\n", b"[" * 5000 + b"\n", b'{"type":"Shell"}\n', b"no end"):
            reader = asyncio.StreamReader()
            reader.feed_data(line)
            reader.feed_eof()
            with pytest.raises(NodeError):
                await Conversation(reader, None, ToNode).hear(PairingStart, 5.0)

    run(test)


def test_a_refusal_is_shown_as_the_node_words_it() -> None:
    async def test(_: Machines) -> None:
        client, node = conversations()
        node.say(Refusal("not today"))
        with pytest.raises(NodeError, match="not today"):
            await client.hear(PairingReply, 5.0)

    run(test)
