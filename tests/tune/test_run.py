"""Whole runs on the embedded model, as users start them: output, resume, kills, bad input."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import psutil
import pytest

from serve.core.config import Cluster
from serve.core.errors import UsageError
from serve.tune import checkpoint
from serve.tune.config import FineTuneConfig
from serve.tune.events import Event, Finished, Reported, Saved, Started, Validated
from serve.tune.run import run
from tests.cluster.servers import BIN, ROOT, TINY_CHAT, free_port_range

pytestmark = pytest.mark.long

QUESTIONS = [(a, b) for a in range(2, 20) for b in (1, 3, 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of one and of two turns."""
    folder = tmp_path_factory.mktemp("data")
    order = random.Random(5)
    for name, count in (("train", 40), ("valid", 6), ("test", 6)):
        lines = []
        for _ in range(count):
            messages = []
            for a, b in order.sample(QUESTIONS, order.randint(1, 2)):
                answer = f"It is {a + b}, friend."
                messages.append({"role": "user", "content": f"What is {a} plus {b}?"})
                messages.append({"role": "assistant", "content": answer})
            lines.append(json.dumps({"messages": messages}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def flags(data: Path, out: Path, *more: str) -> list[str]:
    words = ["--model", str(TINY_CHAT), "--data", str(data), "--adapter-path", str(out)]
    words += ["--mask-prompt", "--num-layers", "6", "--learning-rate", "1e-4", "--iters", "8"]
    return [*words, "--save-every", "4", "--steps-per-report", "1", *more]


def config_of(data: Path, out: Path, **changes: Any) -> FineTuneConfig:
    fields = {"model": TINY_CHAT, "data": data, "adapter_path": out, "mask_prompt": True}
    fields |= {"num_layers": 6, "learning_rate": 1e-4, "iters": 8, "save_every": 4}
    return FineTuneConfig(**{**fields, "steps_per_report": 1, **changes})


def launch(num_ranks: int, words: Sequence[str]) -> list[str]:
    command = [str(BIN / "brigade")]
    if num_ranks > 1:
        command += ["launch", "-n", str(num_ranks), "--"]
    return [*command, "fine-tune", *words]


def finish(command: Sequence[str], code: int = 0) -> str:
    """What it said. Nobody may be left."""
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if "fine-tune" in (p.info["cmdline"] or [])]
    return said


def arrays_of(out: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(out / checkpoint.ADAPTERS))
    assert isinstance(arrays, dict)
    return arrays


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[n], b[n]).item() for n in a)


def losses_of(out: Path) -> dict[int, float]:
    lines = map(json.loads, (out / checkpoint.METRICS).read_text().splitlines())
    return {line["iteration"]: line["loss"] for line in lines if "gradient_norm" in line}


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """A run on one rank in this process."""
    out, events = tmp_path_factory.mktemp("alone") / "out", []
    run(config_of(folder, out, train=True, test=True), Cluster(), events.append)
    return out, events


@pytest.fixture(scope="module")
def two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("two") / "out"
    return out, finish(launch(2, flags(folder, out, "--micro-batches", "2")))


def test_a_run_tells_what_it_does(alone: tuple[Path, list[Event]]) -> None:
    out, events = alone
    kinds = [type(event) for event in events]
    assert kinds[:2] == [Started, Validated]
    assert kinds.count(Reported) == 8
    assert kinds[-3:] == [Saved, Finished, Validated]
    (started,) = (event for event in events if isinstance(event, Started))
    assert started.layers == [(0, 8)]
    assert started.num_trained == sum(array.size for array in arrays_of(out).values())
    validated = [event for event in events if isinstance(event, Validated)]
    assert [event.name for event in validated] == ["valid", "valid", "test"]
    assert validated[1].loss < validated[0].loss / 2, "it has learned nothing"
    finished = events[-2]
    assert isinstance(finished, Finished)
    assert finished.utilisation == pytest.approx(1, abs=0.05)
    assert finished.peak_bytes == pytest.approx(finished.forecast.peak_bytes, rel=0.15)


def test_mlx_lm_loads_the_adapter(
    alone: tuple[Path, list[Event]], two_ranks: tuple[Path, str]
) -> None:
    """The loss of mlx_lm's model with the adapter is the one that the run has reported."""
    from serve.tune.data import micro_batches, read_split, some_examples
    from tests.tune.ranks import loss_sum

    out, events = alone
    reported = [event.loss for event in events if isinstance(event, Validated)][1]
    data = config_of(Path(), out)
    for folder in (out, two_ranks[0]):
        model, tokenizer = mlx_lm.load(str(TINY_CHAT), adapter_path=str(folder))
        path = Path(json.loads((folder / checkpoint.CONFIG).read_text())["data"]) / "valid.jsonl"
        split = read_split(path, tokenizer, data)
        batches = micro_batches(split, some_examples(split, None, 0), 4)
        total = sum(loss_sum(model(b.inputs), b).item() for b in batches)
        loss = total / sum(b.num_labels for b in batches)
        assert loss == pytest.approx(reported, rel=1e-4)
    base, _ = mlx_lm.load(str(TINY_CHAT))
    assert sum(loss_sum(base(b.inputs), b).item() for b in batches) > 2 * total


def test_two_ranks_make_the_same_run(
    alone: tuple[Path, list[Event]], two_ranks: tuple[Path, str]
) -> None:
    first, second = losses_of(alone[0]), losses_of(two_ranks[0])
    assert first.keys() == second.keys() == set(range(1, 9))
    assert max(abs(first[n] - second[n]) for n in first) < 1e-4
    text = two_ranks[1]
    assert "bubble, forecast" in text
    assert "peak memory, rank 1" in text
    assert "1f1b, 2 micro-batches an update" in text


def test_under_mlx_launch(folder: Path, tmp_path: Path, two_ranks: tuple[Path, str]) -> None:
    port = str(free_port_range(3) + 1)
    words = flags(folder, tmp_path / "out", "--micro-batches", "2")
    ranks = ["-n", "2", "--starting-port", port, "--"]
    finish([str(BIN / "mlx.launch"), *ranks, "brigade", "fine-tune", *words])
    assert same(arrays_of(tmp_path / "out"), arrays_of(two_ranks[0]))


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_other_kinds_load_in_mlx_lm_too(folder: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    run(config_of(folder, out, iters=4, fine_tune_type=kind), Cluster(), lambda _: None)
    model, _ = mlx_lm.load(str(TINY_CHAT), adapter_path=str(out))
    names = arrays_of(out)
    assert {int(name.split(".")[2]) for name in names} == set(range(2, 8))
    from mlx.utils import tree_flatten

    loaded = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(loaded[name], array) for name, array in names.items())


# --- resume


def test_a_resumed_run_is_the_same(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    """With dropout off, on one rank and then on two, from the middle."""
    out = tmp_path / "out"
    run(config_of(folder, out, iters=4), Cluster(), lambda _: None)
    shutil.copytree(out, tmp_path / "other")
    run(config_of(folder, out, resume=True), Cluster(), lambda _: None)
    assert same(arrays_of(out), arrays_of(alone[0]))
    assert losses_of(out) == losses_of(alone[0])
    other = tmp_path / "other"
    finish(launch(2, flags(folder, other, "--resume")))
    resumed, whole = losses_of(other), losses_of(alone[0])
    assert max(abs(resumed[n] - whole[n]) for n in whole) < 1e-4


@pytest.mark.parametrize("moment", range(3))
def test_a_killed_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path, moment: int) -> None:
    """Dropout and a learning rate schedule too. The kill comes after the first checkpoint, at
    a moment that nobody has chosen."""
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        "lora_parameters: {rank: 4, scale: 10.0, dropout: 0.2}\n"
        "lr_schedule: {name: cosine_decay, arguments: [1e-4, 30]}\n"
        "iters: 30\nsave_every: 2\n"
    )

    def words(name: str, *more: str) -> list[str]:
        plain = flags(folder, tmp_path / name, "-c", str(settings), *more)
        for flag in ("--iters", "--save-every"):
            at = plain.index(flag)
            del plain[at : at + 2]
        return plain

    finish(launch(1, words("whole")))
    process = subprocess.Popen(
        [sys.executable, "-m", "serve.cli.fine_tune", *words("cut")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    for line in process.stdout:
        if "saved=" in line:
            break
    time.sleep(random.random() * 0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert checkpoint.load_last(tmp_path / "cut", {}).iteration >= 2
    finish(launch(1, words("cut", "--resume")))
    assert same(arrays_of(tmp_path / "cut"), arrays_of(tmp_path / "whole"))
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")


def test_a_lost_rank_ends_the_others(folder: Path, tmp_path: Path) -> None:
    words = flags(folder, tmp_path / "out", "--iters", "4000", "--steps-per-eval", "100000")
    process = subprocess.Popen(
        launch(2, words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    pid = None
    for line in process.stdout:
        if found := re.search(r"rank_started rank=1 pid=(\d+)", line):
            pid = int(found.group(1))
        if "iteration=5 " in line:
            break
    assert pid
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    assert not psutil.wait_procs(family, timeout=5)[1], said


# --- bad input


def test_a_folder_with_another_run_is_not_touched(
    folder: Path, alone: tuple[Path, list[Event]]
) -> None:
    before = arrays_of(alone[0])
    mx.eval(before)
    for changes, said in (
        ({}, "holds a run"),
        ({"resume": True}, "give more --iters"),
        ({"resume": True, "iters": 16, "batch_size": 8}, "other settings: batch_size was 4"),
        ({"resume": True, "iters": 16, "seed": 1}, "seed was 0"),
    ):
        with pytest.raises(UsageError, match=said):
            run(config_of(folder, alone[0], **changes), Cluster(), lambda _: None)
    assert same(arrays_of(alone[0]), before)


def test_a_full_disk_leaves_the_checkpoint_before(folder: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    out = tmp_path / "out"
    run(config_of(folder, out, iters=4), Cluster(), lambda _: None)
    before = arrays_of(out)
    mx.eval(before)
    command = launch(1, flags(folder, out, "--resume"))
    said = finish(["bash", "-c", 'ulimit -f 300; exec "$@"', "bash", *command], code=2)
    assert f"--adapter-path {out} cannot be written" in said
    assert same(arrays_of(out), before)
    run(config_of(folder, out, resume=True), Cluster(), lambda _: None)
    assert max(losses_of(out)) == 8


def test_a_bad_line_is_named_once_before_any_training(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "data")
    lines = (folder / "train.jsonl").read_text().splitlines()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([*lines[:7], "{", *lines[7:]]))
    said = finish(launch(2, flags(tmp_path / "data", tmp_path / "out")), code=2)
    assert said.count("train.jsonl:8: not JSON") == 1
    assert not (tmp_path / "out").exists()


def test_missing_data_and_other_adapters_are_refused(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="is no folder"):
        run(config_of(tmp_path / "nothing", out), Cluster(), lambda _: None)
    with pytest.raises(UsageError, match="train.jsonl cannot be read"):
        run(config_of(tmp_path, out), Cluster(), lambda _: None)
    weights = alone[0] / checkpoint.ADAPTERS
    other = config_of(folder, out, resume_adapter_file=weights, num_layers=4)
    with pytest.raises(UsageError, match="is of another model or other settings"):
        run(other, Cluster(), lambda _: None)
    assert not (out / checkpoint.ADAPTERS).exists()


def test_an_adapter_can_be_trained_further_and_tested_alone(
    folder: Path, tmp_path: Path, alone: tuple[Path, list[Event]]
) -> None:
    weights = alone[0] / checkpoint.ADAPTERS
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


def test_ranks_with_other_data_do_not_train(folder: Path, tmp_path: Path) -> None:
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


def test_metrics_are_numbers(alone: tuple[Path, list[Event]]) -> None:
    assert np.isfinite(list(losses_of(alone[0]).values())).all()
