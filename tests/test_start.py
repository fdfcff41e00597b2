"""How the progress of the ranks is shown."""

import os
import subprocess
import sys
from typing import BinaryIO

import pytest

from serve.cli import start
from serve.core.messages import Loaded, Status
from serve.core.types import StageState
from serve.front.pipeline.status import StageStatus

URL = "http://127.0.0.1:8080"


def stage(rank: int, state: str, done: int = 0, total: int = 0) -> StageStatus:
    status = StageStatus(rank, "127.0.0.1")
    status.update(Status(StageState(state), done, total), ring=[0, 1], now=0.0)
    return status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(start.time, "monotonic", lambda: now[0])
    return now


def test_each_rank_has_a_line_with_its_bytes_and_the_time_left(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    view = start.TerminalView(URL, "tiny")
    view.progressed(stage(1, "fetching", 0, 20_000_000_000))
    view.progressed(stage(0, "loading", 0, 300_000_000))
    for second in range(1, 11):
        clock[0] += 1
        view.progressed(stage(1, "fetching", second * 500_000_000, 20_000_000_000))
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert "rank 1 fetching" in first
    assert "3.0/20.0 GB" in first
    assert "500.0 MB/s" in first
    assert "0:00:34" in first
    assert "rank 0 loading" in second


def test_ranks_that_are_ready_have_no_line(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    view = start.TerminalView(URL, "tiny")
    view.progressed(stage(1, "fetching", 1, 2))
    view.progressed(stage(1, "loading", 1, 2))
    view.progressed(stage(0, "loading", 1, 2))
    view.progressed(stage(0, "ready"))
    clock[0] += 10
    view.progressed(stage(1, "loading", 2, 2))
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 1 loading" in line
    view.progressed(stage(1, "ready"))
    view.close()
    assert capsys.readouterr().err == ""


def test_outside_of_a_terminal_progress_is_printed_without_bars(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    view = start.TerminalView(URL, "tiny")
    clock[0] += 60  # of imports
    for done in range(10):
        clock[0] += 0.2
        view.progressed(stage(0, "loading", done, 10))
    assert capsys.readouterr().err == "", "loading took two seconds"
    for done in range(10, 20):
        clock[0] += 1
        view.progressed(stage(0, "loading", done, 20))
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all("rank 0 loading" in line and "━" not in line for line in lines)


def test_a_long_warm_up_prints_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    view = start.TerminalView(URL, "tiny")
    clock[0] += 60  # of loading
    for done in range(20):
        view.warming_up(done, 40)
        clock[0] += 1
    view.warming_up(0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == ["15%", "30%", "45%"]
    assert all("warming up" in line and "━" not in line for line in lines)
    view.close()
    assert capsys.readouterr().err == ""


def test_the_bar_of_a_warm_up_is_gone_before_ready_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    view = start.TerminalView(URL, "tiny")
    view.warming_up(1, 4)
    view.warming_up(2, 4)
    assert view._warm_up.live.is_started
    view.warming_up(0, 0)
    assert not view._warm_up.live.is_started
    view.ready()
    out, err = capsys.readouterr()
    assert "━" in err
    assert "50%" in err
    assert out == "\x1b[1;32mReady on http://127.0.0.1:8080, model tiny\x1b[0m\n"


def test_the_last_line_of_a_start_names_address_and_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = start.TerminalView(URL, "org/tiny [chat]")
    status = stage(0, "ready")
    status.loaded = Loaded(3_000_000, None, 1_000_000, 0, "any")
    view.loaded([status, status], 203_640)
    view.ready()
    loaded, ready = capsys.readouterr().out.splitlines()
    assert loaded.startswith("Loaded 6.0 MB, 2.0 MB of them fetched.")
    status.loaded = Loaded(3_000_000, None, 1_000_000, 0, "any", bytes_from_neighbours=600_000)
    view.loaded([status, status], 203_640)
    lines = capsys.readouterr().out
    assert "2.0 MB of them fetched (1.2 MB from other machines)." in lines
    assert "203,640 tokens" in loaded
    assert ready == "Ready on http://127.0.0.1:8080, model org/tiny [chat]"


def ready_on(stdout: BinaryIO) -> None:
    program = (
        "from serve.cli.start import TerminalView\n"
        "for _ in range(2): TerminalView('http://h:1', 'm').ready()\n"
        "print('it went on')\n"
        "import sys; sys.exit(5)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, timeout=60
    )
    assert (done.returncode, done.stderr) == (5, b"")


def test_output_without_a_reader_does_not_end_the_start() -> None:
    """As in `brigade serve | true`."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as broken:
        ready_on(broken)


def test_a_full_disk_does_not_end_the_start(full_disk: BinaryIO) -> None:
    """As where the disk of the log is full."""
    ready_on(full_disk)


def test_the_models_own_sampling_is_printed_before_ready(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = start.TerminalView(URL, "tiny")
    view.sampling({"temperature": 0.6, "top_k": 20})
    view.ready()
    *_, sampling, ready = capsys.readouterr().out.splitlines()
    assert sampling == "Sampling by default: temperature 0.6, top_k 20 (generation_config.json)"
    assert ready.startswith("Ready on")
