"""Restarts within a window of time."""

from serve.core.restart_window import RestartWindow


def test_restart_window_does_not_count_restarts_that_are_older_than_the_window() -> None:
    window = RestartWindow(2, 10.0)
    assert window.num_left(0.0) == 2
    window.add(0.0)
    window.add(4.0)
    assert window.num_left(9.9) == 0
    assert window.num_left(10.0) == 1, "the first is exactly as old as the window"
    assert window.num_left(14.0) == 2


def test_restart_window_also_counts_restarts_above_its_limit() -> None:
    window = RestartWindow(1, 10.0)
    for now in (0.0, 1.0, 2.0):
        window.add(now)
    assert len(window) == 3
    assert window.num_left(2.0) == -2


def test_restart_window_forgets_the_latest_restarts() -> None:
    window = RestartWindow(3, 10.0)
    window.add(0.0)
    window.add(5.0)
    window.forget(1)
    assert window.num_left(10.0) == 3, "the one that is left has expired"
    window.add(11.0)
    window.forget(7)
    assert len(window) == 0
