"""A server that a self-test starts with `brigade launch`, as a user would."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from launcher.command import HOST
from launcher.demo import DEFAULT_MODEL, DemoServer, pieces
from launcher.process import free_ports
from serve.core.errors import ClusterError
from serve.selftest.report import Line
from serve.selftest.section import Context

_READY_SECONDS = 280.0  # time to read a large model from a disk
_END_SECONDS = 45.0
_POLL_SECONDS = 0.1
_QUESTION = "Tell me a story."
_BRIGADE = [sys.executable, "-m", "launcher.cli"]


class RankStatus(msgspec.Struct, frozen=True):
    """A rank in /admin/pipeline. pid is the id of its parent process."""

    rank: int
    pid: int | None
    bytes_read: int | None


class _Ranks(msgspec.Struct, frozen=True):
    stages: list[RankStatus]


@dataclass(frozen=True, slots=True)
class Story:
    """A streamed answer: its text, and the longest wait for one of its pieces."""

    text: str
    longest_gap_seconds: float


class Server:
    """A running launch. ready_seconds is the time from its start to the first answer."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://{HOST}:{port}"
        self.ready_seconds = 0.0
        self._log = log
        self._calls = DemoServer(port)

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def wait_until_ready(self) -> None:
        """Raises ClusterError if it ends, or is not ready in time."""
        started = time.monotonic()
        while time.monotonic() < started + _READY_SECONDS:
            if self.process.poll() is not None:
                last = self.log.strip().rpartition("\n")[2]
                raise ClusterError(f"The server ended with {self.process.returncode}: {last}")
            with suppress(OSError):
                if self._calls.call("/ready")[0] == 200:
                    self.ready_seconds = time.monotonic() - started
                    return
            time.sleep(_POLL_SECONDS)
        raise ClusterError(f"The server is not ready after {_READY_SECONDS:g} s.")

    def stages(self) -> list[RankStatus]:
        _, text = self._calls.call("/admin/pipeline")
        return msgspec.json.decode(text, type=_Ranks).stages

    def ask(self, max_tokens: int, after: int = 0, then: Callable[[], None] | None = None) -> Story:
        """Asks for a story, and calls `then` after this many pieces."""
        models = self._calls.get("/v1/models")
        body = {
            "model": models["data"][0]["id"],
            "messages": [{"role": "user", "content": _QUESTION}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        texts: list[str] = []
        gap = 0.0
        last = time.monotonic()
        for text, _ in pieces(self._calls.chat(body)):
            now = time.monotonic()
            gap = max(gap, now - last)
            last = now
            texts.append(text)
            if then and len(texts) == after:
                then()
        return Story("".join(texts), gap)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """Asks the launch to end. Returns its exit code, or None if it does not end in time."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int | None:
        """Waits until the launch has ended. Returns its exit code, or None if that takes long."""
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def left_over(self) -> list[Line]:
        """Counts the processes and the temporary folders that an ended launch has left."""
        folder = self._log.parent
        num_processes = 0
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # Other users' processes cannot be read.
                num_processes += process.environ().get("TMPDIR") == str(folder)
        num_folders = len(list(folder.glob("brigade-*")))
        return [Line("endings.left", num_processes), Line("endings.folders", num_folders)]


@contextmanager
def launched(
    context: Context,
    where: Sequence[str],
    *flags: str,
) -> Iterator[Server]:
    """Starts a server and waits until it is ready. `where` is `-n N`, or the words that name the
    hosts. Raises ClusterError."""
    if not context.starts_here:
        raise ClusterError(
            'Rank 0 is another machine: run it there, with "ssh": "127.0.0.1" in its line of the '
            "hostfile."
        )
    (port,) = free_ports(1)
    model = context.model or str(DEFAULT_MODEL)
    words = [*_BRIGADE, "launch", *where, "--", "serve", "--model", model]
    words += ["--host", HOST, "--port", str(port), *flags]
    environment = dict(os.environ)
    for name in ("BRIGADE_API_KEY", "BRIGADE_ADMIN_KEY"):
        environment.pop(name, None)  # The calls of the self-test have no key.
    with tempfile.TemporaryDirectory() as folder:
        environment["TMPDIR"] = folder  # where anything left over is found
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        server = Server(process, port, log)
        try:
            server.wait_until_ready()
            yield server
        finally:
            if process.poll() is None and server.end() is None:
                process.kill()
                process.wait()


def on_hosts(context: Context) -> list[str]:
    """Returns the words of `brigade launch` for all hosts, or for two local ranks."""
    if context.nodes:
        return ["--nodes", ",".join(context.nodes)]
    if context.hostfile is None:
        return ["-n", "2"]
    words = ["--hostfile", context.hostfile, "--python", context.python]
    words += ["--ssh", shlex.join(context.ssh)]
    if context.folder:
        words += ["--cwd", context.folder]
    return words


def run_brigade(*words: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command of Brigade to its end."""
    command = [*_BRIGADE, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=_READY_SECONDS)
