"""Sections of `brigade selftest` as they run, and with the fault that each of them has to find."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.demo import DEFAULT_MODEL
from serve.selftest import report, runner, serving
from serve.selftest.report import Line, Verdict
from serve.selftest.runner import run_section
from serve.selftest.section import SECTIONS, Began, Context
from tests.selftest.macs import DEVICES, PORTS, make_tool

INSIDE = Path(__file__).parent / "inside"
ROOT = Path(__file__).parents[2]
SECTION = "serve.selftest.section"
CONTEXT = Context(minutes=1)
Run = Callable[..., dict[str, Line]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Returns a function that runs a section, with a fault, and leaves no process behind."""
    monkeypatch.setenv("PYTHONPATH", f"{INSIDE}:{ROOT}")
    before = set(psutil.Process().children())  # Other tests share servers and nodes.

    def run_with(section: str, fault: str = "", seconds: float = 100) -> dict[str, Line]:
        monkeypatch.setenv("SELFTEST_FAULT", fault)
        lines = run_section(section, CONTEXT, time.monotonic() + seconds)
        return {line.id: line.judged() for line in lines}

    yield run_with
    assert set(psutil.Process().children()) <= before


def is_right(lines: dict[str, Line]) -> bool:
    return not [line for line in lines.values() if line.verdict is Verdict.WORSE]


def test_this_system_gives_only_expected_values(run: Run) -> None:
    lines = run("system")
    assert {"system.chip", "system.keep_alive", "system.timer"} <= set(lines)
    assert lines["system.rdma"].verdict is Verdict.NOT_TRIED
    del lines["system.timer"]  # A busy machine is late.
    assert is_right(lines), lines


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "id"),
    [
        ("keep_alive = lambda connection: None", "system.keep_alive"),
        ("allow_files = lambda: 256", "system.open_files"),
        ("full_sync = lambda file: os.write(file, bytes(60_000_000))", "system.sparse"),
        (
            "fcntl = type('', (), dict(flock=lambda *a: 0, LOCK_EX=0, LOCK_NB=0))",
            "system.folder_lock",
        ),
        pytest.param(
            *("signal_group = lambda *a: None", "system.ending_processes"),
            marks=pytest.mark.slow,  # It waits for half a minute.
        ),
        (
            "distribution = lambda name: type('', (), dict(read_text=lambda self, name: ''))()",
            "system.wheel_fits",
        ),
    ],
)
def test_each_fault_of_the_system_is_found(run: Run, fault: str, id: str) -> None:
    lines = run("system", f"{SECTION} | serve.selftest.system:{fault}")
    assert lines[id].verdict is Verdict.WORSE


@pytest.mark.long
def test_facts_of_a_mac_are_read_from_its_tools(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, output in (
        ("ibv_devices", DEVICES),
        ("ibv_devinfo", PORTS),
        ("rdma_ctl", "enabled"),
        ("sysctl", "Apple M3 Ultra"),
        ("sw_vers", "25C56"),
    ):
        make_tool(tmp_path, name, output)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    lines = run("system")
    names = ("rdma", "rdma_active", "rdma_enabled", "chip", "macos_build")
    found = [lines[f"system.{name}"].value for name in names]
    assert found == [2, 1, "enabled", "Apple M3 Ultra", "25C56"]


def test_the_self_test_includes_the_checks_of_doctor(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run("machine")
    assert lines["machine.mlx"].value
    assert lines["machine.variables"].verdict is Verdict.EXPECTED
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    found = run("machine")["machine.variables"]
    assert (found.verdict, found.value) == (Verdict.WORSE, "fail")
    assert "FAST_SYNCH" in found.advice


# --- hangs and aborts


def test_an_abort_in_one_measurement_is_reported_and_other_measurements_are_made(run: Run) -> None:
    lines = run("system", f"{SECTION} | serve.selftest.system:keep_alive = lambda c: os.abort()")
    found = lines["system.keep_alive_options"]
    assert found.verdict is Verdict.WORSE
    assert str(found.value).startswith("ended by SIGABRT")
    assert {"system.chip", "system.timer"} <= set(lines)


@pytest.mark.long
@pytest.mark.parametrize("how", ["time.sleep(60)", "(signal.signal(15, 1), time.sleep(60))"])
def test_a_measurement_that_hangs_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setitem(SECTIONS, "system", replace(SECTIONS["system"], seconds=4.0))
    monkeypatch.setattr(runner, "_END_SECONDS", 1.0)
    next_message = runner._Process.next_message
    began: list[str] = []

    def patient(process: runner._Process, seconds: float) -> Any:
        """Waits longer, but for the measurement that hangs: a busy machine may be slow."""
        if began[-1:] == ["open_files"]:
            began.clear()
            return next_message(process, 1.0)
        message = next_message(process, 60.0)
        if isinstance(message, Began):
            began.append(message.name)
        return message

    monkeypatch.setattr(runner._Process, "next_message", patient)
    lines = run("system", f"{SECTION} | serve.selftest.system:allow_files = lambda: {how}")
    assert lines["system.open_files"].value == "no end within 4 s"
    assert "system.timer" in lines


def test_an_error_in_a_measurement_is_reported(run: Run) -> None:
    lines = run("system", f"{SECTION} | serve.selftest.system:allow_files = lambda: 1 / 0")
    assert lines["system.open_files"].value == "ZeroDivisionError: division by zero"
    assert "system.timer" in lines


def test_a_value_that_is_not_a_number_is_reported(run: Run) -> None:
    """As of logits on a GPU that computes wrong ones. JSON has no word for it."""
    measure = "lambda context: iter([Line('system.sparse', float('nan'))])"
    lines = run("system", f"{SECTION} | serve.selftest.system:MEASUREMENTS = [{measure}]")
    assert lines["system.sparse"].verdict is Verdict.WORSE


@pytest.mark.long
def test_a_section_whose_process_cannot_start_is_reported(run: Run) -> None:
    lines = run("system", f"{SECTION} | serve.selftest.system:MEASUREMENTS = 1 / 0")
    assert "ZeroDivisionError" not in lines  # sitecustomize only prints its own errors
    lines = run("system", f"{SECTION} | os:_exit = os.abort()")
    assert list(lines) == ["system.start"]
    assert lines["system.start"].verdict is Verdict.WORSE


def test_measurements_not_reached_in_time_are_reported_as_not_tried(run: Run) -> None:
    lines = run(
        "system", f"{SECTION} | serve.selftest.system:tool = lambda *a: time.sleep(60)", 1.5
    )
    assert [line.verdict for line in lines.values()] == [Verdict.NOT_TRIED]


@pytest.mark.long
def test_the_process_of_a_section_ends_if_the_self_test_is_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGKILL, only the pipe to the section is closed."""
    ended = []
    monkeypatch.setattr(runner, "signal_group", lambda *a: None)
    monkeypatch.setenv(
        "SELFTEST_FAULT", f"{SECTION} | serve.selftest.system:tool = lambda *a: time.sleep(60)"
    )
    lines = run_section("system", CONTEXT, time.monotonic() + 60)
    monkeypatch.setitem(SECTIONS, "system", replace(SECTIONS["system"], seconds=2.0))
    monkeypatch.setattr(runner, "_END_SECONDS", 0.0)
    original = runner._Process.end

    def end(process: runner._Process) -> None:
        assert process._process.stdin is not None
        process._process.stdin.close()
        ended.append(process._process.wait(20))
        original(process)

    monkeypatch.setattr(runner._Process, "end", end)
    next(lines)
    lines.close()  # type: ignore[attr-defined]
    assert ended == [-signal.SIGTERM]


# --- with MLX, servers and other hosts

FAULTS = [
    (
        "compute",
        f"{SECTION} | serve.selftest.compute:fastest = lambda *a: 5.0",
        "compute.empty_step",
    ),
    (
        "compute",
        f"{SECTION} | serve.selftest.compute:make_prompt_cache = lambda model: time.sleep(0.1)",
        "compute.building",
    ),
    ("memory", f"{SECTION} | mlx.core:get_cache_memory = lambda: 30 * 10**9", "memory.cache"),
    (
        "equality",
        f"{SECTION} | serve.selftest.equality:_greedy = lambda *a: [1]",
        "equality.golden",
    ),
    ("links", f"{SECTION} | launcher.doctor:RING_SECONDS = 0.01", "links.ring"),
    ("links", f"{SECTION} | serve.selftest.links:_SUMS = 'tests.missing'", "links.sums"),
    (
        "links",
        "serve.ring.hop_speeds | serve.ring.check:received = "
        "lambda transport: (time.sleep(0.02), transport.receive()[1][0])[1]",
        "links.hop_with_step",
    ),
    (
        "serving",
        f"{SECTION} | serve.selftest.launched:DEFAULT_MODEL = '/nowhere'",
        "serving.layouts",
    ),
    (
        "endings",
        "serve.rank.worker | serve.rank.memory:give_back = lambda: time.sleep(60)",
        "endings.killed",
    ),
    (
        "faults",
        f"{SECTION} | serve.selftest.faults:_engine = lambda server, rank: _parent(server, 0)",
        "faults.engine_killed",
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("speed", "verdict"), [(1e6, Verdict.EXPECTED), (1.0, Verdict.WORSE)])
def test_forecasts_are_compared_with_measured_speeds(speed: float, verdict: Verdict) -> None:
    layouts = dict.fromkeys(["1 x 1", "2 x 1", "1 x 2"], speed)
    context = Context(model=str(DEFAULT_MODEL), minutes=1)
    lines = list(serving._forecasts(context, layouts))
    assert [line.where for line in lines] == list(layouts)
    assert {line.judged().verdict for line in lines} == {verdict}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("system", "verdict"), [("darwin", "yes"), ("linux", "no")])
def test_a_launch_that_a_renamed_mac_does_not_list_is_found(
    run: Run, system: str, verdict: str
) -> None:
    """With "linux", the list of launches depends on the name, as it may not on a Mac."""
    record = f"launcher.record:sys = type('', (), dict(platform={system!r}))"
    faults = [
        f"launcher.cli | {record}",
        f"{SECTION} | {record}",
        f"{SECTION} | serve.selftest.endings:platform = "
        "type('', (), dict(system=lambda: 'Darwin'))",
        f"{SECTION} | serve.selftest.endings:MEASUREMENTS = [by_command]",
    ]
    assert run("endings", "\n".join(faults))["endings.renamed"].value == verdict


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_self_test_finds_no_fault_on_a_working_host(tmp_path: Path) -> None:
    words = ["selftest", "--minutes", "12", "--faults", "--yes"]
    command = [sys.executable, "-m", "launcher.cli", *words]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    (path,) = tmp_path.glob("selftest-*.json")
    lines = {f"{line.id} {line.where}": line for line in report.read(path).lines}
    host_is_busy = ("machine.", "system.timer", "links.hop_with_step")
    found = {name: line for name, line in lines.items() if not name.startswith(host_is_busy)}
    assert is_right(found), ran.stdout
    layout = "serving.forecast_embedded 1 x 2"
    assert {
        layout,
        "serving.mlx_lm_embedded ",
        "faults.text rank killed",
        "endings.listed ",
    } <= set(lines)
    assert ran.returncode == int(not is_right(lines))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("section", "fault", "id"), FAULTS)
def test_each_section_finds_the_fault_it_looks_for(
    run: Run, section: str, fault: str, id: str
) -> None:
    assert run(section, fault, 500)[id].verdict is Verdict.WORSE
