"""`brigade selftest` with hosts over real ssh."""

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launcher import cli
from serve.selftest import report, run
from serve.selftest.report import Line, Verdict
from serve.selftest.runner import run_section
from serve.selftest.section import SECTIONS, Context
from tests.launch.sshd import Sshd
from tests.selftest.macs import DEVICES, PORTS, make_tool
from tests.selftest.test_sections import INSIDE, ROOT, SECTION
from tests.test_launcher import wait_until

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _few_sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choose(monkeypatch, "machine", "system", "links")
    monkeypatch.chdir(tmp_path)


def choose(monkeypatch: pytest.MonkeyPatch, *sections: str) -> None:
    monkeypatch.setattr(run, "SECTIONS", {name: SECTIONS[name] for name in sections})


def measured(folder: Path) -> list[Line]:
    (path,) = folder.glob("selftest-*.json")
    return list(report.read(path).lines)


def places(lines: list[Line], id: str) -> list[str]:
    return [line.where for line in lines if line.id == id]


def test_the_self_test_measures_each_host_and_names_no_host(
    sshd: Sshd, hostfile: Path, tmp_path: Path
) -> None:
    cli.main(["selftest", "--hostfile", str(hostfile), "--ssh", sshd.ssh, "--minutes", "4"])
    lines = measured(tmp_path)
    assert places(lines, "machine.mlx") == ["rank 0", "rank 1"]
    assert places(lines, "system.kill") == ["rank 0", "rank 1"]
    assert places(lines, "links.hop") == ["rank 0 → 1, address 0", "rank 1 → 0, address 0"]
    of_links = [line for line in lines if line.id.startswith("links.")]
    # A busy machine is slow between two steps.
    worse = {line.id for line in of_links if line.verdict is Verdict.WORSE}
    assert worse <= {"links.hop_with_step"}, of_links
    assert "links.sum" in [line.id for line in of_links]
    (path,) = tmp_path.glob("selftest-*.json")
    assert "127.0.0" not in path.read_text()


def test_the_self_test_measures_a_host_with_several_ranks_once(
    sshd: Sshd, hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, "system")
    host = {"ssh": "127.0.0.2", "ips": ["127.0.0.2"]}
    hostfile.write_text(json.dumps([host, host]))
    cli.main(["selftest", "--hostfile", str(hostfile), "--ssh", sshd.ssh, "--minutes", "4"])
    assert places(measured(tmp_path), "system.kill") == ["rank 0"]


def test_the_self_test_reports_a_host_that_cannot_be_reached(
    sshd: Sshd, hostfile: Path, tmp_path: Path
) -> None:
    sshd.profile.write_text("exit 7\n")
    words = ["selftest", "--hostfile", str(hostfile), "--ssh", sshd.ssh, "--minutes", "4"]
    assert cli.main(words) == 1
    lines = measured(tmp_path)
    worse = {line.id for line in lines if line.verdict is Verdict.WORSE}
    links = {f"links.{name}" for name in ("hops", "rings", "hops_with_steps", "sums", "jaccl")}
    assert worse == {"machine.doctor", "system.start"} | links


# --- sums over RDMA

JACCL = "serve.selftest.jaccl"
STAND_IN = f"{JACCL} | jaccl_stand_in:FAULT = "
# The products between the sums would take seconds on a CPU.
NARROW = f"{JACCL} | serve.ring.sum_speeds:_WIDTH = 8\n"
LIMIT_SECONDS = 60
STOPPED_SECONDS = 15  # the limit for sums that never end
OverRdma = Callable[..., Line]


@pytest.fixture
def over_rdma(
    sshd: Sshd, hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OverRdma:
    """Measures sums of two hosts whose tools know RDMA devices, and leaves no process behind."""

    def measure(fault: str | None, devices: str = DEVICES, ports: str = PORTS) -> Line:
        limit_seconds = STOPPED_SECONDS if fault == "stopped" else LIMIT_SECONDS
        make_tool(tmp_path, "ibv_devices", devices)
        make_tool(tmp_path, "ibv_devinfo", ports)
        there = f"export PYTHONPATH={INSIDE}:{ROOT} PATH={tmp_path}:$PATH\n"
        if fault is not None:
            there += f"export SELFTEST_FAULT={shlex.quote(NARROW + STAND_IN + repr(fault))}\n"
        sshd.profile.write_text(there)
        links = "serve.selftest.links"
        faults = [
            f"{SECTION} | {links}:_JACCL_SECONDS = {limit_seconds}",
            f"{SECTION} | {links}:MEASUREMENTS = [jaccl]",
        ]
        monkeypatch.setenv("PYTHONPATH", f"{INSIDE}:{ROOT}")
        monkeypatch.setenv("SELFTEST_FAULT", "\n".join(faults))
        context = Context(hostfile=str(hostfile), ssh=tuple(shlex.split(sshd.ssh)))
        (line,) = run_section("links", context, time.monotonic() + 100)
        wait_until(lambda: not _ranks())
        return line.judged()

    return measure


def _ranks() -> list[int]:
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if JACCL in (each.info["cmdline"] or ())]


def test_sums_over_rdma_are_measured(over_rdma: OverRdma) -> None:
    line = over_rdma("")
    assert list(line.series) == ["8 KB", "16 KB", "64 KB", "1024 KB", "8192 KB"]
    assert line.value == line.series["8 KB"]
    assert line.where == "rank 0 and 1"


def test_slow_sums_over_rdma_are_found(over_rdma: OverRdma) -> None:
    assert over_rdma("slow").verdict is Verdict.WORSE


@pytest.mark.parametrize(
    ("fault", "result"),
    [
        ("no_domain", "[jaccl] Couldn't allocate protection domain"),
        ("no_address", "[jaccl] Changing queue pair to RTR failed with errno 22"),
        ("killed", "a rank ended with code 137"),
        ("crashed", "a rank ended with code 139"),
        pytest.param("stopped", f"no end within {STOPPED_SECONDS} s", marks=pytest.mark.slow),
    ],
)
def test_sums_over_rdma_that_fail_are_a_result(
    over_rdma: OverRdma, fault: str, result: str
) -> None:
    line = over_rdma(fault)
    assert line.verdict is Verdict.WORSE
    assert result in str(line.value)


@pytest.mark.parametrize(
    ("fault", "devices", "ports", "reason"),
    [
        (None, DEVICES, PORTS, "this MLX has no JACCL"),
        ("", "", "", "there is no device rdma_lo"),
        ("", DEVICES, PORTS.replace("PORT_ACTIVE (4)", "PORT_DOWN (1)"), "rdma_lo is not active"),
    ],
)
def test_sums_over_rdma_are_not_tried_without_a_ready_device(
    over_rdma: OverRdma, fault: str | None, devices: str, ports: str, reason: str
) -> None:
    line = over_rdma(fault, devices, ports)
    assert line.verdict is Verdict.NOT_TRIED
    assert reason in str(line.value)
