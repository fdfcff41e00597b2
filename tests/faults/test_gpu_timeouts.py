"""A GPU's watchdog, as on macOS: work that takes longer than 5 s is an error, also if it waits for
another machine. The engines are real ones; MLX fails by inside/sitecustomize.py.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.cluster.servers import Server, quick, running
from tests.faults.cases import CHAT, JSON, good_body, said
from tests.faults.test_inside import INSIDE
from tests.test_launcher import wait_until

pytestmark = pytest.mark.long

GPU_SECONDS = 5.0
HELD_SECONDS = 6.0
STEP_SECONDS = 0.02
LONG = "word " * 1000  # so long that its prefill is seen before it is over
SHORT = "Tell me a story."


@contextmanager
def shards(cost_of_waiting: float) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", INSIDE)
        patch.setenv("GPU_SECONDS", str(GPU_SECONDS))
        patch.setenv("GPU_COST", str(cost_of_waiting))
        patch.setenv("STEP_SECONDS", str(STEP_SECONDS))
        flags = ("--tensor-parallel-size", "2", "--no-enable-prefix-caching")
        with running(2, *flags, quick(prefill_chunk=16)) as server:
            yield server


@pytest.fixture(scope="module")
def waiting() -> Iterator[Server]:
    """Shards that evaluate each sum separately, in decode too."""
    with shards(cost_of_waiting=1.0) as server:
        yield server


def text_of(server: Server, prompt: str) -> str:
    body = good_body(messages=said(prompt), max_tokens=60, ignore_eos=True)
    reply = httpx2.post(server.url + CHAT, content=body, headers=JSON, timeout=60)
    content: str = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    return content


def steps(server: Server, seconds: float) -> list[dict[str, Any]]:
    """Returns the steps of rank 0's latest seconds."""
    trace = server.get(f"/admin/trace?seconds={seconds}")["traceEvents"]
    return [event for event in trace if event["ph"] == "X" and event["pid"] == 0]


def longest(server: Server, kind: str) -> float:
    """Returns the seconds of the longest of the latest steps of a kind."""
    return max(step["dur"] for step in steps(server, 60) if step["name"].startswith(kind)) / 1e6


def text_with_held_shard(server: Server, kind: str, prompt: str) -> str:
    """Asks, and stops rank 1's engine for a while in the middle of the prefill or decode steps."""
    engine = server.engines()[1].pid
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(text_of, server, prompt)
        deadline = time.monotonic() + 60
        while not any(step["name"].startswith(kind) for step in steps(server, 0.5)):
            assert time.monotonic() < deadline, f"no {kind} step"
        os.kill(engine, signal.SIGSTOP)
        time.sleep(HELD_SECONDS)
        os.kill(engine, signal.SIGCONT)
        return answer.result()


@pytest.mark.parametrize(("kind", "prompt"), [("prefill", LONG), ("decode", SHORT)])
def test_shards_survive_while_one_of_them_is_suspended(
    waiting: Server, kind: str, prompt: str
) -> None:
    expected = text_of(waiting, prompt)
    time.sleep(1)  # These steps are no longer in the trace.
    engines = {rank: engine.pid for rank, engine in waiting.engines().items()}
    assert text_with_held_shard(waiting, kind, prompt) == expected
    wait_until(lambda: longest(waiting, kind) > GPU_SECONDS)  # The ranks report it once in a while.
    print(f"{kind}: a pause of {longest(waiting, kind):.2f} s")
    assert {rank: engine.pid for rank, engine in waiting.engines().items()} == engines
    assert waiting.get("/admin/pipeline")["num_restarts"] == 0


def test_a_gpu_timeout_is_logged_and_the_answer_continues() -> None:
    """In decode steps that are one lazy graph, because waiting for each sum costs too much."""
    with shards(cost_of_waiting=9.0) as server:
        expected = text_of(server, SHORT)
        time.sleep(1)
        assert text_with_held_shard(server, "decode", SHORT) == expected
        line = server.wait_for_log("event=recovering life=1 .*")
        assert "Caused GPU Timeout Error" in line
        assert "macOS ended a step that took the GPU too long" in line
