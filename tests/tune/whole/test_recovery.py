"""Whole runs that lose a rank, which the launcher starts again: the others keep what they have
loaded, and the result is that of an uninterrupted run."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from serve.core.errors import RETURN_EXIT_CODE
from serve.tune.results import run_folder
from tests.cluster.servers import BIN, ROOT, TINY_CHAT
from tests.tune.runs import finish, flags, launch, losses_of, valid_losses_of

pytestmark = pytest.mark.long

WITHOUT_DROPOUT = ["--iters", "12", "--save-every", "4", "--steps-per-eval", "5"]
WORDS = [*WITHOUT_DROPOUT, "--lora-dropout", "0.1"]
INSIDE = Path(__file__).parent.parent / "inside"
STUCK = "in a sum with a rank that is lost"
MODEL_BYTES = (TINY_CHAT / "model.safetensors").stat().st_size


class Lossy:
    """A run that loses ranks by SIGKILL, when rank 0 reports certain batches. `pids` has the
    process ids of each rank, the first one first; `bytes_read` is what rank 0 has read at each
    batch that it reported. `stuck` are a file and a rank that the first kill leaves in a sum, as
    MLX does sometimes."""

    def __init__(
        self,
        num_ranks: int,
        words: Sequence[str],
        kills: Sequence[tuple[int, int]],
        stuck: tuple[Path, int] | None = None,
    ) -> None:
        self.pids: dict[int, list[int]] = {}
        self.bytes_read: dict[int, int] = {}
        self.said = ""
        self._kills = list(kills)
        self._stuck = stuck
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"}
        if stuck:
            paths = [str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {"PYTHONPATH": ":".join(paths), "STUCK_FILE": str(stuck[0])}
        with subprocess.Popen(
            launch(num_ranks, words),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout
            family = psutil.Process(process.pid)
            try:
                for line in process.stdout:
                    self.said += line
                    self._take(line)
                self.code = process.wait(timeout=30)
            finally:
                for child in family.children(recursive=True) if process.poll() is None else []:
                    child.kill()
                process.kill()

    def _take(self, line: str) -> None:
        if started := re.search(r"rank_started rank=(\d+) pid=(\d+)", line):
            rank, pid = map(int, started.groups())
            self.pids.setdefault(rank, []).append(pid)
        if reported := re.search(r"iteration=(\d+) .*loss=", line):
            batch = int(reported[1])
            if psutil.pid_exists(self.pids[0][-1]):
                counters = psutil.Process(self.pids[0][-1]).io_counters()
                self.bytes_read[batch] = counters.read_chars
            if self._kills and batch == self._kills[0][0]:
                _, rank = self._kills.pop(0)
                self._leave_in_a_sum()
                os.kill(self.pids[rank][-1], signal.SIGKILL)

    def _leave_in_a_sum(self) -> None:
        if self._stuck:
            file, rank = self._stuck
            self._stuck = None
            new = file.with_suffix(".new")
            new.write_text(str(rank))
            new.rename(file)
            wait_until(lambda: not file.exists(), "the rank computes no sum")


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def check_recovery(
    folder: Path,
    tmp_path: Path,
    words: list[str],
    *kills: tuple[int, int],
    num_ranks: int = 0,
    stuck: int | None = None,
) -> Lossy:
    """On as many ranks as the highest that is lost needs. All others stay, but for shards that are
    stuck in a sum."""
    num_ranks = num_ranks or 1 + max(rank for _, rank in kills)
    whole, out = tmp_path / "whole", tmp_path / "out"
    settings = WITHOUT_DROPOUT if "full" in words else WORDS
    finish(launch(num_ranks, flags(folder, whole, *settings, *words)))
    kept = None if stuck is None else (tmp_path / "stuck", stuck)
    run = Lossy(num_ranks, flags(folder, out, *settings, *words), kills, kept)
    assert run.code == 0, run.said
    for rank, pids in run.pids.items():
        num_lost = sum(lost == rank for _, lost in kills)
        num_stuck = run.said.count(f"rank_ended rank={rank} code={RETURN_EXIT_CODE}")
        assert len(pids) == 1 + num_lost + num_stuck, run.said
    assert run.said.count(STUCK) == run.said.count(f" code={RETURN_EXIT_CODE}")
    assert (out / run_folder.ADAPTERS).read_bytes() == (whole / run_folder.ADAPTERS).read_bytes()
    assert losses_of(out) == losses_of(whole)
    assert valid_losses_of(out) == valid_losses_of(whole)
    return run


def test_a_lost_rank_costs_only_the_updates_since_the_last_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    """In the middle of an update: rank 0 has just reported the one before."""
    run = check_recovery(folder, tmp_path, [], (6, 1))
    assert "Continues after 4 batches." in run.said
    # Rank 0 has half of the weights, and reads only the checkpoint.
    assert 0 < run.bytes_read[10] - run.bytes_read[6] < MODEL_BYTES / 3


LAYOUTS = {
    "replicas": ["--data-parallel", "2"],
    "shards": ["--tensor-parallel", "2"],
    "full": ["--fine-tune-type", "full", "--num-layers", "-1"],
    "dora, shards": ["--fine-tune-type", "dora", "--tensor-parallel", "2"],
    "full, clipped": ["--fine-tune-type", "full", "--grad-checkpoint", "--max-grad-norm", "1"],
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_lost_rank_returns_in_every_layout(
    folder: Path, tmp_path: Path, words: list[str]
) -> None:
    """Before the first checkpoint, and after it."""
    run = check_recovery(folder, tmp_path, words, (2, 1), (10, 1))
    assert "Continues after 8 batches." in run.said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_ranks", "kill", "stuck"),
    [(2, (2, 1), 0), (4, (6, 1), 0), (4, (6, 3), 2)],
    ids=["one stage, before a checkpoint", "rank 0 of four", "rank 2 of four"],
)
def test_a_shard_that_stays_in_a_sum_with_a_lost_rank_returns_too(
    folder: Path, tmp_path: Path, num_ranks: int, kill: tuple[int, int], stuck: int
) -> None:
    """Such a sum cannot be interrupted, so the shard gets a new process, also on rank 0."""
    words = ["--tensor-parallel", "2"]
    run = check_recovery(folder, tmp_path, words, kill, num_ranks=num_ranks, stuck=stuck)
    assert len(run.pids[stuck]) == 2
    assert len([pids for pids in run.pids.values() if len(pids) == 1]) == num_ranks - 2
    if kill > (4, 0):
        assert "Continues after 4 batches." in run.said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_are_not_neighbours_of_the_lost_one_stay_too(
    folder: Path, tmp_path: Path
) -> None:
    check_recovery(folder, tmp_path, [], (5, 2), (10, 3))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_is_lost_again_and_again_ends_the_run(folder: Path, tmp_path: Path) -> None:
    words = flags(folder, tmp_path / "out", *WORDS, "--save-every", "12")
    run = Lossy(2, words, [(2, 1)] * 4)
    assert run.code
    assert "There is no checkpoint yet: start the run again." in run.said
    assert len(run.pids[0]) == 1
