"""Nodes in this process: what they tell each other, and what they do again and again."""

import asyncio
import os
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from launcher.nodes import node as node_module
from launcher.nodes.door import Services, listen
from launcher.nodes.group import NodeFiles, public
from launcher.nodes.link import NodePlace, talking
from launcher.nodes.messages import ListSeen, Machine, NodeError, SeenList
from launcher.nodes.neighbours import NeighbourSockets
from launcher.nodes.node import NodeServer
from tests.ports import free_ports

HOST = "127.0.0.1"


class Member:
    """A node with its files. Other machines reach it while its door is open."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(mode=0o700)
        (self.port,) = free_ports(1)
        self.files = NodeFiles(folder)
        sockets = NeighbourSockets(folder / "sockets", self.files)
        weights = str(folder / "weights")
        self.node = NodeServer(self.files, name, self.port, sockets, weights)
        self.neighbours = sockets

    @property
    def entry(self) -> Machine:
        return Machine(self.node.key, self.node.name, 1.0, addresses=[HOST], port=self.port)

    async def open(self) -> asyncssh.SSHAcceptor:
        return await listen(self.files, self.node.services, self.port, self.node.visitors)


async def close(door: asyncssh.SSHAcceptor) -> None:
    door.close()
    await door.wait_closed()


def test_a_machine_that_was_away_hears_that_another_one_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has only slept: it does not start again, and so does not ask."""
    monkeypatch.setattr(node_module, "RETELL_SECONDS", 0.1)
    one, two = Member(tmp_path / "1", "one"), Member(tmp_path / "2", "two")
    key = public(asyncssh.generate_private_key("ssh-ed25519"))
    for member in (one, two):
        member.files.merge([one.entry, two.entry, Machine(key, "lost", 1.0)])

    async def test() -> None:
        async with one.neighbours, two.neighbours:
            telling = asyncio.create_task(one.node.keep_telling())
            one.node.exchange([Machine(key, "lost", 2.0, is_revoked=True)])
            await asyncio.sleep(0.5)
            door = await two.open()
            while any(machine.name == "lost" for machine in two.files.members()):
                assert not telling.done()
                await asyncio.sleep(0.05)
            telling.cancel()
            await close(door)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_sockets_do_not_look_as_if_nobody_used_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "TOUCH_SECONDS", 0.05)
    member = Member(tmp_path / "1", "one")
    place = NodePlace("two", (HOST,), 1, "key")

    async def test() -> None:
        async with member.neighbours:
            await member.neighbours.refresh([place])
            (path,) = (tmp_path / "1" / "sockets").glob("*.sock")
            os.utime(path, (0.0, 0.0))
            keeping = asyncio.create_task(member.node.keep_sockets())
            while not path.stat().st_atime:
                assert not keeping.done()
                await asyncio.sleep(0.05)
            keeping.cancel()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_connection_that_is_lost_in_a_conversation_is_an_error_that_names_the_node(
    tmp_path: Path,
) -> None:
    one, two = Member(tmp_path / "1", "one"), Member(tmp_path / "2", "two")
    two.files.merge([one.entry])

    async def hang_up(visitor: Any, _: Any) -> None:
        visitor.close()

    async def test() -> None:
        services = Services({}, {"node": hang_up}, two.node.services.weights)
        door = await listen(two.files, services, two.port, two.node.visitors)
        place = NodePlace("two", (HOST,), two.port, two.node.key)
        with pytest.raises(NodeError, match="^two: "):
            async with talking(place, one.files) as talk:
                await talk.ask(ListSeen(), SeenList)
        await close(door)

    asyncio.run(asyncio.wait_for(test(), 60))
