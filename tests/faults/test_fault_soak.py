"""A cluster that has a fault of a random kind every twenty seconds, for as long as
FAULT_SOAK_SECONDS says: nothing is lost, no token changes, and no process grows."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.cluster.recovery.crowd import (
    MAX_SILENT_SECONDS,
    NUM_STREAMS,
    AnyStream,
    Pair,
    has_changed,
    is_lost,
    pair,
    run_crowd,
)
from tests.cluster.servers import LOG_SECONDS, gone, quick

SOAK_SECONDS = float(os.environ.get("FAULT_SOAK_SECONDS", "240"))
SEED = int(os.environ.get("FAULT_SOAK_SEED", "0"))
SECONDS_BETWEEN_FAULTS = 20.0
STREAMS_AT_A_TIME = 5
HELD_SECONDS = 1.0
NUM_FIRST_ROUNDS = 6  # in which everything is used once
NUM_FILLING_ROUNDS = 2
MAX_GROWTH_BYTES = 30 << 20
# A parent has more of them while it keeps a spare engine.
MAX_MORE_DESCRIPTORS = 4
MAX_MORE_THREADS = 4

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(int(SOAK_SECONDS * 1.5) + 600),
]


@dataclass(frozen=True, slots=True)
class Size:
    """What a process uses when nothing runs."""

    num_descriptors: int
    num_threads: int
    num_bytes: int


@dataclass
class FaultSoak:
    """Rounds with a few streams and one fault each. sizes has what each process used after each of
    the later rounds, by role and process id."""

    cluster: Pair
    expected: list[AnyStream]
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    sizes: dict[tuple[str, int], list[Size]] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        number = 0
        while time.monotonic() < began + seconds:
            self.round(number)
            number += 1
            time.sleep(max(0.0, began + number * SECONDS_BETWEEN_FAULTS - time.monotonic()))

    def round(self, number: int) -> None:
        kind, cause = self.chance.choice(list(self.faults().items()))
        numbers = self.chance.sample(range(NUM_STREAMS), STREAMS_AT_A_TIME)

        def disturb(_: list[AnyStream]) -> None:
            time.sleep(self.chance.uniform(0.0, 1.5))
            cause()

        streams = run_crowd(self.cluster.server, disturb, numbers)
        self.counts[kind] += 1
        for stream in streams:
            self.counts["streams"] += 1
            if is_lost(stream):
                self.note_wrong(number, kind, f"stream {stream.number} was lost: {stream.end!r}")
            elif has_changed(stream, self.expected[stream.number]):
                self.note_wrong(number, kind, f"stream {stream.number} got {stream.text!r}")
        self.cluster.server.wait_until_ready(MAX_SILENT_SECONDS)
        if number >= NUM_FIRST_ROUNDS:
            self.note_sizes()

    def note_wrong(self, number: int, kind: str, what: str) -> None:
        """Notes what was lost or changed, at once on standard output: the soak may be long."""
        self.wrong.append(f"round {number}, {kind}: {what}")
        logs = (self.cluster.server.log, self.cluster.other.log)
        latest = "\n".join("".join(log[-100:]) for log in logs)
        print(f"{self.wrong[-1]}\n{latest}", flush=True)

    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            "reset": self.reset,
            "parents' reset": self.reset_parents,
            "hold": lambda: self.cluster.ranks.hold_links(HELD_SECONDS),
            "engine kill": lambda: self.random_engine().kill(),
            "SIGSTOP": lambda: self.random_engine().send_signal(signal.SIGSTOP),
            "parent kill": self.kill_parent,
        }

    def reset(self) -> None:
        proxies = self.cluster.ranks.proxies
        for proxy in self.chance.sample(proxies, self.chance.choice((1, 2))):
            proxy.reset()

    def reset_parents(self) -> None:
        """Resets the connection between the parents, and sometimes the ring's links with it."""
        assert self.cluster.ranks.control_proxy
        self.cluster.ranks.control_proxy.reset()
        if self.chance.random() < 0.5:
            self.reset()

    def random_engine(self) -> psutil.Process:
        return self.chance.choice(list(self.cluster.engines().values()))

    def kill_parent(self) -> None:
        """Kills the parent of rank 1, whose engine ends with it. Rank 0's parent holds the clients'
        connections, so nothing outlives that one."""
        family = self.cluster.other.family()
        family[0].kill()
        assert gone(family[1:], LOG_SECONDS), "an engine outlives its parent"
        self.cluster.start_other_again()

    def note_sizes(self) -> None:
        """Notes what the parents and the engines use."""
        processes: dict[str, psutil.Process] = {}
        for rank, family in self.cluster.family().items():
            processes[f"parent {rank}"] = family[0]
        for rank, engine in self.cluster.engines().items():
            processes[f"engine {rank}"] = engine
        for role, process in processes.items():
            # An engine that the last fault has ended may still be listed.
            with suppress(psutil.Error), process.oneshot():
                size = Size(process.num_fds(), process.num_threads(), process.memory_info().rss)
                self.sizes.setdefault((role, process.pid), []).append(size)

    def growth(self) -> list[tuple[str, int, Size, Size]]:
        """Returns role, number of rounds, first and last size of each process that lived through
        several faults. In its first two rounds a process fills its caches."""
        found: list[tuple[str, int, Size, Size]] = []
        for (role, _), sizes in self.sizes.items():
            if len(sizes) > NUM_FILLING_ROUNDS + 1:
                found.append((role, len(sizes), sizes[NUM_FILLING_ROUNDS], sizes[-1]))
        return found

    def report(self) -> None:
        print(f"seed {SEED}: {dict(self.counts)}")
        print(f"{len(self.wrong)} streams lost or changed")
        for role, num_rounds, first, last in self.growth():
            print(f"{role} in {num_rounds} rounds: {first} then {last}", flush=True)


def test_faults_every_twenty_seconds_lose_no_answer(tmp_path: Path) -> None:
    flag = quick(max_restarts=100_000, stall_timeout=7, keeps_spare_engine=True)
    with pair(tmp_path, flag) as cluster:
        expected = run_crowd(cluster.server, lambda _: None)
        assert not [stream.number for stream in expected if is_lost(stream)], cluster.server.text
        soak = FaultSoak(cluster, expected, random.Random(SEED))
        try:
            soak.run(SOAK_SECONDS)
        finally:
            soak.report()
        assert not soak.wrong
        for role, _, first, last in soak.growth():
            assert last.num_descriptors <= first.num_descriptors + MAX_MORE_DESCRIPTORS, role
            assert last.num_threads <= first.num_threads + MAX_MORE_THREADS, role
            assert last.num_bytes <= first.num_bytes + MAX_GROWTH_BYTES, role
        families = [process for family in cluster.family().values() for process in family]
    assert gone(families, LOG_SECONDS), "processes were left behind"
