"""`brigade selftest` with hosts over real ssh."""

import json
from pathlib import Path

import pytest

from launcher import cli
from serve.selftest import report, run
from serve.selftest.report import Line, Verdict
from serve.selftest.section import SECTIONS
from tests.launch.sshd import Sshd

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _few_sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = ("machine", "system", "links")
    monkeypatch.setattr(run, "SECTIONS", {name: SECTIONS[name] for name in few})
    monkeypatch.chdir(tmp_path)


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
    assert all(line.verdict is not Verdict.WORSE for line in of_links), of_links
    assert "links.sum" in [line.id for line in of_links]
    (path,) = tmp_path.glob("selftest-*.json")
    assert "127.0.0" not in path.read_text()


def test_the_self_test_measures_a_host_with_several_ranks_once(
    sshd: Sshd, hostfile: Path, tmp_path: Path
) -> None:
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
    assert worse == {"machine.doctor", "system.start", "links.hops", "links.rings", "links.sums"}
