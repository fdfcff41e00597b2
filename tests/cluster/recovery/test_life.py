"""Starting and ending: one clear line, the right code, nobody left behind."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.cluster.servers import (
    BIN,
    ROOT,
    TINY_CHAT,
    Server,
    alone,
    brigade_launch,
    gone,
    mlx_launch,
    quick,
    running,
    serve_flags,
    started,
)
from tests.ports import free_ports
from tests.test_launcher import wait_until

pytestmark = pytest.mark.long


def run_to_its_end(command: list[str], seconds: float = 60.0) -> Server:
    with started(command) as server:
        server.process.wait(seconds)
    return server


def error_lines(server: Server) -> list[str]:
    """The reasons that commands give when they end, without the rank and the command."""
    return re.findall(r"^(?:\[rank .*?\] )?brigade [a-z-]+: (.*)$", server.text, re.MULTILINE)


def broken_model(folder: Path) -> Path:
    shutil.copytree(TINY_CHAT, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


# Each with the number of ranks on which .ci/run tries it; the launcher has a part in some.
WRONG_STARTS: list[tuple[int, list[str], int, str]] = [
    (2, ["--model", "/nowhere"], 3, "/nowhere is not a folder"),
    (2, ["--model", "BROKEN"], 3, "fetch it again"),
    (1, ["--model", "BAD-TOKENIZER"], 3, "tokenizer"),
    (2, ["--model", "BAD-SHAPE"], 3, "cannot build the model"),
    (0, ["--model", "UNKNOWN-TYPE"], 3, "cannot build the model"),
    (1, ["--model", "TOKENIZER-CODE"], 3, "Brigade never does that"),
    (2, ["--model", "GOOD", "--bogus"], 2, "--bogus"),
    (2, ["--model", "GOOD", "--port", "http"], 2, "--port"),
    (2, ["--model", "GOOD", "--host", "256.1.1.1"], 5, "--host 256.1.1.1"),
    (2, ["--model", "GOOD", "--port", "TAKEN"], 5, "in use"),
]


def wrong_starts() -> list[Any]:
    found = []
    for chosen, *start in WRONG_STARTS:
        for num_ranks in (1, 2):
            marks = [] if num_ranks == chosen else pytest.mark.slow
            found.append(pytest.param(num_ranks, *start, marks=marks))
    return found


@pytest.mark.parametrize(("num_ranks", "flags", "code", "words"), wrong_starts())
def test_a_failed_start_prints_one_line_and_ends_with_its_own_exit_code(
    tmp_path: Path, num_ranks: int, flags: list[str], code: int, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"GOOD": str(TINY_CHAT), "TAKEN": str(taken.getsockname()[1])}
        for name, damage in DAMAGES.items():
            if name in flags:
                names[name] = str(damage(tmp_path / name))
        flags = [names.get(flag, flag) for flag in flags]
        if "--port" not in flags:
            flags += ["--port", "0"]  # The default one may be taken here.
        command = alone(flags) if num_ranks == 1 else brigade_launch(num_ranks, flags)
        server = run_to_its_end(command)
    assert server.process.returncode == code, server.text
    reasons = error_lines(server)
    if num_ranks > 1:  # The launcher says why, in its last line.
        reasons += re.findall(r'ERROR event=failed rank=0 .*reason="(.*)"$', server.text, re.M)
    assert len(set(reasons)) == 1, server.text
    assert words in reasons[0]
    assert "Traceback" not in server.text


def bad_tokenizer(folder: Path) -> Path:
    shutil.copytree(TINY_CHAT, folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tokenizer_with_code(folder: Path) -> Path:
    shutil.copytree(TINY_CHAT, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('it has run')")
    return folder


def edited_config(folder: Path, **changes: Any) -> Path:
    shutil.copytree(TINY_CHAT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


DAMAGES: dict[str, Any] = {
    "BROKEN": broken_model,
    "BAD-TOKENIZER": bad_tokenizer,
    "BAD-SHAPE": lambda folder: edited_config(folder, intermediate_size=64),
    "TOKENIZER-CODE": tokenizer_with_code,
    "UNKNOWN-TYPE": lambda folder: edited_config(folder, model_type="abacus"),
}


@pytest.mark.parametrize("launch", [brigade_launch, mlx_launch])
def test_more_ranks_than_layers_are_refused_in_one_line(launch: Any, tmp_path: Path) -> None:
    model = edited_config(tmp_path / "model", num_hidden_layers=2)
    with started(launch(3, serve_flags(free_ports(1)[0], model))) as server:
        family = server.family()
        server.process.wait(60)
        assert gone(family, 60), "ranks were left behind"
    assert len(set(error_lines(server))) == 1, server.text
    assert "start at most 2 ranks" in error_lines(server)[0]
    if launch is brigade_launch:
        assert len(error_lines(server)) == 1, server.text
        assert server.process.returncode == 4


@pytest.mark.slow
def test_a_second_cluster_on_the_same_ports_is_refused_with_the_reason() -> None:
    with running(2, launch=mlx_launch) as first:
        command = list(first.process.args)
        command[command.index("--port") + 1] = str(free_ports(1)[0])
        second = run_to_its_end(command, 30)
        said = ("is another cluster running there?", "two clusters use the same ports")
        assert any(words in second.text for words in said), second.text
        assert first.get("/ready") == {"status": "ready"}


@pytest.mark.parametrize(
    "victim",
    ["engine 0", pytest.param("engine 1", marks=pytest.mark.slow), "parent 1"],
)
def test_a_killed_process_ends_the_cluster_and_every_request_without_restarts(victim: str) -> None:
    kind, victim_rank = victim.split()
    with running(2, quick(max_restarts=0)) as server:
        family = server.family()
        target = find(server, victim)
        events = stream_in_background(server)
        time.sleep(0.3)
        target.kill()
        events.join(60)
        assert not events.is_alive(), "a client waits without end"
        server.process.wait(60)
        assert gone(family, 60), "processes were left behind"
        # The launcher starts a lost rank again, but rank 0 ends with the code of its engine or its
        # link.
        expected = (6, 7) if kind == "parent" else (7,)
        assert server.process.returncode in expected, server.text
        if kind == "engine":
            assert f"The engine of rank {victim_rank} ended by signal 9" in server.text
        assert b'"error"' in events.body or events.refused


def find(server: Server, victim: str) -> psutil.Process:
    kind, rank = victim.split()
    engine = server.engines()[int(rank)]
    return engine if kind == "engine" else engine.parent()


class stream_in_background(threading.Thread):  # noqa: N801
    """A client with a long stream; body is what it got."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.url = server.url
        self.body = b""
        self.refused = False
        self.start()

    def run(self) -> None:
        body = {
            "model": "tiny-chat",
            "messages": [{"role": "user", "content": "Hello!"}],
            "temperature": 2,
            "stream": True,
        }
        try:
            while b'"error"' not in self.body:
                with httpx2.stream("POST", f"{self.url}/v1/chat/completions", json=body) as reply:
                    for data in reply.iter_bytes():
                        self.body += data
        except httpx2.TransportError:
            self.refused = True


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_signal_ends_all_processes_with_code_0(number: signal.Signals) -> None:
    with running(2) as server:
        family = server.family()
        server.process.send_signal(number)
        assert server.process.wait(60) == 0, server.text
        assert gone(family, 60)
    assert "failed" not in server.text, server.text
    assert "Traceback" not in server.text


@pytest.mark.slow
def test_running_streams_finish_before_the_cluster_ends() -> None:
    with running(2) as server:
        body = {
            "model": "tiny-chat",
            "messages": [{"role": "user", "content": "Say the alphabet."}],
            "temperature": 0,
            "max_tokens": 100,
            "stream": True,
        }
        url = f"{server.url}/v1/chat/completions"
        with httpx2.stream("POST", url, json=body) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            text = first + "".join(lines)
        assert "[DONE]" in text
        assert server.process.wait(60) == 0, server.text


def test_no_process_outlives_a_killed_launcher() -> None:
    with running(2) as server:
        family = server.family()
        server.process.kill()
        assert gone(family, 60), "ranks outlived their launcher"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_ranks_end_when_mlx_launch_is_gone(number: signal.Signals) -> None:
    with running(2, launch=mlx_launch) as server:
        family = server.family()
        server.process.send_signal(number)
        assert gone(family, 60), "ranks outlived mlx.launch"


def test_a_rank_ends_during_its_first_checks_when_mlx_launch_is_gone(
    tmp_path: Path,
) -> None:
    """Here it asks a hub that does not answer, which may take minutes."""
    hostfile, ports = tmp_path / "hosts.json", free_ports(2)
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(60)
        endpoint = f"HF_ENDPOINT=http://127.0.0.1:{hub.getsockname()[1]}"
        variables = [endpoint, f"HF_HOME={tmp_path}", "MLX_RANK=0", f"MLX_HOSTFILE={hostfile}"]
        rank = ["env", *variables, *alone(["--model", "org/tiny", "--port", "0"])]
        with started(["bash", "-c", f"{shlex.join(rank)} & wait"]) as launcher, hub.accept()[0]:
            family = launcher.family()
            launcher.process.kill()
            assert len(family) == 2
            assert gone(family, 60), "a rank outlived mlx.launch"


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_a_signal_ends_a_start_without_an_error(seconds: float) -> None:
    with started(brigade_launch(2, serve_flags(free_ports(1)[0]))) as server:
        server.wait_for_log("rank_started rank=1")
        time.sleep(seconds)
        family = server.family()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        assert gone(family, 60)
    assert "Traceback" not in server.text
    assert server.process.returncode == 0, server.text


def test_no_process_outlives_a_killed_rank_0_under_mlx_launch() -> None:
    with running(2, launch=mlx_launch) as server:
        family = server.family()
        find(server, "parent 0").kill()
        assert gone([p for p in family if p.pid != server.process.pid], 60)


def test_ctrl_c_under_mlx_launch_prints_no_traceback_of_a_rank(tmp_path: Path) -> None:
    """A terminal's signal reaches the engines too, which may still be importing MLX. mlx.launch
    shows nothing of its ranks after Ctrl-C, so they write into a file."""
    log, script = tmp_path / "log", tmp_path / "rank.py"
    log.touch()
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"file = os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND)\n"
        "os.dup2(file, 1), os.dup2(file, 2)\n"
        f"os.execv({str(BIN / 'serve')!r}, ['serve', *sys.argv[1:]])"
    )
    script.chmod(0o755)
    command = mlx_launch(2, serve_flags(free_ports(1)[0]))
    command[command.index("serve")] = str(script)
    ours, theirs = pty.openpty()
    family: list[psutil.Process] = []
    with open(ours, "rb", buffering=0) as terminal, open(theirs, "wb", buffering=0) as inside:
        # In a session of its own, whose terminal is ours, as in a shell.
        start = [sys.executable, "-c", IN_TERMINAL, *command]
        launched = subprocess.Popen(
            start, cwd=ROOT, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
        )
        try:
            wait_until(lambda: "event=stage_starting rank=1" in log.read_text())
            family = psutil.Process(launched.pid).children(recursive=True)
            os.write(terminal.fileno(), b"\x03")
            launched.wait(60)
            assert gone(family, 60)
        finally:
            launched.kill()
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    assert "Traceback" not in log.read_text()


# Takes the terminal, and becomes the program that is named.
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    ports = free_ports(3)
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:2]]))
    environment = {
        "MLX_RANK": "0",
        "MLX_HOSTFILE": str(hostfile),
        "BRIGADE_CONTROL": f"127.0.0.1:{ports[2]}",
    }
    flags = serve_flags(free_ports(1)[0], TINY_CHAT, "--join-timeout", "2")
    command = ["env", *(f"{k}={v}" for k, v in environment.items()), *alone(flags)]
    server = run_to_its_end(command)
    assert server.process.returncode == 6
    assert "Ranks [1] did not join within 2 s" in server.text


def test_ranks_with_different_models_are_refused_with_the_digest_of_each(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    ports = free_ports(4)
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:2]]))
    other = edited_config(tmp_path / "other", rope_theta=5000.0)

    def command(rank: int, model: Path) -> list[str]:
        control = f"BRIGADE_CONTROL=127.0.0.1:{ports[2]}"
        variables = [f"MLX_RANK={rank}", f"MLX_HOSTFILE={hostfile}", control]
        flags = serve_flags(ports[3], model, "--join-timeout", "60")
        return ["env", *variables, *alone(flags)]

    with started(command(1, other)) as rank_1:
        rank_0 = run_to_its_end(command(0, TINY_CHAT))
        assert rank_0.process.returncode == 6
        assert re.search(r"config\.json +│ [0-9a-f]{16} │ [0-9a-f]{16}", rank_0.text), rank_0.text
        assert "The ranks differ (config.json" in rank_0.text
        rank_1.process.wait(60)


def test_a_demo_ends_when_its_output_is_closed() -> None:
    """As in `brigade demo | head -1`."""
    command = [str(BIN / "brigade"), "demo"]
    demo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert demo.stdout
    demo.stdout.readline()
    demo.stdout.close()
    family = [psutil.Process(demo.pid), *psutil.Process(demo.pid).children(recursive=True)]
    assert demo.wait(60) == 1
    assert gone(family, 60)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_suspended_rank_is_named_within_the_stall_timeout(rank: int) -> None:
    """SIGSTOP closes no connection: only the deadline tells."""
    with running(2, quick(stall_timeout=3, max_restarts=0)) as server:
        family = server.family()
        os.kill(server.engines()[rank].pid, signal.SIGSTOP)
        time.sleep(2)
        assert (
            httpx2.get(server.url + "/ready").json()["error"]["message"] == f"rank {rank}: silent"
        )
        events = stream_in_background(server)
        events.join(60)
        assert not events.is_alive(), "a client waits without end"
        assert b'"error"' in events.body
        assert server.process.wait(60) == 6, server.text
        assert gone(family, 60)
    assert f"ank {rank} on 127.0.0.1 is silent" in server.text
