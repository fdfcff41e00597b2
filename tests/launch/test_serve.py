"""Whole clusters as a user starts them: on two hosts over ssh, and beside strangers."""

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.conftest import mlx_lm_answer  # noqa: F401
from tests.cluster.recovery.test_life import error_lines, run_to_its_end
from tests.cluster.servers import (
    BIN,
    TINY_CHAT,
    Server,
    brigade_launch,
    gone,
    mlx_launch,
    running,
    serve_flags,
    started,
)
from tests.launch.sshd import Sshd
from tests.ports import free_ports

pytestmark = pytest.mark.long

Launch = Callable[[int, list[str]], list[str]]
QUESTION = "What is the capital of France?"


@pytest.fixture
def over_ssh(sshd: Sshd, hostfile: Path) -> Launch:
    def launch(_: int, flags: list[str]) -> list[str]:
        words = ["--hostfile", str(hostfile), "--ssh", sshd.ssh]
        return [str(BIN / "brigade"), "launch", *words, "--", "serve", *flags]

    return launch


@contextmanager
def on_two_hosts(launch: Launch) -> Iterator[tuple[Server, list[psutil.Process]]]:
    """With all processes of the hosts, which are no children of the launcher. A busy machine may
    take long over an answer, also over one that has to be finished before the end."""
    with running(2, "--drain-timeout", "100", launch=launch) as server:
        parents = [psutil.Process(s["pid"]) for s in server.get("/admin/pipeline")["stages"]]
        engines = [child for parent in parents for child in parent.children(recursive=True)]
        agents = [parent.parent() for parent in parents]
        yield server, [*agents, *parents, *engines]


def brigade(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [str(BIN / "brigade"), "launch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_cluster_on_two_hosts_answers_and_is_listed_and_stopped(
    over_ssh: Launch,
    mlx_lm_answer: Callable[[str], str],  # noqa: F811
) -> None:
    with on_two_hosts(over_ssh) as (server, processes):
        stages = server.get("/admin/pipeline")["stages"]
        assert [stage["host"] for stage in stages] == ["127.0.0.2", "127.0.0.3"]
        reply = server.client().chat.completions.create(
            model="tiny-chat",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=48,
        )
        assert reply.choices[0].message.content == mlx_lm_answer(QUESTION)
        shown = brigade("--status").stdout
        assert f"launch {server.process.pid}: ready, started 0 min ago, {server.url}" in shown
        assert f"rank 1 on 127.0.0.3: runs as {stages[1]['pid']}" in shown
        assert brigade("--stop", str(server.process.pid)).returncode == 0
        assert server.process.wait(60) == 0, server.text
        assert gone(processes, 60)


def test_no_process_outlives_a_killed_launcher_on_any_host(over_ssh: Launch) -> None:
    with on_two_hosts(over_ssh) as (server, processes):
        server.process.kill()
        assert gone(processes, 60), "a host was left with processes"


def test_a_stream_is_finished_before_its_hosts_end(over_ssh: Launch) -> None:
    with on_two_hosts(over_ssh) as (server, processes):
        fields: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
        stream = server.client().completions.create(
            model="tiny-chat", prompt=QUESTION, stream=True, **fields
        )
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.process.wait(60) == 0, server.text
        assert gone(processes, 60)


def test_a_wrong_flag_is_reported_once_before_any_host_is_called(over_ssh: Launch) -> None:
    server = run_to_its_end(over_ssh(2, ["--model", str(TINY_CHAT), "--bogus"]))
    assert server.process.returncode == 2
    assert len(server.log) == 1


def test_a_missing_model_is_reported_by_rank_0_only(over_ssh: Launch) -> None:
    server = run_to_its_end(over_ssh(2, ["--model", "/nowhere"]))
    assert server.process.returncode == 3
    assert server.text.count("/nowhere is not a folder") == 1


# --- what should not be there


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_foreign_program_on_the_control_port_is_refused(greeting: bytes) -> None:
    """mlx.launch has fixed ports. The program answers the other rank, or keeps silent."""
    command = mlx_launch(2, serve_flags(0))
    port = int(command[command.index("--starting-port") + 1]) - 1
    with socket.create_server(("127.0.0.1", port)) as foreign:
        threading.Thread(target=answer, args=(foreign, greeting), daemon=True).start()
        server = run_to_its_end([*command, "--join-timeout", "5"])
    # Whoever sees it first: rank 0, or the rank that is answered.
    said = (
        f"cannot listen on 127.0.0.1:{port}",
        "does not speak Brigade's protocol",
        "is not rank 0 of this launch",
        "Does another program use that port?",
    )
    assert any(words in line for words in said for line in error_lines(server)), server.text
    assert "Traceback" not in server.text


def answer(foreign: socket.socket, greeting: bytes) -> None:
    kept = []
    while True:
        try:
            kept.append(foreign.accept()[0])
            kept[-1].sendall(greeting)
        except OSError:
            return


@pytest.mark.slow
def test_a_port_scanner_during_the_start_changes_no_answer(
    mlx_lm_answer: Callable[[str], str],  # noqa: F811
) -> None:
    """It connects to whatever listens, as soon as it does, and leaves again. MLX takes it for a
    neighbour, so the ring may not form: then the cluster ends and says so."""
    ended = threading.Event()
    scanner = threading.Thread(target=scan, args=(ended,))
    scanner.start()
    try:
        port = free_ports(1)[0]
        with started(brigade_launch(2, serve_flags(port)), port) as server:
            family: set[psutil.Process] = set()
            while server.process.poll() is None and "event=ready " not in server.text:
                family |= set(psutil.Process().children(recursive=True))
                time.sleep(0.1)
            if server.process.poll() is None:
                reply = server.client().chat.completions.create(
                    model="tiny-chat",
                    messages=[{"role": "user", "content": QUESTION}],
                    temperature=0,
                )
                assert reply.choices[0].message.content == mlx_lm_answer(QUESTION)
            else:
                assert server.process.returncode in (6, 7), server.text
                assert "ring" in error_lines(server)[-1]
                assert gone(list(family), 1)
    finally:
        ended.set()
        scanner.join()


def scan(ended: threading.Event) -> None:
    """Every port that one of this process's descendants listens on."""
    seen = set()
    while not ended.is_set():
        for process in psutil.Process().children(recursive=True):
            try:
                found = process.net_connections("tcp")
            except psutil.Error:
                continue
            ports = {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN} - seen
            for port in ports:
                with socket.socket() as stranger:
                    stranger.settimeout(0.5)
                    stranger.connect_ex(("127.0.0.1", port))
            seen |= ports
        time.sleep(0.01)
