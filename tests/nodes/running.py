"""Real nodes on this machine, each with a state folder of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

from launcher.nodes import client
from tests.nodes.network import enter, inside
from tests.test_launcher import ROOT
from tests.test_launcher import wait_until as wait_for_a_minute

Answer = TypeVar("Answer")
_PORT = re.compile(r"listens on port (\d+)")


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for longer than a minute: so often a node repeats what another one, which was too busy,
    has not heard."""
    wait_for_a_minute(condition, 150.0)


@dataclass
class RunningNode:
    """The process of a node. log is its output, state the base of its state folder, before the
    words before each command on its machine, and namespace that of its network, if any."""

    name: str
    state: Path
    log: Path
    process: "subprocess.Popen[bytes]"
    before: Sequence[str] = ()
    namespace: str = ""

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

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Calls a function of launcher.nodes.client as on this node's machine.

        It runs in this process, because a command would take half a second for its imports, and
        tests ask often. A thread can have a network of its own."""

        def answer() -> Answer:
            if self.namespace:
                enter(self.namespace)
            return question()

        thread = ThreadPoolExecutor(1)
        with patch.dict(os.environ, {"XDG_STATE_HOME": str(self.state)}):
            try:
                return thread.submit(answer).result(100)
            finally:
                thread.shutdown(wait=False)

    def states(self) -> dict[str, str]:
        """Returns the states of the nodes that this one knows, by name."""
        return {node.name: node.state for node in self.ask(client.known_nodes)}

    def nodes_at(self, port: int) -> list[client.Node]:
        """Returns the nodes with this port that this one knows."""
        return [node for node in self.ask(client.known_nodes) if node.port == port]

    def pair(self, other: "RunningNode") -> None:
        """Pairs this node's machine with another one that it has found."""
        wait_until(lambda: other.name in self.states())
        code = other.ask(client.own_code)
        self.ask(lambda: client.pair(client.node_named(other.name), code))

    def pair_by_port(self, other: "RunningNode") -> None:
        """Pairs this node's machine with another one, even if a third has the other's name."""
        wait_until(lambda: len(self.nodes_at(other.port)) == 1)
        (found,) = self.nodes_at(other.port)
        code = other.ask(client.own_code)
        self.ask(lambda: client.pair(found, code))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def running_node(
    name: str,
    folder: Path,
    flags: Sequence[str] = (),
    before: Sequence[str] = (),
    namespace: str = "",
) -> Iterator[RunningNode]:
    """Runs a node whose files are in a folder. Its name has the id of this process added, because
    other processes run tests with nodes, too. `before` are the words before its command, which
    runs in this namespace."""
    name = f"{name}-{os.getpid()}"
    if namespace:
        before = [*inside(namespace), *before]
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
    node = RunningNode(name, state, log, process, before, namespace)
    try:
        wait_until(lambda: process.poll() is not None or _PORT.search(log.read_text()))
        yield node
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
