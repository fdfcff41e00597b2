"""Whole runs whose ranks are killed: the launcher starts all again, and the result is that of an
uninterrupted run."""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from serve.tune.results import checkpoint, run_folder
from tests.cluster.servers import BIN, READY_SECONDS
from tests.kernels import share_kernels
from tests.test_launcher import Launch, wait_until
from tests.tune.runs import (
    WITHOUT_CHARTS,
    finish,
    flags,
    launch,
    losses_of,
    valid_losses_of,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

INSIDE = Path(__file__).parent.parent / "inside"
WITHOUT_DROPOUT = ["--iters", "12", "--save-every", "4", "--steps-per-eval", "5"]
WORDS = [*WITHOUT_DROPOUT, "--lora-dropout", "0.1"]

Train = Callable[..., Launch]
Whole = Callable[..., Path]
Hold = Callable[..., Path]


@pytest.fixture
def train(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Starts a run that writes to `out`."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "200")
    if "PYTHONPATH" not in os.environ:  # as with `hold`
        monkeypatch.setenv("PYTHONPATH", WITHOUT_CHARTS)
    share_kernels(tmp_path)
    made: list[Launch] = []

    def start(num_ranks: int, *words: str) -> Launch:
        command = launch(num_ranks, flags(folder, tmp_path / "out", *words))
        made.append(Launch(command, tmp_path))
        return made[-1]

    yield start
    for each in made:
        each.clean_up()


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Returns the folder of an uninterrupted run, which is made once."""
    made: dict[Sequence[str], Path] = {}

    def of(num_ranks: int, *words: str) -> Path:
        key = (str(num_ranks), *words)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("whole") / "out"
            finish(launch(num_ranks, flags(folder, made[key], *words)))
        return made[key]

    return of


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Makes a rank stay in a function once its number is in the returned file, but not in the first
    `after` calls."""

    def at(function: str, after: int = 0) -> Path:
        paths = [str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", ":".join(paths))
        monkeypatch.setenv("HOLD_FILE", str(tmp_path / "hold"))
        monkeypatch.setenv("HOLD_AT", function)
        monkeypatch.setenv("HOLD_AFTER", str(after))
        return tmp_path / "hold"

    return at


def starts(launched: Launch) -> list[tuple[int, int]]:
    """The rank and the process id of every start."""
    found = re.findall(r"rank_started rank=(\d+) pid=(\d+)", launched.text)
    return [(int(rank), int(pid)) for rank, pid in found]


def kill(launched: Launch, *ranks: int) -> None:
    """Kills the last process of each of these ranks."""
    pids = dict(starts(launched))
    for rank in ranks:
        if psutil.pid_exists(pids[rank]):
            os.kill(pids[rank], signal.SIGKILL)


def check_same(out: Path, whole: Path) -> None:
    assert (out / run_folder.ADAPTERS).read_bytes() == (whole / run_folder.ADAPTERS).read_bytes()
    assert losses_of(out) == losses_of(whole)
    assert valid_losses_of(out) == valid_losses_of(whole)


def test_a_lost_rank_costs_only_the_updates_since_the_last_checkpoint(
    train: Train, whole: Whole, hold: Hold, tmp_path: Path
) -> None:
    """It is killed before the second checkpoint, of batch 8, is written."""
    expected = whole(2, *WORDS)
    file = hold("serve.tune.saving:save", after=1)
    file.write_text("1")
    launched = train(2, *WORDS)
    wait_until(lambda: not file.exists(), READY_SECONDS)
    kill(launched, 1)
    assert launched.end(120)[0] == 0, launched.text
    assert len(starts(launched)) == 4
    assert "Continues after 4 batches." in launched.text
    check_same(tmp_path / "out", expected)


# --- ranks that are killed at random


RANKS_AND_WORDS = {
    "1f1b": (2, WORDS),
    "gpipe": (2, [*WORDS, "--schedule", "gpipe"]),
    "interleaved": (2, [*WORDS, "--schedule", "interleaved"]),
    "zero-bubble": (3, [*WORDS, "--schedule", "zero-bubble"]),
    "replicas": (2, [*WORDS, "--data-parallel-size", "2"]),
    "shards": (2, [*WORDS, "--tensor-parallel-size", "2"]),
    "stages of shards": (4, [*WORDS, "--tensor-parallel-size", "2"]),
    "dora, shards": (2, [*WORDS, "--fine-tune-type", "dora", "--tensor-parallel-size", "2"]),
    "full": (2, [*WITHOUT_DROPOUT, "--fine-tune-type", "full", "--num-layers", "-1"]),
}
CELLS = [(name, seed) for name in RANKS_AND_WORDS for seed in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), CELLS)
def test_kills_of_random_ranks_do_not_change_the_result(
    train: Train, whole: Whole, tmp_path: Path, name: str, seed: int
) -> None:
    """Up to all at once, also while they start, load, write a checkpoint or end."""
    num_ranks, words = RANKS_AND_WORDS[name]
    draw = random.Random(seed)
    launched = train(num_ranks, *words)
    for number in range(1, 4):
        launched.see("event=rank_started", number * num_ranks)
        time.sleep(draw.uniform(0, 8))
        kill(launched, *draw.sample(range(num_ranks), draw.randint(1, num_ranks)))
        if "iteration=12 saved" in launched.text:
            break
    assert launched.end(240)[0] == 0, launched.text
    check_same(tmp_path / "out", whole(num_ranks, *words))


@pytest.mark.slow
def test_a_shard_that_hangs_in_a_sum_with_a_lost_rank_is_ended(
    train: Train, whole: Whole, hold: Hold, tmp_path: Path
) -> None:
    words = [*WORDS, "--tensor-parallel-size", "2"]
    expected = whole(2, *words)
    file = hold("mlx.core:distributed.all_sum")
    launched = train(2, *words).see("iteration=6 ")
    file.with_suffix(".new").write_text("0")
    file.with_suffix(".new").rename(file)
    wait_until(lambda: not file.exists())
    kill(launched, 1)
    assert launched.end(120)[0] == 0, launched.text
    assert len(starts(launched)) == 4
    check_same(tmp_path / "out", expected)


# --- after the last checkpoint


FULL = ["--fine-tune-type", "full", "--num-layers", "-1"]
ENDS = [
    pytest.param("serve.tune.results.card:write", [0, 1], [], id="all", marks=pytest.mark.slow),
    pytest.param("serve.tune.results.card:write", [1], [], id="rank 1", marks=pytest.mark.slow),
    pytest.param(
        "serve.tune.results.whole:write", [0], FULL, id="rank 0, full", marks=pytest.mark.slow
    ),
    pytest.param("serve.cli.report_to:Reports.close", [0], [], id="rank 0, the others have ended"),
]


@pytest.mark.parametrize(("function", "killed", "words"), ENDS)
def test_a_run_is_finished_after_kills_that_follow_its_last_checkpoint(
    train: Train,
    hold: Hold,
    tmp_path: Path,
    function: str,
    killed: list[int],
    words: list[str],
) -> None:
    """The launch ended with the code of a signal."""
    file = hold(function)
    file.write_text("0")
    out = tmp_path / "out"
    launched = train(2, "--iters", "4", "--train", "--test", *words)
    wait_until(lambda: not file.exists() or launched.process.poll() is not None, READY_SECONDS)
    assert not file.exists(), launched.text
    if "Reports" in function:
        launched.see("event=rank_ended rank=1 code=0")
    assert [path.name for path in run_folder.whole_checkpoints(out)] == ["0000004"]
    kill(launched, *killed)
    assert launched.end(120)[0] == 0, launched.text
    assert len(starts(launched)) == 4
    assert "All 4 batches are done" in launched.text
    assert (out / run_folder.CARD).exists()
    assert (out / "model" / "config.json").exists() == bool(words)
    assert [line["loss"] for line in checkpoint.read_metrics(out) if line.get("name") == "test"]
