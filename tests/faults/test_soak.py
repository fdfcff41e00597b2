"""Hours of use in minutes: clients that ask, wait and leave, adapters that are swapped, and engines
that are killed.

SOAK_SECONDS is how long, ten minutes unless it is set. Nothing may be lost, and nothing may grow.
"""

import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil
import pytest

from tests.cluster.servers import TINY_CHAT, Server, gone, quick, running

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
NUM_CLIENTS = 8
NUM_KILLS = max(4, int(SOAK_SECONDS / 300))
SWAPS_OF_A_KILL = 8
ADAPTERS = TINY_CHAT.parent / "adapters"
LEAVING_SHARE = 0.2
MAX_GROWTH_BYTES = 30 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(int(SOAK_SECONDS * 7 / 6) + 300),
    pytest.mark.uses("adapters"),
]


@dataclass
class Soak:
    server: Server
    until: float
    ends: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)

    def client(self, seed: int) -> None:
        chance = random.Random(seed)
        with httpx2.Client(base_url=self.server.url, timeout=60) as http:
            while time.monotonic() < self.until:
                try:
                    self.ask(http, chance)
                except (httpx2.HTTPError, AssertionError) as error:
                    self.lost.append(repr(error))

    def ask(self, http: httpx2.Client, chance: random.Random) -> None:
        words = " ".join(["word"] * int(chance.lognormvariate(3, 1)))
        body: dict[str, Any] = {
            "model": chance.choice(["tiny-chat", "swapped"]),
            "messages": [{"role": "user", "content": f"Say something about {words[:1500]}"}],
            "max_tokens": chance.randint(1, 120),
            "temperature": chance.choice([0, 1]),
            "stream": True,
        }
        leaves_after = chance.randint(0, 30) if chance.random() < LEAVING_SHARE else None
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            line = ""
            for n, line in enumerate(filter(None, reply.iter_lines())):
                assert '"error"' not in line, line
                if n == leaves_after:
                    self.ends["left"] += 1
                    return
        assert line == "data: [DONE]", line
        self.ends["whole"] += 1

    def swap(self, path: str) -> None:
        body = {"lora_name": "swapped", "lora_path": path, "load_inplace": True}
        reply = httpx2.post(f"{self.server.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        self.ends["swapped"] += 1

    def run(self) -> None:
        clients = [threading.Thread(target=self.client, args=(n,)) for n in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        pause = (self.until - time.monotonic()) / (NUM_KILLS + 1) / SWAPS_OF_A_KILL
        for number in range(NUM_KILLS * SWAPS_OF_A_KILL):
            time.sleep(pause)
            self.server.wait_until_ready()
            self.swap(("pirate", "poet")[number % 2])
            if number % SWAPS_OF_A_KILL == SWAPS_OF_A_KILL - 1:
                random.choice(list(self.server.engines().values())).kill()
        for client in clients:
            client.join(max(0.0, self.until - time.monotonic()) + 120)
            assert not client.is_alive(), "a client waits without end"


def idle(server: Server) -> list[tuple[int, int]]:
    """Descriptors and bytes of the launcher and each rank's parent, when nothing runs."""
    deadline = time.monotonic() + 60
    while any(server.get("/admin/pipeline")[name] for name in ("num_running", "num_waiting")):
        assert time.monotonic() < deadline, "something runs without a client"
        time.sleep(0.1)
    time.sleep(1)
    pids = [stage["pid"] for stage in server.get("/admin/pipeline")["stages"]]
    processes = map(psutil.Process, [server.process.pid, *pids])
    return [(process.num_fds(), process.memory_info().rss) for process in processes]


def test_long_use_loses_no_answer_and_leaks_no_memory() -> None:
    adapters = ("--adapter-root", str(ADAPTERS), "--lora-modules", f"swapped={ADAPTERS / 'poet'}")
    with running(2, quick(max_restarts=1000), *adapters) as server:
        Soak(server, time.monotonic() + SOAK_SECONDS / 6).run()  # until everything was used once
        before = idle(server)
        soak = Soak(server, time.monotonic() + SOAK_SECONDS)
        soak.run()
        after = idle(server)
        print(f"{dict(soak.ends)} descriptors and bytes: {before} then {after}")
        assert not soak.lost
        assert min(soak.ends["whole"], soak.ends["left"], soak.ends["swapped"]) > 10
        for (fds_before, bytes_before), (fds, num_bytes) in zip(before, after, strict=True):
            assert fds <= fds_before + 2
            assert num_bytes <= bytes_before + MAX_GROWTH_BYTES
        family = server.family()
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert gone(family, 60), "processes were left behind"
