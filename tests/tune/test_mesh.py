"""How a rank ends that is in a sum of MLX with a rank that is lost or silent."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serve.core.errors import LostRankError
from serve.tune import transport
from serve.tune.transport import TcpLinks

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
    monkeypatch.setattr("serve.tune.transport.os._exit", exits.exit)
    monkeypatch.setattr(transport, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(transport, "_STUCK_SECONDS", 600.0)
    return exits


@contextmanager
def links_with_sums(
    stall_seconds: float = STALL_SECONDS,
) -> Iterator[tuple[TcpLinks, socket.socket]]:
    """The links of rank 0 to one other rank, and that rank's end of the connection. They are
    closed after the block."""
    own, other = socket.socketpair()
    links = TcpLinks(0, 2, {1: own}, stall_seconds, has_sums=True)
    (receiving,) = [each for each in threading.enumerate() if each.name == "_receive_all 1"]
    with own, other:
        yield links, other
        other.close()
        links.close()
        receiving.join(60)  # Otherwise it would end this process after the test.
        assert not receiving.is_alive()


def test_a_rank_that_hangs_in_a_sum_after_a_loss_is_ended(
    exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_STUCK_SECONDS", 0.2)
    with links_with_sums() as (_, other):
        other.close()
        assert exits.happened.wait(60)
    assert exits.codes[0] == LostRankError.exit_code


def test_a_rank_that_hangs_in_a_sum_with_a_silent_neighbour_is_ended(
    exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_STUCK_SECONDS", 0.2)
    with links_with_sums(stall_seconds=0.2):
        assert exits.happened.wait(60)
    assert exits.codes[0] == LostRankError.exit_code


def test_a_rank_that_closes_its_links_after_a_loss_is_not_ended(exits: Exits) -> None:
    with links_with_sums() as (links, other):
        other.close()
        links.close()
    assert exits.codes == []
