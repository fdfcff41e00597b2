"""Whole runs on the embedded model, as users start them: output, resume, kills, bad input."""

import gc
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from serve.cli import fine_tune
from serve.core.config import Cluster
from serve.core.errors import UsageError
from serve.tune import pipeline
from serve.tune.events import (
    Event,
    Finished,
    NothingLeft,
    Reported,
    Saved,
    Started,
    Validated,
    Written,
)
from serve.tune.results import checkpoint, run_folder
from serve.tune.run import run
from tests.cluster.servers import BIN, ROOT, TINY_CHAT
from tests.errors import fails
from tests.ports import free_ports
from tests.tune.runs import arrays_of, config_of, finish, flags, launch, losses_of, ran, same

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """A run on one rank in this process. Ops take the time of the processor, as on an idle
    machine."""
    out, events = tmp_path_factory.mktemp("alone") / "out", []
    gc.collect()  # What earlier tests have left would count as memory, until it is collected.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "time", SimpleNamespace(perf_counter=time.process_time))
        run(config_of(folder, out, train=True, test=True), Cluster(), events.append)
    return out, events


@pytest.fixture(scope="module")
def two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("two") / "out"
    return out, finish(launch(2, flags(folder, out, "--micro-batches", "2")))


def test_a_run_reports_its_events_in_order(alone: tuple[Path, list[Event]]) -> None:
    out, events = alone
    kinds = [type(event) for event in events]
    assert kinds[:2] == [Started, Validated]
    assert kinds.count(Reported) == 8
    assert kinds[-4:] == [Saved, Finished, Validated, Written]
    (started,) = (event for event in events if isinstance(event, Started))
    assert started.layers == [(0, 8)]
    assert started.num_trained == sum(array.size for array in arrays_of(out).values())
    validated = [event for event in events if isinstance(event, Validated)]
    assert [event.name for event in validated] == ["valid", "valid", "test"]
    assert validated[1].loss < validated[0].loss / 2, "it has learned nothing"
    finished = events[-3]
    assert isinstance(finished, Finished)
    assert finished.utilisation == pytest.approx(1, abs=0.05)
    assert finished.peak_bytes == pytest.approx(finished.forecast.peak_bytes, rel=0.15)


def test_mlx_lm_loads_the_trained_adapter_with_the_reported_loss(
    alone: tuple[Path, list[Event]], two_ranks: tuple[Path, str]
) -> None:
    """The loss of mlx_lm's model with the adapter is the one that the run has reported."""
    from serve.tune.data.examples import micro_batches, read_split, some_examples
    from tests.tune.ranks import loss_sum

    out, events = alone
    reported = [event.loss for event in events if isinstance(event, Validated)][1]
    data = config_of(Path(), out)
    for folder in (out, two_ranks[0]):
        model, tokenizer = mlx_lm.load(str(TINY_CHAT), adapter_path=str(folder))
        path = Path(json.loads((folder / run_folder.CONFIG).read_text())["data"]) / "valid.jsonl"
        split = read_split(path, tokenizer, data)
        batches = micro_batches(split, some_examples(split, None, 0), 4)
        total = sum(loss_sum(model(b.inputs), b).item() for b in batches)
        loss = total / sum(b.num_labels for b in batches)
        assert loss == pytest.approx(reported, rel=1e-4)
    base, _ = mlx_lm.load(str(TINY_CHAT))
    assert sum(loss_sum(base(b.inputs), b).item() for b in batches) > 2 * total


def test_losses_on_two_ranks_equal_those_on_one_rank(
    alone: tuple[Path, list[Event]], two_ranks: tuple[Path, str]
) -> None:
    first, second = losses_of(alone[0]), losses_of(two_ranks[0])
    assert first.keys() == second.keys() == set(range(1, 9))
    assert second == pytest.approx(first, rel=1e-4)
    text = two_ranks[1]
    assert "bubble" in text
    assert "peak memory, rank 1" in text
    assert "1f1b: 2 micro-batches an update" in text


MEMORY = [
    [],
    ["--schedule", "gpipe", "--grad-checkpoint", "--split", "2,6"],
    ["--schedule", "interleaved", "--max-grad-norm", "1"],
    ["--schedule", "zero-bubble", "--fine-tune-type", "full", "--num-layers", "-1"],
]


@pytest.mark.slow
@pytest.mark.parametrize("more", MEMORY, ids=lambda more: " ".join(more[:2]))
def test_each_rank_uses_as_much_memory_as_forecast(
    folder: Path, tmp_path: Path, more: list[str]
) -> None:
    out = tmp_path / "out"
    said = finish(launch(2, flags(folder, out, "--batch-size", "8", *more)))
    assert (" 6-7 " in said) == ("--split" in more)
    finished = checkpoint.read_metrics(out)[-1]
    assert finished["peak_bytes"] == pytest.approx(finished["forecast"]["peak_bytes"], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_an_update_uses_as_much_memory_as_forecast(
    folder: Path, tmp_path: Path, optimizer: str
) -> None:
    """Of all weights it needs more than the micro-batches do."""
    more = {"fine_tune_type": "full", "num_layers": -1, "val_batches": 0, "micro_batches": 4}
    *_, finished, _, _ = ran(folder, tmp_path / "out", iters=4, optimizer=optimizer, **more)
    assert isinstance(finished, Finished)
    assert finished.peak_bytes == pytest.approx(finished.forecast.peak_bytes, rel=0.15)


def test_a_run_can_be_started_by_mlx_launch(
    folder: Path, tmp_path: Path, two_ranks: tuple[Path, str]
) -> None:
    port = str(free_ports(3)[1])
    words = flags(folder, tmp_path / "out", "--micro-batches", "2")
    ranks = ["-n", "2", "--starting-port", port, "--"]
    finish([str(BIN / "mlx.launch"), *ranks, "brigade", "fine-tune", *words])
    assert same(arrays_of(tmp_path / "out"), arrays_of(two_ranks[0]))


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_mlx_lm_loads_other_kinds_of_trained_adapters(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    run(config_of(folder, out, iters=4, fine_tune_type=kind), Cluster(), lambda _: None)
    model, _ = mlx_lm.load(str(TINY_CHAT), adapter_path=str(out))
    names = arrays_of(out)
    assert {int(name.split(".")[2]) for name in names} == set(range(2, 8))
    from mlx.utils import tree_flatten

    loaded = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(loaded[name], array) for name, array in names.items())


# --- resume


def test_a_resumed_run_gives_exactly_the_same_weights(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    out = tmp_path / "out"
    run(config_of(folder, out, iters=4), Cluster(), lambda _: None)
    run(config_of(folder, out, resume=True), Cluster(), lambda _: None)
    assert same(arrays_of(out), arrays_of(alone[0]))
    assert losses_of(out) == losses_of(alone[0])


@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_a_run_resumed_on_other_numbers_of_ranks_gives_exactly_the_same_weights(
    folder: Path, tmp_path: Path, ranks: tuple[int, int]
) -> None:
    """With dropout, whose masks differ from micro-batch to micro-batch, and clipping."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("lora_parameters: {rank: 4, scale: 10.0, dropout: 0.2}\n")
    more = ["-c", str(settings), "--max-grad-norm", "0.5"]
    for out, num_ranks in ((tmp_path / "whole", ranks[0]), (tmp_path / "out", ranks[1])):
        if num_ranks == ranks[1]:
            finish(launch(ranks[0], flags(folder, out, *more, "--iters", "4")))
            finish(launch(num_ranks, flags(folder, out, *more, "--resume")))
        else:
            finish(launch(num_ranks, flags(folder, out, *more)))
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert losses_of(out) == losses_of(whole)
    assert same(arrays_of(out), arrays_of(whole))
    norms = [
        line["gradient_norm"]
        for line in checkpoint.read_metrics(whole)
        if "loss" in line and "name" not in line
    ]
    assert min(norms) > 0.5, "nothing was clipped"


def test_resuming_after_the_last_batch_completes_what_is_left_to_write(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    """A kill right behind the last checkpoint leaves nothing but that."""
    out = tmp_path / "out"
    shutil.copytree(alone[0], out)
    (out / run_folder.ADAPTERS).write_bytes(b"of the checkpoint before")
    for name in (f"0000008_{run_folder.ADAPTERS}", run_folder.CARD):
        (out / name).unlink()
    (out / "checkpoints" / "0000002").mkdir()
    (out / "checkpoints" / "0000016.new").mkdir()
    tested = [event for event in alone[1] if isinstance(event, Validated)][-1]
    events: list[Event] = []
    more = {"resume": True, "train": True, "test": True, "peft": True}
    assert run(config_of(folder, out, **more), Cluster(), events.append) == out
    assert [type(event) for event in events] == [NothingLeft, Validated, Written]
    assert events[0] == NothingLeft(8, False)
    assert isinstance(events[1], Validated)
    assert events[1].loss == tested.loss
    assert same(arrays_of(out), arrays_of(alone[0]))
    assert (out / f"0000008_{run_folder.ADAPTERS}").exists()
    assert (out / "peft" / "adapter_model.safetensors").exists()
    kept = {path.name for path in (out / "checkpoints").iterdir()}
    assert kept == {"0000004", "0000008"}
    assert "test loss" in (out / run_folder.CARD).read_text()


def interrupted_flags(folder: Path, out: Path, *more: str) -> list[str]:
    """Dropout and a learning rate schedule too, and a checkpoint after every other batch."""
    settings = out.parent / "settings.yaml"
    settings.write_text(
        "lora_parameters: {rank: 4, scale: 10.0, dropout: 0.2}\n"
        "lr_schedule: {name: cosine_decay, arguments: [1e-4, 30]}\n"
        "iters: 30\nsave_every: 2\nsteps_per_eval: 3\n"
    )
    plain = flags(folder, out, "-c", str(settings), *more)
    for flag in ("--iters", "--save-every"):
        index = plain.index(flag)
        del plain[index : index + 2]
    return plain


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The run, and the seconds it took from its first word to its last."""
    out = tmp_path_factory.mktemp("whole") / "out"
    began = time.monotonic()
    finish(launch(1, interrupted_flags(folder, out)))
    return out, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(20))
def test_a_run_that_was_killed_and_resumed_gives_exactly_the_same_weights(
    folder: Path, tmp_path: Path, uninterrupted: tuple[Path, float], moment: int
) -> None:
    """At a moment that nobody has chosen, from the first batch on; most are in the middle of
    an update, some of a save. Before the first checkpoint it is simply started again."""
    whole, seconds = uninterrupted
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "serve.cli.fine_tune", *interrupted_flags(folder, out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    for line in process.stdout:
        if "valid_loss=" in line:
            break
    time.sleep(random.random() * 0.5 * seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    saved = [path.name for path in (out / "checkpoints").glob("*") if path.name.isdecimal()]
    finish(launch(1, interrupted_flags(folder, out, *(["--resume"] if saved else []))))
    assert same(arrays_of(out), arrays_of(whole))
    assert losses_of(out) == losses_of(whole)
    assert same(arrays_of(out / run_folder.BEST), arrays_of(whole / run_folder.BEST))


@pytest.mark.slow
def test_resuming_without_the_optimizers_state_would_give_other_weights(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    """The negative control of the tests above."""
    out = tmp_path / "out"
    ran(folder, out, iters=4)
    path = out / "checkpoints" / "0000004" / "optimizer.safetensors"
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    mx.eval(arrays)
    mx.save_safetensors(str(path), {name: mx.zeros_like(array) for name, array in arrays.items()})
    ran(folder, out, resume=True)
    assert losses_of(out)[5] == losses_of(alone[0])[5]
    assert not same(arrays_of(out), arrays_of(alone[0]))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_a_signal_ends_exits_with_128_plus_its_number(
    folder: Path, tmp_path: Path, num_ranks: int
) -> None:
    words = flags(folder, tmp_path / "out", "--iters", "4000", "--steps-per-eval", "100000")
    process = subprocess.Popen(
        launch(num_ranks, words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert process.stdout
    assert any("iteration=3 " in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said


SWALLOWS = """
import time
class Swallows:
    def __del__(self):
        print("up", flush=True)
        time.sleep(30)
def busy(*_, **__):
    gone = Swallows()
    del gone
    time.sleep(30)
"""

BLOCKS = """
import ctypes
def busy(*_, **__):
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    print("up", flush=True)
    libc.pthread_mutex_lock(mutex)
"""

MAIN = """
import signal, sys
from serve.cli import fine_tune
signal.signal(signal.SIGINT, signal.default_int_handler)
fine_tune._STOP_SECONDS, fine_tune.check = 1, busy
sys.exit(fine_tune.main([]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", [SWALLOWS, BLOCKS], ids=["lost", "late"])
def test_a_signal_ends_the_run_even_if_its_exception_is_lost_or_late(
    busy: str, number: signal.Signals
) -> None:
    """A handler in Python raises in the middle of a finaliser, or has to wait for C."""
    words = [sys.executable, "-c", busy + MAIN]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number


def test_a_run_continues_if_its_output_is_closed(folder: Path, tmp_path: Path) -> None:
    """As in `brigade fine-tune ... | head -2`."""
    out, pipe = tmp_path / "out", subprocess.PIPE
    words = [sys.executable, "-m", "serve.cli.fine_tune", *flags(folder, out, "--iters", "4")]
    process = subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)
    process.stderr.close()
    assert (out / "checkpoints" / "0000004").is_dir()


def test_a_run_continues_if_its_output_fills_the_disk(
    folder: Path, tmp_path: Path, full_disk: BinaryIO
) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "serve.cli.fine_tune", *flags(folder, out, "--iters", "4")]
    run = subprocess.run(words, cwd=ROOT, stdout=full_disk, stderr=subprocess.PIPE, timeout=60)
    assert (run.returncode, run.stderr) == (0, b"")
    assert (out / "checkpoints" / "0000004").is_dir()


# --- bad input


def test_a_folder_with_another_run_is_refused_and_not_changed(
    folder: Path, alone: tuple[Path, list[Event]]
) -> None:
    before = arrays_of(alone[0])
    mx.eval(before)
    for changes, said in (
        ({}, "contains a run"),
        ({"resume": True, "iters": 16, "batch_size": 8}, "other settings: batch_size was 4"),
        ({"resume": True, "iters": 16, "seed": 1}, "seed was 0"),
        ({"resume": True, "iters": 16, "micro_batches": 2}, "micro_batches was 1"),
    ):
        with pytest.raises(UsageError, match=said):
            run(config_of(folder, alone[0], **changes), Cluster(), lambda _: None)
    assert same(arrays_of(alone[0]), before)


def test_resuming_a_run_with_other_validation_examples_is_refused(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    """Otherwise `best` and --early-stop would compare losses over different examples."""
    data = Path(shutil.copytree(folder, tmp_path / "data"))
    lines = (data / "valid.jsonl").read_text().splitlines(keepends=True)
    (data / "valid.jsonl").write_text("".join(lines[1:]))
    config = config_of(data, alone[0], resume=True, iters=16)
    with fails(UsageError, "usage", match=r"valid\.jsonl"):
        run(config, Cluster(), lambda _: None)


@pytest.mark.parametrize("place", ["", pytest.param("/best", marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_files_of_the_last_save_unchanged(
    folder: Path, tmp_path: Path, place: str
) -> None:
    """A limit on the size of files stands in for the disk."""
    out = tmp_path / "out"
    run(config_of(folder, out, iters=4), Cluster(), lambda _: None)
    before = [arrays_of(out), arrays_of(out / run_folder.BEST)]
    mx.eval(before)
    more = [] if place else ["--val-batches", "0"]
    command = launch(1, flags(folder, out, "--resume", *more))
    said = finish(["bash", "-c", 'ulimit -f 300; exec "$@"', "bash", *command], code=2)
    assert f"--adapter-path {out}{place} cannot be written" in said
    assert same(arrays_of(out), before[0])
    assert same(arrays_of(out / run_folder.BEST), before[1])
    run(config_of(folder, out, resume=True), Cluster(), lambda _: None)
    assert max(losses_of(out)) == 8


def test_an_invalid_line_of_data_is_reported_once_before_training(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "data")
    lines = (folder / "train.jsonl").read_text().splitlines()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([*lines[:7], "{", *lines[7:]]))
    said = finish(launch(2, flags(tmp_path / "data", tmp_path / "out")), code=2)
    assert said.count("train.jsonl:8: not JSON") == 1
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_a_number_ends_the_run_on_all_ranks(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    weights = {name: array * 1e30 for name, array in arrays_of(alone[0]).items()}
    mx.save_safetensors(str(tmp_path / run_folder.ADAPTERS), weights)
    more = ["--resume-adapter-file", str(tmp_path / run_folder.ADAPTERS), "--iters", "12"]
    said = finish(launch(2, flags(folder, tmp_path / "out", *more)), code=7)
    assert said.count("10 updates in a row were not finite") == 1
    assert "the learning rate is not the cause" in said
    assert "No checkpoint was written." in said
    assert "loss=nan" in said
    assert "skipped=1" in said


def test_missing_data_and_adapters_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    out = tmp_path / "out"
    with fails(UsageError, "unreadable", match=r"train\.jsonl"):
        run(config_of(tmp_path, out), Cluster(), lambda _: None)
    weights = alone[0] / run_folder.ADAPTERS
    other = config_of(folder, out, resume_adapter_file=weights, num_layers=4)
    with fails(UsageError, "other_model"):
        run(other, Cluster(), lambda _: None)
    assert not (out / run_folder.ADAPTERS).exists()


def test_a_written_adapter_can_be_trained_further_or_only_tested(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    weights = alone[0] / run_folder.ADAPTERS
    tested = [event for event in alone[1] if isinstance(event, Validated)][-1]
    events: list[Event] = []
    run(config_of(folder, alone[0], test=True), Cluster(), events.append)
    (event,) = events
    assert isinstance(event, Validated)
    assert event.loss == pytest.approx(tested.loss, rel=1e-6)
    run(
        config_of(folder, tmp_path / "out", resume_adapter_file=weights),
        Cluster(),
        events.append,
    )
    first = next(event for event in events if isinstance(event, Reported))
    assert first.loss < losses_of(alone[0])[1] / 2


def test_ranks_whose_data_differ_refuse_to_train(folder: Path, tmp_path: Path) -> None:
    """Each rank gets a data folder by the same name, relative to its own directory."""
    out = tmp_path / "out"
    wrapper = tmp_path / "rank.sh"
    for rank in (0, 1):
        shutil.copytree(folder, tmp_path / f"rank{rank}" / "data")
    text = (folder / "train.jsonl").read_text().splitlines()
    (tmp_path / "rank1" / "data" / "train.jsonl").write_text("\n".join(text[:-1]))
    words = flags(Path("data"), out)
    python = f"{sys.executable} -m serve.cli.fine_tune"
    wrapper.write_text(f'cd {tmp_path}/rank$MLX_RANK; PYTHONPATH={ROOT} exec {python} "$@"\n')
    from launcher.process import local_ranks
    from launcher.supervisor import Supervisor

    lines: list[str] = []
    ranks = local_ranks(["bash", str(wrapper), *words], 2)
    code = Supervisor(ranks, write=lines.append).run()
    assert code == 6, lines
    assert any("The ranks differ (train.jsonl: rank 0 has" in line for line in lines)
    assert not out.exists()


def test_every_reported_loss_is_a_finite_number(alone: tuple[Path, list[Event]]) -> None:
    assert np.isfinite(list(losses_of(alone[0]).values())).all()


def test_an_adapter_is_tested_with_the_settings_it_was_trained_with(
    folder: Path, tmp_path: Path
) -> None:
    """With another rank, scale and kind than the flags of the test say."""
    out, events = tmp_path / "out", []
    lora = {"rank": 4, "scale": 5.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
    made = {"fine_tune_type": "dora", "num_layers": 3, "lora_parameters": lora}
    trained = ran(folder, out, iters=4, train=True, test=True, **made)
    before = [event.loss for event in trained if isinstance(event, Validated)][-1]
    config = config_of(folder, out, test=True, num_layers=16)
    run(config, Cluster(), events.append)
    assert events[0].loss == pytest.approx(before, rel=1e-6)
    (out / run_folder.CONFIG).write_text('{"fine_tune_type": "dora"}')
    with fails(UsageError, "adapter_not_found", match="num_layers"):
        run(config, Cluster(), events.append)
    (out / run_folder.CONFIG).unlink()
    with fails(UsageError, "adapter_not_found", match=str(out / run_folder.CONFIG)):
        run(config, Cluster(), events.append)


def test_an_internal_error_is_logged_and_ends_its_rank(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("serve.tune.run.run", broken)
    monkeypatch.setattr(fine_tune, "_with_fast_blas", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert fine_tune.main(flags(folder, tmp_path / "out")) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(-1)
    assert "of our own" in caplog.text
