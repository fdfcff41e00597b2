"""Ranks on other hosts, over real ssh. Small programs stand in for them, and none may be left."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from launcher import remote
from launcher.agent import Agent
from launcher.hostfile import Host
from launcher.remote import AgentConnection, HostError, connected
from launcher.ssh import SshAccess
from launcher.supervisor import RETRY_SECONDS
from serve.core.addresses import Addresses
from serve.core.agent_messages import (
    AgentError,
    EnterFolder,
    FolderEntered,
    FromAgent,
    PortsReserved,
    RankEnded,
    ReservePorts,
    RunRank,
    StartEcho,
)
from serve.core.errors import ClusterError
from serve.core.wire import LineReader, line
from tests.errors import fails
from tests.launch.sshd import Sshd
from tests.test_launcher import (
    DEAF,
    DEAF_CHILD,
    ESCAPE,
    LEASHED,
    RANK,
    SILENT,
    SLEEP,
    TELL,
    Launch,
    alive,
    crash_when_told,
    end_before_escaped,
    environments,
    wait_until,
)

pytestmark = pytest.mark.long

# As `brigade launch --hostfile` does it, but with another program, and with times that are so long
# that a busy machine makes no test fail.
LAUNCH = """
import os, shlex, sys
from pathlib import Path
from launcher import remote, supervisor
from launcher.command import forwarded
from launcher.hostfile import read_hostfile
from launcher.remote import connected, find_routes, remote_ranks
from launcher.ssh import SshAccess
from launcher.supervisor import Supervisor, write_line
supervisor.FOLLOW_SECONDS = supervisor.OUTPUT_SECONDS = remote.GREETING_SECONDS = 100.0
supervisor.GONE_SECONDS = supervisor.LEFT_SECONDS = 100.0
hostfile, ssh, program = sys.argv[1:]
hosts, way = read_hostfile(Path(hostfile)).hosts, SshAccess(tuple(shlex.split(ssh)))
with connected(hosts, way, write_line) as all:
    environment = {**forwarded(os.environ), "GIVEN": "a 'b'"}
    words, routes = ["-c", program], find_routes(all, [])
    ranks = remote_ranks(all, routes, words, environment, 2.0)
    sys.exit(Supervisor(ranks, drain_seconds=100.0, serves=True).run())
"""

Start = Callable[..., Launch]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes long to start an agent."""
    monkeypatch.setattr(remote, "GREETING_SECONDS", 100.0)


SLEEP_LONG = "import time; time.sleep(60)"

AGENT = "print(f'rank={rank} agent={os.getppid()}', flush=True)\n"


@pytest.fixture
def launch(sshd: Sshd, hostfile: Path, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(program: str, drain_seconds: float = 100.0) -> Launch:
            words = [str(hostfile), sshd.ssh, RANK + program]
            text = LAUNCH.replace("drain_seconds=100.0", f"{drain_seconds=}")
            launched = Launch([sys.executable, "-c", text, *words], tmp_path)
            stack.callback(launched.clean_up)
            return launched

        yield start


def all_gone(launched: Launch) -> bool:
    return not any(map(alive, launched.pids))


# --- ends


def test_each_line_begins_with_its_rank_and_host(launch: Start) -> None:
    launched = launch("print('out', rank)\nprint('err', rank, file=sys.stderr)")
    assert launched.end()[0] == 0
    lines = [line for line in launched.text.splitlines() if not line.startswith("[launch]")]
    assert sorted(lines) == [
        "[rank 0 127.0.0.2] err 0",
        "[rank 0 127.0.0.2] out 0",
        "[rank 1 127.0.0.3] err 1",
        "[rank 1 127.0.0.3] out 1",
    ]


def test_a_launch_returns_the_code_of_the_first_failed_rank_and_ends_the_other_ranks(
    launch: Start,
) -> None:
    launched = launch(f"if rank == 1: sys.exit(7)\n{SLEEP}")
    assert launched.end()[0] == 7
    assert "event=killing" not in launched.text


def test_the_exit_code_of_a_launch_is_128_plus_the_signal_that_ended_a_rank(launch: Start) -> None:
    assert launch(f"if rank == 1: os.kill(os.getpid(), 9)\n{SLEEP}").end()[0] == 137


def test_a_signal_is_forwarded_to_each_host(launch: Start) -> None:
    program = f"signal.signal(15, lambda *_: (print('got it'), sys.exit(0)))\n{SLEEP}"
    launched = launch(program).see("up", 2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    assert launched.text.count("got it") == 2


def test_ranks_that_ignore_a_signal_are_killed_with_their_children(launch: Start) -> None:
    launched = launch(DEAF_CHILD + DEAF + SLEEP, drain_seconds=3.0)
    launched.see("child up", 2).see("] up", 2).mark()
    launched.process.send_signal(signal.SIGTERM)
    code, seconds = launched.end()
    assert code == 137
    assert seconds >= 3
    assert len(launched.pids) == 4


def test_second_signals_kill_ranks_at_once(launch: Start) -> None:
    launched = launch(DEAF + SLEEP).see("up", 2)
    launched.process.send_signal(signal.SIGINT)
    launched.see("event=ending").process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 137


def test_grandchildren_of_a_crashed_rank_are_killed(launch: Start, tmp_path: Path) -> None:
    launched = launch(crash_when_told(tmp_path / "mark")).see("child up", 2)
    (tmp_path / "mark").touch()
    assert launched.end()[0] == 5


def test_a_grandchild_in_a_session_of_its_own_does_not_block_the_launcher(launch: Start) -> None:
    end_before_escaped(launch(ESCAPE))


# --- what breaks


@pytest.mark.parametrize("program", [SLEEP, DEAF_CHILD + DEAF + SLEEP])
def test_no_process_outlives_a_killed_launcher(launch: Start, program: str) -> None:
    launched = launch(program).see("up", 2)
    launched.process.kill()
    launched.process.wait()
    wait_until(lambda: all_gone(launched))


def ssh_clients(launched: Launch) -> dict[str, psutil.Process]:
    """The ssh of each host."""
    clients: dict[str, psutil.Process] = {}
    for child in psutil.Process(launched.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # It ends just now.
            words = child.cmdline()
            if words[:1] == ["ssh"]:
                clients[words[-2]] = child
    return clients


def test_a_lost_connection_is_logged_and_ends_all_ranks(launch: Start) -> None:
    launched = launch(SLEEP).see("up", 2)
    ssh_clients(launched)["127.0.0.3"].kill()
    wait_until(lambda: not alive(launched.pids[1]))  # The launcher does not hear of its end.
    assert launched.end()[0] == ClusterError.exit_code
    assert "the connection to 127.0.0.3 was lost: try `ssh" in launched.text
    assert "event=rank_ended rank=1 code=6" in launched.text


def test_a_killed_agent_ends_its_rank(launch: Start, sshd: Sshd) -> None:
    launched = launch(LEASHED + SLEEP).see("up", 2)
    psutil.Process(launched.pids[1]).parent().kill()
    wait_until(lambda: not alive(launched.pids[1]))  # The launcher does not hear of its end.
    assert launched.end()[0] == ClusterError.exit_code
    (left,) = sshd.temporary.glob(
        "brigade-*"
    )  # All that a killed agent leaves is where the ring was.
    shutil.rmtree(left)


@pytest.mark.slow
def test_a_suspended_agent_does_not_block_the_launcher(
    launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LAUNCH.replace("supervisor.GONE_SECONDS = ", "")
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    launched = launch(SLEEP, drain_seconds=3.0).see("up", 2)
    agent = psutil.Process(launched.pids[1]).parent()
    agent.suspend()
    launched.process.send_signal(signal.SIGTERM)
    try:
        assert launched.process.wait(60) == 137
        assert "event=rank_lost ranks=1" in launched.text
    finally:
        agent.resume()
    wait_until(lambda: all_gone(launched))


# An agent that says how long it waits for its next input. SIGUSR1 ends that time.
SILENT_LAUNCHER = """
import os, signal, sys
import launcher.agent as agent
from types import SimpleNamespace

reading, writing = os.pipe()
signal.signal(signal.SIGUSR1, lambda *_: os.write(writing, b"x"))
wait = agent.select.select

def wait_or_end(inputs, outputs, errors, seconds):
    print(f"waits for {seconds:g} s", flush=True)
    heard = wait([*inputs, reading], outputs, errors)[0]
    return ([each for each in heard if each != reading], [], [])

agent.select = SimpleNamespace(select=wait_or_end)
sys.exit(agent.main())
"""


def test_an_agent_ends_its_rank_if_the_launcher_is_silent() -> None:
    """As when its machine lost power: no connection says so. Here nobody closes the pipe."""
    agent = subprocess.Popen(
        [sys.executable, "-c", SILENT_LAUNCHER, "token"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    order = RunRank(0, 1, ["-c", SLEEP_LONG], {}, Addresses(0, (), ()), "", "", 100.0)
    with agent:
        agent.stdout.readline()
        agent.stdin.write(line(order).encode() + b"\n")
        for _ in range(4):  # It lives as long as it hears of its launcher.
            agent.stdin.write(b"\n")
            agent.stdin.flush()
            while b"waits for 60 s" not in agent.stdout.readline():
                assert agent.poll() is None
        assert agent.poll() is None
        agent.send_signal(signal.SIGUSR1)
        assert agent.wait(60) == 143
        reader: LineReader[FromAgent] = LineReader(FromAgent)
        assert reader.read(agent.stdout.read().split(b"token ")[-1]) == RankEnded(-15)


# --- ranks that come back


@pytest.fixture
def relaunch(launch: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """As for `serve`: ranks that were lost are started again, twice at most."""
    monkeypatch.setattr(
        sys.modules[__name__],
        "LAUNCH",
        LAUNCH.replace("serves=True", "serves=True, max_restarts=2"),
    )
    return launch


def test_a_killed_rank_is_started_again_on_its_host_in_the_same_ring(relaunch: Start) -> None:
    launched = relaunch(TELL + SLEEP).see("] up", 2)
    os.kill(launched.pids[1], signal.SIGKILL)
    launched.see("] up", 3)
    first, second = (rank for rank in environments(launched) if rank["MLX_RANK"] == "1")
    assert first["BRIGADE_SECRET"] == second["BRIGADE_SECRET"]
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_rank_is_started_again_after_a_lost_connection(relaunch: Start) -> None:
    """And rank 0 never meets the old one and the new one at the same time."""
    launched = relaunch(DEAF_CHILD + DEAF + SLEEP).see("child up", 2)
    ssh_clients(launched)["127.0.0.3"].kill()
    launched.see("event=rank_started", 3)
    wait_until(lambda: [alive(pid) for pid in launched.pids].count(False) == 2)
    launched.see("] up", 3).process.send_signal(signal.SIGTERM)
    launched.see("event=ending").process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 137


@pytest.fixture
def relaunch_here(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """As `relaunch`, with both agents on this machine: it needs no ssh server."""
    hosts = tmp_path / "here.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    text = LAUNCH.replace("serves=True", "serves=True, max_restarts=2")
    text = f"from launcher import remote\nremote.KILL_SECONDS = 0.5\n{text}"
    with ExitStack() as stack:

        def start(program: str, kind: str = "serves", drain_seconds: float = 100.0) -> Launch:
            words = [str(hosts), "ssh", RANK + program]
            launch = text.replace("serves", kind)
            launch = launch.replace("drain_seconds=100.0", f"{drain_seconds=}")
            launched = Launch([sys.executable, "-c", launch, *words], tmp_path)
            stack.callback(launched.clean_up)
            return launched

        yield start


def test_a_suspended_rank_is_replaced_on_its_host(relaunch_here: Start, tmp_path: Path) -> None:
    program = f"PID_FILE = {str(tmp_path / 'pid')!r}\n{SILENT}"
    launched = relaunch_here(f"{program}if rank == 0: tell(1, pid_of_rank_1())\n{SLEEP}").see(
        "up", 2
    )
    assert launched.text.count("event=rank_started rank=1") == 2
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_rank_that_is_suspended_with_its_agent_is_replaced(
    relaunch_here: Start, tmp_path: Path
) -> None:
    """As in a container that is frozen: the agent does not hear that it should kill the rank."""
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    program = SILENT.replace(stop, f"os.kill(os.getppid(), signal.SIGSTOP); {stop}")
    program = f"PID_FILE = {str(tmp_path / 'pid')!r}\n{program}"
    launched = relaunch_here(f"{program}if rank == 0: tell(1, pid_of_rank_1())\n{SLEEP}")
    wait_until(lambda: launched.text.count("up") == 2)
    assert launched.text.count("event=rank_started rank=1") == 2
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_training_run_starts_again_without_a_suspended_agent(
    relaunch_here: Callable[..., Launch],
) -> None:
    """As on a host that is frozen: rank 0 has lost rank 1, and the agent does not end it."""
    launched = relaunch_here(AGENT + SLEEP, "trains", drain_seconds=3.0).see("up", 2)
    (agent,) = re.findall(r"rank=1 agent=(\d+)", launched.text)
    os.kill(int(agent), signal.SIGSTOP)
    os.kill(launched.pids[1], signal.SIGSTOP)
    os.kill(launched.pids[0], signal.SIGKILL)
    launched.see("up", 4).process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert launched.text.count("event=rank_started") == 4


def test_all_ranks_of_a_training_run_start_again_after_a_host_was_unreachable(
    launch: Start, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LAUNCH.replace("serves=True", "trains=True, max_restarts=2")
    text = f"from launcher import supervisor\nsupervisor.RETRY_SECONDS = 0.1\n{text}"
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    launched = launch(SLEEP).see("up", 2)
    sshd.profile.write_text("exit 1\n")
    os.kill(launched.pids[0], signal.SIGKILL)
    launched.see("event=rank_waited_for rank=0").see("event=rank_waited_for rank=1")
    sshd.profile.write_text("")
    launched.see("] up", 4).process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert launched.text.count("event=rank_started") == 4


@pytest.mark.slow
def test_a_rank_on_an_unreachable_host_is_waited_for(relaunch: Start, sshd: Sshd) -> None:
    """It is rank 0 that gives up: it knows how long its clients may wait."""
    launched = relaunch(SLEEP).see("up", 2)
    sshd.profile.write_text("exit 1\n")
    os.kill(launched.pids[1], signal.SIGKILL)
    launched.see("event=rank_waited_for rank=1")
    time.sleep(3 * RETRY_SECONDS)
    assert launched.text.count("event=rank_waited_for") == 1  # said once, tried more often
    sshd.profile.write_text("")
    launched.see("up", 3)
    os.kill(launched.pids[0], signal.SIGKILL)
    assert launched.end()[0] == 137


def test_a_signal_while_a_host_is_unreachable_ends_every_process(
    relaunch: Start, sshd: Sshd
) -> None:
    launched = relaunch(SLEEP).see("up", 2)
    sshd.profile.write_text("cat >/dev/null\n")  # never says a word
    clients = ssh_clients(launched).values()
    os.kill(launched.pids[1], signal.SIGKILL)
    launched.see("code=137")
    wait_until(lambda: bool(set(ssh_clients(launched).values()) - set(clients)))
    children = psutil.Process(launched.process.pid).children(recursive=True)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    assert not [child for child in children if alive(child.pid)]


# --- the environment of ranks


def test_all_ranks_get_the_same_ring_and_each_its_own_number(launch: Start) -> None:
    launched = launch(TELL + "print('hosts ' + open(os.environ['MLX_HOSTFILE']).read())")
    launched.end()
    ranks = environments(launched)
    assert sorted(rank["MLX_RANK"] for rank in ranks) == ["0", "1"]
    for name in ("BRIGADE_SECRET", "BRIGADE_CONTROL"):
        assert len({rank[name] for rank in ranks}) == 1
    (hosts,) = set(re.findall(r"hosts (.*)", launched.text))
    addresses = [address for (address,) in json.loads(hosts)]
    assert [address.partition(":")[0] for address in addresses] == ["127.0.0.2", "127.0.0.3"]
    assert ranks[0]["BRIGADE_CONTROL"].startswith("127.0.0.2:")
    assert len({*addresses, ranks[0]["BRIGADE_CONTROL"]}) == 3


def test_this_machine_can_have_several_addresses_in_a_ring_with_other_hosts(
    launch: Start, hostfile: Path
) -> None:
    here = {"ssh": "127.0.0.1", "ips": ["127.0.0.2", "127.0.0.4"]}
    there = {"ssh": "127.0.0.3", "ips": ["127.0.0.3", "127.0.0.5"]}
    hostfile.write_text(json.dumps([here, there]))
    launched = launch("print('hosts ' + open(os.environ['MLX_HOSTFILE']).read())")
    launched.end()
    (hosts,) = set(re.findall(r"hosts (.*)", launched.text))
    ips = [[address.partition(":")[0] for address in own] for own in json.loads(hosts)]
    assert ips == [["127.0.0.2", "127.0.0.4"], ["127.0.0.3", "127.0.0.5"]]


def test_a_rank_gets_only_given_and_allowed_variables(
    launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_1")
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    launched = launch(TELL)
    launched.end()
    for environment in environments(launched):
        assert environment["GIVEN"] == "a 'b'"
        assert environment["HF_TOKEN"] == "hf_1"
        assert "SECRET_OF_MINE" not in environment


def test_no_secret_is_on_a_command_line(launch: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_show")
    launched = launch(TELL + SLEEP).see("] up", 2)
    secrets = {environments(launched)[0]["BRIGADE_SECRET"], "hf_do_not_show"}
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if any(s in word for s in secrets for word in line)]


# --- getting there


def greet(sshd: Sshd, host: str = "127.0.0.2", python: str = sys.executable) -> AgentConnection:
    way = SshAccess(tuple(shlex.split(sshd.ssh)), python)
    with connected([Host(0, host, (host,))], way, lambda _: None) as (connection,):
        return connection


def test_output_of_a_shell_profile_does_no_harm(sshd: Sshd, launch: Start) -> None:
    sshd.profile.write_text("echo 'Welcome to this host!'\nprintf 'no end of line'\n")
    launched = launch("print('hello', rank)")
    assert launched.end()[0] == 0
    assert launched.text.count("hello") == 2
    assert "Welcome" not in launched.text
    assert greet(sshd).noise == ["Welcome to this host!", "no end of line"]


def test_a_shell_profile_that_blocks_is_reported_after_the_deadline(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd.profile.write_text("sleep 30\n")
    monkeypatch.setattr(remote, "GREETING_SECONDS", 0.5)
    monkeypatch.setattr(remote, "GOODBYE_SECONDS", 0.1)
    with fails(ClusterError, "host", match="0.5 s"):
        greet(sshd)


NONSENSE = ("{", "[]", "null", '{"type": "Nothing"}', '{"type": "RankEnded", "returncode": "no"}')


@pytest.mark.parametrize("said", NONSENSE)
def test_malformed_lines_from_an_agent_are_reported_in_one_line(tmp_path: Path, said: str) -> None:
    agent = tmp_path / "agent"
    agent.write_text(f"#!/bin/sh\nprintf '%s %s\\n' $3 '{said}'\n")
    agent.chmod(0o700)
    connection = AgentConnection(Host(0, "127.0.0.1", ()), SshAccess(python=str(agent)))
    with fails(HostError, "host") as refused:
        connection.greet()
    assert "\n" not in str(refused.value)
    connection.close()


@pytest.mark.parametrize("said", NONSENSE)
def test_malformed_lines_to_an_agent_are_reported_in_one_line_and_end_it(said: str) -> None:
    command = [sys.executable, "-m", "launcher.agent", "token"]
    run = subprocess.run(command, input=f"{said}\n", capture_output=True, text=True)
    assert run.returncode == ClusterError.exit_code
    assert run.stderr == ""
    reader: LineReader[FromAgent] = LineReader(FromAgent)
    _, refused = run.stdout.splitlines()
    error = reader.read(refused.removeprefix("token "))
    assert isinstance(error, AgentError)
    assert "cannot be read" in error.reason


def test_an_agent_that_gets_a_malformed_line_ends_its_rank() -> None:
    command = [sys.executable, "-m", "launcher.agent", "token"]
    order = RunRank(0, 1, ["-c", SLEEP_LONG], {}, Addresses(0, (), ()), "", "", 100.0)
    said = f"{line(order)}\n{{\n"
    run = subprocess.run(command, input=said, capture_output=True, text=True)
    assert run.returncode == 143
    assert "cannot be read" in run.stdout
    assert run.stdout.splitlines()[-1] == "token " + line(RankEnded(-15))


def test_a_truncated_answer_counts_as_the_end_of_the_connection(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\nprintf '%s {\"ended\": ' $3\n")
    agent.chmod(0o700)
    connection = AgentConnection(Host(0, "127.0.0.1", ()), SshAccess(python=str(agent)))
    assert connection.next_line(60) is None
    connection.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_connecting_ends_the_launch(
    sshd: Sshd, hostfile: Path, number: signal.Signals, code: int
) -> None:
    sshd.profile.write_text("sleep 90\n")
    words = ["--hostfile", str(hostfile), "--ssh", sshd.ssh, "--", "serve", "--model", "m"]
    launcher = subprocess.Popen([sys.executable, "-m", "launcher.cli", "launch", *words])
    wait_until(lambda: len(psutil.Process(launcher.pid).children()) == 2)
    clients = psutil.Process(launcher.pid).children()
    launcher.send_signal(number)
    assert launcher.wait(60) == code
    assert not psutil.wait_procs(clients, timeout=60)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("serves", [False, True])
def test_a_signal_right_after_connecting_still_ends_the_launch(
    number: signal.Signals, serves: bool
) -> None:
    """An exception that its handler raised could get lost in a callback."""
    connections: list[AgentConnection] = []

    def connect() -> None:
        hosts = [Host(0, "127.0.0.1", ())]
        with connected(hosts, SshAccess(), lambda _: None, serves=serves) as made:
            os.kill(os.getpid(), number)
            connections.extend(made)  # The signal has not ended it here, but the next request will.
            made[0].request(ReservePorts([]), PortsReserved)

    with pytest.raises(SystemExit) as ended:
        connect()
    assert ended.value.code == (0 if serves and number == signal.SIGTERM else 128 + number)
    assert [each.process.returncode for each in connections] == [-signal.SIGKILL]


def test_a_signal_before_the_first_connection_still_ends_the_launch() -> None:
    hosts = [Host(0, "127.0.0.1", ())]
    with (
        pytest.raises(SystemExit) as ended,
        connected(hosts, SshAccess(), lambda _: os.kill(os.getpid(), signal.SIGTERM)),
    ):
        pytest.fail("it went on")
    assert ended.value.code == 143


def test_a_missing_python_on_another_host_is_reported(sshd: Sshd) -> None:
    with fails(ClusterError, "host", match="/no/python"):
        greet(sshd, python="/no/python")


def test_a_python_without_brigade_is_reported(sshd: Sshd, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    with fails(ClusterError, "host", match=str(bare)):
        greet(sshd, python=str(bare))


def test_a_host_without_an_ssh_server_is_reported(sshd: Sshd) -> None:
    with fails(ClusterError, "host", match="no ssh server"):
        greet(sshd, "127.0.0.9")


def test_an_unknown_host_name_is_reported(sshd: Sshd) -> None:
    with fails(ClusterError, "host", match="cannot be resolved"):
        greet(sshd, "no-such-host.invalid")


def test_every_host_that_fails_is_named(sshd: Sshd) -> None:
    hosts = [Host(rank, f"127.0.0.{rank + 1}", ("127.0.0.9",)) for rank in range(1, 4)]
    way = SshAccess(tuple(shlex.split(sshd.ssh)), "/no/python")
    with pytest.raises(ClusterError) as raised, connected(hosts, way, lambda _: None):
        pytest.fail("nobody is there")
    assert all(host.label in str(raised.value) for host in hosts)


def test_a_missing_ssh_command_is_reported() -> None:
    with fails(ClusterError, "host", match="/no/ssh"):
        AgentConnection(Host(0, "a", ()), SshAccess(("/no/ssh",)))


def test_a_missing_python_on_this_host_is_reported() -> None:
    with fails(ClusterError, "host", match="/no/python"):
        AgentConnection(Host(0, "127.0.0.1", ()), SshAccess(python="/no/python"))


def test_an_address_that_belongs_to_another_host_is_reported(sshd: Sshd) -> None:
    way = SshAccess(tuple(shlex.split(sshd.ssh)))
    hosts = [Host(0, "127.0.0.2", ("198.51.100.7",))]
    with connected(hosts, way, lambda _: None) as connections:
        with fails(ClusterError, "host", match="198.51.100.7"):
            connections[0].request(ReservePorts(["198.51.100.7"]), PortsReserved)
        assert connections[0].request(ReservePorts(["127.0.0.2"]), PortsReserved).ports


def test_a_given_folder_must_exist_but_the_current_one_need_not(sshd: Sshd, tmp_path: Path) -> None:
    ssh, hosts = tuple(shlex.split(sshd.ssh)), [Host(0, "127.0.0.2", ())]
    for folder, entered in ((None, os.getcwd()), (tmp_path, str(tmp_path))):
        way = SshAccess(ssh, folder=folder)
        with connected(hosts, way, lambda _: None) as (connection,):
            question = EnterFolder("/no", must_exist=False)
            assert connection.request(question, FolderEntered).folder == entered
    missing = SshAccess(ssh, folder=Path("/no/folder"))
    with (
        fails(ClusterError, "host", match="/no/folder"),
        connected(hosts, missing, lambda _: None),
    ):
        pytest.fail("there is no such folder")


def test_ranks_on_this_machine_start_without_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "GOODBYE_SECONDS", 100.0)
    way = SshAccess(("/no/ssh",))
    with connected([Host(0, "127.0.0.1", ("127.0.0.1",))], way, lambda _: None) as (connection,):
        process = connection.process
        assert connection.request(ReservePorts([]), PortsReserved) == PortsReserved([])
    assert process.returncode == 0


def test_long_messages_are_joined_from_their_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    saved = os.dup(0)
    try:
        os.dup2(reading, 0)
        agent = Agent("t")
        os.write(writing, b"\n" * 3000)  # the signs of life of some hours
        os.write(writing, b'{"type": "ReservePorts", "ips": []}\n{"ty')
        assert agent._hear() == ReservePorts([])
        os.write(writing, b'pe": "StartEcho", "ip": "a"}\n')
        assert agent._hear() == StartEcho("a")
        os.close(writing)
        assert agent._hear() is None
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(reading)
