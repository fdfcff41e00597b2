"""The steps of a warm-up have drafts where those of requests will have some."""

from pathlib import Path

import pytest

from serve.front.parts.drafts.speculation import Speculation
from tests.configs import serve_config
from tests.front.pipeline.test_warm_up import Stages

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("has_drafts", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
async def test_warm_up_runs_steps_with_drafts_if_drafts_are_possible(
    num_stages: int, has_drafts: bool
) -> None:
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = has_drafts
    stages = Stages(num_stages, parts=(speculation,))
    await stages.run()
    rows = {len(step.rows) for step in stages.steps if step.num_drafts}
    assert rows >= {1, 4} if has_drafts else not rows
    assert stages.model.held == {}
    done, total = stages.progress[-2]
    assert done == total > 0


async def test_a_warm_up_with_drafts_takes_few_steps() -> None:
    """There were 60 steps, many of which repeated the sizes of others."""
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    stages = Stages(parts=(speculation,))
    await stages.run()
    assert len([step for step in stages.steps if step.rows]) <= 24
    assert sum(len(step.tokens) for step in stages.steps) <= 300


@pytest.mark.parametrize("stop_after", range(0, 30, 3))
async def test_a_warm_up_with_drafts_that_is_stopped_leaves_no_sequence(stop_after: int) -> None:
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    stages = Stages(parts=(speculation,))
    await stages.run(stop_after)
    assert stages.model.held == {}
