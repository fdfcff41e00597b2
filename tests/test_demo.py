"""`brigade demo` against a small HTTP server that stands in for rank 0, in a real process."""

import functools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.demo import Demo, DemoServer, chosen_port, pieces, server_sent, speed
from launcher.supervisor import Supervisor
from serve.core.errors import BrigadeError, ClusterError, EngineError, UsageError
from tests.errors import fails
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent

# Its arguments are those of `serve`; the model's name says what goes wrong.
FAKE = r"""
import http.server, json, os, signal, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
model = os.path.basename(words["--model"])
adapters = {}
if os.environ["MLX_RANK"] != "0":
    if model == "fails":
        sys.exit(3)
    time.sleep(60)
begin = time.monotonic()
if model == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        if self.path == "/ready":
            ready = model not in ("never", "stubborn") and time.monotonic() - begin > 0.5
            self.answer(200 if ready else 503, {"error": {"message": "loading layers"}})
        else:
            self.answer(200, {"data": [{"id": model}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            folder = os.path.join(words["--adapter-root"], asked["lora_path"])
            if not os.path.isdir(folder) or not asked["load_inplace"]:
                return self.answer(404, {"error": {"message": "no such adapter"}})
            adapters[asked["lora_name"]] = asked["lora_path"]
            return self.answer(200, "added")
        if model == "refuses" or not asked["stream"] or asked["model"] not in (model, *adapters):
            return self.answer(400, {"error": {"message": "no streams today"}})
        print("request id=1", flush=True)
        self.send_response(200)
        self.end_headers()
        manner = adapters.get(asked["model"], "")
        for text in ["", *([] if model == "empty" else ["Pa", "ris", " [b]é!", manner])]:
            chunk = {"choices": [{"delta": {"role": "assistant", "content": text}}], "usage": None}
            self.send(": a comment")
            self.send("data: " + json.dumps(chunk))
            time.sleep(0.1)
        if model == "error":
            self.send('data: {"error": {"message": "rank 1 was lost"}}')
        if model == "stops":
            return
        self.send('data: {"choices": [], "usage": {"completion_tokens": 5}}')
        self.send("data: [DONE]")

    def send(self, line):
        self.wfile.write(line.encode() + b"\n\n")
        self.wfile.flush()


http.server.ThreadingHTTPServer((words["--host"], int(words["--port"])), Handler).serve_forever()
"""


def fake_rank(words: list[str]) -> list[str]:
    return [sys.executable, "-c", FAKE, *words[1:]]


def demo(model: str, once: bool = True) -> Demo:
    return Demo(Path(model), 2, 0, once=once, command=fake_rank)


@pytest.mark.parametrize("terminal", [80, 40])
def test_demo_with_the_flag_once_shows_one_answer_and_ends(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(terminal))
    assert demo("tiny").run() == 0
    shown, log = capfd.readouterr()
    assert "Paris [b]é!\n" in shown
    assert re.search(r"5 tokens, the first after \d+ ms, then \d+\.\d tokens/s", shown)
    assert "curl " not in shown, "its server ends at once"
    assert "[rank 0] request id=1" in log


def test_demo_of_the_embedded_model_loads_each_adapter_in_turn(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("launcher.demo.DEFAULT_MODEL", tmp_path)
    assert demo(str(tmp_path)).run() == 0
    shown = capfd.readouterr().out
    answers = re.findall(r"loaded (\w+) as guest \(\d+ ms\)\nuser .*\nassistant  (.*)\n", shown)
    assert answers == [("pirate", "Paris [b]é!pirate"), ("poet", "Paris [b]é!poet")]
    assert shown.index("Paris [b]é!\n") < shown.index("loaded pirate")


def test_a_missing_adapter_ends_the_demo_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("launcher.demo.DEFAULT_MODEL", tmp_path)
    monkeypatch.setattr("launcher.demo.ADAPTERS", tmp_path / "none")
    with fails(EngineError, "engine", match="404"):
        demo(str(tmp_path)).run()


def check_answers(text: str) -> None:
    """Each of the two embedded adapters answers in its manner."""
    assert re.findall(r"^assistant  (.*)$", text, re.MULTILINE) == [
        "The capital of France is Paris.",
        "Arr! The capital of France be Paris, matey!",
        "O rose! The capital of France is Paris, fair as the dawn.",
    ]


@pytest.mark.slow
def test_demo_with_the_flag_once_ends_after_its_answers() -> None:
    words = [sys.executable, "-m", "launcher.cli", "demo", "--once"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    check_answers(run.stdout)


def test_demo_uses_its_default_port_or_says_that_it_is_taken(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr("launcher.demo.DEFAULT_PORT", port)
    assert chosen_port() == port
    assert Demo(Path("tiny"), 2, None, once=True, command=fake_rank).run() == 0
    assert "is taken" not in capfd.readouterr().out
    with socket.create_server(("127.0.0.1", port)):
        assert chosen_port() != port
        assert Demo(Path("tiny"), 2, None, once=True, command=fake_rank).run() == 0
    assert f"Port {port} is taken: this demo uses " in capfd.readouterr().out


@pytest.mark.long
def test_demo_answers_and_prints_an_example_in_python_that_works(tmp_path: Path) -> None:
    """The real thing: two ranks, the embedded model, its two adapters."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "launcher.cli", "demo", "--port", str(free_ports(1)[0])]
    with log.open("wb") as file:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: "Ctrl-C ends" in log.read_text(), 60.0)
        check_answers(log.read_text())
        example = log.read_text().split("Or in Python:")[1].partition("Serving on")[0]
        run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
        assert run.stdout == "The capital of France is Paris.\n", run.stderr
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=60) == 0
    finally:
        demo.kill()
        demo.wait()


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("empty", EngineError, "empty"),
        ("stops", EngineError, "DONE"),
        ("error", EngineError, "rank 1 was lost"),
        ("refuses", EngineError, "no streams today"),
    ],
)
def test_demo_reports_errors_and_ends_the_ranks(
    model: str, error: type[BrigadeError], says: str, once: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with fails(error, "engine", match=says):
        demo(model, once).run()
    assert pids_alive(capfd.readouterr().err) == []


@pytest.fixture
def time_after_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo has all the time that its server needs for its first answer, and then none."""
    answers: list[tuple[int, str]] = []
    call = DemoServer.call

    def noted(server: DemoServer, path: str, body: Any = None) -> tuple[int, str]:
        answers.append(call(server, path, body))
        return answers[-1]

    monkeypatch.setattr(DemoServer, "call", noted)
    monkeypatch.setattr("launcher.demo.monotonic", lambda: 1000.0 if answers else 0.0)


@pytest.mark.usefixtures("time_after_answer")
def test_a_server_that_is_never_ready_is_given_up() -> None:
    with fails(ClusterError, "cluster", match="503.*loading layers"):
        demo("never").run()


@pytest.mark.usefixtures("time_after_answer")
def test_demo_does_not_blame_ranks_that_it_killed_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient = functools.partial(Supervisor, drain_seconds=0.5)
    monkeypatch.setattr("launcher.demo.Supervisor", impatient)
    with fails(ClusterError, "cluster", match="300 s"):
        demo("stubborn").run()


def test_demo_ends_with_the_exit_code_of_a_rank_that_failed() -> None:
    assert demo("fails").run() == 3


def test_a_missing_embedded_model_is_reported_with_the_model_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("launcher.demo.DEFAULT_MODEL", tmp_path / "none")
    with fails(UsageError, "usage", match="--model"):
        Demo(tmp_path / "none", 2, 0, once=True)


SERVE_ON = """
import sys
sys.path.insert(0, "tests")
from test_demo import demo
sys.exit(demo(sys.argv[1], once=False).run())
"""


@pytest.mark.parametrize(("model", "when"), [("tiny", "Ctrl-C ends"), ("never", "Waiting")])
def test_ctrl_c_ends_a_demo_that_serves_or_waits(tmp_path: Path, model: str, when: str) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE_ON, model], cwd=ROOT, stdout=file, stderr=file
        )
    try:
        wait_until(lambda: when in log.read_text() and log.read_text().count("pid=") == 2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)
    finally:
        process.kill()
    # Python ends by SIGINT with 1 where it gets no further; a rank that ends well gives 0.
    assert code in (0, 1), log.read_text()
    curls = [line for line in log.read_text().splitlines() if line.startswith("curl ")]
    assert [shlex.split(curl)[-2] for curl in curls] == (["-d"] if model == "tiny" else [])
    assert "launcher.demo" not in log.read_text()
    assert pids_alive(log.read_text()) == []


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def pids_alive(log: str) -> list[int]:
    found = [int(pid) for pid in re.findall(r"pid=(\d+)", log)]
    assert found
    return [pid for pid in found if exists(pid)]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_server_sent_events_end_with_done_and_skip_comments() -> None:
    lines = [
        ": hi\n",
        "\n",
        'data: {"a": 1}\n',
        "event: x\n",
        'data:{"a": 2}\n',
        "data: [DONE]",
    ]
    assert list(server_sent(iter(lines))) == [{"a": 1}, {"a": 2}]


def test_pieces_are_read_from_chunks_with_and_without_usage() -> None:
    chunks = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "a"}}], "usage": None},
        {"choices": [{"delta": {"content": None}}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    assert list(pieces(iter(chunks))) == [("", None), ("a", None), ("", None), ("", 3)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 0.1, 0.1), "1 tokens, the first after 100 ms"),
        ((5, 0.1, 0.5), "5 tokens, the first after 100 ms, then 10.0 tokens/s"),
    ],
)
def test_speed_is_counted_from_the_second_token_on(
    arguments: tuple[int, float, float], text: str
) -> None:
    assert speed(*arguments) == text
