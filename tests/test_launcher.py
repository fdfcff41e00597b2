"""The launcher with real processes: small programs stand in for ranks. None may be left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from launcher import cli
from launcher import process as launcher_process
from launcher import supervisor as supervisor_module
from launcher.command import (
    Ring,
    exit_code,
    rank_command,
    rank_environment,
)
from launcher.process import local_ranks, shown
from launcher.supervisor import Supervisor
from serve.core.errors import ClusterError, LostRankError
from tests.errors import fails
from tests.models import save
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent

# One launch in a process of its own, as `brigade launch` is, but with another program. Its times
# are so long that a busy machine makes no test fail: see `with_times`.
LAUNCH = """
import sys
from launcher import supervisor
from launcher.process import local_ranks
supervisor.FOLLOW_SECONDS = supervisor.OUTPUT_SECONDS = 100.0
supervisor.GONE_SECONDS = supervisor.LEFT_SECONDS = 100.0
ranks = local_ranks([sys.executable, "-c", sys.argv[2]], int(sys.argv[1]))
sys.exit(supervisor.Supervisor(ranks, drain_seconds=100.0, serves=True).run())
"""


def with_times(drain_seconds: float = 100.0, **constants: float) -> str:
    """Returns LAUNCH with other times of the supervisor."""
    changes = "".join(f"supervisor.{name} = {value}\n" for name, value in constants.items())
    text = LAUNCH.replace("ranks = ", f"{changes}ranks = ", 1)
    return text.replace("drain_seconds=100.0", f"drain_seconds={drain_seconds}")


RANK = "import os, signal, sys, time\nrank = int(os.environ.get('MLX_RANK', 0))\n"
SLEEP = "print('up', flush=True)\ntime.sleep(60)\n"
DEAF = "for s in (2, 15): signal.signal(s, signal.SIG_IGN)\n"


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """A zombie whose parent is not ours to mend counts as gone."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Launch:
    """A launcher process, its output, and the processes that ranks reported by `pid=`."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.log = folder / "launch.log"
        self._begin = time.monotonic()
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        self.folder = folder

    @property
    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"pid=(\d+)", self.text)]

    def see(self, text: str, times: int = 1) -> "Launch":
        wait_until(lambda: self.text.count(text) >= times)
        return self

    def end(self, seconds: float = 60.0) -> tuple[int, float]:
        """The launcher's exit code and the seconds since `mark` or the start; nothing is left."""
        code = self.process.wait(timeout=seconds)
        took = time.monotonic() - self._begin
        assert not [pid for pid in self.pids if alive(pid)], self.text
        assert not list(self.folder.glob("brigade-*"))
        return code, took

    def mark(self) -> "Launch":
        self._begin = time.monotonic()
        return self

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in filter(alive, self.pids):
            with suppress(ProcessLookupError):  # It may end just now.
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[int, str], Launch]]:
    made: list[Launch] = []

    def start(num_ranks: int, program: str) -> Launch:
        command = [sys.executable, "-c", LAUNCH, str(num_ranks), RANK + program]
        made.append(Launch(command, tmp_path))
        return made[-1]

    yield start
    for each in made:
        each.clean_up()


Start = Callable[[int, str], Launch]


# --- ends


def test_a_launch_ends_with_code_0_if_all_its_ranks_end_with_code_0(launch: Start) -> None:
    assert launch(3, "print('done', rank)").end()[0] == 0


def test_a_launch_returns_the_code_of_the_first_failed_rank_and_ends_the_other_ranks(
    launch: Start,
) -> None:
    launched = launch(3, f"if rank == 1: sys.exit(7)\n{SLEEP}")
    assert launched.end()[0] == 7
    assert "event=killing" not in launched.text


def test_the_exit_code_of_a_launch_is_128_plus_the_signal_that_ended_a_rank(launch: Start) -> None:
    assert launch(2, f"if rank == 0: os.kill(os.getpid(), 9)\n{SLEEP}").end()[0] == 137


@pytest.mark.long
def test_a_rank_that_ignores_sigterm_is_killed_after_a_grace_period(
    launch: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(drain_seconds=3.0))
    mark = tmp_path / "mark"
    failing = f"if rank == 1:\n    {until_there(mark)}    sys.exit(4)\n"
    launched = launch(2, f"{DEAF}{failing}{SLEEP}").see("up").mark()
    mark.touch()
    code, seconds = launched.end()
    assert code == 4
    assert seconds > 3
    assert "event=killing ranks=0" in launched.text


def test_a_rank_that_runs_on_after_another_rank_exits_with_0_is_ended(
    launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(FOLLOW_SECONDS=1.0))
    launched = launch(2, f"if rank == 0: sys.exit(0)\n{SLEEP}")
    code, seconds = launched.end()
    assert code == 0
    assert seconds >= 1
    assert 'signal=SIGTERM reason="still running after 1 s"' in launched.text


def test_a_program_that_does_not_exist_is_reported_with_its_rank() -> None:
    lines: list[str] = []
    with fails(ClusterError, "cluster", match="rank 0 .*--python"):
        Supervisor(local_ranks(["/no/such/program"], 2), lines.append).run()


def test_ranks_are_ended_if_another_rank_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def second_fails(*arguments: object, **options: object) -> "subprocess.Popen[bytes]":
        if started:
            raise OSError("no more processes")
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr("launcher.process.subprocess.Popen", second_fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = local_ranks([sys.executable, "-c", "import time; time.sleep(60)"], 2)
    with fails(ClusterError, "cluster", match="rank 1"):
        Supervisor(ranks, lambda _: None).run()
    wait_until(lambda: started[0].returncode == -9)
    assert list(tmp_path.iterdir()) == []


# --- signals


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_once_to_each_rank(launch: Start, signum: int) -> None:
    program = f"signal.signal({int(signum)}, lambda *_: (print('got it'), sys.exit(0)))\n{SLEEP}"
    launched = launch(2, program).see("up", 2).mark()
    launched.process.send_signal(signum)
    assert launched.end()[0] == 0
    assert launched.text.count("got it") == 2
    assert "event=killing" not in launched.text


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ranks_start_gives_code_0_for_a_server_but_not_for_training(
    launch: Start, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    """`brigade launch … fine-tune && …` went on without an adapter."""
    program = f"signal.signal({int(signum)}, signal.SIG_DFL)\n{SLEEP}"
    for serves, code in (("True", 0), ("False", 128 + signum)):
        text = LAUNCH.replace("serves=True", f"serves={serves}")
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "LAUNCH", text)
            launched = launch(2, program).see("up", 2)
        launched.process.send_signal(signum)
        assert launched.end()[0] == code


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGQUIT])
def test_the_hangup_or_quit_signal_of_a_terminal_ends_ranks(launch: Start, signum: int) -> None:
    """SIGQUIT left the ranks to their leash, and the folder of the launch to the next one."""
    launched = launch(2, SLEEP).see("up", 2)
    launched.process.send_signal(signum)
    assert launched.end()[0] == 0
    assert launched.text.count("signal=SIGTERM") == 1


def test_ranks_live_on_after_a_closed_terminal_under_nohup(
    launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{LAUNCH}"
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    launched = launch(2, SLEEP).see("up", 2)
    launched.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert all(map(alive, launched.pids))
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_second_signals_kill_ranks_at_once(launch: Start) -> None:
    launched = launch(2, DEAF + SLEEP).see("up", 2)
    launched.process.send_signal(signal.SIGINT)
    launched.see("event=ending")
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 137
    assert 'reason="a second SIGINT"' in launched.text


@pytest.mark.long
def test_ranks_that_ignore_a_signal_are_killed_after_the_drain_time(
    launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(drain_seconds=3.0))
    launched = launch(2, DEAF + SLEEP).see("up", 2).mark()
    launched.process.send_signal(signal.SIGTERM)
    code, seconds = launched.end()
    assert code == 137
    assert seconds >= 3


def test_a_rank_stopped_by_sigstop_is_killed_after_a_signal(
    launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM waits for a stopped process; SIGKILL does not."""
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(drain_seconds=0.5))
    launched = launch(2, f"os.kill(os.getpid(), signal.SIGSTOP)\n{SLEEP}")
    launched.see("event=rank_started", 2)
    ranks = [psutil.Process(pid) for pid in launched.pids]
    wait_until(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks))
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 137


def test_ranks_are_not_in_the_process_group_of_the_terminal(launch: Start) -> None:
    """Ctrl-C at a terminal reaches the launcher alone, which then forwards it."""
    launched = launch(2, f"print('group', os.getpgrp() == os.getpid(), flush=True)\n{SLEEP}")
    launched.see("group True", 2)


def test_a_mac_is_kept_awake_as_long_as_a_rank_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    caffeinate = tmp_path / "caffeinate"
    script = f'#!/bin/sh\necho "$$ $@" > {told}.new\nmv {told}.new {told}\nexec sleep 60\n'
    caffeinate.write_text(script)
    caffeinate.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with local_ranks(["sleep", "60"], 1) as (start,):
        with monkeypatch.context() as on_a_mac:
            on_a_mac.setattr(launcher_process.sys, "platform", "darwin")
            rank = start()
        wait_until(told.exists)
        pid, *words = told.read_text().split()
        assert words == ["-ims", "-w", str(rank.pid)]
        assert alive(int(pid))
        rank.kill()
        rank.wait()
        assert not alive(int(pid))
        list(rank.lines())


# --- what ranks leave behind

CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", {inner!r}])
print(f"pid={{child.pid}}", flush=True)
"""
DEAF_CHILD = CHILD.format(
    inner="import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\n"
    "print('child up', flush=True)\ntime.sleep(600)"
)


def crash_when_told(mark: Path) -> str:
    """The program of ranks with a child, of which rank 1 crashes when a file is there."""
    return f"{DEAF_CHILD}if rank:\n    {until_there(mark)}    os._exit(5)\n{SLEEP}"


def test_grandchildren_of_a_crashed_rank_are_killed(launch: Start, tmp_path: Path) -> None:
    """They hold the output pipe open, too: the launcher must not wait for its end."""
    launched = launch(2, crash_when_told(tmp_path / "mark")).see("child up", 2)
    (tmp_path / "mark").touch()
    assert launched.end()[0] == 5
    assert "event=killing" not in launched.text


def test_ranks_are_supervised_without_waitid(
    launch: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """macOS had no waitid before Python 3.13: every rank was killed as soon as it ran."""
    text = f"import os\ndel os.waitid\n{LAUNCH}"
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    launched = launch(2, crash_when_told(tmp_path / "mark")).see("child up", 2)
    (tmp_path / "mark").touch()
    assert launched.end()[0] == 5


def test_grandchildren_are_killed_after_a_signal(launch: Start) -> None:
    launched = launch(2, f"{DEAF_CHILD}{SLEEP}").see("child up", 2).mark()
    assert len(launched.pids) == 4
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    assert "event=killing" not in launched.text


ESCAPE = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(f"escaped={child.pid}", flush=True)
os._exit(0)
"""


def end_before_escaped(launched: Launch) -> None:
    """Waits until a launch has ended whose ranks ran ESCAPE, and ends what they left."""
    code, _ = launched.end()
    escaped = [int(pid) for pid in re.findall(r"escaped=(\d+)", launched.text)]
    still_there = [alive(pid) for pid in escaped]
    for pid in escaped:
        os.kill(pid, signal.SIGKILL)
    assert code == 0
    assert still_there
    assert all(still_there)


def test_a_grandchild_in_a_session_of_its_own_does_not_block_the_launcher(
    launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(OUTPUT_SECONDS=1.0))
    end_before_escaped(launch(1, ESCAPE))


LEASHED = (
    "import threading\n"
    "def watch():\n"
    "    os.read(int(os.environ['BRIGADE_LEASH']), 1)\n"
    "    os.kill(os.getpid(), 9)\n"
    "threading.Thread(target=watch, daemon=True).start()\n"
)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_end_when_their_launcher_is_killed(launch: Start, num_ranks: int) -> None:
    launched = launch(num_ranks, LEASHED + SLEEP).see("up", num_ranks)
    assert all(map(alive, launched.pids))
    launched.process.kill()
    launched.process.wait()
    wait_until(lambda: not any(map(alive, launched.pids)))


def test_no_rank_inherits_the_pipe_that_ends_another_rank(launch: Start) -> None:
    """With the writing end inherited, no leash would ever end."""
    program = f"print('leash', os.read(int(os.environ['BRIGADE_LEASH']), 1), flush=True)\n{DEAF}"
    launched = launch(3, program)
    launched.see("event=rank_started", 3)
    launched.process.kill()
    wait_until(lambda: not any(map(alive, launched.pids)))


# --- ranks that come back


@pytest.fixture
def relaunch(launch: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """As for `serve`: ranks that were lost are started again, twice at most."""
    text = LAUNCH.replace("serves=True", "serves=True, max_restarts=2")
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    return launch


def test_a_killed_rank_is_started_again_in_the_same_ring(relaunch: Start) -> None:
    launched = relaunch(2, TELL + SLEEP).see("] up", 2)  # "up" may be in a variable, too.
    os.kill(launched.pids[1], signal.SIGKILL)
    launched.see("] up", 3)
    first, second = (rank for rank in environments(launched) if rank["MLX_RANK"] == "1")
    assert second == first | {"BRIGADE_RETURNS": "1"}
    assert alive(launched.pids[0])
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_rank_comes_back_after_the_system_has_deleted_temporary_folders(
    relaunch: Start, tmp_path: Path
) -> None:
    """macOS does that after three days."""
    launched = relaunch(2, "print(open(os.environ['MLX_HOSTFILE']).read())\n" + SLEEP)
    launched.see("up", 2)
    (folder,) = tmp_path.glob("brigade-*")
    shutil.rmtree(folder)
    os.kill(launched.pids[1], signal.SIGKILL)
    launched.see("up", 3)
    assert len(set(re.findall(r"\[\[.*", launched.text))) == 1
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_rank_that_is_lost_again_and_again_ends_the_launch(relaunch: Start) -> None:
    launched = relaunch(2, f"if rank == 1: os.kill(os.getpid(), 9)\n{SLEEP}")
    assert launched.end()[0] == 137
    assert launched.text.count("event=rank_started rank=1") == 3


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (f"if rank == 1: sys.exit(3)\n{SLEEP}", 3),
        (f"if rank == 0: os.kill(os.getpid(), 9)\n{SLEEP}", 137),
    ],
)
def test_rank_0_and_ranks_that_decide_to_end_are_not_started_again(
    relaunch: Start, program: str, code: int
) -> None:
    launched = relaunch(2, program)
    assert launched.end()[0] == code
    assert launched.text.count("event=rank_started") == 2


def test_a_rank_that_ends_soon_after_its_return_is_started_again(
    relaunch: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its host has booted, but the disk with the model is not there yet."""
    text = with_times(RETRY_SECONDS=0.5, EARLY_SECONDS=1000.0)
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    marks = tmp_path / "marks"
    program = f"""
if rank == 1:
    with open({str(marks)!r}, "a+") as file:
        file.write("x"); file.seek(0)
        num_starts = len(file.read())
    if num_starts == 1: os.kill(os.getpid(), 9)
    if num_starts < 4: sys.exit(3)
    print("at last", flush=True)
"""
    began = time.monotonic()
    launched = relaunch(2, program + SLEEP).see("at last", 1)
    assert time.monotonic() - began > 2 * 0.5, "it was not left any time"
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_returned_rank_that_cannot_reach_rank_0_is_started_again(
    relaunch: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It tries for --join-timeout before it ends: that is no decision for all."""
    text = with_times(EARLY_SECONDS=0.1, RETRY_SECONDS=0.1)
    text = text.replace("max_restarts=2", "max_restarts=2, join_seconds=1000.0")
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    program = f"""
if rank == 1:
    with open({str(tmp_path / "marks")!r}, "a+") as file:
        file.write("x"); file.seek(0)
        num_starts = len(file.read())
    if num_starts == 1: os.kill(os.getpid(), 9)
    if num_starts == 2: time.sleep(0.5); sys.exit(6)
    print("at last", flush=True)
"""
    launched = relaunch(2, program + SLEEP).see("at last", 1)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_rank_that_decides_to_end_long_after_it_came_back_ends_the_launch(
    relaunch: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(EARLY_SECONDS=0.1))
    program = f"""
if rank == 1:
    with open({str(tmp_path / "mark")!r}, "a+") as file:
        if not file.tell(): file.write("x"); file.close(); os.kill(os.getpid(), 9)
    {until_there(tmp_path / "end")}
    sys.exit(3)
"""
    launched = relaunch(2, program + SLEEP).see("event=rank_started rank=1", 2)
    time.sleep(0.2)  # So long has it been there when the launcher sees its end.
    (tmp_path / "end").touch()
    assert launched.end()[0] == 3
    assert launched.text.count("event=rank_started rank=1") == 2


def test_a_rank_that_ends_after_a_signal_is_not_started_again(relaunch: Start) -> None:
    launched = relaunch(2, SLEEP).see("up", 2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    assert launched.text.count("event=rank_started") == 2


def test_a_signal_while_a_rank_is_away_ends_the_launch(
    relaunch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(RESTART_SECONDS=1000.0))
    launched = relaunch(2, f"if rank == 1: os.kill(os.getpid(), 9)\n{SLEEP}").see("code=137", 2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def until_there(file: Path) -> str:
    """The lines of a rank that waits for a file."""
    return f"while not os.path.exists({str(file)!r}): time.sleep(0.02)\n"


# --- a training run, whose ranks are all started again


@pytest.fixture
def train(relaunch: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """As for `fine-tune`: all ranks are started again if one is lost, twice at most."""
    text = LAUNCH.replace("serves", "trains")
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    return relaunch


AGAIN = "is_again = 'BRIGADE_RETURNS' in os.environ\n"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
# Once rank 0 has ended with 0, the launcher starts no other rank, so all have to be there before.
MEET = """
def meet(folder, num_ranks):
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, str(rank)), 'w').close()
    while len(os.listdir(folder)) < num_ranks:
        time.sleep(0.01)
    sys.exit()
"""


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_all_ranks_start_again_after_the_loss_of_one_rank(
    train: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: int
) -> None:
    """Also one that does not end by itself, such as a shard in a sum."""
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(drain_seconds=1.0))
    deaf = f"if rank == {(lost + 1) % 3}:\n    {DEAF}"
    meet = f"{MEET}if is_again: meet({str(tmp_path / 'met')!r}, 3)\n"
    launched = train(3, f"{AGAIN}{TELL}{meet}{deaf}{SLEEP}").see("] up", 3)
    os.kill(launched.pids[lost], signal.SIGKILL)
    assert launched.end()[0] == 0
    assert launched.text.count("event=rank_started") == 6
    first, again = environments(launched)[:3], environments(launched)[3:]
    assert {rank["MLX_RANK"] for rank in again} == {"0", "1", "2"}
    assert all(rank | {"BRIGADE_RETURNS": "1"} in again for rank in first)


def test_the_only_rank_of_a_training_run_is_started_again(train: Start) -> None:
    launched = train(1, f"{AGAIN}if not is_again: {DIES}")
    assert launched.end()[0] == 0
    assert launched.text.count("event=rank_started") == 2


def test_a_rank_that_ends_because_another_rank_is_lost_does_not_end_the_launch(
    train: Start, tmp_path: Path
) -> None:
    """It may end before the launcher hears of the other one, which can be on another host."""
    code = LostRankError.exit_code
    meet = f"{MEET}if is_again: meet({str(tmp_path / 'met')!r}, 2)\n"
    launched = train(2, f"{AGAIN}{meet}if rank == 0: sys.exit({code})\n{SLEEP}")
    assert launched.end()[0] == 0
    assert launched.text.count("event=rank_started") == 4


def test_a_training_run_that_loses_ranks_again_and_again_is_ended(train: Start) -> None:
    launched = train(2, f"if rank == 1: {DIES}\n{SLEEP}")
    assert launched.end()[0] == 137
    assert launched.text.count("event=rank_started rank=1") == 3


def test_a_rank_that_decides_to_end_ends_the_training_run(train: Start, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    decides = f"if rank:\n    {until_there(mark)}\n    sys.exit(3)\n"
    launched = train(2, f"{AGAIN}if not is_again and rank: {DIES}\n{decides}{SLEEP}")
    launched.see("event=rank_started", 4)
    mark.touch()
    assert launched.end()[0] == 3


def test_a_training_run_starts_again_if_rank_0_is_lost_after_all_other_ranks_have_ended(
    train: Start, tmp_path: Path
) -> None:
    """The other ranks may end again before rank 0 has started again."""
    mark = tmp_path / "mark"
    launched = train(2, f"if rank == 0:\n    {until_there(mark)}")
    launched.see("event=rank_ended rank=1 code=0")
    os.kill(launched.pids[0], signal.SIGKILL)
    launched.see("event=rank_started", 4)
    mark.touch()
    assert launched.end()[0] == 0


def test_a_rank_lost_after_rank_0_has_finished_is_not_started_again(train: Start) -> None:
    launched = train(2, f"if rank: time.sleep(60)\n{SLEEP.replace('60', '0')}")
    launched.see("event=rank_ended rank=0 code=0")
    os.kill(launched.pids[1], signal.SIGKILL)
    assert launched.end()[0] == 0
    assert launched.text.count("event=rank_started") == 2


def test_rank_0_of_a_training_run_may_finish_long_after_the_other_ranks(
    train: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It loads the adapter into a server. It was ended, with code 143."""
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(FOLLOW_SECONDS=0.0))
    mark = tmp_path / "mark"
    launched = train(2, f"if rank == 0:\n    {until_there(mark)}").see("event=rank_ended rank=1")
    time.sleep(0.2)
    mark.touch()
    assert launched.end()[0] == 0


def test_a_signal_ends_a_training_run_that_waits_to_start_its_rank_again(
    train: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its second loss the rank is away for long."""
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", with_times(RESTART_SECONDS=1000.0))
    launched = train(1, DIES).see("event=ending", 2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert launched.text.count("event=rank_started") == 2


def test_after_a_signal_a_training_run_does_not_start_again(train: Start) -> None:
    launched = train(2, f"if rank == 0:\n    {DEAF}{SLEEP}").see("up", 2)
    os.kill(launched.pids[1], signal.SIGKILL)
    launched.see("event=ending").process.send_signal(signal.SIGTERM)
    launched.see("event=ending", 2).process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 137, "rank 0 heeds no signal"
    assert launched.text.count("event=rank_started") == 2


# What rank 0 of a server logs when it can answer.
READY = "2026-11-22 19:00:00,000 INFO event=ready num_ranks=2 url=http://127.0.0.1:1"
KILLED = "if rank == 1: os.kill(os.getpid(), 9)\n"


@pytest.fixture
def replanned(
    relaunch: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], Launch]:
    """As for `serve --replan`: two ranks, of which rank 1 runs a program once rank 0 was ready."""
    text = LAUNCH.replace("serves=True", "serves=True, replans=True")
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    mark = tmp_path / "ready"

    def start(program: str) -> Launch:
        begin = f"if rank == 0: print({READY!r}, flush=True)\n{until_there(mark)}"
        launched = relaunch(2, begin + program).see("event=ready")
        mark.touch()
        return launched

    return start


def test_a_server_that_replans_goes_on_without_a_rank_that_is_lost_again_and_again(
    replanned: Callable[[str], Launch],
) -> None:
    """The other ranks were ended, and with them the answers of all clients."""
    launched = replanned(KILLED + SLEEP).see("event=rank_left_out rank=1")
    assert launched.text.count("event=rank_started rank=1") == 3
    assert "event=ending" not in launched.text
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    assert "event=ending ranks=0 " in launched.text


def test_a_server_that_replans_goes_on_without_a_rank_that_ends_by_itself(
    replanned: Callable[[str], Launch],
) -> None:
    launched = replanned(f"if rank == 1: sys.exit('brigade serve: no disk')\n{SLEEP}")
    launched.see("event=rank_left_out rank=1")
    assert "[rank 1] brigade serve: no disk" in launched.text
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_server_that_replans_ends_with_its_rank_0(replanned: Callable[[str], Launch]) -> None:
    assert replanned(f"if rank == 0: sys.exit(6)\n{SLEEP}").end()[0] == 6


def test_the_last_line_is_rank_0s_reason_if_it_gives_up_after_losing_a_rank(
    replanned: Callable[[str], Launch], tmp_path: Path
) -> None:
    """As one does whose model does not fit without the other."""
    ends = "sys.exit('brigade serve: No other rank came in time')"
    launched = replanned(f"{KILLED}{until_there(tmp_path / 'end')}{ends}")
    launched.see("event=rank_left_out rank=1")
    (tmp_path / "end").touch()
    assert launched.end()[0] == 1
    last = launched.text.splitlines()[-1]
    assert last.endswith('event=failed rank=0 code=1 reason="No other rank came in time"')


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (KILLED, 137),
        ("if rank == 1: sys.exit(3)\n", 3),
        # Only rank 0 is believed, and only a whole line.
        (f"if rank == 1: print({READY!r}, flush=True)\n{KILLED}", 137),
        (f"if rank == 0: print('request', {READY!r}, flush=True)\n{KILLED}", 137),
    ],
)
def test_a_server_that_is_not_ready_ends_with_a_failed_rank_even_if_it_replans(
    relaunch: Start, monkeypatch: pytest.MonkeyPatch, program: str, code: int
) -> None:
    """No rank has shown yet that the model can be served."""
    text = LAUNCH.replace("serves=True", "serves=True, replans=True")
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    launched = relaunch(2, program + SLEEP)
    assert launched.end()[0] == code
    assert "event=rank_left_out" not in launched.text


def test_after_a_failed_rank_the_other_ranks_have_time_to_drain(tmp_path: Path) -> None:
    """They were killed after 3 s, in the middle of answers."""
    asked, finish = tmp_path / "asked", tmp_path / "finish"
    program = f"""
signal.signal(signal.SIGTERM, lambda *_: open({str(asked)!r}, "w").close())
print("up", flush=True)
if rank == 1:
    {until_there(tmp_path / "fail")}
    sys.exit(7)
{until_there(finish)}
print("drained")
"""
    lines: list[str] = []
    ranks = local_ranks([sys.executable, "-c", RANK + program], 2)
    supervisor = Supervisor(ranks, lines.append, drain_seconds=600.0, serves=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(supervisor.run)
        try:
            wait_until(lambda: lines.count("[rank 0] up") == 1)
            (tmp_path / "fail").touch()
            wait_until(asked.exists)
            assert supervisor._deadline is not None
            assert supervisor._deadline - time.monotonic() > 300
        finally:
            finish.touch()
            (tmp_path / "fail").touch()
        assert running.result(60) == 7
    assert "[rank 0] drained" in lines


SILENT = """
def tell(rank, pid):
    print(f"2026-11-22 19:00:00,000 WARNING event=rank_silent rank={rank} pid={pid}", flush=True)

def pid_of_rank_1():
    while not os.path.exists(PID_FILE): time.sleep(0.02)
    return int(open(PID_FILE).read())

if rank == 1 and not os.path.exists(PID_FILE):
    with open(PID_FILE + ".new", "w") as file: file.write(str(os.getpid()))
    os.rename(PID_FILE + ".new", PID_FILE)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_suspended_rank_is_replaced_when_rank_0_reports_it(
    relaunch: Start, tmp_path: Path
) -> None:
    program = f"PID_FILE = {str(tmp_path / 'pid')!r}\n{SILENT}"
    launched = relaunch(2, f"{program}if rank == 0: tell(1, pid_of_rank_1())\n{SLEEP}").see("up", 2)
    assert launched.text.count("event=rank_started rank=1") == 2
    assert "event=rank_killed rank=1" in launched.text
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


@pytest.mark.parametrize(
    "says",
    [
        "if rank == 0: tell(1, os.getpid())",  # one that had the place before
        "if rank == 1: tell(1, os.getpid())",  # only rank 0 is believed
        "if rank == 0: tell(0, os.getpid())",
        "if rank == 0: tell(7, os.getpid())",
        "if rank == 0: print('request', end=' ')\nif rank == 0: tell(1, os.getppid())",
    ],
)
def test_a_rank_that_rank_0_did_not_report_is_not_killed(relaunch: Start, says: str) -> None:
    program = f"PID_FILE = os.devnull\n{SILENT}{says}\n"
    launched = relaunch(2, program + SLEEP).see("up", 2).see("event=rank_silent")
    time.sleep(0.3)
    assert "event=rank_killed" not in launched.text
    assert all(map(alive, launched.pids))
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


@pytest.mark.parametrize(
    ("other", "follow_seconds", "code"),
    [
        ("sys.exit(6)", 100.0, 0),  # it found nobody there
        (SLEEP, 0.5, 0),
        (f"{DEAF}{SLEEP}", 0.5, 0),
        ("sys.exit(7)", 100.0, 7),
        ("os.abort()", 100.0, 134),
    ],
)
def test_a_rank_that_did_not_learn_of_the_drain_does_not_fail_the_launch(
    launch: Start,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    other: str,
    follow_seconds: float,
    code: int,
) -> None:
    text = with_times(drain_seconds=0.5, FOLLOW_SECONDS=follow_seconds)
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", text)
    drained = tmp_path / "drained"
    launched = launch(2, f"if rank == 0: sys.exit(0)\n{until_there(drained)}{other}")
    launched.see("event=rank_ended rank=0")
    drained.touch()
    assert launched.end()[0] == code


def test_a_launch_removes_the_folder_of_a_killed_launch(launch: Start, tmp_path: Path) -> None:
    killed = launch(1, LEASHED + SLEEP).see("up")
    (folder,) = tmp_path.glob("brigade-*")
    killed.process.kill()
    killed.process.wait()
    wait_until(lambda: not any(map(alive, killed.pids)))
    assert folder.exists()
    assert launch(1, "print('done')").end()[0] == 0
    assert not folder.exists()


# --- the environment of ranks

TELL = "print('environment ' + __import__('json').dumps(dict(os.environ)), flush=True)\n"


def environments(launched: Launch) -> list[dict[str, str]]:
    return [json.loads(line) for line in re.findall(r"environment (\{.*\})", launched.text)]


def test_all_ranks_get_the_same_ring_and_each_its_own_number(launch: Start) -> None:
    program = TELL + "print('hosts ' + open(os.environ['MLX_HOSTFILE']).read(), flush=True)"
    launched = launch(3, program)
    launched.end()
    ranks = environments(launched)
    assert sorted(rank["MLX_RANK"] for rank in ranks) == ["0", "1", "2"]
    for name in ("BRIGADE_SECRET", "BRIGADE_CONTROL", "MLX_HOSTFILE"):
        assert len({rank[name] for rank in ranks}) == 1
    (hosts,) = {line for line in re.findall(r"hosts (.*)", launched.text)}
    addresses = [address for (address,) in json.loads(hosts)]
    assert len({*addresses, ranks[0]["BRIGADE_CONTROL"]}) == 4
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert len(ranks[0]["BRIGADE_SECRET"]) >= 32


def test_a_single_rank_gets_no_variables_of_a_ring(
    launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even of one that the launcher itself was started in."""
    for name in ("MLX_RANK", "MLX_HOSTFILE", "BRIGADE_CONTROL", "BRIGADE_SECRET"):
        monkeypatch.setenv(name, "3")
    launched = launch(1, TELL)
    launched.end()
    (environment,) = environments(launched)
    assert not [name for name in environment if name.startswith("MLX_")]
    assert "BRIGADE_CONTROL" not in environment
    assert "BRIGADE_LEASH" in environment


def test_the_environment_of_a_rank_keeps_variables_that_the_caller_set() -> None:
    ring = Ring("hosts.json", "127.0.0.1:9", "nonce", 5)
    base = {"PATH": "/bin", "PYTHONUNBUFFERED": "0", "MLX_WORLD_SIZE": "8"}
    assert rank_environment(base, ring, 1, 2) == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "0",
        "BRIGADE_LEASH": "5",
        "BRIGADE_CONTROL": "127.0.0.1:9",
        "BRIGADE_SECRET": "nonce",
        "MLX_HOSTFILE": "hosts.json",
        "MLX_RANK": "1",
    }


def test_the_command_of_a_rank_contains_its_arguments_unchanged() -> None:
    words = ["serve", "--model", "a b", "--", "-n", "3"]
    assert rank_command(words) == [sys.executable, "-m", "serve.cli.main", *words[1:]]


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(50))) == 50


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (7, 7), (-9, 137), (-15, 143)])
def test_the_exit_code_after_a_signal_is_128_plus_its_number(returncode: int, code: int) -> None:
    assert exit_code(returncode) == code


# --- output


def lines_of(program: str, num_ranks: int = 1) -> list[str]:
    lines: list[str] = []
    command = [sys.executable, "-c", RANK + program]
    with pytest.MonkeyPatch.context() as patch:
        # A busy machine may take long to start a rank, or to read what it has left in its pipe.
        patch.setattr(supervisor_module, "FOLLOW_SECONDS", 100.0)
        patch.setattr(supervisor_module, "OUTPUT_SECONDS", 100.0)
        Supervisor(local_ranks(command, num_ranks), lines.append).run()
    return [line for line in lines if not line.startswith("[launch]")]


def test_each_line_of_output_and_errors_begins_with_its_rank() -> None:
    program = "print('out', rank, flush=True)\nprint('err', rank, file=sys.stderr)"
    assert sorted(lines_of(program, 2)) == [
        "[rank 0] err 0",
        "[rank 0] out 0",
        "[rank 1] err 1",
        "[rank 1] out 1",
    ]


def test_a_last_line_without_a_newline_is_shown() -> None:
    assert lines_of("sys.stdout.write('a\\n\\nb')") == ["[rank 0] a", "[rank 0] ", "[rank 0] b"]


def test_invalid_bytes_are_shown_as_far_as_they_are_text() -> None:
    program = "sys.stdout.buffer.write(b'a\\xff\\x00b\\n\\xc3\\xa9\\n\\xc3')"
    assert lines_of(program) == ["[rank 0] a\ufffd\x00b", "[rank 0] é", "[rank 0] \ufffd"]


def test_a_long_line_arrives_whole_in_bounded_parts() -> None:
    """Cut inside a character, which must not become two broken ones."""
    lines = lines_of("sys.stdout.buffer.write(b'x' + 'é'.encode() * 100_000 + b'\\n')")
    texts = [line.removeprefix("[rank 0] ") for line in lines]
    assert "".join(texts) == "x" + "é" * 100_000
    assert max(map(len, texts)) <= 65536


def test_much_output_is_neither_lost_nor_mixed() -> None:
    lines = lines_of("for i in range(5000): print(rank, i)", 3)
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] {rank} {i}" for i in range(5000)]


def test_a_closed_pipe_of_output_does_not_block_the_ranks() -> None:
    """As in `brigade launch … 2>&1 | head -1`."""
    program = "for i in range(20000): print('a line of some length', i)"
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "2", RANK + program], cwd=ROOT, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(timeout=100) == 0


def test_output_to_a_file_has_no_colour_codes(launch: Start) -> None:
    launched = launch(1, "print('plain')")
    launched.end()
    assert "[rank 0] plain\n" in launched.text
    assert "\x1b" not in launched.text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_ready_line_is_highlighted_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(supervisor_module, "OUTPUT_SECONDS", 100.0)
    lines: list[str] = []
    command = [sys.executable, "-c", "print('Loaded'); print('Ready on http://h:1, model m')"]
    Supervisor(local_ranks(command, 1), lines.append, serves=True).run()
    (loaded,) = [line for line in lines if "Loaded" in line]
    (ready,) = [line for line in lines if "Ready on" in line]
    assert loaded.endswith(" Loaded")
    styled = "\x1b[1;32mReady on http://h:1, model m\x1b[0m"
    assert ready.endswith(styled) == is_terminal


@pytest.mark.parametrize(
    ("text", "seen"), [("a\n", "a"), ("a\r\n", "a"), ("10%\r20%\r30%\n", "30%"), ("", "")]
)
def test_only_the_last_state_of_a_progress_bar_is_shown(text: str, seen: str) -> None:
    assert shown(text) == seen


def test_a_waiting_launcher_uses_almost_no_processor_time(launch: Start) -> None:
    """mlx.launch spins a core all the while."""
    launched = launch(2, SLEEP).see("up", 2)
    before = cpu_seconds(launched.process.pid)
    time.sleep(1.0)
    assert cpu_seconds(launched.process.pid) - before <= 0.05


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


# --- the command line


def test_brigade_launch_runs_brigade_serve_with_the_arguments_after_the_dashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = save(tmp_path, "llama")
    seen: list[object] = []

    def recorded(command: list[str], num_ranks: int, _: object) -> "nullcontext[list[object]]":
        seen.append((command[1:], num_ranks))
        return nullcontext([])

    monkeypatch.setattr(cli, "local_ranks", recorded)
    monkeypatch.setattr(Supervisor, "run", lambda _: 9)
    words = ["--model", str(model), "--port", "1"]
    assert cli.main(["launch", "-n", "3", "--", "serve", *words]) == 9
    assert seen == [(["-m", "serve.cli.main", *words], 3)]


@pytest.mark.parametrize(
    ("words", "own", "command"),
    [
        ("-n 2 serve --model m -n 3", "-n 2", "serve --model m -n 3"),
        ("-n 2 -- serve serve", "-n 2", "serve serve"),
        ("--python serve -n 2 serve", "--python serve -n 2", "serve"),
        ("--hostfile fine-tune fine-tune", "--hostfile fine-tune", "fine-tune"),
        ("-n 2 serve -- x", "-n 2 serve", "x"),
        ("--status", "--status", ""),
    ],
)
def test_brigade_launch_finds_its_command_without_dashes_if_it_is_unambiguous(
    words: str, own: str, command: str
) -> None:
    assert cli.split_at_command(words.split()) == (own.split(), command.split())


def test_a_training_run_that_a_signal_ends_early_does_not_exit_with_code_0(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    words = ["fine-tune", "--model", str(save(tmp_path / "m", "llama")), "--train"]
    words += ["--data", str(tmp_path), "--adapter-path", str(tmp_path / "out")]
    command = [sys.executable, "-m", "launcher.cli", "launch", "-n", "2", "--", *words]
    launched = Launch(command, tmp_path)
    try:
        wait_until(lambda: "event=rank_started rank=1" in launched.text)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end()[0] == 143, launched.text
    finally:
        launched.clean_up()


def test_brigade_launch_reports_errors_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(tmp_path, "llama")
    monkeypatch.setattr(Supervisor, "run", lambda _: pytest.fail("ranks were started"))
    for words, code in (
        (["-n", "5", "--", "serve", "--model", str(model)], 4),
        (["-n", "2", "--", "serve", "--model", str(tmp_path / "none")], 3),
        (["-n", "2", "--", "serve", "--model", str(model), "--bogus"], 2),
        (["-n", "2", "--cwd", "/", "--", "serve", "--model", str(model)], 2),
        (["-n", "2", "--ssh", "ssh", "--", "serve", "--model", str(model)], 2),
        (["-n", "2", "--status"], 2),
        (["-n", "3", "serve", "--model", str(model), "--tensor-parallel-size", "2"], 2),
        (["-n", "2", "serve", "--model", str(model), "--tensor-parallel-size", "x"], 2),
    ):
        assert cli.main(["launch", *words]) == code
        assert capsys.readouterr().err.count("\n") == 1


def test_brigade_serve_gets_its_arguments_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("serve.cli.main.main", lambda words: seen.append(words) or 4)
    assert cli.main(["serve", "--version", "--", "launch", "-h"]) == 4
    assert seen == [["--version", "--", "launch", "-h"]]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "nope",
        "--nope",
        "launch",
        "launch -n 2",
        "launch -n 2 --",
        "launch -n 2 -- nope",
        "launch -n 2 -- python -c 1",
        "launch -n 2 serve -- --model m",
        "launch -n 2 --python serve",
        "lauch -n 2",
        "launch --hostfil hosts.json -- serve",
        "launch -n 0 -- serve",
        "launch -n -1 -- serve",
        "launch -n two -- serve",
        "launch --num 2 -- serve",
        "launch -n 2 --nope -- serve",
        "demo --nope",
        "demo -n 0",
        "demo --port x",
        "demo --port 99999",
        "doctor --port 99999",
        "doctor --port -1",
        "demo -- serve",
    ],
)
def test_a_wrong_command_line_gives_one_line_and_exit_code_2(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(words.split())
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert re.fullmatch(r"brigade.*: .+\n", printed.err), printed.err


def test_the_process_ends_with_the_exit_code_of_a_wrong_command_line() -> None:
    command = [sys.executable, "-m", "launcher.cli", "launch"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stdout == ""
    assert re.fullmatch(r"brigade.*: .+\n", run.stderr), run.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["lauch", "-n", "2"], "did you mean launch?"),
        (["launch", "--hostfil", "h", "--", "serve"], "did you mean --hostfile?"),
        (["launch", "-n", "2", "--", "serve", "--model", "m", "--prot", "1"], "mean --port?"),
        (["serve", "--model", "m", "--prot=1"], "did you mean --port?"),
        (["demo", "--onc"], "did you mean --once?"),
        (["bench", "--uurl", "http://a"], "did you mean --url?"),
    ],
)
def test_a_misspelt_word_is_answered_with_a_similar_word(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert hint in said
    assert said.startswith("brigade")
    assert said.count("\n") == 1


def test_no_word_is_suggested_if_none_is_similar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["serve", "--model", "m", "--xyzzy"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["serve"], ["fine-tune"], ["bench"], ["plan"]])
def test_the_help_begins_with_the_command_as_it_was_typed(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would leave a thread that ends this process when a later test sends it a signal.
    monkeypatch.setattr("serve.cli.fine_tune._heed_signals", lambda: None)
    with suppress(SystemExit):
        cli.main([*words, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: brigade {words[0]} ")


def test_the_reason_of_a_failed_start_is_the_last_line(launch: Start) -> None:
    launched = launch(
        3, f"if rank == 1: sys.exit('brigade serve: the port \\'9\\' is in use')\n{SLEEP}"
    )
    assert launched.end()[0] == 1
    lines = launched.text.splitlines()
    assert lines[-1].endswith("""event=failed rank=1 code=1 reason="the port '9' is in use\"""")
    assert launched.text.count("the port '9' is in use") == 1
    assert launched.text.count("event=rank_ended") == 1, "the others ended because of it"


def test_each_reason_is_written_once_even_if_two_ranks_give_it(
    launch: Start, tmp_path: Path
) -> None:
    said = "'brigade serve: the model is broken'"
    same = launch(2, f"sys.exit({said})")
    assert same.end()[0] == 1
    assert same.text.count("the model is broken") == 1
    assert same.text.splitlines()[-1].endswith('reason="the model is broken"')
    fail, end = tmp_path / "fail", tmp_path / "end"
    first = f"if rank == 1:\n    {until_there(fail)}    sys.exit({said})\n"
    second = f"{DEAF}print('up', flush=True)\n{until_there(end)}sys.exit('brigade serve: no disk')"
    different = launch(2, first + second).see("] up")
    fail.touch()
    different.see("event=ending")
    end.touch()
    assert different.end()[0] == 1
    assert different.text.count("the model is broken") == 1
    assert different.text.count("no disk") == 1
    assert different.text.splitlines()[-1].endswith('reason="the model is broken"')


def test_the_error_line_of_a_rank_that_goes_on_keeps_its_place(
    launch: Start,
) -> None:
    launched = launch(
        1, "print('brigade serve: a note', flush=True); print('more', flush=True); sys.exit(3)"
    )
    assert launched.end()[0] == 3
    lines = [line for line in launched.text.splitlines() if line.startswith("[rank 0]")]
    assert lines == ["[rank 0] brigade serve: a note", "[rank 0] more"]


def test_a_launch_of_a_server_that_a_signal_ends_exits_with_code_0(launch: Start) -> None:
    launched = launch(2, SLEEP).see("up", 2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    assert "event=failed" not in launched.text


def test_each_line_of_the_launcher_begins_with_the_time(launch: Start) -> None:
    launched = launch(1, "print('done')")
    launched.end()
    own = [line for line in launched.text.splitlines() if line.startswith("[launch]")]
    form = r"\[launch\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|ERROR) event=.+"
    assert own
    assert all(re.fullmatch(form, line) for line in own)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", ["launch --status", "plan --json --model examples/tiny-chat -n 2", "--help"]
)
def test_output_without_a_reader_causes_no_traceback(words: str, unbuffered: str) -> None:
    """As in `brigade … | true`."""
    command = [sys.executable, "-m", "launcher.cli", *words.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as broken:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=broken, stderr=subprocess.PIPE
        )
    assert (run.returncode, run.stderr) == (1, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_disk_is_reported_in_one_line(
    unbuffered: str, full_disk: BinaryIO
) -> None:
    """As in `brigade … >/dev/full`."""
    command = [sys.executable, "-m", "launcher.cli", "launch", "--status"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=full_disk, stderr=subprocess.PIPE
    )
    assert run.returncode == 1
    assert run.stderr.startswith(b"brigade: cannot write the output: No")
    assert run.stderr.count(b"\n") == 1, run.stderr


@pytest.mark.parametrize(
    ("handler", "code"), [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)]
)
@pytest.mark.parametrize(
    ("program", "imported"),
    [("launcher.cli", "launcher.demo"), ("serve.cli.main", "serve.parent.member")],
)
def test_ctrl_c_during_imports_causes_no_traceback(
    program: str, imported: str, handler: str, code: int
) -> None:
    text = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.{handler})
class Finder:
    def find_spec(name, *_):
        if name == {imported!r}: os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
import {program}
assert signal.getsignal(signal.SIGINT) == signal.{handler}
"""
    run = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True)
    assert (run.returncode, run.stderr) == (code, b"")


def test_the_flags_version_and_help_exit_with_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["--help"]):
        assert cli.main(words) == 0
    for words in (["launch", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
    assert "0.1.0" in capsys.readouterr().out
