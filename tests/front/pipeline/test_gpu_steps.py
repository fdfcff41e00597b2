"""Prefill steps on GPUs are bounded in time, and smaller after a GPU did not survive one."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from serve.core.config import ServeConfig
from serve.core.constants import Constants
from serve.core.errors import EngineError, UnavailableError
from serve.core.messages import Fault, Loaded, Result, Span
from serve.core.plan import StagePlan
from serve.core.sections import MemoryUse, StepLimit
from serve.core.types import Row, Sampling, Step
from serve.front.pipeline.gpu_steps import GpuSteps
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.status import NO_ACTIVITY, StageStatus
from serve.parent.engines import Engines
from tests.errors import fails
from tests.front.pipeline.cluster_simulation import PlayedCluster, check_answer
from tests.front.pipeline.test_lifecycle import HEALING_SECONDS

MAX_SECONDS = 2.0
DECODE_SECONDS = 0.05
TIMEOUT = Fault(EngineError.exit_code, "Rank 1: [METAL] GPU Timeout Error", "gpu_timeout")


class Gpu:
    """A GPU that takes twice as long for a token after so many others as for a first one."""

    def __init__(self, seconds_per_token: float, context_of_double_time: int) -> None:
        self.seconds_per_token = seconds_per_token
        self.context_of_double_time = context_of_double_time
        self.now = 0.0

    def run(self, step: Step) -> Span:
        started = self.now
        num_tokens = len(step.tokens)
        context = sum(row.position + row.num_tokens / 2 for row in step.rows) / len(step.rows)
        self.now += DECODE_SECONDS
        if not step.sample:
            factor = 1 + context / self.context_of_double_time
            self.now += num_tokens * self.seconds_per_token * factor
        times = (started, self.now)
        return Span(step.number, 0, len(step.rows), num_tokens, *times, context=context)


class Served:
    """Requests on one GPU, or on a CPU of the same speed."""

    def __init__(self, gpu: Gpu, is_gpu: bool = True) -> None:
        self.gpu = gpu
        self.sent: list[Step] = []
        self.chunks: list[tuple[int, int, float]] = []  # position, tokens and seconds
        engines = cast(Engines, SimpleNamespace(send=self.send))
        self.requests = Requests(ServeConfig(model=Path()), 1, engines)
        plan = StagePlan(0, (0, 4), 0, 0, 10, 0, 0, 0.5, None)
        sections = (StepLimit(MAX_SECONDS),) if is_gpu else ()
        loaded = Loaded(0, None, 0, 10**8, "any", sections=sections)
        self.stage = StageStatus(0, "h", plan, loaded=loaded)
        self.requests.settle([self.stage])
        self.requests.resume()

    def send(self, message: object) -> None:
        if isinstance(message, Step):
            self.sent.append(message)

    def read(self, prompt: list[int]) -> None:
        """Reads a prompt, and samples one token."""
        self.requests.submit([Prompt(prompt, 1, (Sampling(),), frozenset())], 0, "")
        while self.sent:
            step = self.sent.pop(0)
            if not step.rows:
                self.requests.on_result(Result(step.number, ()))
                continue
            span = self.gpu.run(step)
            self.stage.pace.update([span])
            row = step.rows[0]
            if not step.sample:
                self.chunks.append((row.position, row.num_tokens, span.end - span.start))
            self.requests.on_result(Result(step.number, (7,) if step.sample else ()))


@pytest.mark.parametrize("seconds_per_token", [0.0001, 0.002, 0.01])
@pytest.mark.parametrize("context_of_double_time", [10_000, 100_000])
def test_prefill_steps_take_less_than_two_seconds(
    seconds_per_token: float, context_of_double_time: int
) -> None:
    served = Served(Gpu(seconds_per_token, context_of_double_time))
    served.read(list(range(60_000)))
    served.read([9] * 500)
    # This one begins as a copy, after a context that the latest prompt did not have.
    served.read([*range(60_000), *range(4000)])
    first, *later = served.chunks
    assert first[1] == 128, "nothing was known"
    position, *_ = next(chunk for chunk in reversed(later) if chunk[0] >= 60_000)
    assert position >= 60_000
    assert max(seconds for *_, seconds in later) < MAX_SECONDS


def test_prefill_chunks_have_2048_tokens_on_a_fast_gpu_and_512_on_a_cpu() -> None:
    gpu, cpu = (Served(Gpu(0.0001, 30_000), is_gpu) for is_gpu in (True, False))
    for served in (gpu, cpu):
        served.read(list(range(12_000)))
    assert max(num_tokens for _, num_tokens, _ in gpu.chunks) == 2048
    assert max(num_tokens for _, num_tokens, _ in cpu.chunks) <= 512 * 1.25


def step(number: int, position: int, num_tokens: int) -> Step:
    return Step(number, 0, (Row(1, position, num_tokens),), (0,) * num_tokens, False)


def test_a_step_that_fails_halves_the_work_of_later_steps() -> None:
    steps = GpuSteps(Constants(prefill_chunk=2048))
    steps.begin(step(1, 0, 100))
    steps.begin(step(2, 30_000, 1024))
    steps.end(1)
    assert steps.interrupt()
    steps.halve()
    # A chunk may have a quarter more tokens, so that a prompt's last one is not small.
    assert 390 <= steps.max_tokens(30_000) <= 410
    assert 780 <= steps.max_tokens(0) <= 820, "half of the work, with less context"
    steps.begin(step(3, 90_000, 2048))
    assert steps.interrupt()
    steps.halve()
    assert 780 <= steps.max_tokens(0) <= 820, "the smallest size that failed counts"


@pytest.mark.parametrize(("position", "num_tokens"), [(0, 16), (0, 20), (60_000, 16)])
def test_the_smallest_step_is_not_halved_so_that_its_request_is_blamed(
    position: int, num_tokens: int
) -> None:
    steps = GpuSteps(Constants())
    assert not steps.interrupt()
    steps.begin(step(1, position, num_tokens))
    assert not steps.interrupt()
    assert steps.max_tokens(0) == 512


def with_memory(head_room: int) -> StageStatus:
    use = MemoryUse(90 * 10**9, 0, None, head_room, bytes_per_token=10**6)
    return StageStatus(1, "h", activity=replace(NO_ACTIVITY, sections=(use,)))


def test_chunks_are_small_enough_for_the_memory_that_is_left() -> None:
    """Each token of a prompt takes 1 MB while it is computed."""
    steps = GpuSteps(Constants())
    steps.settle([with_memory(10**9), with_memory(250 * 10**6)])
    assert steps.max_tokens(0) == 200
    assert steps.refusal(is_idle=False) is None


def test_a_prompt_may_try_with_little_memory_while_nothing_else_runs() -> None:
    """Otherwise one prompt that needed much would shut out all others for good."""
    steps = GpuSteps(Constants())
    steps.settle([with_memory(10**7)])
    assert "has 10.0 MB left" in (steps.refusal(is_idle=False) or "")
    assert steps.refusal(is_idle=True) is None


def test_prompts_are_refused_with_the_numbers_before_memory_runs_out() -> None:
    served = Served(Gpu(0.001, 30_000))
    served.read([1] * 100)
    served.stage.activity = with_memory(0).activity
    with fails(UnavailableError, "no_memory", "uses 90.0 GB of memory and has 0 B left"):
        served.read([1] * 100)


@pytest.mark.parametrize("seed", range(4))
def test_a_gpu_that_fails_in_a_chunk_gets_smaller_chunks_and_no_request_is_blamed(
    seed: int,
) -> None:
    """More often than a request may end the engines, and than they may be restarted."""
    cluster = PlayedCluster(seed, prefill_chunk=2048, max_restarts=3, restart_window=300.0)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    asked = cluster.ask(20_000, 20)
    steps = cluster.requests._gpu_steps
    num_faults = 0
    while steps.max_tokens(0) > 40:
        num_faults += 1
        assert cluster.run(20, lambda: bool(steps._under_way))
        before = steps.max_tokens(0)
        cluster.say(1, cluster.lifecycle.life, TIMEOUT)
        assert cluster.run(60, lambda: cluster.lifecycle.is_working)
        assert cluster.lifecycle.life == num_faults
        assert steps.max_tokens(0) < before
    assert num_faults > 3
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert cluster.failure is None
    assert cluster.requests._fault_blame.alone is None
    assert not any("request_given_up" in line for line in cluster.logged)
    assert check_answer(asked)
