"""The memory of a Mac: a stand-in for MLX keeps accounts, and refuses what Metal refuses."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from serve.core.sections import MemoryUse
from serve.rank import memory

GB = 10**9
RECOMMENDED = 96 * GB


class StandIn:
    """MLX on a Mac with 128 GB."""

    def __init__(self, active: int = 0, cache: int = 0, has_metal: bool = True) -> None:
        self.active, self.cache = active, cache
        self.wired_limit = 0
        self.cache_limit: int | None = None
        self.peak = 0
        self.called: list[str] = []
        self.metal = SimpleNamespace(is_available=lambda: has_metal)

    def device_info(self) -> dict[str, Any]:
        return {"max_recommended_working_set_size": RECOMMENDED}

    def get_active_memory(self) -> int:
        return self.active

    def get_cache_memory(self) -> int:
        return self.cache

    def get_peak_memory(self) -> int:
        return self.peak

    def reset_peak_memory(self) -> None:
        self.peak = self.active

    def ones(self, size: int) -> int:
        return size

    def eval(self, _: int) -> None:
        self.called.append("eval")

    def clear_cache(self) -> None:
        self.called.append("clear")
        self.cache = 0

    def set_cache_limit(self, limit: int) -> None:
        self.called.append("cache")
        self.cache_limit = limit

    def set_wired_limit(self, limit: int) -> None:
        if limit > RECOMMENDED:
            raise ValueError("[metal::set_wired_limit] larger than the maximum working set size")
        self.called.append("wire")
        self.wired_limit = limit


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(active=40 * GB, cache=4 * GB)
    monkeypatch.setattr(memory, "mx", stand_in)
    return stand_in


def available(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_memory = SimpleNamespace(available=num_bytes, wired=50 * GB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: virtual_memory)


def test_free_memory_of_a_mac_is_a_share_of_its_working_set(
    mac: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    available(80 * GB, monkeypatch)
    assert memory.free_bytes() == int(0.9 * RECOMMENDED) - 40 * GB
    mac.active = 95 * GB
    assert memory.free_bytes() == 0


def test_free_memory_of_a_mac_leaves_out_what_other_programs_use(
    mac: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working set that macOS recommends knows nothing of them."""
    available(20 * GB, monkeypatch)
    assert memory.free_bytes() == int(0.9 * 24 * GB)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_engines_on_a_mac_together_wire_no_more_memory_than_macos_allows(
    mac: StandIn, num_processes: int
) -> None:
    memory.wire(num_processes)
    assert mac.wired_limit == RECOMMENDED // num_processes
    assert mac.called == ["clear", "wire"], "what loading has left is not wired"


def test_the_cache_of_mlx_can_be_limited_and_emptied_and_unwired(mac: StandIn) -> None:
    memory.limit_cache()
    assert mac.cache_limit == 2 << 30
    memory.tidy()
    assert mac.cache == 0
    memory.wire(1)
    memory.give_back()
    assert mac.wired_limit == 0
    assert mac.called[-2:] == ["wire", "clear"]


def test_no_function_of_metal_is_called_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = StandIn(has_metal=False)
    monkeypatch.setattr(memory, "mx", stand_in)
    available(10 * GB, monkeypatch)
    memory.limit_cache()
    memory.wire(1)
    memory.tidy()
    memory.give_back()
    assert stand_in.called == []
    assert memory.free_bytes() == 8 * GB


def test_the_report_contains_the_memory_that_steps_may_use(
    mac: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than keys and values may take, whose room leaves a share for this."""
    available(80 * GB, monkeypatch)
    steps = memory.StepMemory()
    assert steps.usage() == MemoryUse(40 * GB, 4 * GB, 50 * GB, RECOMMENDED - 40 * GB)
    available(2 * GB, monkeypatch)
    assert steps.usage().head_room_bytes == 6 * GB, "other programs took it; MLX's cache can go"


def test_memory_of_prefill_steps_is_measured(mac: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    available(80 * GB, monkeypatch)
    steps = memory.StepMemory()
    for num_tokens, peak in ((100, 10_000), (100, 30_000)):
        steps.begin()
        mac.peak += peak
        steps.end(num_tokens)
    assert steps.usage().bytes_per_token == 200, "the mean of 100 and 300"
    assert mac.called == ["clear", "clear"]
    steps.begin()
    mac.peak += 6400
    steps.end(1)
    assert steps.usage().bytes_per_token == 150, "as of 64 tokens"


def test_an_idle_gpu_is_kept_awake_for_some_minutes(
    mac: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a step runs, nor long after the latest one."""
    monkeypatch.setattr(memory, "_BEAT_SECONDS", 0.001)
    is_ending = threading.Event()
    idle = [0.0, 1.0, 299.0, 301.0]

    def idle_seconds() -> float:
        seconds = idle.pop(0)
        if not idle:
            is_ending.set()
        return seconds

    memory.keep_wired(idle_seconds, is_ending)
    assert mac.called == ["eval", "eval"]
