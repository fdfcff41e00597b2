"""What drafts cost, from what the stages report."""

import pytest

from serve.core.messages import Span
from serve.core.sections import DraftCosts
from serve.front.parts.drafts.costs import draft_model_costs, token_cost
from serve.front.pipeline.status import StageStatus
from tests.front.pipeline.test_stages import load, make_stage


def test_token_cost_is_a_share_of_a_step_and_unknown_until_all_stages_have_run_steps() -> None:
    stage = make_stage(0, (0, 4), 0.2)
    stage.pace.update([Span(10, 0, 1, n, 0.0, 0.2 + 0.02 * n, n - 1) for n in [1, 9] * 80])
    assert token_cost([stage]) == pytest.approx(0.02 / 0.22, rel=0.2)
    assert token_cost([stage, StageStatus(1, "h")]) is None


def test_draft_model_costs_are_shares_of_one_step_through_all_stages() -> None:
    stages = [make_stage(0, (4, 8), 0.1), make_stage(1, (0, 4), 0.1)]
    assert draft_model_costs(stages) is None
    load(stages[0], bytes_owned=1000, sections=(DraftCosts(100, 0.0),))
    load(stages[1], bytes_owned=1000)
    assert draft_model_costs(stages) == pytest.approx((0.05, 0.005))
    runs = [Span(n, 0, 1, 3, 0.0, 0.06, 3, is_draft=True) for n in range(20)]
    reading = Span(0, 0, 1, 100, 0.0, 0.5, 0, is_draft=True)
    stages[0].pace.update([reading, *runs])
    # A step of four rows takes 0.1 s on each stage; one of a row takes less.
    guess, reading_cost = draft_model_costs(stages) or (0.0, 0.0)
    assert guess == pytest.approx(0.02 / 0.17, rel=0.1)
    assert reading_cost == pytest.approx(guess / 4, rel=0.1)
    assert stages[0].pace.num_decode_steps == 500
    assert runs[0].kind == "draft"
