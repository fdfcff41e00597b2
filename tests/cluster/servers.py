"""Real servers for the tests: started like a user would, and surely gone afterwards."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil

from tests.ports import free_ports

ROOT = Path(__file__).parent.parent.parent
TINY_CHAT = ROOT / "examples" / "tiny-chat"
BIN = Path(sys.executable).parent
# Limits for servers that hang. A machine with other work takes long over everything.
READY_SECONDS = 100.0
LOG_SECONDS = 60.0
END_SECONDS = 60.0


def alone(flags: Sequence[str]) -> list[str]:
    return [str(BIN / "brigade"), "serve", *flags]


def brigade_launch(num_ranks: int, flags: Sequence[str]) -> list[str]:
    return [str(BIN / "brigade"), "launch", "-n", str(num_ranks), "--", "serve", *flags]


def mlx_launch(num_ranks: int, flags: Sequence[str]) -> list[str]:
    """As docs/cluster.md has it, but for the ports: other tests may run beside this one."""
    port = str(free_ports(num_ranks + 1)[1])
    ranks = ["-n", str(num_ranks), "--starting-port", port]
    return [str(BIN / "mlx.launch"), *ranks, "serve", *flags]


@dataclass
class Server:
    """A running cluster. log grows with what it prints."""

    process: subprocess.Popen[str]
    port: int
    log: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    clients: list[openai.OpenAI] = field(default_factory=list)
    reader: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def text(self) -> str:
        """What it has printed so far, and everything once it has ended."""
        if self.reader and self.process.poll() is not None:
            self.reader.join(LOG_SECONDS)
        return "".join(self.log)

    def client(self, **options: Any) -> openai.OpenAI:
        """Closed with the server, and not whenever garbage is collected."""
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)
        self.clients.append(made)
        return made

    def get(self, path: str) -> Any:
        return httpx2.get(self.url + path).raise_for_status().json()

    def family(self) -> list[psutil.Process]:
        """The launcher, the ranks' parents and their engines."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def engines(self) -> dict[int, psutil.Process]:
        """The engine child of each rank. A spare one is younger than the one that works."""
        parents = {stage["pid"]: stage["rank"] for stage in self.get("/admin/pipeline")["stages"]}
        found: list[tuple[float, int, psutil.Process]] = []
        for process in self.family():
            with suppress(psutil.NoSuchProcess):  # It ends just now.
                if "serve.rank.worker" in process.cmdline() and process.ppid() in parents:
                    found.append((process.create_time(), parents[process.ppid()], process))
        found.sort(key=lambda each: each[0], reverse=True)
        return {rank: process for _, rank, process in found}

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended with {self.process.poll()}:\n{self.text}"
            try:
                if httpx2.get(self.url + "/ready", timeout=5).status_code == 200:
                    return
            except httpx2.TransportError:
                time.sleep(0.05)
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s:\n{self.text}")

    def wait_for_log(self, pattern: str, seconds: float = LOG_SECONDS) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.text):
                return found.group(0)
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} did not come:\n{self.text}")


def serve_flags(port: int, model: Path = TINY_CHAT, *more: str) -> list[str]:
    """Most tests ask little of a server, so that a warm-up and a spare engine would cost more than
    they save."""
    return ["--model", str(model), "--port", str(port), "--quick-start", *more]


def quick(**constants: Any) -> str:
    """Returns the flag that starts a server quickly, with other constants. It replaces the one of
    serve_flags."""
    changes = [f"{name}={value}".lower() for name, value in constants.items()]
    return f"--quick-start={','.join(changes)}"


@contextmanager
def started(command: Sequence[str], port: int = 0) -> Iterator[Server]:
    """A process whose output is read; its whole family is gone at the end."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = Server(process, port)
    reader = server.reader = threading.Thread(target=_read, args=(server,))
    reader.start()
    family: list[psutil.Process] = []
    try:
        yield server
    finally:
        for client in server.clients:
            client.close()
        if process.poll() is None:
            family = server.family()
            process.send_signal(signal.SIGTERM)
        _end(process, family)
        reader.join(END_SECONDS)
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


def _end(process: subprocess.Popen[str], family: list[psutil.Process]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for left in psutil.wait_procs(family, timeout=0.1)[1]:
        # mlx.launch leaves its ranks running. An engine ends when its parent is killed.
        with suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(family, timeout=5)


def _read(server: Server) -> None:
    assert server.process.stdout
    for line in server.process.stdout:
        server.log.append(line)


@contextmanager
def running(
    num_ranks: int,
    *more: str,
    launch: Any = brigade_launch,
    model: Path = TINY_CHAT,
) -> Iterator[Server]:
    """A cluster that answers, with the embedded model or another one."""
    port = free_ports(1)[0]
    flags = serve_flags(port, model, *more)
    command = alone(flags) if launch is alone else launch(num_ranks, flags)
    with started(command, port) as server:
        server.wait_until_ready()
        yield server


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether processes have ended. init may leave a zombie of an orphan for a while."""
    _, others = psutil.wait_procs(processes, timeout=seconds)
    return not [each for each in others if _runs(each)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
