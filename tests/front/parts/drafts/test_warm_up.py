"""The steps of a warm-up have drafts where those of requests will have some, and the last ones tell
what drafts cost."""

from collections.abc import Callable
from pathlib import Path

import pytest

from serve.core.types import Step
from serve.front.parts.drafts.speculation import Speculation
from tests.configs import serve_config
from tests.front.parts.drafts.test_speculation import make_sequence, make_speculation
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


async def test_a_warm_up_with_drafts_takes_few_steps_on_slow_stages() -> None:
    """There were 60 steps, many of which repeated the sizes of others."""
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    stages = Stages(parts=(speculation,), seconds_of=lambda _: 0.2)
    await stages.run()
    assert len([step for step in stages.steps if step.rows]) <= 24
    assert sum(len(step.tokens) for step in stages.steps) <= 300
    assert speculation.row_costs == [1.0]


def stairs(num_tokens: int) -> float:
    """Returns the relative time of a step on stages for which 4 to 9 tokens take longer than 10."""
    if 4 <= num_tokens <= 9:
        return 2.5
    return 1 + 0.02 * (num_tokens - 1) + 0.4 * max(0, num_tokens - 10)


def slope(num_tokens: int) -> float:
    return 1 + 0.1 * (num_tokens - 1)


async def warmed_up(cost: Callable[[int], float]) -> Speculation:
    """Runs a warm-up whose steps take this time by their number of tokens. The first step of each
    size takes longer, because it prepares kernels."""
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    sizes: set[int] = set()

    def seconds_of(step: Step) -> float:
        size = len(step.tokens)
        seconds = 0.01 * cost(size)
        if size not in sizes:
            seconds += 0.02
        sizes.add(size)
        return seconds

    stages = Stages(parts=(speculation,), seconds_of=seconds_of)
    await stages.run()
    assert stages.model.held == {}
    done, total = stages.progress[-2]
    assert done == total
    return speculation


@pytest.mark.parametrize("cost", [stairs, slope])
async def test_a_warm_up_finds_the_costs_of_up_to_16_drafts(cost: Callable[[int], float]) -> None:
    speculation = await warmed_up(cost)
    assert speculation.row_costs == pytest.approx([cost(n) for n in range(1, 18)])


async def test_the_costs_that_a_warm_up_has_found_decide_the_number_of_drafts() -> None:
    """A straight line through the steps made it 4 to 7, the dear ones."""
    ((drafts, _),) = (await warmed_up(stairs)).propose([make_sequence()])
    assert len(drafts) == 9
    on_slope = (await warmed_up(slope)).propose([make_sequence()])
    assert on_slope == make_speculation(token_cost=0.1).propose([make_sequence()])


async def test_a_warm_up_times_fewer_drafts_where_steps_take_longer() -> None:
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    stages = Stages(parts=(speculation,), seconds_of=lambda _: 0.1)
    await stages.run()
    assert 4 <= len(speculation.row_costs) <= 10
    assert stages.seconds <= 0.1 * 24 + 1.2
    assert stages.model.held == {}


@pytest.mark.parametrize("stop_after", range(0, 60, 3))
async def test_a_warm_up_with_drafts_that_is_stopped_leaves_no_sequence(stop_after: int) -> None:
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    stages = Stages(parts=(speculation,))
    await stages.run(stop_after)
    assert stages.model.held == {}


async def test_a_warm_up_times_no_drafts_without_gpus() -> None:
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    stages = Stages(parts=(speculation,), seconds_of=lambda _: 0.001, times_rows=False)
    await stages.run()
    assert speculation.row_costs == [1.0]
