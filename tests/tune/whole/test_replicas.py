"""Whole runs with replicas and shards, in processes: what they write, resume, kills, bad input."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from serve.cli import fine_tune
from serve.core.errors import UsageError
from tests.cluster.servers import BIN, ROOT
from tests.errors import fails
from tests.tune.ranks import largest_difference
from tests.tune.runs import arrays_of, finish, flags, launch, losses_of, ran, same

pytestmark = pytest.mark.long


@pytest.mark.slow
def test_a_run_on_two_replicas_equals_a_run_on_a_single_pipeline(
    folder: Path, tmp_path: Path
) -> None:
    ran(folder, tmp_path / "one", micro_batches=2, peft=True)
    more = "--data-parallel-size", "2", "--peft"
    said = finish(launch(2, flags(folder, tmp_path / "two", *more)))
    assert "2 micro-batches an update, on 2 replicas of 1 stage" in said
    one, two = tmp_path / "one", tmp_path / "two"
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)
    # Adam divides by the root of squared gradients, so rounding decides where these are near 0.
    assert largest_difference(arrays_of(two), arrays_of(one)) < 5e-3
    peft = [mx.load(str(out / "peft" / "adapter_model.safetensors")).keys() for out in (one, two)]
    assert peft[0] == peft[1]


@pytest.mark.slow
def test_a_run_can_be_resumed_with_another_number_of_replicas(folder: Path, tmp_path: Path) -> None:
    words = "--micro-batches", "4", "--max-grad-norm", "5"
    finish(launch(1, flags(folder, tmp_path / "one", *words)))
    out = tmp_path / "changing"
    half = flags(folder, out, "--data-parallel-size", "2", *words)
    finish(launch(4, [*half, "--iters", "4"]))
    finish(launch(2, [*flags(folder, out, *words), "--resume"]))
    assert losses_of(out) == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_with_replicas_gives_exactly_the_same_weights(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("exact", "stopped"):
        early = ["--iters", "4"] if name == "stopped" else []
        finish(launch(2, [*flags(folder, tmp_path / name, "--data-parallel-size", "2"), *early]))
    again = flags(folder, tmp_path / "stopped", "--data-parallel-size", "2", "--resume")
    finish(launch(2, again))
    assert same(arrays_of(tmp_path / "stopped"), arrays_of(tmp_path / "exact"))


@contextmanager
def training(out: Path, words: list[str]) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """A run on four ranks, which is killed afterwards, and the process ids of its ranks. It has
    begun to train."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    output = subprocess.PIPE
    command = launch(4, words)
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            until = time.monotonic() + 90
            while not (out / "metrics.jsonl").exists():
                assert time.monotonic() < until
                assert run.poll() is None
                time.sleep(0.2)
            ranks = psutil.Process(run.pid).children(recursive=True)
            yield run, {int(rank.environ()["MLX_RANK"]): rank.pid for rank in ranks}
            assert not [rank for rank in ranks if rank.is_running()]
        finally:
            run.kill()


LAYOUTS = [["--data-parallel-size", "2"], ["--tensor-parallel-size", "2"]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0])
def test_all_ranks_start_again_after_one_rank_was_suspended(
    folder: Path, tmp_path: Path, layout: list[str]
) -> None:
    """A shard waits for it in a sum of MLX, which cannot be interrupted."""
    words = flags(folder, tmp_path / "out", *layout, "--iters", "4000", "--stall-timeout", "5")
    with training(tmp_path / "out", words) as (run, pids):
        os.kill(pids[3], signal.SIGSTOP)
        assert run.stdout
        said = ""
        while said.count("event=rank_started") < 8:
            line = run.stdout.readline()
            assert line, said
            said += line
        assert "Rank 3 has been silent for 5 s" in said
        run.terminate()
        run.communicate(timeout=60)


def test_numbers_of_replicas_that_do_not_divide_ranks_or_batches_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    def check(num_ranks: int, *more: str) -> None:
        fine_tune.check(flags(folder, tmp_path / "out", *more), num_ranks)

    with fails(UsageError, "uneven_ranks", match="--data-parallel-size 2"):
        check(3, "--data-parallel-size", "2")
    with fails(UsageError, "uneven_batches", match="--data-parallel-size 3 .*--batch-size 4"):
        check(3, "--data-parallel-size", "3")
    with fails(UsageError, "uneven_batches", match=" 1:"):
        check(2, "--data-parallel-size", "2", "--micro-batches", "1")
    with fails(UsageError, "uneven_ranks", match="--tensor-parallel-size 2"):
        check(3, "--tensor-parallel-size", "2")
    check(4, "--tensor-parallel-size", "2", "--data-parallel-size", "2")
