"""Steps before clients come, on simulated stages. They leave no trace."""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve.core.errors import ClusterError
from serve.core.types import FIRST_WARM_UP_STEP, Sequence, Step
from serve.front.parts.interface import SchedulerPart
from serve.front.pipeline.scheduler import Scheduler
from serve.front.pipeline.warm_up import WarmUp
from tests.configs import serve_config
from tests.errors import fails
from tests.front.pipeline.simulation import make_sequence
from tests.front.pipeline.stage_model import StageModel, next_token, result_of

pytestmark = pytest.mark.anyio


class Stages:
    """Run each step that they are sent, in order."""

    def __init__(
        self,
        num_stages: int = 2,
        room: int = 100_000,
        parts: tuple[SchedulerPart, ...] = (),
        seconds_of: Callable[[Step], float] = lambda _: 0.0,
        is_log_seen: Callable[[], bool] = lambda: False,
        times_rows: bool = True,
        **flags: Any,
    ) -> None:
        config = serve_config(model=Path("model"), **flags)
        adapters = flags.pop("lora_modules", ())
        versions = list(range(1, 1 + len(adapters)))
        self.model = StageModel()
        self.steps: list[Step] = []
        self.admitted: set[int] = set()
        self.todo: deque[Step] = deque()
        self._is_log_seen = is_log_seen
        self.begun: list[Sequence] = []
        self.progress: list[tuple[int, int]] = []
        self.warm_up = WarmUp(
            config,
            num_stages,
            room,
            versions,
            self._send,
            parts,
            times_rows=times_rows,
            progressed=self._note,
            clock=lambda: self.seconds,
        )
        self.seconds = 0.0
        self._seconds_of = seconds_of

    def _note(self, done: int, total: int) -> None:
        assert not self._is_log_seen()
        self.progress.append((done, total))

    def _send(self, step: Step, begun: list[Sequence]) -> None:
        assert {sequence.id for sequence in begun} == set(step.begun)
        self.admitted.update(step.begun)
        self.begun += begun
        self.steps.append(step)
        self.todo.append(step)

    def run_step(self) -> None:
        step = self.todo.popleft()
        self.seconds += self._seconds_of(step)
        self.model.run(step)
        self.warm_up.on_result(result_of(step, next_token))

    async def run(self, stop_after: int = -1) -> None:
        running = asyncio.create_task(self.warm_up.run())
        num_run = 0
        while not running.done():
            await asyncio.sleep(0)
            if num_run == stop_after:
                self.warm_up.stop()
            if self.todo:
                self.run_step()
                num_run += 1
        await running

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Rows, and tokens of each."""
        return {(len(step.rows), row.num_tokens) for step in self.steps for row in step.rows}


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_warm_up_runs_a_chunk_and_rows_alone_and_together(num_stages: int) -> None:
    stages = Stages(num_stages)
    await stages.run()
    assert {(1, 1), (4, 1)} <= stages.shapes
    chunks = {num_tokens for num_rows, num_tokens in stages.shapes if num_rows == 1}
    assert max(chunks) >= (512 if num_stages == 1 else 64)
    assert min(step.number for step in stages.steps) > FIRST_WARM_UP_STEP


async def test_warm_up_takes_few_steps_and_tokens() -> None:
    """There were 60 steps, many of which repeated the sizes of others."""
    stages = Stages(num_stages=2)
    await stages.run()
    assert len([step for step in stages.steps if step.rows]) <= 24
    assert sum(len(step.tokens) for step in stages.steps) <= 300


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_a_whole_chunk_is_left_out_of_a_warm_up_if_it_would_take_seconds(
    num_stages: int,
) -> None:
    stages = Stages(num_stages, seconds_of=lambda _: 0.2)
    await stages.run()
    assert max(num_tokens for _, num_tokens in stages.shapes) == 64


@pytest.mark.parametrize("max_num_seqs", [1, 32])
async def test_warm_up_samples_greedily_and_randomly_and_under_a_grammar(max_num_seqs: int) -> None:
    stages = Stages(max_num_seqs=max_num_seqs, max_queue=0)
    await stages.run()
    samplings = [sequence.sampling for sequence in stages.begun]
    assert any(sampling.temperature for sampling in samplings)
    assert any(sampling.grammar for sampling in samplings)
    assert any(not sampling.temperature and not sampling.grammar for sampling in samplings)


async def test_warm_up_reports_its_progress_until_its_line_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The line was written into the bar."""
    caplog.set_level("INFO")
    stages = Stages(1, is_log_seen=lambda: "warmed_up" in caplog.text)
    await stages.run()
    assert "warmed_up" in caplog.text
    *progress, end = stages.progress
    assert end == (0, 0)
    done = [done for done, _ in progress]
    assert done == sorted(done)
    last_done, total = progress[-1]
    assert last_done == total > 0


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"room": 256},
        {"max_model_len": 2},
        {"max_num_seqs": 1},
        {"max_queue": 0, "max_num_seqs": 2},
        {"num_groups": 1},
        {"prefill_chunk": 1, "max_model_len": 40},
        {"lora_modules": ("a=x", "b=y")},
    ],
)
async def test_warm_up_leaves_no_sequence_on_the_stages(flags: dict[str, Any]) -> None:
    stages = Stages(**flags)
    await stages.run()
    assert stages.admitted
    assert stages.model.held == {}
    max_tokens = flags.get("max_model_len", flags.get("room", 1000))
    assert all(row.position + row.num_tokens <= max_tokens for s in stages.steps for row in s.rows)


async def test_warm_up_also_runs_steps_that_mix_adapters() -> None:
    stages = Stages(lora_modules=("a=x", "b=y"))
    await stages.run()
    mixes = [{row.adapter_version for row in step.rows} for step in stages.steps if step.sample]
    assert {1} in mixes
    assert {0, 1, 2} in mixes


@pytest.mark.parametrize("stop_after", range(0, 30, 3))
async def test_a_warm_up_that_is_stopped_leaves_no_sequence_on_the_stages(stop_after: int) -> None:
    stages = Stages()
    await stages.run(stop_after)
    assert stages.model.held == {}
    assert len(stages.steps) <= stop_after + 12  # those under way, and what is dropped


async def test_a_warm_up_whose_steps_get_no_result_is_a_fault() -> None:
    stages = Stages(load_timeout=1.0)
    with fails(ClusterError, "cluster"):
        await stages.warm_up.run()


def test_step_numbers_start_again_before_they_reach_those_of_a_warm_up() -> None:
    scheduler = Scheduler(1, max_num_sequences=8, max_queue=8, prefill_chunk=8)
    scheduler.num_steps = FIRST_WARM_UP_STEP - 2
    scheduler.add(make_sequence(1, 9, 3))
    numbers = []
    for _ in range(2):
        step = scheduler.schedule()
        assert step is not None
        numbers.append(step.number)
    assert numbers == [FIRST_WARM_UP_STEP - 1, 1]
