"""Every check, good and bad: each finding that is not ok says what to do."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from launcher import checks, facts
from launcher.checks import Finding, broken_hop, check_hop, check_hosts, check_kinds
from launcher.hostfile import Host
from launcher.routes import HostRoute, needed_pairs
from serve.core.agent_messages import (
    HopSpeed,
    HostFacts,
    MacFacts,
    NetworkAddress,
    PrefixFolder,
)

GOOD = HostFacts(
    host="studio",
    system="Linux",
    python="3.12.4",
    executable="/opt/python",
    versions={"mlx-brigade": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"},
    memory_bytes=64 * 10**9,
    free_memory_bytes=40 * 10**9,
    free_disk_bytes=500 * 10**9,
    max_files=65536,
    blas="/usr/lib/libopenblas.so.0",
    variables={},
    strays=[],
    interfaces={"10.0.0.1": "en5"},
    unusable={},
    time=0.0,
    model={"config.json": "1", "weights": "2"},
    backend="cpu",
)
Changes = dict[str, Any]


def mac(**changes: Any) -> Changes:
    """The fields of a good Mac, of whose own facts these are different."""
    own = MacFacts(wired_limit="0", sleep="0")
    return {"system": "Darwin", "blas": None, "mac": msgspec.structs.replace(own, **changes)}


def host(**changes: Any) -> HostFacts:
    return msgspec.structs.replace(GOOD, **changes)


def found(changes: Changes) -> list[Finding]:
    return [each for each in check_hosts([host(**changes)]) if each.status != "ok"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        mac(),
        mac(version="26.2", machine="arm64"),
        mac(wired_bytes=11 * 10**9),
        mac(wired_bytes=60 * 10**9, has_ranks=True),
        {"model": None},
        {"max_files": -1},
    ],
)
def test_a_host_without_problems_has_no_findings(changes: Changes) -> None:
    assert found(changes) == []
    assert checks.exit_code(list(check_hosts([host(**changes)]))) == 0


@pytest.mark.parametrize(
    ("free_bytes", "problem", "status"),
    [(10**12, None, None), (10**6, None, "warn"), (10**12, "/d cannot be written", "fail")],
)
def test_hosts_are_checked_for_room_in_the_folder_of_prefixes(
    free_bytes: int, problem: str | None, status: str | None
) -> None:
    folder = PrefixFolder("/d", 5 * 10**9, free_bytes, problem)
    findings = found({"prefix_folder": folder})
    assert [each.status for each in findings] == ([status] if status else [])
    assert any("/d" in each.what for each in check_hosts([host(prefix_folder=folder)]))


def versions(**changes: str) -> dict[str, Any]:
    return {"versions": {**GOOD.versions, **changes}}


@pytest.mark.parametrize(
    ("changes", "status", "what", "fix"),
    [
        (versions(mlx="0.32.0"), "fail", "mlx 0.32.0", "pip install 'mlx>=0.32.1'"),
        (versions(mlx="0.9.9"), "fail", "mlx 0.9.9", "/opt/python -m pip"),
        (versions(**{"mlx-lm": "-"}), "fail", "missing", "install Brigade for"),
        ({"blas": None}, "warn", "no OpenBLAS", "libopenblas0-pthread"),
        ({"free_memory_bytes": 6 * 10**9}, "warn", "6.0 GB of 64.0 GB", "--memory"),
        (mac(wired_limit="60000"), "warn", "62.9 GB may be wired", "iogpu.wired_limit_mb=53405"),
        (mac(wired_bytes=13 * 10**9), "warn", "13.0 GB are wired although", "restart the Mac"),
        (mac(version="26.1"), "fail", "this is 26.1", "update macOS to 26.2"),
        (mac(version="13.7.1"), "fail", "older than MLX", "update macOS to 14"),
        (mac(machine="x86_64"), "fail", "built for Intel", "PYTHON=/opt/homebrew"),
        (mac(power_mode="1"), "warn", "low power mode", "pmset -a powermode 0"),
        (mac(has_firewall=True), "warn", "firewall", "--unblockapp /opt/python"),
        ({"free_disk_bytes": 5 * 10**9}, "warn", "5.0 GB of disk space are free", "--cache-dir"),
        ({"free_disk_bytes": 5 * 10**7}, "warn", "50.0 MB of disk space are free", "HF_HOME"),
        ({"max_files": 256}, "warn", "256 files", "limits.conf"),
        ({**mac(), "max_files": 256}, "warn", "256 files", "launchctl limit maxfiles"),
        ({"unusable": {"169.254.3.4": "no"}}, "warn", "169.254.3.4 is not", "leave out"),
        ({"variables": {"MLX_METAL_FAST_SYNCH": "1"}}, "fail", "hang a GPU", "unset MLX_METAL"),
        ({"strays": [7, 9]}, "warn", "still run: 7 9", "kill -9 7 9"),
        (
            {"unusable": {"10.0.0.9": "no port"}},
            "fail",
            "10.0.0.9 is not an address of",
            "`ip addr`",
        ),
        ({**mac(), "unusable": {"10.0.0.9": "no"}}, "fail", "10.0.0.9", "mlx.distributed_config"),
        (mac(sleep="10"), "warn", "after 10 minutes", "pmset"),
        (
            {"model": None, "model_error": "/m is no folder."},
            "fail",
            "/m is no folder",
            "same path",
        ),
        ({"model": None, "hub_model": "org/name"}, "warn", "was not checked", "brigade plan"),
    ],
)
def test_each_problem_is_found_and_a_fix_is_named(
    changes: Changes, status: str, what: str, fix: str
) -> None:
    (finding,) = found(changes)
    assert (finding.status, finding.where) == (status, "studio")
    assert what in finding.what
    assert fix in finding.fix
    assert "\n" not in finding.what + finding.fix


def of_kind(kind: str, num_hosts: int) -> list[Finding]:
    """What is found if all hosts are connected over this kind of network."""
    hosts = [Host(rank, name, ()) for rank, name in enumerate("abc"[:num_hosts])]
    needed = needed_pairs(num_hosts)
    return list(
        check_kinds(hosts, {pair: HostRoute(("10.0.0.1",), kind) for pair in needed}, needed)
    )


def test_a_thunderbolt_bridge_is_accepted_for_two_macs_and_gets_a_warning_for_three() -> None:
    assert not of_kind("Thunderbolt Bridge", 2)
    warnings = of_kind("Thunderbolt Bridge", 3)
    assert sorted(each.where for each in warnings) == ["a and b", "a and c", "b and c"]
    assert all("--auto-setup" in each.fix for each in warnings)


def test_each_pair_of_hosts_connected_by_wifi_is_reported_once() -> None:
    (warning,) = of_kind("Wi-Fi", 2)
    assert (warning.status, warning.where) == ("warn", "a and b")
    assert "over Wi-Fi (10.0.0.1)" in warning.what
    assert "cable" in warning.fix
    assert not of_kind("Thunderbolt 1", 3)


TOOLS = {
    "pmset": """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 sleep                1 (sleep prevented by powerd, bluetoothd)
 lowpowermode         1
 womp                 1""",
    "sysctl": "499712",
    "networksetup": """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:00:00:00:02""",
    "socketfilterfw": "Firewall is enabled. (State = 1)",
}


def test_facts_of_a_mac_are_read_from_the_output_of_its_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in TOOLS.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(facts, "_FIREWALL", str(tmp_path / "socketfilterfw"))
    read = facts.mac_facts()
    assert (read.wired_limit, read.sleep, read.power_mode) == ("499712", "1", "1")
    assert read.has_firewall


def test_wired_memory_is_read_and_an_engine_that_may_hold_it_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def processes(_: list[str]) -> Iterator[SimpleNamespace]:
        return iter([SimpleNamespace(info={"cmdline": command}) for command in commands])

    monkeypatch.setattr(facts.psutil, "virtual_memory", lambda: SimpleNamespace(wired=414 * 2**30))
    monkeypatch.setattr(facts.psutil, "process_iter", processes)
    commands = [None, ["python", "-m", "http.server"]]
    read = facts.mac_facts()
    assert (read.wired_bytes, read.has_ranks) == (414 * 2**30, False)
    commands.append(["python", "-m", "serve.rank.worker", "5"])
    assert facts.mac_facts().has_ranks


def test_addresses_are_listed_with_the_kinds_of_their_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "networksetup"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{TOOLS['networksetup']}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def address(family: int, ip: str, netmask: str | None) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=ip, netmask=netmask)

    addresses = {
        "en0": [
            address(socket.AF_INET6, "fe80::1%en0", "ffff:ffff:ffff:ffff::"),
            address(socket.AF_INET, "192.168.0.1", "255.255.255.252"),
        ],
        "en1": [address(socket.AF_INET, "169.254.7.8", "255.255.0.0")],
        "utun3": [address(socket.AF_INET, "100.64.0.1", None)],
        "en7": [address(socket.AF_INET, "10.0.0.1", "255.0.0.0")],
    }
    states = {name: SimpleNamespace(isup=name != "en7") for name in addresses}
    monkeypatch.setattr(facts.psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(facts.psutil, "net_if_stats", lambda: states)
    assert facts.network_addresses() == [
        NetworkAddress("192.168.0.1", 30, "en0", "Ethernet"),
        NetworkAddress("169.254.7.8", 16, "en1", "Wi-Fi"),
        NetworkAddress("100.64.0.1", 32, "utun3", "utun3"),
    ]


def test_addresses_of_this_machine_are_listed() -> None:
    assert "127.0.0.1" in [address.ip for address in facts.network_addresses()]


def test_facts_of_a_mac_are_empty_without_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    read = facts.mac_facts()
    assert (read.wired_limit, read.sleep, read.has_firewall) == ("", "", False)
    changes = {"mac": msgspec.structs.replace(read, machine="arm64")}
    assert not [each for each in found(changes) if each.status == "fail"]


@pytest.mark.parametrize("value", ["", "0"])
def test_a_harmful_variable_that_is_turned_off_is_accepted(value: str) -> None:
    assert found({"variables": {"MLX_METAL_FAST_SYNCH": value}}) == []


def together(changes: Changes) -> list[Finding]:
    other = host(**{"host": "mini", **changes})
    return [each for each in check_hosts([GOOD, other]) if each.where == "all hosts"]


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        (
            versions(mlx="0.32.10"),
            "mlx of mini is 0.32.10",
            "on studio: /opt/python -m pip install 'mlx[cpu]==0.32.10'",
        ),
        (
            versions(mlx="0.32.3", **{"mlx-lm": "0.31.9"}),
            "mlx-lm of mini is 0.31.9",
            "on mini: /opt/python -m pip install 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2'",
        ),
        (
            versions(**{"mlx-brigade": "0.0.9"}),
            "mlx-brigade of mini is 0.0.9",
            "on mini: git pull && scripts/install",
        ),
        (
            {"python": "3.11.9"},
            "Python of mini is 3.11.9",
            "PYTHON=python3.12 scripts/install on mini",
        ),
        ({"model": {"config.json": "1", "weights": "3"}}, "weights of mini is 3", "copy the model"),
        ({"model": None}, "config.json of mini is -", "copy the model"),
    ],
)
def test_differences_between_hosts_are_reported_with_a_fix(
    changes: Changes, what: str, fix: str
) -> None:
    (finding,) = [each for each in together(changes) if each.status == "fail"]
    assert what in finding.what
    assert "of studio is" in finding.what
    assert fix in finding.fix


def test_hosts_get_the_python_that_most_of_them_have() -> None:
    others = [host(host=name, python="3.13.1") for name in ("mini", "air")]
    (finding,) = [each for each in check_hosts([GOOD, *others]) if each.status == "fail"]
    assert finding.fix == "PYTHON=python3.13 scripts/install on studio"


def test_only_existing_files_are_reported_as_equal() -> None:
    model = {"config.json": "1", "chat_template.jinja": "-", "weights": "3"}
    findings = check_hosts([host(model=model), host(host="mini", model=model)])
    assert [each.what for each in findings if "weights" in each.what] == [
        "the same config.json, weights"
    ]


def test_a_difference_in_the_patch_level_of_python_is_only_a_warning() -> None:
    versions, model = together({"python": "3.12.9"})
    assert (versions.status, model.status) == ("warn", "ok")
    assert "Python of studio is 3.12.4, Python of mini is 3.12.9" in versions.what


def test_hosts_may_differ_in_memory() -> None:
    assert {each.status for each in together({"memory_bytes": 1})} == {"ok"}


def test_a_single_host_is_not_compared_with_other_hosts() -> None:
    assert not [each for each in check_hosts([GOOD]) if each.where == "all hosts"]


@pytest.mark.parametrize(
    ("speed", "status", "text"),
    [
        (HopSpeed(2e-4, 1.2e9), "ok", "0.20 ms, 1,200 MB/s"),
        (HopSpeed(2e-4, 2e7), "warn", "cable"),
        (HopSpeed(0.02, 1.2e9), "warn", "cable"),
    ],
)
def test_a_cable_is_recommended_for_a_slow_hop(speed: HopSpeed, status: str, text: str) -> None:
    finding = check_hop("a → b", speed)
    assert finding.status == status
    assert text in finding.what + finding.fix


@pytest.mark.parametrize(
    ("reason", "fix"),
    [("timed out", "firewall"), ("[Errno 65] No route to host", "Local Network")],
)
def test_the_finding_for_a_broken_hop_says_what_to_fix(reason: str, fix: str) -> None:
    finding = broken_hop("a → b", reason)
    assert finding.status == "fail"
    assert reason in finding.what
    assert fix in finding.fix


def test_findings_cover_shell_profile_and_clock_and_port() -> None:
    assert checks.check_shell("a", [], "it answers").status == "ok"
    assert "'Welcome'" in checks.check_shell("a", ["Welcome", "more"], "").what
    assert checks.check_clock("a", -1.0) == Finding("ok", "a", "its clock is 1.0 s behind")
    assert checks.check_clock("a", 9.0).status == "warn"
    assert checks.check_port(host(port=80)).status == "ok"
    taken = checks.check_port(host(port=80, port_holder="nginx (pid 3)"))
    assert "nginx (pid 3)" in taken.what
    assert "--port 81" in taken.fix


@pytest.mark.parametrize(
    ("statuses", "code"), [(["ok"], 0), (["ok", "warn"], 1), (["warn", "fail", "ok"], 2)]
)
def test_the_worst_finding_decides_the_exit_code(statuses: list[str], code: int) -> None:
    assert checks.exit_code([Finding(status, "a", "b") for status in statuses]) == code
