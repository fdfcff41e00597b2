"""`brigade doctor` with real hosts: what it finds, how it says it, and that it leaves nothing."""

import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher import cli, doctor, supervisor
from launcher.checks import Finding
from launcher.command import RING_CHECK
from launcher.facts import host_facts, interface, listener, model_facts, strays
from launcher.hop import Echo, measure_hop
from launcher.hostfile import Host
from launcher.process import local_ranks
from launcher.remote import AgentConnection, connected, find_routes
from launcher.ssh import SshAccess
from launcher.supervisor import Supervisor
from serve.core.agent_messages import (
    DescribeHost,
    FromAgent,
    HopSpeed,
    HostFacts,
    MeasureHop,
)
from serve.core.errors import ClusterError
from serve.core.wire import LineReader, line
from tests.cluster.servers import TINY_CHAT
from tests.launch.sshd import Sshd
from tests.models import save
from tests.ports import free_ports
from tests.test_launcher import wait_until

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a ring that has formed may end one long after the other."""
    for name in ("FOLLOW_SECONDS", "OUTPUT_SECONDS"):
        monkeypatch.setattr(supervisor, name, 100.0)


def examined(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, str]]]:
    code = cli.main(["doctor", "--json", "--port", str(free_ports(1)[0]), *words])
    return code, json.loads(capsys.readouterr().out)


def bad(findings: list[dict[str, str]]) -> list[dict[str, str]]:
    return [finding for finding in findings if finding["status"] != "ok"]


def on_hosts(sshd: Sshd, hostfile: Path) -> list[str]:
    return ["--hostfile", str(hostfile), "--ssh", sshd.ssh]


# --- as it is run


def test_doctor_without_hosts_examines_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = examined(capsys, "--model", str(TINY_CHAT))
    assert code in (0, 1), findings  # A machine may be short of memory; nothing may fail.
    assert {finding["where"] for finding in findings} == {"this machine"}
    assert {"the model's files are complete"} <= {finding["what"] for finding in findings}


def test_doctor_measures_two_hosts_in_both_directions_and_in_a_ring(
    sshd: Sshd, hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = examined(capsys, *on_hosts(sshd, hostfile), "--model", str(TINY_CHAT))
    assert code in (0, 1), bad(findings)
    where = [finding["where"] for finding in findings]
    assert where[-3:-1] == [
        "127.0.0.2 → 127.0.0.3 (127.0.0.3)",
        "127.0.0.3 → 127.0.0.2 (127.0.0.2)",
    ]
    assert [name[:6] for name in dict.fromkeys(where)][:2] == ["rank 0", "rank 1"]
    whats = [finding["what"] for finding in findings]
    assert {"127.0.0.2 on lo", "127.0.0.3 on lo"} <= set(whats)
    assert "the sum over 2 ranks is correct" in findings[-1]["what"]
    assert sum(name == "all hosts" for name in where) == 2

    def agents() -> list[psutil.Process]:
        """Other tests have agents, too."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if "launcher.agent" in (process.info["cmdline"] or ())
            and (process.info["environ"] or {}).get("TMPDIR") == str(sshd.temporary)
        ]

    wait_until(lambda: not agents())  # They end with their connections.


def test_doctor_measures_every_address_of_a_host(
    sshd: Sshd, hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [["127.0.0.2", "127.0.0.4"], ["127.0.0.3", "127.0.0.5"]]
    hostfile.write_text(json.dumps([{"ssh": ips[0], "ips": ips} for ips in two]))
    _, findings = examined(capsys, *on_hosts(sshd, hostfile))
    assert sum("→" in finding["where"] for finding in findings) == 4
    assert "the sum over 2 ranks is correct" in findings[-1]["what"]


def test_findings_are_in_the_order_of_ranks_even_if_rank_0_is_this_machine(
    sshd: Sshd, hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "127.0.0.3", "ips": ["127.0.0.3"]}]
    hostfile.write_text(json.dumps(ranks))
    _, findings = examined(capsys, *on_hosts(sshd, hostfile))
    where = list(dict.fromkeys(finding["where"] for finding in findings))
    assert where[:2] == ["rank 0 on this machine", "rank 1 on 127.0.0.3"]


def test_findings_are_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("ok", "a", "fine"),
        Finding("fail", "b [x]", "broken [y]", "mend it"),
        Finding("ok", "a", "fine, too"),
    ]
    doctor.show(findings, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "a",
        "  ok  fine",
        "  ok  fine, too",
        "b [x]",
        "  fail  broken [y]",
        "        → mend it",
        "2 ok, 0 warn, 1 fail",
    ]


def test_an_unreachable_host_is_reported_as_a_failure(
    sshd: Sshd, hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = examined(capsys, *on_hosts(sshd, hostfile), "--python", "/no/python")
    assert code == 2
    assert [finding["where"] for finding in findings] == [
        "rank 0 on 127.0.0.2",
        "rank 1 on 127.0.0.3",
    ]
    assert {finding["what"] for finding in findings} == {"/no/python does not exist there"}
    assert all("--python" in finding["fix"] for finding in findings)


def test_output_of_a_shell_profile_is_a_warning(
    sshd: Sshd, hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sshd.profile.write_text("echo Hello from the profile\n")
    code, findings = examined(capsys, *on_hosts(sshd, hostfile))
    assert code == 1
    noisy = [finding for finding in findings if "Hello from the profile" in finding["what"]]
    assert len(noisy) == 2
    assert "interactive shells only" in noisy[0]["fix"]


def test_a_missing_model_and_a_harmful_variable_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    code, findings = examined(capsys, "--model", str(tmp_path / "none"))
    assert code == 2
    failed = [finding["what"] for finding in findings if finding["status"] == "fail"]
    assert len(failed) == 2
    assert findings[-1]["what"] == "not tried"
    assert any("none is not a folder" in what for what in failed)


def test_the_finding_for_a_port_in_use_names_the_program_that_uses_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["doctor", "--json", "--port", str(port)]) == 2
        (finding,) = [f for f in json.loads(capsys.readouterr().out) if f["status"] == "fail"]
    assert f"port {port} is taken by" in finding["what"]
    assert str(psutil.Process().pid) in finding["what"]


def test_a_launch_is_refused_if_a_check_of_a_host_fails(
    sshd: Sshd, hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile.write_text('[{"ssh": "127.0.0.2", "ips": ["198.51.100.7"]}]')
    words = ["launch", *on_hosts(sshd, hostfile), "--", "serve", "--model", str(TINY_CHAT)]
    assert cli.main(words) == ClusterError.exit_code
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("brigade launch: 127.0.0.2: 198.51.100.7 is not an address of this host")
    assert "rank_started" not in said


@pytest.mark.parametrize("how", ["--env", "environment"])
def test_a_harmful_variable_stops_a_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(Supervisor, "run", lambda _: pytest.fail("ranks were started"))
    words = ["--env", "MLX_METAL_FAST_SYNCH=1"]
    if how == "environment":
        monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
        words = []
    words = ["launch", "-n", "2", *words, "--", "serve", "--model", str(TINY_CHAT)]
    assert cli.main(words) == ClusterError.exit_code
    assert "hang a GPU until the next reboot: unset" in capsys.readouterr().err


# --- its parts


@pytest.fixture(scope="module")
def facts() -> HostFacts:
    return host_facts(str(TINY_CHAT), ["127.0.0.1", "198.51.100.7"])


def test_facts_of_this_host_are_right_and_can_be_sent(facts: HostFacts) -> None:
    reader: LineReader[FromAgent] = LineReader(FromAgent)
    assert reader.read(line(facts)) == facts
    assert facts.host == socket.gethostname()
    assert facts.versions["mlx-brigade"] == "0.1.0"
    assert 0 < facts.free_memory_bytes <= facts.memory_bytes
    assert facts.interfaces["198.51.100.7"] is None
    assert list(facts.unusable) == ["198.51.100.7"]
    assert facts.model is not None
    assert set(facts.model) > {"config.json", "tokenizer.json", "weights"}


def test_every_loopback_address_belongs_to_the_same_interface() -> None:
    """psutil lists one of them."""
    interfaces = host_facts(None, ["127.0.0.1", "127.0.0.9"]).interfaces
    assert interfaces["127.0.0.9"] == interfaces["127.0.0.1"]
    assert interfaces["127.0.0.1"]


def test_facts_name_the_problem_of_a_missing_model(tmp_path: Path) -> None:
    facts = host_facts(str(tmp_path / "none"), [])
    assert facts.model is None
    assert facts.model_error is not None
    assert "is not a folder" in facts.model_error


def test_facts_do_not_include_files_of_a_model_on_the_hub() -> None:
    facts = host_facts("org/name", [])
    assert (facts.hub_model, facts.model, facts.model_error) == ("org/name", None, None)


def test_facts_describe_the_folder_of_prefixes(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    found = host_facts(None, [], str(folder)).prefix_folder
    assert found is not None
    assert (found.num_bytes, found.problem) == (0, None), "the first start makes it"
    part = folder / "rank-0" / "a"
    part.mkdir(parents=True)
    (part / "b.safetensors").write_bytes(bytes(100))
    (part / "c.safetensors").symlink_to("deleted meanwhile")
    found = host_facts(None, [], str(folder)).prefix_folder
    assert found is not None
    assert (found.num_bytes, found.problem) == (100, None)
    found = host_facts(None, [], str(part / "b.safetensors")).prefix_folder
    assert found is not None
    assert "is not a folder" in (found.problem or "")


def test_a_digest_differs_if_a_file_of_the_model_differs(tmp_path: Path) -> None:
    one, other = save(tmp_path / "a", "llama"), save(tmp_path / "b", "llama")
    assert model_facts(one)["config.json"] == model_facts(other)["config.json"]
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert model_facts(one)["config.json"] != model_facts(other)["config.json"]


def test_the_network_interface_of_an_own_address_is_found() -> None:
    name = interface("127.0.0.1")
    assert name
    assert name.startswith("lo")
    assert interface("198.51.100.7") is None


def test_the_program_that_listens_on_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert listener(taken.getsockname()[1])
    assert listener(free_ports(1)[0]) is None


@pytest.fixture
def orphan() -> Iterator[psutil.Process]:
    """A process that looks like an engine and has lost its parent."""
    program = (
        "import subprocess, sys\n"
        "words = [sys.executable, '-c', 'import time; time.sleep(600)', 'serve.rank.worker']\n"
        "print(subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    process = psutil.Process(int(run.stdout))
    yield process
    process.kill()


def test_a_rank_whose_launcher_is_gone_is_found(orphan: psutil.Process) -> None:
    if orphan.ppid() != 1:
        pytest.skip("another process than init takes orphans here")
    wait_until(lambda: orphan.pid in strays())


def test_a_rank_whose_launcher_is_init_is_not_reported_as_left_behind(
    orphan: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container."""
    if orphan.ppid() != 1:
        pytest.skip("another process than init takes orphans here")
    wait_until(lambda: orphan.pid in strays())
    cmdline = psutil.Process.cmdline

    def faked(process: psutil.Process) -> list[str]:
        return ["brigade", "launch"] if process.pid == 1 else cmdline(process)

    monkeypatch.setattr(psutil.Process, "cmdline", faked)
    assert orphan.pid not in strays()


def test_a_rank_whose_launcher_runs_is_not_reported_as_left_behind() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(30)", "serve.rank.worker"]
    with subprocess.Popen(words) as child:
        assert child.pid not in strays()
        child.kill()


def test_the_time_and_rate_of_a_hop_are_measured() -> None:
    measured = measure_hop("127.0.0.1", Echo("127.0.0.1").port, 0.2)
    assert 0 < measured.round_trip_seconds < 1
    assert measured.bytes_per_second > 1e6


def test_the_echo_server_survives_a_broken_measurement() -> None:
    echo = Echo("127.0.0.1")
    with socket.create_connection(("127.0.0.1", echo.port)) as connection:
        connection.sendall(b"abc")
    assert measure_hop("127.0.0.1", echo.port, 0.0).round_trip_seconds > 0


def test_an_unreachable_hop_is_a_failure_with_its_reason(sshd: Sshd) -> None:
    hosts = [Host(0, "127.0.0.2", ()), Host(1, "127.0.0.3", ())]
    way = SshAccess(tuple(shlex.split(sshd.ssh)))
    with connected(hosts, way, lambda _: None) as (one, other):
        with pytest.raises(ClusterError, match="refused"):
            one.request(MeasureHop("127.0.0.3", 1, 0.0), HopSpeed)
        finding = doctor.examine_hop(one, other, "198.51.100.7")
    assert finding.status == "fail"
    assert "198.51.100.7" in finding.where


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_sum_over_a_real_ring_is_correct(num_ranks: int) -> None:
    lines: list[str] = []
    command = [sys.executable, "-m", RING_CHECK]
    assert Supervisor(local_ranks(command, num_ranks), lines.append).run() == 0
    last = next(line for line in lines if "the sum over" in line)
    assert last.startswith(
        f"[rank {num_ranks - 1}] the sum over {num_ranks} ranks is correct: 4.2 MB"
    )
    assert "ring can be re-formed: engines survive a fault" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", ["measuring", "forming"])
def test_a_signal_ends_doctor(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: signal.Signals
) -> None:
    """Asking a host that is gone again waited 20 s; a ring that was ended had no sum to show."""
    hosts = [{"ssh": "127.0.0.1", "ips": [f"127.0.0.{rank}"]} for rank in (1, 1)]
    hostfile.write_text(json.dumps(hosts))
    program = f"""
import os, sys, threading
from launcher import cli, doctor, remote
# So long may an agent take to answer that this test would not end.
remote.AgentConnection.request.__defaults__ = (1000.0,)
name = {"examine_hops" if what == "measuring" else "examine_ring"!r}
original = getattr(doctor, name)
def late(*given):
    threading.Timer(0.3, os.kill, (os.getpid(), {int(number)})).start()
    return original(*given)
setattr(doctor, name, late)
doctor.RING_CHECK = "tests.launch.sleeper"
sys.exit(cli.main(["doctor", "--json", "--hostfile", {str(hostfile)!r}]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 128 + number, run.stderr
    assert "Traceback" not in run.stderr


def test_a_request_to_an_agent_that_has_ended_fails_at_once() -> None:
    connection = AgentConnection(Host(0, "127.0.0.1", ()), SshAccess(python="/bin/true"))
    for _ in range(2):
        with pytest.raises(ClusterError):
            connection.request(DescribeHost(None, []), HostFacts, 1000.0)
    connection.close()


def test_a_ring_that_does_not_form_is_given_up(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [Host(0, "127.0.0.2", ("127.0.0.2",)), Host(1, "127.0.0.3", ("127.0.0.3",))]
    monkeypatch.setattr(doctor, "RING_CHECK", "tests.launch.sleeper")
    monkeypatch.setattr(doctor, "RING_SECONDS", 0.2)
    way = SshAccess(tuple(shlex.split(sshd.ssh)))
    with connected(hosts, way, lambda _: None) as connections:
        routes = find_routes(connections, [])
        finding = doctor.examine_ring(connections, routes, lambda _: None)
    assert finding == Finding("fail", "ring", "no answer within 0.2 s", finding.fix)
