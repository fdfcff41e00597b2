"""Engines that are killed, stopped or cut off under real streams: what clients get is what an
undisturbed run gives, token for token."""

import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import psutil
import pytest

from tests.cluster.servers import (
    LOG_SECONDS,
    Server,
    alone,
    brigade_launch,
    gone,
    mlx_launch,
    quick,
    running,
)
from tests.kernels import share_kernels

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

NUM_STREAMS = 8
ANSWER_TOKENS = 300
NUM_SPARE_KILLS = int(os.environ.get("SPARE_KILLS", "6"))
IMPORTED_BYTES = 50 << 20
WITHOUT_LIMIT = quick(max_restarts=1000)
EACH_RANK = [0, 1]


@dataclass
class Stream(threading.Thread):
    """A client. Every other one is greedy, the rest draw with penalties and a seed of their own;
    some want log-probabilities, some JSON."""

    server: Server
    number: int
    num_tokens: int = ANSWER_TOKENS
    text: str = ""
    scores: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return self.number

    def body(self) -> dict[str, Any]:
        question = f"Tell me a story about {self.number + 2} bridges."
        fields: dict[str, Any] = {
            "model": "tiny-chat",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.num_tokens,
            "stream": True,
            "temperature": 0 if self.number % 2 else 1.1,
            "seed": self.number,
            "ignore_eos": True,
        }
        if self.number % 4 == 2:
            fields |= {"frequency_penalty": 0.5, "presence_penalty": 0.3}
        if self.number % 4 == 1:
            fields |= {"logprobs": True, "top_logprobs": 2}
        if self.number == 4:
            fields |= {"response_format": {"type": "json_object"}, "ignore_eos": False}
        return fields

    def run(self) -> None:
        url = f"{self.server.url}/v1/chat/completions"
        with httpx2.stream("POST", url, json=self.body(), timeout=120) as reply:
            for line in filter(None, reply.iter_lines()):
                self.end = line
                if line.startswith("data: {"):
                    self.take(json.loads(line.removeprefix("data: ")))

    def take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.times.append(time.monotonic())
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            for entry in (choice.get("logprobs") or {}).get("content") or []:
                self.scores.append(entry["logprob"])


def run_streams(
    server: Server,
    disturb: Any = lambda: None,
    num_streams: int = NUM_STREAMS,
    num_tokens: int = ANSWER_TOKENS,
) -> list[Stream]:
    streams = [Stream(server, number, num_tokens) for number in range(num_streams)]
    for stream in streams:
        stream.start()
    disturb()
    for stream in streams:
        stream.join(240)
        assert not stream.is_alive(), f"a client waits without end:\n{server.text[-3000:]}"
        assert stream.end == "data: [DONE]", stream.end
    return streams


class Killer:
    """Kills a random rank's engine, or all of a rank but rank 0, and again when that is mended. All
    other engines have to stay."""

    def __init__(self, server: Server, num_kills: int, seed: int, whole: bool) -> None:
        self.server, self.num_kills, self.whole = server, num_kills, whole
        self.chance = random.Random(seed)
        self.times: list[float] = []
        self.num_others = 0
        self.num_stayed = 0

    def __call__(self) -> None:
        for _ in range(self.num_kills):
            time.sleep(self.chance.uniform(0.05, 0.6))
            self.server.wait_until_ready()
            engines = self.server.engines()
            num_recoveries = self.server.text.count("event=recovered")
            self.times.append(time.monotonic())
            engine = engines.pop(self.chance.choice(sorted(engines)[self.whole :]))
            for process in [engine.parent(), engine] if self.whole else [engine]:
                assert process is not None
                process.kill()
            self.wait_for_recovery(num_recoveries)
            self.count_others(engines)

    def wait_for_recovery(self, num_recoveries: int) -> None:
        """Waits until the log holds one more of these lines than before."""
        deadline = time.monotonic() + LOG_SECONDS
        while self.server.text.count("event=recovered") == num_recoveries:
            assert time.monotonic() < deadline, self.server.text[-3000:]
            time.sleep(0.05)

    def count_others(self, others: dict[int, psutil.Process]) -> None:
        now = self.server.engines()
        self.num_others += len(others)
        self.num_stayed += sum(now[rank].pid == other.pid for rank, other in others.items())

    def seconds_to_next_token(self, streams: list[Stream]) -> list[float]:
        """Returns the seconds from each kill to the next token, if a client waited for one."""
        arrivals = sorted(arrival for stream in streams for arrival in stream.times)
        pauses: list[float] = []
        for killed in self.times:
            # Tokens that were under way at the moment of the kill still come.
            later = [arrival for arrival in arrivals if arrival > killed + 0.1]
            if later:
                pauses.append(later[0] - killed)
        return pauses


def check_same(streams: list[Stream], expected: list[Stream]) -> None:
    for stream, undisturbed in zip(streams, expected, strict=True):
        assert stream.text == undisturbed.text, f"stream {stream.number} got another answer"
        assert len(stream.scores) == len(undisturbed.scores), "scores came twice, or not"
        assert stream.scores == pytest.approx(undisturbed.scores, abs=1e-3)


def check_kills(
    num_ranks: int,
    num_rounds: int,
    kills_of_a_round: int,
    launch: Any,
    first_seed: int = 0,
    whole: bool = False,
    num_tokens: int = ANSWER_TOKENS,
) -> None:
    with running(num_ranks, WITHOUT_LIMIT, launch=launch) as server:
        expected, seconds = run_streams(server, num_tokens=num_tokens), []
        num_processes = len(server.family())
        num_others = num_stayed = 0
        for seed in range(num_rounds):
            killer = Killer(server, kills_of_a_round, first_seed + seed, whole)
            streams = run_streams(server, killer, num_tokens=num_tokens)
            check_same(streams, expected)
            seconds += killer.seconds_to_next_token(streams)
            num_others += killer.num_others
            num_stayed += killer.num_stayed
        pipeline = server.get("/admin/pipeline")
        recoveries = "\n".join(line for line in server.log if "event=recovering" in line)
        assert pipeline["num_restarts"] == num_rounds * kills_of_a_round, recoveries
        assert pipeline["num_running"] == 0
        family = server.family()
        assert len(family) == num_processes, "engines were left behind, or are missing"
        if seconds:  # On a busy machine, all answers may have come before the kills.
            print(f"kill to next token: p50 {median(seconds):.2f} s, max {max(seconds):.2f} s")
        print(f"{num_stayed} of {num_others} other engines stayed")
        assert num_stayed == num_others, recoveries
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        assert gone(family, 30), "processes were left behind"


@pytest.mark.usefixtures("patient_parents")
@pytest.mark.parametrize(
    ("num_ranks", "num_kills", "num_tokens", "launch"),
    [
        (2, 2, 120, brigade_launch),
        pytest.param(2, 4, 300, brigade_launch, marks=pytest.mark.slow),
        pytest.param(1, 4, 300, alone, marks=pytest.mark.slow),
        pytest.param(3, 4, 300, brigade_launch, marks=pytest.mark.slow),
        pytest.param(2, 4, 300, mlx_launch, marks=pytest.mark.slow),
    ],
)
def test_streams_continue_after_kills(
    num_ranks: int, num_kills: int, num_tokens: int, launch: Any
) -> None:
    """With this seed the ranks are killed in turn."""
    check_kills(num_ranks, 1, num_kills, launch, first_seed=3, num_tokens=num_tokens)


def test_steps_of_one_rank_that_run_ahead_are_lost_with_their_engine() -> None:
    """No row of the two streams needs its token, so each step begins before the one before is
    read. Text would be guessed otherwise, and then steps wait."""
    flags = (WITHOUT_LIMIT, "--draft-model", "none")
    with running(1, *flags, launch=alone) as server:
        expected = run_streams(server, num_streams=2)
        killer = Killer(server, 3, seed=5, whole=False)
        check_same(run_streams(server, killer, num_streams=2), expected)
    assert server.text.count("event=recovered") == 3


@pytest.mark.usefixtures("patient_parents")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first_seed", [100, 200, 300, 400])
def test_a_hundred_kills_change_no_token(first_seed: int) -> None:
    check_kills(2, 9, 3, brigade_launch, first_seed)


@pytest.mark.usefixtures("patient_parents")
@pytest.mark.slow
@pytest.mark.timeout(300 + 30 * NUM_SPARE_KILLS)
def test_spare_engines_that_replace_killed_engines_change_no_token() -> None:
    """Prints the figures of kills at which each rank has a spare engine, as after a quiet time."""
    with running(2, quick(max_restarts=1000, keeps_spare_engine=True)) as server:
        expected = run_streams(server)
        seconds: list[float] = []
        for seed in range(NUM_SPARE_KILLS):
            engines = server.engines()
            spares = wait_for_spares(server)
            killer = Killer(server, 1, seed, whole=False)
            streams = run_streams(server, killer)
            check_same(streams, expected)
            seconds += killer.seconds_to_next_token(streams)
            pids = {engine.pid for engine in server.engines().values()}
            assert len(pids & {engine.pid for engine in engines.values()}) == 1
            assert len(pids & spares) == 1, "the spare was not used"
        print(f"kill to next token: p50 {median(seconds):.2f} s, max {max(seconds):.2f} s")


def wait_for_spares(server: Server) -> set[int]:
    """Waits until each rank has a spare engine that waits for an order, and returns their ids."""
    working = {engine.pid: engine.ppid() for engine in server.engines().values()}
    deadline = time.monotonic() + LOG_SECONDS
    while True:
        assert time.monotonic() < deadline, server.text
        children = [child for pid in working.values() for child in psutil.Process(pid).children()]
        engines = [child for child in children if "serve.rank.worker" in child.cmdline()]
        spares = [engine for engine in engines if engine.pid not in working]
        # MLX is there, and the interpreter has nothing left to do.
        have_imported = all(spare.memory_info().rss > IMPORTED_BYTES for spare in spares)
        if len(spares) == len(working) and have_imported:
            time.sleep(1)
            return {spare.pid for spare in spares}
        time.sleep(0.1)


@pytest.mark.usefixtures("patient_parents")
@pytest.mark.slow
def test_killing_whole_ranks_changes_no_token() -> None:
    """The launcher starts each again, five times in five minutes at most."""
    check_kills(3, 3, 2, brigade_launch, whole=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A cluster that every test leaves as good as new."""
    with running(2, quick(stall_timeout=7, max_restarts=1000)) as mended:
        yield mended


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Stream]:
    return run_streams(server)


@pytest.mark.slow
@pytest.mark.parametrize("rank", EACH_RANK)
def test_a_killed_engine_costs_no_more_than_a_pause(
    server: Server, expected: list[Stream], rank: int
) -> None:
    before = server.get("/admin/pipeline")["num_restarts"]
    engines = server.engines()

    def kill() -> None:
        time.sleep(0.5)
        engines[rank].kill()
        began = time.monotonic()
        while httpx2.get(server.url + "/ready").status_code == 200:
            assert time.monotonic() - began < 10, "it says that it is ready, and is not"
        assert httpx2.get(server.url + "/health").status_code == 200

    check_same(run_streams(server, kill), expected)
    assert f"The engine of rank {rank} ended by signal 9" in server.text
    assert server.get("/admin/pipeline")["num_restarts"] == before + 1
    check_others_stayed(server, engines, rank)
    metrics = httpx2.get(server.url + "/metrics").text
    assert f"brigade_restarts_total {before + 1:.1f}" in metrics
    assert float(metrics.split("\nbrigade_recovery_seconds_total ")[1].split()[0]) > 0


def check_others_stayed(server: Server, before: dict[int, psutil.Process], lost: int) -> None:
    """Checks that the engines of all other ranks are the processes that they were."""
    after = server.engines()
    stayed = {rank for rank, engine in before.items() if after[rank].pid == engine.pid}
    assert stayed == before.keys() - {lost}, server.text
    stages = server.get("/admin/pipeline")["stages"]
    assert {stage["rank"] for stage in stages if stage["has_stayed"]} == stayed
    for rank in stayed:
        assert f"event=engine_stayed rank={rank} life=" in server.text


@pytest.mark.usefixtures("patient_parents")
@pytest.mark.slow
def test_engines_of_three_ranks_go_on_after_any_of_them_is_killed() -> None:
    with running(3, WITHOUT_LIMIT) as server:
        expected = run_streams(server)
        for rank in range(3):
            engines = server.engines()

            def kill(victim: psutil.Process = engines[rank]) -> None:
                time.sleep(0.5)
                victim.kill()

            check_same(run_streams(server, kill), expected)
            check_others_stayed(server, engines, rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", EACH_RANK)
def test_an_engine_suspended_for_five_seconds_is_no_fault(
    server: Server, expected: list[Stream], rank: int
) -> None:
    before = server.get("/admin/pipeline")["num_restarts"]

    def pause() -> None:
        time.sleep(0.5)
        victim = server.engines()[rank].pid
        os.kill(victim, signal.SIGSTOP)
        time.sleep(2)
        assert (
            httpx2.get(server.url + "/ready").json()["error"]["message"] == f"rank {rank}: silent"
        )
        time.sleep(3)
        os.kill(victim, signal.SIGCONT)

    check_same(run_streams(server, pause), expected)
    assert server.get("/admin/pipeline")["num_restarts"] == before


@pytest.mark.slow
@pytest.mark.parametrize("rank", EACH_RANK)
def test_an_engine_suspended_for_ever_is_found_and_named(
    server: Server, expected: list[Stream], rank: int
) -> None:
    seconds: list[float] = []

    def stop() -> None:
        before = server.get("/admin/pipeline")["num_restarts"]
        time.sleep(0.5)
        os.kill(server.engines()[rank].pid, signal.SIGSTOP)
        began = time.monotonic()
        while server.get("/admin/pipeline")["num_restarts"] == before:
            time.sleep(0.05)
        seconds.append(time.monotonic() - began)

    check_same(run_streams(server, stop), expected)
    print(f"SIGSTOP to replacement: {seconds[0]:.1f} s")
    assert 6 < seconds[0] < 7 + 2
    assert f"No step came back for 7 s: rank {rank} on 127.0.0.1 has been silent for" in server.text
    # The engine that was not stopped says where it waited.
    server.wait_for_log(r"in (_next_hop|receive|unpack|send)\b")


@pytest.mark.slow
def test_a_rank_suspended_with_its_parent_is_replaced(
    server: Server, expected: list[Stream]
) -> None:
    """Its connections stay open, and it hears no word that it should end."""

    def stop() -> None:
        time.sleep(0.5)
        engine = server.engines()[1]
        for process in (engine.parent(), engine):
            assert process is not None
            process.suspend()

    num_processes = len(server.family())
    check_same(run_streams(server, stop), expected)
    assert len(re.findall(r"WARNING event=rank_silent rank=1 pid=\d+", server.text)) == 1
    assert server.text.count("event=rank_killed rank=1") == 1
    assert len(server.family()) == num_processes


@pytest.mark.slow
@pytest.mark.parametrize("launch", [brigade_launch, mlx_launch])
def test_deleting_temporary_folders_does_no_harm(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd does it after ten days, macOS after three."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    share_kernels(tmp_path)
    with running(2, launch=launch) as server:
        expected = run_streams(server)

        def clean_and_kill() -> None:
            engine = server.engines()[1]
            Path(engine.environ()["MLX_HOSTFILE"]).unlink()
            for folder in tmp_path.glob("brigade-*"):
                shutil.rmtree(folder)
            time.sleep(0.5)
            engine.kill()

        check_same(run_streams(server, clean_and_kill), expected)
        assert server.get("/admin/pipeline")["num_restarts"] == 1, server.text


@pytest.mark.slow
def test_the_cluster_ends_with_the_reason_after_its_last_restart() -> None:
    with running(2, quick(max_restarts=1)) as server:
        family = server.family()
        server.engines()[1].kill()
        server.wait_for_log("event=recovered")
        stream = Stream(server, 0)
        broken: list[str] = []

        def ask() -> None:
            with httpx2.stream(
                "POST", f"{server.url}/v1/chat/completions", json=stream.body(), timeout=60
            ) as reply:
                broken.extend(filter(None, reply.iter_lines()))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.4)
        server.engines()[1].kill()
        asking.join(60)
        assert not asking.is_alive(), "a client waits without end"
        error = json.loads(broken[-2].removeprefix("data: "))["error"]
        assert "its cluster failed" in error["message"], "the reason may name hosts"
        assert server.process.wait(60) == 7, server.text
        assert "signal 9. The engines were restarted 1 times in 300 s: given up" in server.text
        assert gone(family, 60), "processes were left behind"


@pytest.mark.slow
def test_no_port_stays_open_after_a_recovery_and_the_end() -> None:
    with running(2) as server:
        family = server.family()
        server.engines()[0].kill()
        server.wait_for_log("event=recovered")
        listening = {
            connection.laddr.port
            for process in server.family()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert len(listening) == 2, "HTTP and rank 0's door for ranks, and none of a ring before"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.text
        assert gone(family, 60)
    held = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not held & listening
