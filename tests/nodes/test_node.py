"""Real nodes: who sees whom, who may do what, and what becomes of it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import zeroconf
from zeroconf.asyncio import AsyncZeroconf

from launcher.cli import main
from launcher.nodes import client, discovery
from launcher.nodes.messages import SeenNode
from launcher.nodes.up import members
from serve.core.errors import ClusterError, UsageError
from tests.nodes.running import RunningNode, running_node, wait_until

pytestmark = pytest.mark.timeout(300)

Pair = tuple[RunningNode, RunningNode]


def connect(node: RunningNode, *words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.nodes.connect", *words],
        env=node.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def agents(node: RunningNode) -> list[int]:
    found = []
    for child in psutil.Process(node.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # It ends just now.
            if "launcher.agent" in child.cmdline():
                found.append(child.pid)
    return found


def test_paired_nodes_know_each_other(pair_of_nodes: Pair) -> None:
    one, two = pair_of_nodes
    assert one.states()[two.name] == "paired"
    assert two.states()[one.name] == "paired"
    assert one.states()[one.name] == "here"


def test_an_agent_runs_on_the_other_machine_until_its_connection_ends(pair_of_nodes: Pair) -> None:
    one, two = pair_of_nodes
    process = connect(one, two.name, "agent", "token-7")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'{"type":"ListAddresses"}\n')
    process.stdin.flush()
    process.stdout.readline()  # the empty line with which an agent begins
    token, _, message = process.stdout.readline().decode().partition(" ")
    assert token == "token-7"
    assert json.loads(message)["type"] == "AddressesListed"
    assert len(agents(two)) == 1
    process.kill()
    process.communicate()
    wait_until(lambda: not agents(two))


def test_a_name_that_nobody_has_is_an_error_that_lists_those_there_are(
    pair_of_nodes: Pair,
) -> None:
    one, two = pair_of_nodes
    _, error = connect(one, "three", "agent", "token").communicate(timeout=60)
    assert f"three is not known here, only {one.name}, {two.name}".encode() in error


@pytest.mark.parametrize("is_same_port", [False, True])
def test_a_second_node_of_the_same_user_is_refused(pair_of_nodes: Pair, is_same_port: bool) -> None:
    port = pair_of_nodes[0].port if is_same_port else 0
    run = pair_of_nodes[0].brigade("node", "--port", str(port))
    assert run.returncode == ClusterError.exit_code
    assert run.stderr.startswith("brigade node: your node runs on this machine already")
    assert run.stderr.count("\n") == 1


def test_a_port_that_is_in_use_is_refused(pair_of_nodes: Pair, tmp_path: Path) -> None:
    with running_node("n", tmp_path, ["--port", str(pair_of_nodes[0].port)]) as node:
        assert node.process.wait(60) == ClusterError.exit_code
        said = node.log.read_text()
        assert f"port {pair_of_nodes[0].port} cannot be used (Address already in use)" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_ends_without_a_word(tmp_path: Path, number: signal.Signals) -> None:
    with running_node("n", tmp_path) as node:
        before = node.log.read_text()
        node.process.send_signal(number)
        assert node.process.wait(60) == 0
        assert node.log.read_text() == before


def test_a_node_with_a_host_that_cannot_be_one_goes_on(tmp_path: Path) -> None:
    with running_node("n", tmp_path, ["--join", "a..b"]) as node:
        wait_until(lambda: "event=not_joined" in node.log.read_text())
        assert node.states()[node.name] == "here"
        assert node.process.poll() is None


def test_only_what_up_has_started_is_ended_for_others(pair_of_nodes: Pair) -> None:
    """A group's machine that says `down` must not end a training on another machine."""
    one, two = pair_of_nodes
    program = """
from launcher.record import recorded
with recorded([{!r}, "a b"], ["h"], 1.0):
    print("recorded", flush=True)
    input()
"""
    with ExitStack() as stack:
        for word in ("up", "fine-tune"):
            process = subprocess.Popen(
                [sys.executable, "-c", program.format(word)],
                env=one.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        ended = two.ask(lambda: client.stop_launches(client.node_named(one.name)))
        assert ended == ["up 'a b'"]
        assert process.poll() is None


def test_a_stranger_with_the_name_of_a_member_does_not_replace_it(tmp_path: Path) -> None:
    with running_node("a", tmp_path) as a:
        joins = ["--join", f"127.0.0.1:{a.port}"]
        with (
            running_node("b", tmp_path, joins) as b,
            running_node("b", tmp_path / "2", joins),
        ):
            a.pair_by_port(b)

            def states_of_b() -> set[str]:
                """Nodes of other tests are found, too."""
                return {node.state for node in a.ask(client.known_nodes) if node.name == b.name}

            wait_until(lambda: states_of_b() == {"paired", "found"})
            found = a.ask(lambda: members([b.name], None))
            states = [(node.name, node.state) for node in found]
            assert states == [(a.name, "here"), (b.name, "paired")]
            reports = json.loads(a.brigade("nodes", "--json").stdout)
            own = [each for each in reports if each["name"] in (a.name, b.name)]
            assert [(each["state"], each["facts"] is None) for each in own] == [
                ("this machine", False),
                ("paired", False),
                ("not paired", True),
            ]


def test_commands_say_that_no_node_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "launcher.cli", "node", "--code"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == ClusterError.exit_code
    assert "run `brigade node` in another terminal" in run.stderr


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--name", "a b"], "cannot be used"),
        (["--name", ""], "cannot be used"),
        (["--join", "host:x"], "is not HOST or HOST:PORT"),
        (["--join", ":1"], "is not HOST or HOST:PORT"),
        (["--join", ""], "is not HOST or HOST:PORT"),
        (["--join", "host:²"], "is not HOST or HOST:PORT"),
        (["--join", "host:0"], "is not HOST or HOST:PORT"),
        (["--join", "::1"], "is not HOST or HOST:PORT"),
        (["--name", "all"], "cannot be used"),
        (["--port", "65536"], "--port"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "launcher.cli", "node", *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert error in run.stderr


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["launch", "--nodes", "", "--", "serve", "--model", "m"], "--nodes"),
        (["launch", "--nodes", ",", "--", "serve", "--model", "m"], "--nodes"),
        (["doctor", "--nodes", ""], "--nodes"),
        (["selftest", "--nodes="], "--nodes"),
        (["up", "m", "--nodes", ""], "--nodes"),
        (["up", ""], "name the model first"),
        (["nodes", "--pair", ""], "--pair"),
        (["nodes", "--forget="], "--forget"),
    ],
)
def test_names_that_are_empty_are_refused(
    words: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == UsageError.exit_code
    said = capsys.readouterr().err
    assert flag in said
    assert said.count("\n") == 1


def test_a_machine_with_the_longest_name_is_found(pair_of_nodes: Pair, tmp_path: Path) -> None:
    """A label of DNS has at most 63 bytes, and a node adds some to its name."""
    with running_node("a" * (62 - len(str(os.getpid()))), tmp_path) as node:
        assert len(node.name) == 63
        wait_until(lambda: node.name in pair_of_nodes[0].states())


def test_an_announcement_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    num_open: list[int] = []  # in each try, with the sockets of that try

    async def fail(*_: object) -> None:
        num_open.append(psutil.Process().num_fds())
        raise zeroconf.Error("no")

    async def test() -> None:
        num_before = psutil.Process().num_fds()
        own = SeenNode("key", "n", "1", [], 1)
        announcing = asyncio.create_task(discovery.announce(own, discovery.Seen()))
        while len(num_open) < 10:
            assert not announcing.done()
            await asyncio.sleep(0.01)
        # Not in the middle of a try, which would leave sockets to the collector.
        while psutil.Process().num_fds() > num_before:
            await asyncio.sleep(0.001)
        announcing.cancel()

    monkeypatch.setattr(AsyncZeroconf, "async_register_service", fail)
    monkeypatch.setattr(discovery, "LOOK_SECONDS", 0.05)
    asyncio.run(asyncio.wait_for(test(), 60))
    # A socket is closed some turns of the event loop later.
    assert num_open[-1] < num_open[0] + 8, num_open


@pytest.mark.parametrize("code", ["", "12345", "1234567", "12345x", "１２３４５６"])
def test_what_cannot_be_a_code_costs_no_try(pair_of_nodes: Pair, code: str) -> None:
    one, two = pair_of_nodes
    before = one.ask(client.own_code)
    for _ in range(3):  # After three tries there would be another code.
        with pytest.raises(ClusterError, match="a code has six digits"):
            two.ask(lambda: client.pair(client.node_named(one.name), code))
    assert one.ask(client.own_code) == before


def test_a_code_may_be_typed_in_groups(tmp_path: Path) -> None:
    with (
        running_node("a", tmp_path) as a,
        running_node("b", tmp_path, ["--join", f"127.0.0.1:{a.port}"]) as b,
    ):
        wait_until(lambda: a.name in b.states())
        code = a.ask(client.own_code)
        b.ask(lambda: client.pair(client.node_named(a.name), f"{code[:3]} {code[3:]} "))
        assert b.states()[a.name] == "paired"


def test_files_of_the_node_are_private(pair_of_nodes: Pair) -> None:
    one = pair_of_nodes[0]
    folders = list(one.state.glob("brigade/*/node"))
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700]
    for path in folders[0].iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with running_node("n", tmp_path) as node:
        node.stop()
        (key,) = node.state.glob("brigade/*/node/key")
        key.chmod(0o644)
        run = node.brigade("node", "--port", "0")
        assert run.returncode == ClusterError.exit_code
        assert "chmod 600" in run.stderr


def knows_members(node: RunningNode, *members: RunningNode) -> bool:
    """Whether a node takes these machines as members. Before, it may have found them only."""
    states = node.states()
    return all(states.get(each.name) in ("here", "paired", "away") for each in members)


def test_a_group_of_three_learns_of_a_new_machine_and_of_one_that_is_forgotten(
    tmp_path: Path,
) -> None:
    """Each machine is paired with one other only."""
    with running_node("a", tmp_path) as a:
        joins = ["--join", f"127.0.0.1:{a.port}"]
        with running_node("b", tmp_path, joins) as b, running_node("c", tmp_path, joins) as c:
            b.pair(a)
            c.pair(a)
            for node in (a, b, c):
                wait_until(lambda node=node: knows_members(node, a, b, c))  # type: ignore[misc]
            # b and c have never paired with each other. c's address is known from a's list.
            process = connect(b, c.name, "agent", "token")
            assert process.stdout is not None
            process.stdout.readline()
            wait_until(lambda: len(agents(c)) == 1)
            a.ask(lambda: client.forget(client.node_named(b.name)))
            # All members close their connections to it once they know. A member that was too busy
            # to listen is told again after a minute.
            process.communicate(timeout=150)
            wait_until(lambda: not agents(c))
            wait_until(lambda: c.states().get(b.name, "found") == "found")
            _, error = connect(b, c.name, "agent", "token").communicate(timeout=60)
            assert b"does not know this machine" in error
            # It can come back by its code.
            b.pair(a)
            wait_until(lambda: c.states().get(b.name) in ("paired", "away"))


def test_a_machine_keeps_its_group_over_a_restart(tmp_path: Path) -> None:
    with running_node("a", tmp_path) as a:
        with running_node("b", tmp_path, ["--join", f"127.0.0.1:{a.port}"]) as b:
            b.pair(a)
            assert b.stop() == 0
        with running_node("b", tmp_path, ["--join", f"127.0.0.1:{a.port}"]) as b:
            wait_until(lambda: b.states().get(a.name) == "paired")
            wait_until(lambda: a.states().get(b.name) == "paired")


def test_a_name_that_the_group_has_already_is_refused(tmp_path: Path) -> None:
    with running_node("a", tmp_path / "1") as a, running_node("b", tmp_path / "1") as b:
        joins = ["--join", f"127.0.0.1:{a.port}"]
        with running_node("a", tmp_path / "2", joins) as other:
            wait_until(lambda: b.name in other.states() and len(other.nodes_at(a.port)) == 1)
            code = a.ask(client.own_code)
            # The node itself has this name, so nothing can be forgotten.
            (found,) = other.nodes_at(a.port)
            with pytest.raises(ClusterError, match="it has the name.*another --name"):
                other.ask(lambda: client.pair(found, code))
        assert b.process.poll() is None


def test_once_ends_with_the_first_launch(tmp_path: Path) -> None:
    with running_node("a", tmp_path) as a:
        joins = ["--join", f"127.0.0.1:{a.port}"]
        with running_node("b", tmp_path, [*joins, "--once"]) as b:
            b.pair(a)
            process = connect(a, b.name, "agent", "token")
            assert process.stdout is not None
            process.stdout.readline()
            assert b.process.poll() is None
            process.communicate(timeout=60)
            assert b.process.wait(60) == 0


def test_a_node_that_ends_ends_its_agents(tmp_path: Path) -> None:
    with running_node("a", tmp_path) as a:
        joins = ["--join", f"127.0.0.1:{a.port}"]
        with running_node("b", tmp_path, joins) as b:
            b.pair(a)
            process = connect(a, b.name, "agent", "token")
            assert process.stdout is not None
            process.stdout.readline()
            (agent,) = agents(b)
            b.process.kill()
            b.process.wait()
            wait_until(lambda: not psutil.pid_exists(agent))
            assert process.wait(60) != 0
            process.communicate()
