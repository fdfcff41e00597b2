"""Tests of links between any two ranks."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serve.core.errors import ClusterError
from serve.tune import mesh
from serve.tune.mesh import MeshLinks

STALL_SECONDS = 600.0


class Exits:
    """Notes with which codes this process would have ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.happened = threading.Event()

    def exit(self, code: int) -> None:
        self.codes.append(code)
        self.happened.set()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    exits = Exits()
    monkeypatch.setattr("serve.tune.mesh.os._exit", exits.exit)
    monkeypatch.setattr(mesh, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(mesh, "_MAX_STUCK_SECONDS", 0.2)
    return exits


@contextmanager
def watched_links() -> Iterator[tuple[MeshLinks, socket.socket]]:
    """The links of rank 0 to one other rank, and that rank's end of the connection."""
    own, other = socket.socketpair()
    links = MeshLinks(0, {1: own}, STALL_SECONDS)
    links.watch()
    with own, other:
        yield links, other


def test_rank_that_does_not_leave_after_a_loss_ends(exits: Exits) -> None:
    with watched_links() as (links, other):
        other.close()
        assert exits.happened.wait(30)
        links.leave(30)
    assert set(exits.codes) == {ClusterError.exit_code}


def test_rank_that_leaves_after_a_loss_goes_on(
    exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_MAX_STUCK_SECONDS", 60.0)
    with watched_links() as (links, other):
        *_, watching = [each for each in threading.enumerate() if each.name == "watch"]
        other.close()
        links.leave(30)
        watching.join(30)
        assert not watching.is_alive()
    assert exits.codes == []


def test_rank_that_waits_for_mlx_after_a_loss_ends(exits: Exits) -> None:
    with mesh.ending_if_stuck():
        assert exits.happened.wait(30)
    assert exits.codes == [ClusterError.exit_code]


def test_rank_for_which_mlx_returns_in_time_goes_on(
    exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_MAX_STUCK_SECONDS", 60.0)
    with mesh.ending_if_stuck():
        (timer,) = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    timer.join(30)
    assert not timer.is_alive()
    assert exits.codes == []
