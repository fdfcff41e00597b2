"""Real nodes on this machine, each with a state folder of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.test_launcher import ROOT, wait_until

_PORT = re.compile(r"listens on port (\d+)")


@dataclass
class RunningNode:
    """The process of a node. log is its output, state the base of its state folder."""

    name: str
    state: Path
    log: Path
    process: "subprocess.Popen[bytes]"
    before: Sequence[str] = ()

    @property
    def port(self) -> int:
        found = _PORT.search(self.log.read_text())
        assert found, self.log.read_text()
        return int(found.group(1))

    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.state), "PYTHONPATH": str(ROOT)}

    def brigade(self, *words: str, text: str = "") -> "subprocess.CompletedProcess[str]":
        """Runs a command on this node's machine."""
        return subprocess.run(
            [*self.before, sys.executable, "-m", "launcher.cli", *words],
            env=self.environment(),
            input=text,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def ask(self, program: str) -> str:
        """Runs Python code on this node's machine, in which `client` is launcher.nodes.client, and
        returns what it printed."""
        run = subprocess.run(
            [
                *self.before,
                *(sys.executable, "-c", f"from launcher.nodes import client\n{program}"),
            ],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    def states(self) -> dict[str, str]:
        """Returns the states of the nodes that this one knows, by name."""
        listed = self.ask("for node in client.known_nodes(): print(node.name, node.state)")
        return dict(line.split() for line in listed.splitlines())  # type: ignore[misc]

    def pair(self, other: "RunningNode") -> None:
        """Pairs this node's machine with another one that it has found."""
        wait_until(lambda: other.name in self.states())
        code = other.ask("print(client.own_code())")
        self.ask(f"client.pair(client.node_named({other.name!r}), {code!r})")

    def pair_by_port(self, other: "RunningNode") -> None:
        """Pairs this node's machine with another one, even if a third has the other's name."""
        found = f"[node for node in client.known_nodes() if node.port == {other.port}]"
        wait_until(lambda: self.ask(f"print(len({found}))") == "1")
        code = other.ask("print(client.own_code())")
        self.ask(f"client.pair({found}[0], {code!r})")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def running_node(
    name: str,
    folder: Path,
    flags: Sequence[str] = (),
    before: Sequence[str] = (),
) -> Iterator[RunningNode]:
    """Runs a node whose files are in a folder. Its name has the id of this process added, because
    other processes run tests with nodes, too. `before` are the words before its command."""
    name = f"{name}-{os.getpid()}"
    state = folder / name
    state.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    command = [*before, sys.executable, "-m", "launcher.cli", "node", "--name", name, *flags]
    if "--port" not in flags:
        command += ["--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    node = RunningNode(name, state, log, process, before)
    try:
        wait_until(lambda: process.poll() is not None or _PORT.search(log.read_text()))
        yield node
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
