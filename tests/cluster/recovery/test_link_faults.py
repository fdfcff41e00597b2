"""Links that are reset, or held for a second, again and again under fourteen streams: nothing is
lost, no token changes, and the engines read and compute nothing twice."""

import json
import math
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import psutil
import pytest

from tests.cluster.recovery.crowd import (
    NUM_STREAMS,
    AnyStream,
    Pair,
    has_changed,
    is_lost,
    longest_gap,
    pair,
    run_crowd,
)
from tests.cluster.recovery.test_links import num_restarts
from tests.cluster.servers import LOG_SECONDS, TINY_CHAT, quick

HELD_SECONDS = 1.0
NUM_DISTURBED = 10  # A fault comes only while this many streams run.
MAX_READ_BYTES = 1 << 20  # of all engines: hostfiles and the like. The weights have 5.3 MB.
KINDS = ("reset", "hold")

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("patient_parents")]


@dataclass(frozen=True, slots=True)
class Outage:
    """began and ended are times of the monotonic clock."""

    kind: str
    began: float
    ended: float


@dataclass
class LinkFaults:
    """Runs of all streams with as many faults as fit in. pauses has the longest pause in seconds of
    each fault, less the time of the outage itself."""

    cluster: Pair
    expected: list[AnyStream]
    num_faults: int
    num_tokens: int
    chance: random.Random
    outages: list[Outage] = field(default_factory=list)
    pauses: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    num_lost: int = 0
    num_changed: int = 0
    prefilled: list[tuple[int, int]] = field(default_factory=list)  # by each rank in each run

    def run(self) -> None:
        while len(self.outages) < self.num_faults:
            num_before = len(self.outages)
            began = time.time()
            streams = run_crowd(self.cluster.server, self.disturb, num_tokens=self.num_tokens)
            self.prefilled.append(num_prefilled(self.cluster, began))
            # None if a busy machine lets all streams end before anything disturbs them.
            for outage in self.outages[num_before:]:
                gap = longest_gap(streams, outage.began, outage.ended)
                self.pauses[outage.kind].append(gap - (outage.ended - outage.began))
            for stream in streams:
                lost = is_lost(stream)
                self.num_lost += lost
                self.num_changed += not lost and has_changed(stream, self.expected[stream.number])

    def disturb(self, streams: list[AnyStream]) -> None:
        wait_for_first_tokens(streams)
        while len(self.outages) < self.num_faults:
            time.sleep(self.chance.uniform(0.05, 0.5))
            self.cluster.server.wait_until_ready()
            if sum(stream.is_alive() for stream in streams) < NUM_DISTURBED:
                return
            kind = KINDS[len(self.outages) % len(KINDS)]
            began = time.monotonic()
            ended = self.reset() if kind == "reset" else self.hold()
            self.outages.append(Outage(kind, began, ended))
            wait_until_all_go_on(streams, ended)  # A pause is to be due to one outage.

    def reset(self) -> float:
        """Resets the connection that carries rank 1's tensors, or both. (The other one is idle,
        because rank 0 starts steps without tensors.) Returns when that was done, after the fault
        was noticed."""
        before = num_restarts(self.cluster.server)
        num_links = self.chance.choice((1, 2))
        for proxy in self.cluster.ranks.proxies[:num_links]:
            proxy.reset()
        ended = time.monotonic()
        while num_restarts(self.cluster.server) == before:
            assert time.monotonic() < ended + LOG_SECONDS, "a reset is not noticed"
            time.sleep(0.02)
        return ended

    def hold(self) -> float:
        self.cluster.ranks.hold_links(HELD_SECONDS)
        return time.monotonic()


def wait_for_first_tokens(streams: list[AnyStream]) -> None:
    deadline = time.monotonic() + LOG_SECONDS
    while not all(stream.times for stream in streams):
        assert time.monotonic() < deadline, "no first token came"
        time.sleep(0.01)


def wait_until_all_go_on(streams: list[AnyStream], since: float) -> None:
    """Waits until each stream has ended or has had a token since a time of the monotonic clock."""
    deadline = time.monotonic() + LOG_SECONDS
    while any(stream.is_alive() and stream.times[-1] <= since for stream in streams):
        assert time.monotonic() < deadline, "a stream does not go on after an outage"
        time.sleep(0.01)


def num_prefilled(cluster: Pair, since: float) -> tuple[int, int]:
    """Returns how many tokens of prompts each rank has computed since a time (of time.time())."""
    time.sleep(0.6)  # until the ranks have reported
    counts = [0, 0]
    seconds = math.ceil(time.time() - since)
    for event in cluster.server.get(f"/admin/trace?seconds={seconds}")["traceEvents"]:
        is_prefill = event["ph"] == "X" and event["name"].startswith("prefill")
        if is_prefill and event["ts"] / 1e6 > since:
            counts[event["pid"]] += event["args"]["tokens"]
    first, second = counts
    return first, second


def num_read_bytes(engines: list[psutil.Process]) -> int:
    """Returns how many bytes the engines have read from files since they started, or 0 where the
    system does not count them."""
    if not hasattr(psutil.Process, "io_counters"):
        return 0
    return sum(engine.io_counters().read_chars for engine in engines)


def tiny_chat_in_bfloat16(folder: Path) -> Path:
    shutil.copytree(TINY_CHAT, folder)
    weights: dict[str, Any] = {}
    for name, array in mx.load(str(TINY_CHAT / "model.safetensors")).items():
        weights[name] = array.astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return folder


@pytest.mark.parametrize(
    ("dtype", "num_faults", "num_tokens"),
    [
        ("float32", 2, 150),
        pytest.param("float32", 4, 300, marks=pytest.mark.slow),
        pytest.param("float32", 100, 300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param("bfloat16", 100, 300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_broken_links_cost_no_more_than_a_pause(
    tmp_path: Path,
    dtype: str,
    num_faults: int,
    num_tokens: int,
) -> None:
    model = TINY_CHAT if dtype == "float32" else tiny_chat_in_bfloat16(tmp_path / "tiny-chat")
    flags = (quick(max_restarts=100_000), "--no-enable-prefix-caching")
    with pair(tmp_path, *flags, model=model) as cluster:
        began = time.time()
        expected = run_crowd(cluster.server, wait_for_first_tokens, num_tokens=num_tokens)
        assert not [stream.number for stream in expected if is_lost(stream)], cluster.server.text
        prefilled_once = num_prefilled(cluster, began)
        engines = list(cluster.engines().values())
        num_bytes = num_read_bytes(engines)
        chance = random.Random(num_faults)
        faults = LinkFaults(cluster, expected, num_faults, num_tokens, chance)
        faults.run()
        num_read = num_read_bytes(engines) - num_bytes
        report(faults, dtype, num_read)
        assert (faults.num_lost, faults.num_changed) == (0, 0)
        assert num_restarts(cluster.server) == len(faults.pauses["reset"])
        assert list(cluster.engines().values()) == engines, "an engine was replaced"
        assert num_read < MAX_READ_BYTES
        assert set(faults.prefilled) == {prefilled_once}, "prompts were computed again"


def report(faults: LinkFaults, dtype: str, num_read: int) -> None:
    num_runs = len(faults.prefilled)
    print(f"{dtype}: {len(faults.outages)} faults in {num_runs} runs of {NUM_STREAMS} streams:")
    print(f"{faults.num_lost} lost, {faults.num_changed} changed, {num_read} bytes read from files")
    usual = longest_gap(faults.expected, 0.0, math.inf)
    for kind, pauses in faults.pauses.items():
        middle, longest = median(pauses), max(pauses)
        print(f"{kind}, {len(pauses)} times: p50 {middle:.3f} s, max {longest:.3f} s", end=" ")
        print(f"(longest time between two tokens without a fault: {usual:.3f} s)")
