"""`brigade up`, `down` and `nodes` with real nodes, real ranks and a real model."""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest

from launcher.nodes import client, table
from launcher.nodes.client import Node
from serve.core.errors import ClusterError, ModelError, UsageError
from tests.cluster.servers import TINY_CHAT
from tests.nodes.network import Network, network
from tests.nodes.running import RunningNode, running_node
from tests.ports import free_ports
from tests.test_launcher import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

Pair = tuple[RunningNode, RunningNode]

_numbers = itertools.count()


def fresh(name: str) -> str:
    """A name that no other node of this process has: all nodes on this machine hear each other."""
    return f"{name}{next(_numbers)}"


class Up:
    """A running `brigade up`."""

    def __init__(self, node: RunningNode, folder: Path, model: Path, *words: str) -> None:
        (self.port,) = free_ports(1)
        self._log = folder / f"up-{self.port}.log"
        command = ["up", str(model), "--port", str(self.port), *words]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*node.before, sys.executable, "-m", "launcher.cli", *command],
                env=node.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            )

    @property
    def text(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def see(self, text: str) -> "Up":
        wait_until(lambda: text in self.text or self.process.poll() is not None, 120.0)
        assert text in self.text, self.text
        return self

    def ready(self) -> "Up":
        return self.see("Ready on ")

    def answer(self, model: str = "tiny-chat") -> str:
        """Returns an answer, as soon as the server gives one."""
        url = f"http://127.0.0.1:{self.port}"
        wait_until(lambda: httpx2.get(f"{url}/ready", timeout=60).status_code == 200)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 8,
        }
        reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])

    def table(self) -> list[list[str]]:
        """The rows of what was chosen: rank, machine, address, round trip and its unit, MB/s."""
        rows = re.findall(r"^ (\d+ .*)$", self.text, re.MULTILINE)
        return [row.split() for row in rows]

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"event=rank_started rank=\d+ pid=(\d+)", self.text)]


@contextmanager
def up(
    node: RunningNode,
    folder: Path,
    *words: str,
    model: Path = TINY_CHAT,
) -> Iterator[Up]:
    running = Up(node, folder, model, *words)
    try:
        yield running
    finally:
        running.process.send_signal(signal.SIGTERM)
        try:
            running.process.wait(60)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
            raise


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two paired nodes, for tests that leave them so."""
    with two_nodes(tmp_path_factory.mktemp("nodes")) as pair:
        pair[0].pair(pair[1])
        yield pair


@contextmanager
def two_nodes(folder: Path) -> Iterator[Pair]:
    with (
        running_node(fresh("one"), folder) as one,
        running_node(fresh("two"), folder, ["--join", f"127.0.0.1:{one.port}"]) as two,
    ):
        yield one, two


def test_two_machines_serve_until_another_machine_ends_them(nodes: Pair, tmp_path: Path) -> None:
    one, two = nodes
    with up(one, tmp_path) as running:
        running.ready()
        assert [row[:2] for row in running.table()] == [["0", one.name], ["1", two.name]]
        assert running.answer()
        listed = two.brigade("nodes", "--json")
        reports = json.loads(listed.stdout)
        assert [report["name"] for report in reports[:2]] == [two.name, one.name]
        assert f"rank 1 of {one.name}'s launch" in reports[0]["facts"]["ranks"]
        ended = two.brigade("down")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith(f"ended on {one.name}: up ")
        assert running.process.wait(60) == 0
        wait_until(lambda: not any(map(psutil.pid_exists, running.pids())))
    assert two.brigade("down").returncode == UsageError.exit_code


def test_down_ends_what_runs_on_this_machine(nodes: Pair, tmp_path: Path) -> None:
    one, two = nodes
    with up(one, tmp_path, "--nodes", two.name) as running:
        running.ready()
        assert one.brigade("down").stdout.startswith(f"ended here: up {TINY_CHAT}")
        assert running.process.wait(60) == 0


def test_a_machine_without_others_serves_alone(tmp_path: Path) -> None:
    with running_node(fresh("n"), tmp_path) as node, up(node, tmp_path) as running:
        running.ready()
        assert [row[:3] for row in running.table()] == [["0", node.name, "-"]]
        assert running.answer()


@pytest.mark.slow
def test_the_pythons_of_the_machines_may_be_in_different_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "venv").symlink_to(Path(sys.executable).parent.parent)
    other = str(tmp_path / "venv" / "bin" / "python")
    with ExitStack() as stack:
        one = stack.enter_context(running_node(fresh("one"), tmp_path))
        joins = ["--join", f"127.0.0.1:{one.port}"]
        with monkeypatch.context() as there:
            there.setattr(sys, "executable", other)
            two = stack.enter_context(running_node(fresh("two"), tmp_path, joins))
        one.pair(two)
        running = stack.enter_context(up(one, tmp_path)).ready()
        pythons = [psutil.Process(pid).cmdline()[0] for pid in running.pids()]
        assert sorted(pythons) == sorted([sys.executable, other])


@pytest.mark.slow
def test_machines_that_are_not_paired_or_away_are_named(tmp_path: Path) -> None:
    with running_node(fresh("one"), tmp_path) as one:
        joins = ["--join", f"127.0.0.1:{one.port}"]
        with (
            running_node(fresh("two"), tmp_path, joins) as two,
            running_node(fresh("new"), tmp_path, joins) as new,
        ):
            one.pair(two)
            wait_until(lambda: new.name in one.states())
            refused = one.brigade("up", str(TINY_CHAT), "--nodes", new.name)
            assert refused.returncode == ClusterError.exit_code
            assert f"{new.name} is not paired" in refused.stderr
            assert f"`brigade nodes --pair {new.name}`" in refused.stderr
            wait_until(lambda: one.states()[two.name] == "paired")
            two.process.send_signal(signal.SIGSTOP)  # as a machine that has just gone to sleep
            try:
                with up(one, tmp_path) as running:
                    running.ready()
                    assert "event=left_out" in running.text
                    assert f"{new.name} is not paired" in running.text
                    assert [row[1] for row in running.table()] == [one.name]
                refused = one.brigade("up", str(TINY_CHAT), "--nodes", two.name)
                assert refused.returncode == ClusterError.exit_code
                assert refused.stderr.splitlines()[-1].startswith(f"brigade up: {two.name}")
            finally:
                two.process.send_signal(signal.SIGCONT)


def test_a_model_that_only_this_machine_has_is_read_by_all(tmp_path: Path) -> None:
    model = tmp_path / "own-model"
    shutil.copytree(TINY_CHAT, model)
    # The other machine sees an empty folder.
    hide = f'mount -t tmpfs none {model} && exec "$@"'
    with ExitStack() as stack:
        home = f"HF_HOME={tmp_path}/home"
        one = stack.enter_context(running_node(fresh("one"), tmp_path, before=["env", f"{home}-1"]))
        joins = ["--join", f"127.0.0.1:{one.port}"]
        before = ["unshare", "-m", "sh", "-c", hide, "sh", "env", f"{home}-2"]
        two = stack.enter_context(running_node(fresh("two"), tmp_path, joins, before))
        one.pair(two)
        with up(one, tmp_path, model=model) as running:
            running.ready()
            assert f"not all machines have {model}: they read it from this one" in running.text
            assert running.answer("own-model")
        fetched = list((tmp_path / "home-2").rglob("*.safetensors"))
        assert fetched, "the other machine has fetched its layers"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "name the model first"),
        (["--port", "1"], "name the model first"),
        (["m", "--nodes", "three"], "three is not known here, only"),
        (["m", "--prot", "1"], "--prot"),
        (["/no/model"], "/no/model"),
    ],
)
def test_wrong_words_are_refused(nodes: Pair, words: Sequence[str], error: str) -> None:
    run = nodes[0].brigade("up", *words)
    assert run.returncode in (UsageError.exit_code, ModelError.exit_code), run.stderr
    assert error in run.stderr
    said = [line for line in run.stderr.splitlines() if not line.startswith("[launch]")]
    assert len(said) == 1


def test_a_machine_is_paired_with_a_code_from_standard_input_and_forgotten(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (one, two):
        wait_until(lambda: two.name in one.states())
        assert f"run `brigade nodes --pair {two.name}`" in one.brigade("nodes").stdout
        wrong = one.brigade("nodes", "--pair", two.name, text="12\n")
        assert wrong.returncode == ClusterError.exit_code
        assert wrong.stderr.count("\n") == 1

        def pair() -> bool:
            code = two.brigade("node", "--code").stdout
            return (
                one.brigade("nodes", "--pair", two.name, text=code).stdout
                == f"{two.name} is paired.\n"
            )

        wait_until(pair)  # After a wrong code there is a pause.
        assert one.brigade("nodes", "--pair", two.name).returncode == ClusterError.exit_code
        assert one.brigade("nodes", "--forget", two.name).stdout.startswith(
            f"{two.name} is forgotten"
        )
        wait_until(lambda: one.states()[two.name] == "found")
        # The other machine does not know yet. Following the advice of `brigade nodes` is enough.
        assert two.states()[one.name] == "paired"
        assert f"run `brigade nodes --pair {one.name}`" in two.brigade("nodes").stdout
        code = one.brigade("node", "--code").stdout
        again = two.brigade("nodes", "--pair", one.name, text=code)
        assert again.stdout == f"{one.name} is paired.\n", again.stderr
        assert one.states()[two.name] == two.states()[one.name] == "paired"
        assert "this machine" in two.brigade("nodes", "--pair", two.name).stderr


def test_the_table_of_machines_fits_into_80_columns(
    nodes: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    one, two = nodes
    monkeypatch.setenv("XDG_STATE_HOME", str(one.state))
    # The nodes of other tests may have names of 63 characters, for which cells are broken.
    known = client.known_nodes()
    own = [node for node in known if node.name in (one.name, two.name)]
    stranger = Node("stranger", "key", (), 1, "found", "0.1.0")
    monkeypatch.setattr(client, "known_nodes", lambda: [*own, stranger])
    table.show(as_json=False)
    listed = capsys.readouterr().out
    tables = listed[: listed.rindex("\n\n")]
    assert max(map(len, tables.splitlines())) <= 80
    headings = [part.splitlines()[0].split() for part in listed.strip("\n").split("\n\n")[:3]]
    assert headings == [
        ["machine", "state", "link", "from", "here", "does"],
        ["machine", "address", "memory", "free", "load", "power"],
        ["machine", "system", "mlx-brigade", "mlx", "mlx-lm"],
    ]
    assert re.search(two.name + r" +paired +[\d.]+ ms, [\d,]+ MB/s +\w", listed)
    assert re.search(two.name + r" +127\.0\.0\.1 .* of .* [\d.]+", listed)


# --- machines of their own


def lay_cable(machines: Network, one: int, other: int, number: int) -> None:
    """Connects two machines by a cable with a subnet of its own."""
    names = machines.names[one], machines.names[other]
    device = f"cable{number}"
    ends = f"netns {names[0]} type veth peer name {device} netns {names[1]}"
    subprocess.run(f"ip link add {device} {ends}".split(), check=True)
    for end, name in enumerate(names):
        address = f"192.168.7.{4 * number + 1 + end}/30"
        subprocess.run(f"ip -n {name} addr add {address} dev {device}".split(), check=True)
        subprocess.run(f"ip -n {name} link set {device} up".split(), check=True)


def slow_down(machines: Network, number: int) -> None:
    """Lets a machine send at 1 MB/s over the switch."""
    shape = "rate 8mbit burst 16kb latency 500ms"
    tc = f"tc qdisc add dev lan root tbf {shape}".split()
    subprocess.run([*machines.inside(number), *tc], check=True)


@pytest.mark.slow
def test_the_ring_follows_the_cables_and_avoids_the_slow_switch(tmp_path: Path) -> None:
    """Cables lead from m0 to m2, from there to m1, and from there to m3."""
    with network(4) as machines, ExitStack() as stack:
        for number, ends in enumerate([(0, 2), (2, 1), (1, 3)]):
            lay_cable(machines, *ends, number)
        for number in range(4):
            slow_down(machines, number)
        nodes = [
            stack.enter_context(
                running_node(f"m{number}", tmp_path, namespace=machines.names[number])
            )
            for number in range(4)
        ]
        for other in nodes[1:]:
            nodes[0].pair(other)
        wait_until(lambda: list(nodes[0].states().values()).count("paired") == 3)
        with up(nodes[0], tmp_path) as running:
            running.ready()
            found = {row[1]: row[2] for row in running.table()}
        m0, m1, m2, m3 = (node.name for node in nodes)
        assert list(found) in ([m0, m2, m1, m3], [m0, m3, m1, m2])
        slow = [ip for ip in found.values() if not ip.startswith("192.168.7.")]
        assert len(slow) == 1, "m3 and m0 have no cable"
        for number in range(4):
            machines.plug(number, f"198.19.0.{100 + number}")  # as after a reboot
        wait_until(lambda: "198.19.0.103" in nodes[0].ask(lambda: client.node_named(m3).addresses))
        with up(nodes[0], tmp_path) as running:
            running.ready()
            assert len(running.table()) == 4
