"""Memory and bubble from records of ops."""

import pytest

from serve.core.messages import Probe
from serve.tune.forecast import OpRecord, OpSeconds, forecast, peak_bytes, probe_of, utilisation
from serve.tune.layout import Layout
from serve.tune.schedule import PipelineOp, Shape, make_schedule

# One micro-batch: it holds 10 bytes from F to W, and ops need 5, 4 and 3 more for a while.
RECORDS = [
    OpRecord(PipelineOp("F", 0, 0), 0.0, 1.0, 100, 110, 115),
    OpRecord(PipelineOp("B", 0, 0), 2.0, 4.0, 110, 110, 114),
    OpRecord(PipelineOp("W", 0, 0), 4.0, 4.5, 110, 102, 113),
]


def probed(**changes: int) -> Probe:
    arguments = {"base": 100, "gradients": 2, "updated": 2, **changes}
    return probe_of(RECORDS, **arguments, clips=False)


def test_times_are_averaged_for_each_stage_and_kind_of_operation() -> None:
    seconds = OpSeconds()
    seconds.add(RECORDS)
    seconds.add([OpRecord(PipelineOp("F", 1, 0), 5.0, 8.0, 0, 0, 0)])
    assert seconds.means() == [(0, "F", 2.0), (0, "B", 2.0), (0, "W", 0.5)]


def test_forecast_memory_grows_with_micro_batches_in_flight() -> None:
    probe = probed()
    # base, gradients, n - 1 held, and a forward with its own; or n held, and a backward.
    assert peak_bytes(probe, 1) == 100 + 2 + max(15, 10 + 4)
    assert peak_bytes(probe, 4) == 100 + 2 + max(30 + 15, 40 + 4)
    assert peak_bytes(probe, 0) == 100 + 2 + 15, "a stage that only goes forward"


def test_forecast_memory_can_be_largest_during_the_update() -> None:
    """An update holds the gradients, the new weights, and clipped gradients if it clips."""
    assert peak_bytes(probed(gradients=50, updated=50), 1) == 100 + 50 + 50
    clipped = probe_of(RECORDS, 100, 50, 50, clips=True)
    assert peak_bytes(clipped, 1) == 100 + 50 + 2 * 50


def test_forecast_counts_no_summed_gradients_for_a_single_micro_batch() -> None:
    """Its gradients come in W, which was measured with them."""
    probe = probed(gradients=2, updated=2)
    assert peak_bytes(probe, 1, adds_up=False) == 100 + max(15, 10 + 4, 10 + 3, 2 + 2)


def test_forecast_counts_gradients_of_half_precision_weights_as_float32() -> None:
    """They have twice the bytes of the new weights."""
    assert peak_bytes(probed(gradients=80, updated=45), 1) == 100 + 80 + 45
    clipped = probe_of(RECORDS, 100, 80, 45, clips=True)
    assert peak_bytes(clipped, 1) == 100 + 80 + 45 + 80


def test_forecast_lists_ranks_in_order() -> None:
    """Rank 0 has the last stage, which holds one micro-batch; rank 1 holds two."""
    schedule = make_schedule("1f1b", Shape(2, 8))
    probes = [
        probed(),
        probe_of([r._replace(op=r.op._replace(stage=1)) for r in RECORDS], 200, 2, 2, clips=False),
    ]
    found = forecast(schedule, probes, Layout(2))
    assert found.in_flight == [1, 2]
    assert found.peak_bytes == [peak_bytes(probes[0], 1), peak_bytes(probes[1], 2)]


def test_forecast_utilisation_is_limited_by_the_slowest_stage() -> None:
    schedule = make_schedule("1f1b", Shape(2, 50))
    equal = [(stage, kind, 1.0) for stage in (0, 1) for kind in "FBW"]
    slow = [(stage, kind, 1.0 + 2 * stage) for stage in (0, 1) for kind in "FBW"]
    assert utilisation(schedule, equal) > 0.95
    assert utilisation(schedule, slow) == pytest.approx(4 / 6, abs=0.03)
