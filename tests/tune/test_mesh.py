"""Links between any two ranks, and how a rank ends that is stuck in a sum."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from serve.core.config import Cluster
from serve.core.errors import RETURN_EXIT_CODE, ClusterError
from serve.lora.sharded import TrainedParts
from serve.tune import mesh
from serve.tune.config import FineTuneConfig
from serve.tune.mesh import MeshLinks, StuckLimit
from serve.tune.model import DropoutKeys
from serve.tune.recovery import Kept, limit_of
from serve.tune.session import Progress, Weights

STALL_SECONDS = 600.0
SHORT = StuckLimit(0.2, lambda: False)
LONG = StuckLimit(60.0, lambda: False)
CONFIG = FineTuneConfig(model=Path("m"), data=Path("d"))
LAUNCHED = Cluster(leash=5)


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
    return exits


@contextmanager
def watched_links(
    limit: StuckLimit, stall_seconds: float = STALL_SECONDS
) -> Iterator[tuple[MeshLinks, socket.socket]]:
    """The links of rank 0 to one other rank, and that rank's end of the connection. The block
    leaves them."""
    own, other = socket.socketpair()
    links = MeshLinks(0, {1: own}, stall_seconds)
    links.watch(limit)
    (watching,) = [each for each in threading.enumerate() if each.name == "watch"]
    with own, other:
        yield links, other
        watching.join(30)  # Otherwise it would end this process after the test.
        assert not watching.is_alive()


@pytest.mark.parametrize(
    ("may_return", "code"), [(False, ClusterError.exit_code), (True, RETURN_EXIT_CODE)]
)
def test_rank_that_does_not_leave_after_a_loss_ends(
    exits: Exits, may_return: bool, code: int
) -> None:
    with watched_links(StuckLimit(0.2, lambda: may_return)) as (links, other):
        other.close()
        assert exits.happened.wait(30)
        links.leave(30)
    assert exits.codes[0] == code


def test_rank_with_a_silent_one_asks_to_be_started_again(exits: Exits) -> None:
    with watched_links(StuckLimit(60.0, lambda: True), stall_seconds=0.2) as (links, other):
        assert exits.happened.wait(30)
        other.close()
        links.leave(30)
    assert exits.codes[0] == RETURN_EXIT_CODE


def test_rank_that_leaves_after_a_loss_goes_on(exits: Exits) -> None:
    with watched_links(LONG) as (links, other):
        other.close()
        links.leave(30)
    assert exits.codes == []


def test_rank_that_waits_for_mlx_after_a_loss_ends(exits: Exits) -> None:
    with SHORT.ending():
        assert exits.happened.wait(30)
    assert exits.codes == [ClusterError.exit_code]


def test_rank_for_which_mlx_returns_in_time_goes_on(exits: Exits) -> None:
    with LONG.ending():
        (timer,) = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    timer.join(30)
    assert not timer.is_alive()
    assert exits.codes == []


# --- whether it returns


def kept(num_returns: int, *, has_saved: bool = False) -> Kept:
    """What a rank keeps in the middle of a run."""
    weights = Weights([], {}, DropoutKeys(0), TrainedParts({}, set()), {"a": mx.zeros(1)})
    progress = Progress(1, saved=4, has_saved=has_saved)
    return Kept(num_returns, weights=weights, progress=progress)


@pytest.mark.parametrize(
    ("num_returns", "has_saved", "may_return"),
    [(0, False, True), (2, False, True), (3, False, False), (9, True, True)],
)
def test_a_stuck_rank_returns_until_there_is_no_progress(
    num_returns: int, has_saved: bool, may_return: bool
) -> None:
    limit = limit_of(LAUNCHED, CONFIG, kept(num_returns, has_saved=has_saved))
    assert limit.may_return() == may_return


def test_losses_that_a_rank_has_outlived_count_too() -> None:
    found = kept(1)
    assert found.may_stay(CONFIG)
    assert found.may_return(CONFIG)
    assert found.may_stay(CONFIG)
    assert not found.may_return(CONFIG)


def test_a_rank_that_still_loads_does_not_return() -> None:
    assert not limit_of(LAUNCHED, CONFIG, Kept()).may_return()


def test_a_run_that_should_end_at_a_loss_ends() -> None:
    config = replace(CONFIG, return_timeout=0.0)
    assert not limit_of(LAUNCHED, config, kept(0)).may_return()


def test_without_a_launcher_nobody_returns_and_the_limit_is_a_minute() -> None:
    limit = limit_of(Cluster(), CONFIG, kept(0))
    assert not limit.may_return()
    assert limit.seconds == 60
