"""Runs that count in epochs, stop early, keep the best, pack rows and convert what they write."""

import itertools
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import mlx_lm
import pytest

from serve.core.config import Cluster
from serve.core.errors import AdapterError, UsageError
from serve.lora.formats import convert
from serve.tune.data.examples import micro_batches, read_split, some_examples
from serve.tune.events import (
    Event,
    Finished,
    NothingLeft,
    Saved,
    Started,
    Validated,
    Written,
)
from serve.tune.results import checkpoint, run_folder
from serve.tune.run import run
from tests.cluster.servers import TINY_CHAT
from tests.errors import fails
from tests.tune.ranks import loss_sum
from tests.tune.runs import arrays_of, config_of, finish, flags, launch, losses_of, ran, same

pytestmark = pytest.mark.long

# Learns at first, and then ever faster, until it has forgotten everything.
TOO_FAST = {"name": "linear_schedule", "arguments": [1e-4, 0.1, 16]}


def finished_of(events: list[Event]) -> Finished:
    (finished,) = (event for event in events if isinstance(event, Finished))
    return finished


def validations_of(events: list[Event]) -> dict[int, float]:
    validated = (event for event in events if isinstance(event, Validated))
    return {event.iteration: event.loss for event in validated if event.name == "valid"}


@pytest.fixture(scope="module")
def stopped(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    out = tmp_path_factory.mktemp("stopped") / "out"
    more = {"iters": 100, "lr_schedule": TOO_FAST, "steps_per_eval": 1, "early_stop": 3}
    return out, ran(folder, out, steps_per_report=2, train=True, test=True, **more)


def test_a_run_that_stops_early_leaves_its_best_and_its_last_weights(
    folder: Path, stopped: tuple[Path, list[Event]]
) -> None:
    out, events = stopped
    losses, finished = validations_of(events), finished_of(events)
    best = min(losses, key=lambda n: losses[n])
    assert finished.best == (best, losses[best])
    assert finished.is_early
    assert finished.iteration == max(losses) == best + 3 < 100
    assert [event for event in events if isinstance(event, Saved)][-1].iteration == best + 3
    assert max(losses_of(out)) == best + 3, "the last batches are reported too"
    for place, iteration in ((out, best + 3), (out / run_folder.BEST, best)):
        assert loss_of(place, folder / "valid.jsonl") == pytest.approx(losses[iteration], rel=1e-4)


def test_the_best_weights_are_used_for_the_final_test(
    folder: Path, stopped: tuple[Path, list[Event]]
) -> None:
    out, events = stopped
    (tested,) = (e for e in events if isinstance(e, Validated) and e.name == "test")
    losses = [loss_of(place, folder / "test.jsonl") for place in (out / run_folder.BEST, out)]
    assert tested.loss == pytest.approx(losses[0], rel=1e-4)
    assert losses[1] != pytest.approx(losses[0], rel=1e-2), "best and last are alike"
    best = finished_of(events).best
    assert best is not None
    assert tested.iteration == best[0]


def loss_of(adapter: Path, file: Path) -> float:
    """The loss of mlx_lm's own model with an adapter."""
    model, tokenizer = mlx_lm.load(str(TINY_CHAT), adapter_path=str(adapter))
    split = read_split(file, tokenizer, config_of(file.parent, adapter))
    batches = micro_batches(split, some_examples(split, None, 0), 4)
    total = sum(loss_sum(model(b.inputs), b).item() for b in batches)
    return total / sum(b.num_labels for b in batches)


def test_a_resumed_run_stops_early_at_the_same_batch(
    folder: Path, tmp_path: Path, stopped: tuple[Path, list[Event]]
) -> None:
    out, whole = tmp_path / "out", finished_of(stopped[1])
    more = {"lr_schedule": TOO_FAST, "steps_per_eval": 1, "early_stop": 3, "steps_per_report": 2}
    ran(folder, out, iters=whole.iteration - 1, **more)
    events = ran(folder, out, iters=100, resume=True, **more)
    assert finished_of(events).iteration == whole.iteration
    assert finished_of(events).best == whole.best
    for name in (".", run_folder.BEST):
        assert same(arrays_of(out / name), arrays_of(stopped[0] / name))
    config, events = config_of(folder, out, **{"iters": 100, "resume": True, **more}), []
    assert run(config, Cluster(), events.append) == out / run_folder.BEST
    assert [type(event) for event in events] == [NothingLeft, Written]
    assert events[0] == NothingLeft(whole.iteration, True)


@pytest.mark.slow
def test_each_epoch_counts_only_whole_batches_of_examples(folder: Path, tmp_path: Path) -> None:
    """40 examples in batches of 12 are 3 batches an epoch, and updates take two of them."""
    more = {"epochs": 3, "batch_size": 12, "grad_accumulation_steps": 2}
    events = ran(folder, tmp_path / "out", **more)
    assert finished_of(events).iteration == 8
    best = finished_of(events).best
    assert best is not None
    assert best[0] == 8, "the last is the best"
    with fails(UsageError, "too_few_examples", match="--epochs 1"):
        ran(folder, tmp_path / "other", epochs=1, batch_size=40, grad_accumulation_steps=2)


@pytest.mark.slow
def test_runs_with_packed_rows_are_the_same_on_any_number_of_ranks(
    folder: Path, tmp_path: Path
) -> None:
    more = {"packing": True, "max_seq_length": 128, "batch_size": 2, "epochs": 1}
    events = ran(folder, tmp_path / "one", **more)
    (started,) = (event for event in events if isinstance(event, Started))
    count, rows = map(int, re.findall(r"\d+", started.size))
    assert count == 40
    assert rows < 30, "hardly any row has two examples"
    words = ["--packing", "--max-seq-length", "128", "--batch-size", "2", "--epochs", "1"]
    said = finish(launch(2, flags(folder, tmp_path / "two", *words)))
    assert f"40 examples in {rows} rows" in said
    one, two = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert len(one) == rows // 2
    assert max(abs(one[n] - two[n]) for n in one) < 1e-4


def test_an_adapter_is_also_written_in_the_format_of_peft(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--peft", "--steps-per-eval", "4"]
    said = finish(launch(2, flags(folder, out, *words)))
    assert f'"lora_path": "{out}"' in said, "there is no line for a server"
    for place in (out, out / run_folder.BEST):
        config = json.loads((place / "peft" / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 160)
        back = tmp_path / f"back from {place.name}"
        convert(place / "peft", back)
        assert same(arrays_of(back), arrays_of(place))
    assert "brigade launch -n 2 -- fine-tune" in (out / "README.md").read_text()


def test_an_adapter_that_pefts_format_cannot_express_is_refused_before_training(
    folder: Path, tmp_path: Path
) -> None:
    """No alpha divided by 7, or by its root, is exactly this scale."""
    lora = {"rank": 7, "scale": 0.9149789258623184}
    with fails(AdapterError, "not_convertible"):
        ran(folder, tmp_path / "out", peft=True, lora_parameters=lora)
    assert not (tmp_path / "out").exists()


def test_runs_whose_data_cannot_satisfy_their_flags_are_refused_before_the_start(
    folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(folder / "train.jsonl", data)
    with fails(UsageError, "needs_flag", match=r"--early-stop .*valid\.jsonl"):
        ran(data, tmp_path / "out", early_stop=2)
    with fails(UsageError, "too_few_examples", match="--batch-size 30"):
        ran(data, tmp_path / "out", packing=True, max_seq_length=512, batch_size=30)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_model.safetensors", "README.md"])
def test_files_that_another_program_wrote_are_not_overwritten(
    folder: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"of somebody else")
    # Nothing of --resume, which would say to start without it.
    said = rf"contains {name} but no run: give another folder\.$"
    with pytest.raises(UsageError, match=said):
        ran(folder, tmp_path)
    assert not (tmp_path / run_folder.CONFIG).exists()


def test_a_run_that_was_killed_in_its_first_save_can_be_started_again(
    folder: Path, tmp_path: Path
) -> None:
    half = tmp_path / "checkpoints" / "0000004.new"
    half.mkdir(parents=True)
    (half / run_folder.ADAPTERS).write_bytes(b"half")
    ran(folder, tmp_path, iters=4)
    assert [path.name for path in half.parent.iterdir()] == ["0000004"]


def test_a_kill_while_the_peft_format_is_written_leaves_an_adapter_that_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    ran(folder, out, iters=4, peft=True)
    for moment in range(3):
        moved = itertools.count()

        def replace(path: Path, target: Path, moment: int = moment, moved=moved) -> Path:
            if next(moved) == moment:
                raise KeyboardInterrupt
            return Path.rename(path, target)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", replace)
            checkpoint.export_peft(out)
        convert(out / "peft", tmp_path / f"back {moment}")
        assert same(arrays_of(tmp_path / f"back {moment}"), arrays_of(out))
