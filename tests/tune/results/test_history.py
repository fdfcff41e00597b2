"""Which validation was the best, and when a run gives up."""

import pytest

from serve.tune.results.history import LossHistory

NAN = float("nan")


def added(*losses: float) -> tuple[LossHistory, list[bool]]:
    history = LossHistory()
    return history, [history.add(4 * n, loss) for n, loss in enumerate(losses)]


def test_a_loss_is_the_best_loss_only_if_it_is_lower_than_all_earlier_losses() -> None:
    history, is_best = added(3.0, 2.0, 2.5, 2.0, 1.5)
    assert is_best == [False, True, False, False, True]
    assert history.best == (16, 1.5)
    assert LossHistory().best is None


def test_a_loss_that_is_not_a_number_is_never_the_best_loss() -> None:
    history, is_best = added(NAN, NAN, 2.0, NAN)
    assert is_best == [False, False, True, False]
    assert history.best == (8, 2.0)


@pytest.mark.parametrize(
    ("losses", "patience"),
    [((3.0, 2.0, 2.0, 2.1), 2), ((3.0, 3.1, 3.0), 2), ((1.0, NAN), 1), ((3.0, 2.0, 2.5), 1)],
)
def test_a_run_stalls_after_the_given_number_of_validations_without_progress(
    losses: tuple[float, ...], patience: int
) -> None:
    assert added(*losses)[0].has_stalled(patience)
    assert not added(*losses[:-1])[0].has_stalled(patience)
    assert not added(*losses, 0.5)[0].has_stalled(patience)
    assert not added(*losses)[0].has_stalled(None)


def test_a_run_without_a_finite_loss_has_no_best_loss_and_does_not_stall() -> None:
    history, is_best = added(NAN, NAN, float("inf"), NAN)
    assert not any(is_best)
    assert history.best is None
    assert not history.has_stalled(1)


def test_a_run_without_any_validation_does_not_stall() -> None:
    assert not LossHistory().has_stalled(1)
