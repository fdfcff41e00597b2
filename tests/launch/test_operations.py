"""Every command of docs/cluster.md and of docs/recovery.md's section Watching runs as it stands
there, and the examples of services hold commands that Brigade understands."""

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from configparser import ConfigParser
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from launcher import cli
from serve.cli.flags import parse
from serve.core.config import ServeConfig
from tests.cluster.servers import BIN, TINY_CHAT, alone, running
from tests.launch.sshd import Sshd
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent.parent
SECTIONS = ("Launch", "Doctor", "Upgrade")
SERVICE = ROOT / "examples" / "service"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def blocks(section: str) -> list[str]:
    pages = ("cluster.md", "recovery.md")
    text = "".join((ROOT / "docs" / page).read_text("utf-8") for page in pages)
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return re.findall(r"^```bash\n(.*?)^```", body, re.M | re.S)


class Terminal:
    """A folder with a model, a PATH with brigade and with an ssh that knows the hosts."""

    def __init__(self, folder: Path, sshd: Sshd) -> None:
        self.folder, self.port = folder, free_ports(1, "127.0.0.2")[0]
        (folder / "examples").mkdir()
        (folder / "examples" / "tiny-chat").symlink_to(TINY_CHAT)
        shutil.copy(sshd.folder / "config", folder / "ssh_config")
        with (folder / "ssh_config").open("a") as file:
            file.write("Host studio-1\n  HostName 127.0.0.2\nHost studio-2\n  HostName 127.0.0.3\n")
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(folder),
        }

    def words(self, block: str) -> str:
        """The command for the hosts that there are; nothing is fetched from an index."""
        for there, here in (
            ("10.0.0.1:8080", f"127.0.0.2:{self.port}"),
            ("--host 10.0.0.1", f"--host 127.0.0.2 --port {self.port}"),
            ("10.0.0.1", "127.0.0.2"),
            ("10.0.0.2", "127.0.0.3"),
            (
                "'cd brigade && git pull --quiet && scripts/install'",
                f"{sys.executable} -m pip show mlx-brigade",
            ),
        ):
            block = block.replace(there, here)
        return f"set -eo pipefail\n{block}"

    def run(self, block: str) -> str:
        command = ["bash", "-c", self.words(block)]
        run = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{block}\n{run.stdout}\n{run.stderr}"
        return run.stdout

    def start(self, block: str) -> "subprocess.Popen[bytes]":
        """A block that goes on: until the server is ready."""
        with (self.folder / "launch.log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", self.words(f"exec {block}")],
                cwd=self.folder,
                env=self.environment,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx2.get(f"http://127.0.0.2:{self.port}/ready").status_code == 200:
                    return process
            except httpx2.TransportError:
                time.sleep(0.1)
        process.kill()
        raise AssertionError((self.folder / "launch.log").read_text("utf-8"))


@needs_curl
@pytest.mark.slow
def test_every_command_of_the_documents_runs(tmp_path: Path, sshd: Sshd) -> None:
    terminal = Terminal(tmp_path, sshd)
    said: list[str] = []
    launched = None
    with ExitStack() as stack:
        for block in (block for section in SECTIONS for block in blocks(section)):
            if " -- serve " in block:
                launched = stack.enter_context(terminal.start(block))
                stack.callback(launched.kill)
            else:
                said.append(terminal.run(block))
    assert launched is not None
    assert launched.returncode == 0, "--stop ended it"
    _, status, stop, doctor, upgrade = said
    assert ": ready, started 0 min ago, http://127.0.0.2:" in status
    assert stop.endswith(" has ended.\n")
    assert doctor.count(" 0 fail") == 2
    assert upgrade.startswith("You have no running launch")
    assert upgrade.count("Name: mlx-brigade") == 2


@needs_curl
@pytest.mark.slow
def test_each_way_to_drain_ends_with_code_0() -> None:
    (block,) = blocks("Drain")
    ways = block.splitlines()
    assert len(ways) == 3
    for way in ways:
        with running(1, launch=alone) as server:
            command = way.replace("localhost:8080", f"127.0.0.1:{server.port}")
            environment = {**os.environ, "PID": str(server.process.pid)}
            subprocess.run(["bash", "-c", command], env=environment, check=True)
            assert server.process.wait(60) == 0


@needs_curl
@pytest.mark.long
def test_commands_for_watching_print_restarts_and_state() -> None:
    (block,) = blocks("Watching")
    with running(1, launch=alone) as server:
        command = "set -eo pipefail\n" + block.replace("localhost:8080", f"127.0.0.1:{server.port}")
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "brigade_restarts_total 0.0" in run.stdout
    assert '"state": "ready"' in run.stdout


def test_every_section_has_the_expected_number_of_command_blocks() -> None:
    assert [len(blocks(section)) for section in (*SECTIONS, "Drain", "Watching")] == [4, 1, 1, 1, 1]


def understood(words: list[str]) -> ServeConfig:
    """Raises if a flag is not one of Brigade's."""
    assert words[:2] == ["/opt/brigade/bin/brigade", "launch"]
    own, command = cli.split_at_command(words[2:])
    parse(cli.LaunchFlags, own, "launch", "")
    assert command[0] == "serve"
    return parse(ServeConfig, command[1:], "serve", "")


def test_the_unit_of_systemd_waits_longer_than_answers_take() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(SERVICE / "brigade.service")
    config = understood(shlex.split(unit["Service"]["ExecStart"]))
    assert unit["Service"].getfloat("TimeoutStopSec") > config.drain_timeout + 10
    assert unit["Service"]["KillMode"] == "mixed"
    assert unit["Unit"].getfloat("StartLimitIntervalSec") == 0, "hosts may boot for minutes"
    if analyze := shutil.which("systemd-analyze"):
        file = str(SERVICE / "brigade.service")
        run = subprocess.run([analyze, "verify", file], capture_output=True, text=True)
        complaints = [line for line in run.stderr.splitlines() if "brigade.service" in line]
        assert not [line for line in complaints if "not executable" not in line], run.stderr


def test_the_property_list_of_launchd_waits_longer_than_answers_take() -> None:
    service = plistlib.loads((SERVICE / "brigade.plist").read_bytes())
    config = understood(service["ProgramArguments"])
    assert service["ExitTimeOut"] > config.drain_timeout + 10


def test_launchd_runs_the_service_unthrottled_and_as_a_user() -> None:
    service = plistlib.loads((SERVICE / "brigade.plist").read_bytes())
    assert service["ProcessType"] == "Interactive"
    assert service["LegacyTimers"] is True
    assert service["UserName"] == "brigade"
