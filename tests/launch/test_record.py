"""Which launches run. Another process holds each record's lock, as a launcher does."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher import cli, record
from launcher.record import Launch, launches, recorded, stop
from serve.core.errors import ClusterError, UsageError
from tests.errors import fails
from tests.test_launcher import ROOT, SLEEP, alive, wait_until

LAUNCHER = """
import sys
from launcher import supervisor
from launcher.process import local_ranks
from launcher.record import recorded
from launcher.supervisor import Supervisor
supervisor.FOLLOW_SECONDS = supervisor.GONE_SECONDS = 100.0
with recorded(["serve", "--model", sys.argv[1]], ["127.0.0.1", "studio"], 0.0) as record:
    ranks = local_ranks([sys.executable, "-c", sys.argv[2]], 2)
    sys.exit(Supervisor(ranks, drain_seconds=100.0, observer=record, serves=True).run())
"""
RANK = "import os, sys, time\nrank = int(os.environ['MLX_RANK'])\n"
LEASHED_SLEEP = (
    "import os\nprint('event=listening url=http://127.0.0.1:9', flush=True)\n"
    "os.read(int(os.environ['BRIGADE_LEASH']), 1)\n"
)

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(record, "STOP_SECONDS", 100.0)
    host = "this-mac" if sys.platform == "darwin" else socket.gethostname()
    return tmp_path / "brigade" / host


@pytest.fixture
def launcher() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str = RANK + LEASHED_SLEEP, name: str = "m") -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-c", LAUNCHER, name, program]
        process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
        started.append(process)
        wait_until(lambda: [each for each in launches() if each.pid == process.pid and each.ranks])
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def the_only() -> Launch:
    (launch,) = launches()
    return launch


def test_no_launch_is_listed_if_none_is_running() -> None:
    assert launches() == []


def test_a_launch_is_listed_while_it_runs(launcher: Start, folder: Path) -> None:
    before = time.time()
    process = launcher()
    wait_until(lambda: len(the_only().ranks) == 2)
    launch = the_only()
    assert (launch.pid, launch.words[0], launch.hosts[1]) == (process.pid, "serve", "studio")
    assert before <= launch.since <= time.time()
    assert re.fullmatch(r"runs as \d+", launch.ranks["1"])
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert launches() == []
    assert list(folder.iterdir()) == []


def test_a_killed_launcher_is_not_listed_and_its_record_is_removed(
    launcher: Start, folder: Path
) -> None:
    process = launcher()
    process.kill()
    process.wait()
    assert list(folder.iterdir())
    # A rank that was just being started has the lock up to its exec.
    wait_until(lambda: launches() == [])
    assert list(folder.iterdir()) == []


SAYS = """
if rank == 0:
    for line in sys.argv[1:] or {lines!r}:
        print(line, flush=True)
        time.sleep(0.4)
time.sleep(60)
"""


def test_a_launch_continues_without_a_rank_that_is_left_out() -> None:
    with recorded(["serve"], ["127.0.0.1", "studio"], 0.0) as record:
        record.started(1, 7)
        record.said(0, "x INFO event=ready")
        record.ended(1, 137, "left out")
        launch = the_only()
    assert (launch.state, launch.ranks["1"]) == ("ready", "ended with 137, left out")


START = ("starting", "")


@pytest.mark.parametrize(
    ("lines", "state", "url"),
    [
        ([], "starting", ""),
        (["x INFO event=listening url=http://h:1"], "starting", "http://h:1"),
        (["event=stage_fetching rank=1 layers=0-3"], "fetching", ""),
        (["event=stage_fetching rank=1", "event=stage_loading rank=1"], "loading", ""),
        (["event=ready num_ranks=2", "event=stage_loading rank=1"], "ready", ""),
        (["event=stage_loading rank=0", "event=stage_ready rank=1"], "loading", ""),
        (["request=event=readyish"], "starting", ""),
        (['x INFO request=r path="/event=ready event=recovering event=listening url=h"'], *START),
        (["x INFO event=ready n=2", "x WARNING event=recovering life=1"], "recovering", ""),
    ],
)
def test_the_state_of_a_launch_is_the_last_state_that_rank_0_logged(
    launcher: Start, lines: list[str], state: str, url: str
) -> None:
    launcher(RANK + SAYS.format(lines=[*lines, "said"]))
    time.sleep(0.4 * len(lines))
    wait_until(lambda: (the_only().state, the_only().url) == (state, url))


def test_lines_logged_by_other_ranks_do_not_change_the_state(launcher: Start) -> None:
    launcher(f"{RANK}print('event=ready num_ranks=2' if rank else '', flush=True)\n{SLEEP}")
    time.sleep(1)
    assert the_only().state == "starting"


def test_a_rank_that_has_ended_is_listed_with_its_code(launcher: Start) -> None:
    launcher(f"{RANK}if rank: sys.exit(0)\n{SLEEP}")
    wait_until(lambda: the_only().ranks.get("1") == "ended with 0")
    assert the_only().state == "ending"


# --- stop


def test_the_only_launch_is_stopped_without_its_pid(launcher: Start) -> None:
    process = launcher()
    assert stop(None).pid == process.pid
    assert process.wait(60) == 0


def test_a_pid_is_required_to_stop_one_of_two_launches(launcher: Start) -> None:
    first, second = launcher(name="a"), launcher(name="b")
    with fails(UsageError, "several_launches", match=f"{first.pid}, {second.pid}"):
        stop(None)
    stop(second.pid)
    assert second.wait(60) == 0
    assert [launch.words[-1] for launch in launches()] == ["a"]
    assert first.poll() is None


def test_a_launch_that_is_not_running_cannot_be_stopped(launcher: Start) -> None:
    with fails(UsageError, "usage"):
        stop(None)
    process = launcher()
    with fails(UsageError, "usage", match=str(process.pid)):
        stop(1)
    assert alive(process.pid)


def test_a_launch_that_ends_by_itself_counts_as_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    launch = Launch(ended.pid, ["serve"], ["a"], 0.0)
    monkeypatch.setattr(record, "_chosen", lambda _: launch)
    assert stop(None) is launch


def test_stopping_gives_up_after_a_while(launcher: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "print('event=listening url={}', flush=True)"
    deaf = f"import signal\nsignal.signal(15, lambda *_: {says.format('asked')})\n"
    process = launcher(f"{deaf}{says.format('x')}\n{RANK}{SLEEP}")
    wait_until(lambda: the_only().url == "x")
    monkeypatch.setattr(record, "STOP_SECONDS", 0.3)
    with fails(ClusterError, "cluster", match=str(process.pid)):
        stop(None)
    # Otherwise both signals may be one for the launcher.
    wait_until(lambda: the_only().url == "asked")
    monkeypatch.setattr(record, "STOP_SECONDS", 100.0)
    stop(process.pid)  # The second signal kills its ranks.
    assert process.wait(60) == 137


# --- the file


def test_remains_of_an_older_record_are_ignored(folder: Path) -> None:
    """Shorter than before: the old end is still there between the two calls."""
    with recorded(["serve"], ["a"], 12.0) as mine:
        file = folder / f"{os.getpid()}.launch"
        whole = file.read_bytes()
        file.write_bytes(whole + b'"}, old end')
        assert record._read(file) == Launch(**json.loads(whole))
        mine.started(0, 7)
        assert json.loads(file.read_bytes())["ranks"] == {"0": "runs as 7"}


def test_a_launch_by_another_version_is_listed(folder: Path) -> None:
    with recorded(["serve"], ["a"], 12.0):
        file = folder / f"{os.getpid()}.launch"
        fields = json.loads(file.read_bytes())
        del fields["end_seconds"]
        file.write_text(json.dumps(fields | {"colour": "red"}))
        assert the_only().words == ["serve"]


def test_a_full_disk_does_not_end_a_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with recorded(["serve"], ["a"], 12.0) as mine:
        with monkeypatch.context() as disk:
            disk.setattr(os, "pwrite", full)
            mine.started(0, 7)
        mine.said(0, "event=ready num_ranks=1")
        assert (the_only().state, the_only().ranks) == ("ready", {"0": "runs as 7"})


def test_a_launch_is_listed_after_its_mac_has_got_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with recorded(["serve"], ["a"], 12.0):
        monkeypatch.setattr(socket, "gethostname", lambda: "Mac-2.local")
        assert the_only().words == ["serve"]


def test_the_error_for_a_folder_that_cannot_be_made_says_how_to_choose_another_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "brigade").touch()
    with fails(ClusterError, "cluster", match="XDG_STATE_HOME"):
        launches()


# --- the command line


def test_the_status_lists_every_rank(launcher: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--status"]) == 0
    assert capsys.readouterr().out == "You have no running launch on this machine.\n"
    process = launcher(name="my model")
    wait_until(lambda: the_only().url != "" and len(the_only().ranks) == 2)
    assert cli.main(["launch", "--status"]) == 0
    first, command, *ranks = capsys.readouterr().out.splitlines()
    assert first == f"launch {process.pid}: starting, started 0 min ago, http://127.0.0.1:9"
    assert command == "  serve --model 'my model'"
    assert re.fullmatch(r"  rank 0 on 127.0.0.1: runs as \d+", ranks[0])
    assert re.fullmatch(r"  rank 1 on studio: runs as \d+", ranks[1])
    assert cli.main(["launch", "--stop"]) == 0
    assert capsys.readouterr().out == f"launch {process.pid} has ended.\n"


@pytest.mark.parametrize("flag", ["--status", "--stop"])
def test_status_and_stop_take_no_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", flag, "--", "serve"]) == 2
    assert "take no command" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--status", "--stop"])
@pytest.mark.parametrize(
    "ignored", [["--env", "A=b"], ["--cwd", "/"], ["--ssh", "ssh"], ["--python", "python9"]]
)
def test_the_flags_status_and_stop_refuse_flags_that_they_would_ignore(
    flag: str, ignored: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", flag, *ignored]) == 2
    assert f"do not take {ignored[0]}" in capsys.readouterr().err


def test_losing_another_rank_does_not_change_the_state() -> None:
    with recorded(["serve"], ["a", "b"], 12.0) as kept:
        kept.said(0, "x event=recovering life=1")
        kept.said(0, "x event=ready num_ranks=1 life=1")
        kept.ended(1, 6, "comes back")  # found only now, because a connection was silent
        assert kept._launch.state == "ready"
        assert kept._launch.ranks["1"] == "ended with 6, comes back"
        kept.ended(0, 0)
        assert kept._launch.state == "ending"
