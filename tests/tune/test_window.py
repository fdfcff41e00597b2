"""What a report says of the updates since the one before."""

import math
import time
from dataclasses import replace

import pytest

from serve.tune.forecast import OpRecord
from serve.tune.loop import UpdateMetrics
from serve.tune.schedule import PipelineOp
from serve.tune.window import Window


def update(
    *, busy: float = 1.0, peak: int = 5, loss: float = 2.0, labels: int = 10
) -> UpdateMetrics:
    return UpdateMetrics(
        loss=loss,
        gradient_norm=1.5,
        num_labels=labels,
        num_tokens=100,
        is_skipped=not math.isfinite(loss),
        seconds=2.0,
        busy_seconds=[busy, 2.0],
        peak_bytes=[peak, 7],
        records=[OpRecord(PipelineOp("F", 0, 0), 0.0, busy, 0, 0, 0)],
    )


def test_reported_speed_counts_only_the_time_of_updates() -> None:
    window = Window(2)
    for _ in range(2):
        window.add(update(), 4.0)
        time.sleep(0.05)  # a validation, a checkpoint
    report = window.report(6, 1e-4, accumulated=3)
    assert report.tokens_per_second == pytest.approx(200 / 8)
    assert report.iterations_per_second == pytest.approx(2 * 3 / 8)
    window.add(update(), 1.0)
    assert window.report(9, 1e-4, accumulated=3).tokens_per_second == pytest.approx(100)


def test_reported_loss_is_averaged_over_all_learned_tokens() -> None:
    window = Window(2)
    window.add(update(busy=1.0, peak=9, loss=1.0, labels=30), 1.0)
    window.add(update(busy=2.0, loss=3.0, labels=10), 1.0)
    window.add(update(busy=2.0, loss=math.nan), 1.0)
    report = window.report(3, 1e-4, accumulated=1)
    assert report.loss == pytest.approx((30 + 30) / 40)
    assert report.utilisation == pytest.approx((0.75 + 1 + 1) / 3)
    assert (report.peak_bytes, report.num_skipped) == ([9, 7], 1)
    assert window.utilisation == pytest.approx(11 / 12)
    assert not window.updates


def failed(*losses: float, is_float16: bool = False) -> str:
    """What a window says after updates with these losses; one that is 2.0 was good, one that is
    1.0 has gradients that are not finite."""
    window = Window(2, is_float16=is_float16)
    for loss in losses:
        window.add(replace(update(loss=loss), is_skipped=loss != 2.0), 1.0)
    return window.failure if window.has_failed else ""


def test_a_run_fails_after_ten_updates_in_a_row_that_are_not_finite() -> None:
    nan, inf = math.nan, math.inf
    assert not failed(*[inf] * 9, 2.0, *[nan] * 9)
    assert failed(*[inf] * 9, 2.0, *[nan] * 10).startswith("10 updates in a row were not finite")


def test_the_error_blames_the_learning_rate_only_after_a_good_update() -> None:
    nan = math.nan
    assert "lower --learning-rate" in failed(2.0, *[nan] * 10)
    before = failed(*[nan] * 10)
    assert "the learning rate is not the cause" in before
    assert "lower" not in before


def test_the_error_names_what_was_not_finite_and_recommends_bfloat16() -> None:
    assert "(the loss)" in failed(*[math.nan] * 10)
    overflowed = failed(*[1.0] * 10, is_float16=True)
    assert "(the gradients)" in overflowed
    assert "bfloat16" in overflowed
    assert "bfloat16" not in failed(*[1.0] * 10)
