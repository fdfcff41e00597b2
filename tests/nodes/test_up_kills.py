"""Nodes, and `brigade up` itself, are killed at every point of `up`: no process is left, one line
says what to do, and the same command works again. While ranks run, a lost machine is waited for."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from serve.core.errors import ClusterError
from tests.cluster.servers import TINY_CHAT, quick
from tests.hub.checkpoints import header_sizes
from tests.hub.server import REPO, running
from tests.nodes.machine_group import MachineGroup, Stream, machine_group
from tests.nodes.running import RunningNode, running_node
from tests.nodes.test_up import Up, fresh
from tests.test_launcher import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

# What an agent is asked at each point of `up`, in this order.
POINTS = {
    "connecting": "EnterFolder",
    "facts": "DescribeHost(model=None",
    "addresses": "ListAddresses",
    "link to it": "StartEcho",
    "link from it": "MeasureHop",
    "model": "DescribeHost(model='",
    "ports": "ReservePorts",
    "start": "RunRank",
}
AGAIN = "run `brigade node` there again"


@pytest.fixture(scope="module")
def two_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineGroup]:
    with machine_group(tmp_path_factory.mktemp("two"), 2) as group:
        yield group


@pytest.fixture(scope="module")
def three_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineGroup]:
    with machine_group(tmp_path_factory.mktemp("three"), 3) as group:
        yield group


class Commands:
    """Starts `brigade up` on machine 0, with the machines of these numbers."""

    def __init__(self, group: MachineGroup) -> None:
        self._group = group
        self.started: list[Up] = []

    def __call__(self, *others: int, words: Sequence[str] = ()) -> Up:
        names = ",".join(self._group.nodes[number].name for number in others)
        named = ["--nodes", names] if others else []
        first = self._group.nodes[0]
        running = Up(first, self._group.folder, TINY_CHAT, "--quick-start", *named, *words)
        self.started.append(running)
        return running


@contextmanager
def starting(group: MachineGroup) -> Iterator[Commands]:
    """Afterwards no process of a launch is left on any machine."""
    group.mend()
    commands = Commands(group)
    try:
        yield commands
    finally:
        for each in commands.started:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait()
        for number in range(len(group.nodes)):
            group.release(number)
    group.wait_until_empty()


@pytest.fixture
def group(two_machines: MachineGroup) -> MachineGroup:
    return two_machines


@pytest.fixture
def up(group: MachineGroup) -> Iterator[Commands]:
    with starting(group) as commands:
        yield commands


def ended(running: Up) -> int:
    return running.process.wait(60)


def check_ended_by(running: Up, name: str) -> None:
    """`up` has failed. Its last line, and no other one, says that the machine is lost."""
    assert ended(running) == ClusterError.exit_code, running.text
    said = [line for line in running.text.splitlines() if line.startswith("brigade up: ")]
    assert said == running.text.splitlines()[-1:], running.text
    assert name in said[0]
    assert AGAIN in said[0]


def check_works(running: Up, num_machines: int) -> None:
    running.ready()
    assert len(running.table()) == num_machines
    running.process.send_signal(signal.SIGTERM)
    assert ended(running) == 0, running.text


def kill_at(group: MachineGroup, up: Commands, victim: int, point: str, *others: int) -> Up:
    """Starts `up`, and kills a node when its agent is asked what belongs to this point."""
    group.hold(victim, POINTS[point])
    running = up(*others)
    group.wait_for_held(victim)
    group.kill(victim)
    return running


# --- before ranks run


def test_up_names_a_node_that_was_killed(group: MachineGroup, up: Commands) -> None:
    name = group.nodes[1].name
    group.kill(1)
    running = up(1)
    assert ended(running) == ClusterError.exit_code
    assert running.text.splitlines()[-1].startswith(f"brigade up: {name}: 198.19.0.2:8422 cannot")
    assert "does `brigade node` run there?" in running.text
    for point in ("link to it", "start"):
        group.mend()
        check_ended_by(kill_at(group, up, 1, point, 1), name)
        group.wait_until_empty()


def test_up_names_its_own_node_if_that_was_killed(group: MachineGroup, up: Commands) -> None:
    group.kill(0)
    running = up(1)
    assert ended(running) == ClusterError.exit_code
    assert running.text.startswith("brigade up: no node runs on this machine: run `brigade node`")
    group.mend()
    check_ended_by(kill_at(group, up, 0, "link from it", 1), group.nodes[0].name)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_a_node_is_killed_at_each_point(
    group: MachineGroup, up: Commands, victim: int, point: str
) -> None:
    check_ended_by(kill_at(group, up, victim, point, 1), group.nodes[victim].name)
    group.wait_until_empty()
    group.mend()
    check_works(up(1), 2)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["link to it", "link from it", "start"])
def test_one_node_of_three_is_killed(three_machines: MachineGroup, point: str) -> None:
    group = three_machines
    with starting(group) as up:
        check_ended_by(kill_at(group, up, 2, point, 1, 2), group.nodes[2].name)
        group.wait_until_empty()
        group.mend()
        check_works(up(1, 2), 3)


@pytest.mark.slow
def test_a_node_that_is_not_named_is_left_out_if_it_is_killed_while_up_connects(
    three_machines: MachineGroup,
) -> None:
    with starting(three_machines) as up:
        running = kill_at(three_machines, up, 2, "connecting")
        running.see("event=left_out")
        assert f"{three_machines.nodes[2].name}: it hung up" in running.text
        check_works(running, 2)


# --- `up` itself


def check_signal(group: MachineGroup, up: Commands, point: str, number: int, code: int) -> None:
    group.hold(1, POINTS[point])
    running = up(1)
    group.wait_for_held(1)
    running.process.send_signal(number)
    # The agent does not answer, but a signal is not for it to answer.
    assert ended(running) == code, running.text
    assert "Traceback" not in running.text
    assert "did not answer" not in running.text
    group.release(1)
    group.wait_until_empty()


SIGNALS = [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0), (signal.SIGINT, 130)]


def test_signals_end_up_although_a_machine_does_not_answer(
    group: MachineGroup, up: Commands
) -> None:
    check_signal(group, up, "start", *SIGNALS[0])
    check_signal(group, up, "ports", *SIGNALS[1])


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_signals_end_up_at_each_point(group: MachineGroup, up: Commands, point: str) -> None:
    for each in SIGNALS:
        check_signal(group, up, point, *each)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["event=stage_starting rank=1", "Ready on "])
@pytest.mark.parametrize("number", range(3))
def test_signals_end_up_and_its_ranks(
    group: MachineGroup, up: Commands, line: str, number: int
) -> None:
    running = up(1).see(line)
    signum, code = SIGNALS[number]
    running.process.send_signal(signum)
    assert ended(running) == min(code, 0), "Ctrl-C ends a server as asked"
    group.wait_until_empty()


# --- while ranks run


NUM_TOKENS = 200  # of a stream, which takes some seconds over the slow link


@pytest.fixture
def slow_link(group: MachineGroup) -> Iterator[MachineGroup]:
    """Machine 1 sends slowly once `slow_down` was called."""
    yield group
    group.hasten(1)


def stream(group: MachineGroup, running: Up) -> Stream:
    return Stream(group.nodes[0], running.port, NUM_TOKENS, group.folder / fresh("stream")).begun()


def check_answers(group: MachineGroup, running: Up) -> None:
    """The server answers, with all tokens."""
    log = group.folder / fresh("stream")
    answer = Stream(group.nodes[0], running.port, 5, log)
    assert "[DONE]" in answer.ended()
    assert len(answer.tokens) >= 5


def come_back(group: MachineGroup, running: Up) -> None:
    """Starts the lost node again, and waits until the rank on it has been started again."""
    running.see("event=rank_waited_for rank=1")
    assert f"{group.nodes[1].name}: 198.19.0.2:8422 cannot be reached" in running.text
    group.mend()
    wait_until(lambda: running.text.count("event=rank_started rank=1") == 2, 100.0)


def test_a_stream_goes_on_when_a_machine_that_was_switched_off_is_back(
    slow_link: MachineGroup, up: Commands
) -> None:
    group = slow_link
    running = up(1).ready()
    whole = Stream(group.nodes[0], running.port, NUM_TOKENS, group.folder / fresh("stream"))
    assert "[DONE]" in whole.ended()
    group.slow_down(1)
    cut = stream(group, running)
    group.power_off(1)
    assert len(cut.tokens) < len(whole.tokens)
    group.hasten(1)
    come_back(group, running)
    running.see("event=recovered")
    assert "[DONE]" in cut.ended()
    assert cut.tokens == whole.tokens
    # What `up` has started ends with the node of its own machine, of which the last line speaks.
    group.kill(0)
    assert ended(running) == ClusterError.exit_code
    last = running.text.splitlines()[-1]
    assert f"the connection to {group.nodes[0].name} was lost: {AGAIN}" in last
    assert "event=failed rank=0" in last


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_a_stream_goes_on_when_a_killed_node_is_back(
    slow_link: MachineGroup, up: Commands, ends: bool
) -> None:
    """Without its node, a rank ends after some seconds, in which it goes on. If the node is back
    before that, it ends the rank, and starts it again."""
    group = slow_link
    running = up(1).ready()
    group.slow_down(1)
    cut = stream(group, running)
    group.kill(1)
    if ends:
        wait_until(lambda: not group.processes(1))
    group.hasten(1)
    come_back(group, running)
    assert "[DONE]" in cut.ended()
    check_answers(group, running)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["event=rank_started rank=1", "event=stage_starting rank=1"])
def test_a_node_that_is_killed_while_its_rank_starts_is_waited_for(
    group: MachineGroup, up: Commands, line: str
) -> None:
    running = up(1).see(line)
    group.kill(1)
    wait_until(lambda: not group.processes(1))
    come_back(group, running)
    check_answers(group, running)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["event=rank_started rank=1", "event=stage_starting rank=1"])
def test_up_ends_with_its_own_node_while_ranks_start(
    group: MachineGroup, up: Commands, line: str
) -> None:
    running = up(1).see(line)
    group.kill(0)
    assert ended(running) == ClusterError.exit_code
    last = running.text.splitlines()[-1]
    assert f"the connection to {group.nodes[0].name} was lost: {AGAIN}" in last


@pytest.mark.slow
def test_up_ends_if_a_machine_stays_away(group: MachineGroup, up: Commands) -> None:
    running = up(1, words=[quick(return_timeout=5)]).ready()
    group.power_off(1)
    assert ended(running) == ClusterError.exit_code
    last = running.text.splitlines()[-1]
    assert "event=failed rank=0 code=6" in last
    assert f"rank 1 on {group.nodes[1].name}: 198.19.0.2:8422 cannot be reached" in last


@pytest.mark.slow
def test_a_machine_is_left_out_if_up_may_replan(group: MachineGroup, up: Commands) -> None:
    running = up(1, words=["--join-timeout", "10", "--replan"]).ready()
    group.power_off(1)
    running.see("event=recovered")
    check_answers(group, running)
    come_back(group, running)
    wait_until(lambda: running.text.count("event=recovered") == 2)
    check_answers(group, running)


# --- `brigade down`


@pytest.mark.slow
@pytest.mark.parametrize("asks", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_is_killed_while_down_waits(
    slow_link: MachineGroup, up: Commands, asks: int, victim: int
) -> None:
    group = slow_link
    running = up(1).ready()
    group.slow_down(1)
    cut = stream(group, running)
    node = group.nodes[asks]
    down = subprocess.Popen(
        [*node.before, sys.executable, "-m", "launcher.cli", "down"],
        env=node.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running.see("event=draining")
    group.kill(victim)
    said, _ = down.communicate(timeout=100)
    # Nobody knows whether the rank on that machine has ended in order.
    assert ended(running) == ClusterError.exit_code
    assert said.count("\n") == 1
    if (asks, victim) == (1, 0):
        assert down.returncode == ClusterError.exit_code
        assert f"{group.nodes[0].name}: it hung up: {AGAIN}" in said
    else:
        assert down.returncode == 0
        assert said.startswith("ended ")
    cut.ended()
    group.wait_until_empty()
    group.mend()
    group.hasten(1)
    check_works(up(1), 2)


# --- while files are fetched


def own_processes(node: RunningNode) -> list[psutil.Process]:
    """Returns the processes of a node's machine, where machines share a network."""
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        state = (process.info["environ"] or {}).get("XDG_STATE_HOME")
        is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if state == str(node.state) and process.pid != node.process.pid and not is_zombie:
            found.append(process)
    return found


def machine_with_caches(
    name: str, folder: Path, joins: Sequence[str] = ()
) -> AbstractContextManager[RunningNode]:
    before = ["env", f"HF_HOME={folder / name}"]
    return running_node(name, folder, joins, before)


@pytest.mark.slow
def test_a_node_is_killed_while_its_rank_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repo"
    shutil.copytree(TINY_CHAT, folder)
    names = fresh("one"), fresh("two")
    with running(folder) as hub, ExitStack() as stack:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        one = stack.enter_context(machine_with_caches(names[0], tmp_path))
        joins = ["--join", f"127.0.0.1:{one.port}"]
        two = stack.enter_context(machine_with_caches(names[1], tmp_path, joins))
        one.pair(two)
        command = Up(one, tmp_path, Path(REPO), "--quick-start", "--nodes", two.name)
        stack.callback(command.process.kill)
        # The small files come at once, the weights slowly.
        command.see("event=rank_started rank=1")
        hub.faults.delay_seconds = 0.05
        wait_until(lambda: sum(each.end - each.start for each in hub.served) > 500_000, 100.0)
        two.process.kill()
        two.process.wait()
        wait_until(lambda: not own_processes(two))
        hub.faults.delay_seconds = 0.0
        command.see("event=rank_waited_for rank=1")
        two = stack.enter_context(machine_with_caches(names[1], tmp_path, joins))
        command.ready()
        # What had arrived was not fetched again, but for pieces that were not on the disk yet.
        weights = (folder / "model.safetensors").stat().st_size
        assert hub.data_bytes(header_sizes(folder)) < 1.5 * weights
        command.process.send_signal(signal.SIGTERM)
        assert ended(command) == 0
        wait_until(lambda: not own_processes(one) and not own_processes(two))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), SIGNALS[1:])
def test_a_signal_ends_up_while_the_hub_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    folder = tmp_path / "repo"
    shutil.copytree(TINY_CHAT, folder)
    with running(folder) as hub, machine_with_caches(fresh("one"), tmp_path) as one:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.faults.is_silent = True
        command = Up(one, tmp_path, Path(REPO), "--quick-start")
        wait_until(lambda: bool(hub.requests))
        command.process.send_signal(number)
        assert ended(command) == code, command.text
        assert "hub_retry" not in command.text
        assert "Traceback" not in command.text
        wait_until(lambda: not own_processes(one))
