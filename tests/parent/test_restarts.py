"""When engines restart, and when the cluster is given up."""

import pytest

from serve.core.errors import (
    AddressError,
    BrigadeError,
    ClusterError,
    DisagreementError,
    EngineError,
    ModelError,
    PlanError,
    UsageError,
)
from serve.parent.restarts import Restarts, better_reason, reason_seconds
from tests.errors import fails

KILLED = EngineError("The engine of rank 1 ended by signal 9.")


def test_restarts_of_engines_that_have_worked_are_immediate() -> None:
    restarts = Restarts(3, 60)
    assert [restarts.wait_seconds(KILLED, True, now) for now in (0, 1, 2)] == [0, 0, 0]


def test_restarts_of_engines_that_never_work_wait_longer_and_longer() -> None:
    restarts = Restarts(100, 60)
    waits = [restarts.wait_seconds(KILLED, False, 0) for _ in range(8)]
    assert waits == [0.5, 1, 2, 4, 8, 15, 15, 15]
    assert restarts.wait_seconds(KILLED, True, 0) == 0
    assert restarts.wait_seconds(KILLED, False, 0) == 0.5


def test_too_many_restarts_in_the_window_end_with_the_reason_and_its_exit_code() -> None:
    restarts = Restarts(2, 60)
    for now in (0, 59):
        restarts.wait_seconds(KILLED, True, now)
    with fails(EngineError, "engine", match=r"signal 9\. .* 2 times in 60 s") as caught:
        restarts.wait_seconds(KILLED, True, 59.9)
    assert caught.value.exit_code == 7
    lost = ClusterError("The ring broke.")
    with pytest.raises(ClusterError) as caught_lost:
        restarts.wait_seconds(lost, True, 59.9)
    assert caught_lost.value.exit_code == 6


def test_restarts_that_are_older_than_the_window_do_not_count() -> None:
    restarts = Restarts(2, 60)
    for now in (0, 30, 60, 90, 120, 150):
        assert restarts.wait_seconds(KILLED, True, now) == 0


def test_engines_that_never_work_are_given_up_however_long_each_takes_to_start() -> None:
    """A disk that hangs costs load_timeout each time, which is as long as the window."""
    restarts = Restarts(2, 60)
    for now in (0, 100):
        restarts.wait_seconds(KILLED, False, now)
    with fails(EngineError, "engine", match=r"signal 9\. .* 2 times without"):
        restarts.wait_seconds(KILLED, False, 200)
    assert restarts.wait_seconds(KILLED, True, 300) == 0
    assert restarts.wait_seconds(KILLED, False, 400) > 0


def test_faults_explained_by_a_request_do_not_count() -> None:
    restarts = Restarts(3, 60)
    restarts.wait_seconds(KILLED, True, 0)
    for _ in range(20):
        for _ in range(2):
            restarts.wait_seconds(KILLED, True, 1)
        assert restarts.num_left(1) == 0
        assert restarts.wait_seconds(KILLED, True, 1, num_explained=3) == 0
        assert restarts.num_left(1) == 2, "the one before is still counted"


def test_the_first_fault_is_final_if_no_restart_is_allowed() -> None:
    with fails(EngineError, "engine", match=r"signal 9\.$"):
        Restarts(0, 60).wait_seconds(KILLED, True, 0)


@pytest.mark.parametrize(
    "fault",
    [
        ModelError("x"),
        PlanError("x"),
        UsageError("x"),
        AddressError("x"),
        DisagreementError({"mlx": {0: "1", 1: "2"}}),
        BrigadeError("a fault of our own"),
    ],
)
def test_no_restart_is_tried_after_a_permanent_fault(fault: BrigadeError) -> None:
    with pytest.raises(type(fault)) as caught:
        Restarts(5, 60).wait_seconds(fault, True, 0)
    assert caught.value is fault


def test_the_first_reason_is_kept_unless_it_only_says_that_a_neighbour_is_gone() -> None:
    gone = ClusterError("rank 1 is gone")
    cause = EngineError("out of memory")
    final = PlanError("does not fit")
    assert better_reason(None, gone) is gone
    assert better_reason(gone, cause) is cause
    assert better_reason(cause, gone) is cause
    assert better_reason(gone, ClusterError("rank 2 is gone")) is gone
    assert better_reason(cause, EngineError("another")) is cause
    assert better_reason(cause, final) is final, "no restart can fix it"


def test_a_better_reason_is_awaited_only_briefly_if_clients_wait() -> None:
    gone = ClusterError("rank 1 is gone")
    cause = EngineError("out of memory")
    unhurried = reason_seconds(cause, has_clients=False)
    assert unhurried == reason_seconds(gone, has_clients=False)
    assert 0 < reason_seconds(gone, has_clients=True) < unhurried
    assert reason_seconds(cause, has_clients=True) == 0


def test_faults_after_some_work_do_not_count_if_every_engine_outlives_them() -> None:
    restarts = Restarts(2, 1000)
    restarts.on_ready(0, have_all_stayed=False)
    for now in range(20, 200, 20):
        assert restarts.wait_seconds(ClusterError("The link broke."), True, now) == 0
        restarts.on_ready(now + 1, have_all_stayed=True)
    assert restarts.num_left(200) == 2


@pytest.mark.parametrize(
    ("have_all_stayed", "was_ready", "seconds"),
    [(False, True, 20), (True, False, 20), (True, True, 5)],
)
def test_faults_count_if_they_end_an_engine_or_come_early(
    have_all_stayed: bool, was_ready: bool, seconds: int
) -> None:
    restarts = Restarts(5, 1000)
    restarts.on_ready(0, have_all_stayed=False)
    restarts.wait_seconds(KILLED, was_ready, seconds)
    restarts.on_ready(seconds + 1, have_all_stayed)
    assert restarts.num_left(seconds + 1) == 4


def test_giving_up_a_request_does_not_reduce_the_number_of_other_faults() -> None:
    restarts = Restarts(5, 1000)
    for now in (0, 20, 40):
        restarts.wait_seconds(KILLED, True, now)
    restarts.on_ready(41, have_all_stayed=False)
    restarts.wait_seconds(KILLED, True, 60, num_explained=1)
    restarts.on_ready(61, have_all_stayed=True)
    assert restarts.num_left(61) == 2
