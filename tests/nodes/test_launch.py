"""The commands that reach nodes with --nodes: `brigade launch`, `doctor` and `selftest`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import cli
from serve.core.errors import UsageError
from tests.cluster.servers import TINY_CHAT
from tests.launch.test_selftest import measured, places
from tests.nodes.machine_group import MachineGroup, Stream, machine_group
from tests.ports import free_ports
from tests.test_launcher import wait_until
from tests.tune.runs import arrays_of, flags, losses_of, write_data

pytestmark = pytest.mark.timeout(300)

SERVE = ["--", "serve", "--model", str(TINY_CHAT)]
COMMANDS = {"launch": SERVE, "doctor": [], "selftest": []}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "words",
    [
        ("--hostfile", "hosts.json"),
        ("--python", "/usr/bin/python3"),
        ("--cwd", "/tmp"),
        ("--ssh", "ssh -F file"),
    ],
)
def test_flags_of_ssh_are_refused_with_nodes(
    capsys: pytest.CaptureFixture[str], command: str, words: tuple[str, str]
) -> None:
    code = cli.main([command, "--nodes", "all", *words, *COMMANDS[command]])
    assert code == UsageError.exit_code
    expected = f"brigade {command}: {words[0]} is not for --nodes: leave one of them out.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("words", [("-n", "2"), ("--status",), ("--stop",)])
def test_only_one_place_is_allowed(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert cli.main(["launch", "--nodes", "all", *words, *SERVE]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert said.startswith("brigade launch: give one of -n, --nodes, --hostfile")
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineGroup]:
    with machine_group(tmp_path_factory.mktemp("machines"), 2) as group:
        yield group


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_node_is_refused_with_those_that_are_known(
    group: MachineGroup, command: str
) -> None:
    one, two = group.nodes
    done = one.brigade(command, "--nodes", "three", *COMMANDS[command])
    assert done.returncode == UsageError.exit_code
    assert done.stderr == (
        f"brigade {command}: --nodes: three is not known here, only {one.name}, {two.name}: run "
        "`brigade node` there, with --join if it is not in the same network.\n"
    )


@pytest.mark.long
def test_nodes_serve(group: MachineGroup) -> None:
    one, two = group.nodes
    (port,) = free_ports(1)
    log = group.folder / "launch.log"
    words = ["launch", "--nodes", "all", *SERVE, "--port", str(port), "--quick-start"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*one.before, sys.executable, "-m", "launcher.cli", *words],
            env=one.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
    try:
        wait_until(lambda: "Ready on " in log.read_text() or process.poll() is not None, 100.0)
        assert process.poll() is None, log.read_text()
        assert "[DONE]" in Stream(one, port, 5, group.folder / "stream").ended()
        listed = one.brigade("launch", "--status").stdout
        assert f"rank 1 on {two.name}: runs as " in listed
        assert one.brigade("launch", "--stop").returncode == 0
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    group.wait_until_empty()


@pytest.mark.long
def test_nodes_fine_tune(group: MachineGroup, tmp_path: Path) -> None:
    one, two = group.nodes
    out = tmp_path / "out"
    words = flags(write_data(tmp_path), out, "--iters", "2", "--save-every", "2")
    done = one.brigade("launch", "--nodes", two.name, "--", "fine-tune", *words)
    assert done.returncode == 0, done.stderr
    assert len(losses_of(out)) == 2
    assert arrays_of(out)
    group.wait_until_empty()


@pytest.mark.long
def test_doctor_examines_nodes(group: MachineGroup) -> None:
    one, two = group.nodes
    words = ["--nodes", "all", "--model", str(TINY_CHAT), "--json", "--port", "0"]
    done = one.brigade("doctor", *words)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    findings = json.loads(done.stdout)
    assert f"{one.name} → {two.name} (198.19.0.2)" in [each["where"] for each in findings]
    assert f"{two.name} → {one.name} (198.19.0.1)" in [each["where"] for each in findings]
    for node in (one, two):
        whats = [each["what"] for each in findings if each["where"] == node.name]
        assert {"its node answers", "the model's files are complete"} <= set(whats)
    assert "ssh" not in done.stdout
    assert "the sum over 2 ranks is correct" in findings[-1]["what"]


@pytest.mark.slow
def test_the_self_test_measures_nodes(group: MachineGroup, tmp_path: Path) -> None:
    one, two = group.nodes
    command = [*one.before, sys.executable, "-m", "launcher.cli", "selftest", "--nodes", "all"]
    done = subprocess.run(
        [*command, "--minutes", "1"],
        cwd=tmp_path,
        env=one.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = measured(tmp_path)
    assert places(lines, "machine.mlx") == ["rank 0", "rank 1"]
    assert places(lines, "links.hop") == ["rank 0 → 1, address 0", "rank 1 → 0, address 0"]
    assert not [line for line in lines if line.id == "links.hops"], "it could not be measured"
    (path,) = tmp_path.glob("selftest-*.json")
    assert two.name not in path.read_text()
