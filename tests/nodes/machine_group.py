"""A group of paired machines in network namespaces, whose nodes can be killed at chosen moments."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tests.cluster.recovery.test_namespaces import ip
from tests.nodes.network import Network, network
from tests.nodes.running import RunningNode, running_node
from tests.test_launcher import ROOT, wait_until

# A module of this name is imported by each Python process that finds it. It lets an agent wait when
# it has read a message that begins with the text in the file `hold`, until that file or its node is
# gone.
HOLD = """
import os, sys, time
from pathlib import Path

if "launcher.agent" in sys.orig_argv:
    from serve.core import wire

    folder = Path(__file__).parent
    read = wire.LineReader.read

    def read_and_wait(self, text):
        message = read(self, text)
        hold = folder / "hold"
        if hold.exists() and repr(message).startswith(hold.read_text()):
            (folder / "held").write_text(str(os.getpid()))
            node = os.getppid()
            while hold.exists() and os.getppid() == node:
                time.sleep(0.01)
        return message

    wire.LineReader.read = read_and_wait
"""

# Waits until a server is ready, then prints the lines of a stream as they come.
STREAM = """
import sys, time, urllib.error, urllib.request

url, body = sys.argv[1:]
while True:
    try:
        urllib.request.urlopen(f"{url}/ready", timeout=60)
        break
    except urllib.error.HTTPError:
        time.sleep(0.05)
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(f"{url}/v1/chat/completions", body.encode(), headers)
with urllib.request.urlopen(request, timeout=100) as reply:
    for line in reply:
        print(line.decode().strip(), flush=True)
"""


class Stream:
    """A streamed answer to a client on the machine of rank 0. tokens are those that came."""

    def __init__(self, node: RunningNode, port: int, num_tokens: int, log: Path) -> None:
        question = {
            "model": "tiny-chat",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        command = [sys.executable, "-c", STREAM, f"http://127.0.0.1:{port}", json.dumps(question)]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*node.before, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def tokens(self) -> list[str]:
        pieces = []
        for line in self._log.read_text().split("\n")[:-1]:  # The last line may be incomplete.
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                    pieces.append(choice["delta"].get("content") or "")
        return [piece for piece in pieces if piece]

    def begun(self) -> "Stream":
        wait_until(lambda: bool(self.tokens) or self._process.poll() is not None)
        assert self._process.poll() is None, self._log.read_text()
        return self

    def ended(self) -> str:
        """Returns the whole output when the stream has ended."""
        assert self._process.wait(100) == 0, self._log.read_text()
        return self._log.read_text()


class MachineGroup:
    """Machines by number, of which 0 has paired with all others."""

    def __init__(self, folder: Path, net: Network, stack: ExitStack) -> None:
        self.folder = folder
        self._net = net
        self._stack = stack
        self.nodes: list[RunningNode] = []
        for number in range(len(net.names)):
            self._hook(number).mkdir()
            (self._hook(number) / "sitecustomize.py").write_text(HOLD)
            self.nodes.append(self._start(number))
        for other in self.nodes[1:]:
            self.nodes[0].pair(other)
        self._wait()

    def _hook(self, number: int) -> Path:
        return self.folder / f"hook-{number}"

    def _start(self, number: int) -> RunningNode:
        before = ["env", f"PYTHONPATH={self._hook(number)}:{ROOT}"]
        namespace = self._net.names[number]
        node = running_node(f"m{number}", self.folder, ["--port", "8422"], before, namespace)
        return self._stack.enter_context(node)

    def _wait(self) -> None:
        """Waits until machine 0 sees all others."""
        others = {node.name for node in self.nodes[1:]}
        states = self.nodes[0].states
        wait_until(lambda: others <= {name for name, at in states().items() if at == "paired"})

    # --- what happens to a node

    def kill(self, number: int) -> None:
        """Kills a node. An agent that is held there goes on."""
        self.nodes[number].process.kill()
        self.nodes[number].process.wait()
        self.release(number)

    def power_off(self, number: int) -> None:
        """Kills all processes of a machine."""
        for process in [*self.processes(number), self.nodes[number].process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes[number].process.wait()

    def mend(self) -> None:
        """Starts the nodes that were killed again."""
        killed = [n for n, node in enumerate(self.nodes) if node.process.poll() is not None]
        for number in killed:
            self.nodes[number] = self._start(number)
        if killed:
            self._wait()

    def hold(self, number: int, message: str) -> None:
        """An agent of this machine waits when it is sent a message that begins with this text."""
        (self._hook(number) / "held").unlink(missing_ok=True)
        (self._hook(number) / "hold").write_text(message)

    def wait_for_held(self, number: int) -> None:
        wait_until((self._hook(number) / "held").exists)

    def release(self, number: int) -> None:
        (self._hook(number) / "hold").unlink(missing_ok=True)

    def readdress(self, number: int, address: str) -> None:
        self._net.plug(number, address)

    def slow_down(self, number: int) -> None:
        """Lets a machine send so slowly that a token takes about 30 ms."""
        self._shape(number, "replace dev lan root tbf rate 200kbit burst 16kb latency 500ms")

    def hasten(self, number: int) -> None:
        self._shape(number, "replace dev lan root noqueue")

    def _shape(self, number: int, words: str) -> None:
        command = [*self._net.inside(number), "tc", "qdisc", *words.split()]
        subprocess.run(command, check=True, timeout=60)

    # --- what is left

    def processes(self, number: int) -> list[psutil.Process]:
        """Returns the processes of a machine, but for its node."""
        found = []
        for pid in ip(f"netns pids {self._net.names[number]}").split():
            if int(pid) != self.nodes[number].process.pid:
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(int(pid))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def wait_until_empty(self) -> None:
        """Waits until no process of a launch is left on any machine."""
        for number in range(len(self.nodes)):
            wait_until(lambda number=number: not self.processes(number))  # type: ignore[misc]


@contextmanager
def machine_group(folder: Path, num_machines: int) -> Iterator[MachineGroup]:
    with network(num_machines) as net, ExitStack() as stack:
        yield MachineGroup(folder, net, stack)
