"""Good weights on disk are never replaced by ones that are not finite, by half a file, or because
one rank of several is broken."""

import gc
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from serve.core.config import Cluster
from serve.core.errors import EngineError, UsageError
from serve.tune import session
from serve.tune.backward import Arrays
from serve.tune.config import FineTuneConfig
from serve.tune.data.examples import MicroBatch
from serve.tune.events import Event, Finished, Saved
from serve.tune.loop import Trainer, UpdateMetrics
from serve.tune.mesh import groups_of
from serve.tune.results import checkpoint, run_folder
from serve.tune.run import run, run_rank
from serve.tune.transport import LocalLinks
from tests.cluster.servers import TINY_CHAT
from tests.errors import fails
from tests.tune.ranks import BUILDING, run_ranks
from tests.tune.runs import arrays_of, config_of, losses_of, ran, same, with_tokenizer

pytestmark = pytest.mark.long

FULL: dict[str, Any] = {"fine_tune_type": "full", "num_layers": -1, "learning_rate": 1e-4}
Change = Callable[[Trainer, int, UpdateMetrics], UpdateMetrics]
Train = Callable[..., list[Event]]


def changed_updates(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Each update of a trainer is followed by a change, which gets its number from 1 on."""
    update = Trainer.update

    def then(self: Trainer, number: int, batches: list[MicroBatch], schedule: Any) -> UpdateMetrics:
        return change(self, number + 1, update(self, number, batches, schedule))

    monkeypatch.setattr(Trainer, "update", then)


def spoil(trainer: Trainer) -> None:
    """One number of one array."""
    parameters = trainer.parameters()
    name = min(parameters)
    flat = parameters[name].flatten()
    flat[0] = math.nan
    trainer.set_whole(parameters | {name: flat.reshape(parameters[name].shape)})


def finite(arrays: Arrays) -> bool:
    return all(mx.isfinite(array).all().item() for array in arrays.values())


@pytest.fixture(scope="module")
def settings(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model so small that a run is short."""
    model = with_tokenizer(tmp_path_factory.mktemp("model"), "llama")
    return {"data": folder, "model": model, "num_layers": 3}


@pytest.fixture(scope="module")
def train(settings: dict[str, Any]) -> Train:
    """Trains it on one rank in this process, and returns the events."""

    def run_into(out: Path, **changes: Any) -> list[Event]:
        return ran(out=out, **{**settings, **changes})

    return run_into


@pytest.fixture(scope="module")
def undisturbed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 batches that nothing has damaged. A test that changes it copies it."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    train(out, val_batches=0)
    return out


def copied(run: Path, out: Path) -> Path:
    return Path(shutil.copytree(run, out))


def test_weights_that_are_not_finite_are_never_saved(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update itself was finite, so only looking at the weights shows it."""
    out = tmp_path / "out"

    def change(trainer: Trainer, number: int, update: UpdateMetrics) -> UpdateMetrics:
        if number == 8:
            spoil(trainer)
        return update

    changed_updates(monkeypatch, change)
    with fails(EngineError, "not_finite", match=r"rank 0 .* batch 8.* batch 4\."):
        train(out)
    names = [path.name for path in (out / "checkpoints").iterdir()]
    assert names == ["0000004"]
    for place in (out, out / "checkpoints" / "0000004", out / run_folder.BEST):
        assert not place.exists() or finite(arrays_of(place))


def test_weights_that_are_not_finite_on_one_rank_stop_all_ranks(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def change(trainer: Trainer, number: int, update: UpdateMetrics) -> UpdateMetrics:
        if number == 8 and trainer.links.rank == 1:
            spoil(trainer)
        return update

    changed_updates(monkeypatch, change)

    def load(*words: Any, real: Any = session.load_stage) -> Any:
        with BUILDING:
            return real(*words)

    monkeypatch.setattr(session, "load_stage", load)
    more = {"val_batches": 0, "micro_batches": 2, "split": "even"}
    config = config_of(out=out, **settings, **more)
    said: list[str] = []

    def rank(links: LocalLinks) -> None:
        with pytest.raises(EngineError) as error:
            run_rank(config, groups_of(config.layout(2), links), lambda _: None)
        said.append(str(error.value))

    run_ranks(2, rank)
    assert said[0] == said[1]
    assert "on rank 1 are finite after batch 8" in said[0]
    assert finite(arrays_of(out))
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["0000004"]


def test_no_checkpoint_is_saved_while_updates_are_skipped(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is due then waits for the next good update."""

    def change(_: Trainer, number: int, update: UpdateMetrics) -> UpdateMetrics:
        return replace(update, is_skipped=number in (4, 5), loss=math.nan)

    changed_updates(monkeypatch, change)
    events = train(tmp_path / "out", val_batches=0)
    assert [event.iteration for event in events if isinstance(event, Saved)] == [6, 8]


def test_a_run_that_fails_keeps_its_last_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights can be finite, and the loss not."""
    out = tmp_path / "out"

    def change(_: Trainer, number: int, update: UpdateMetrics) -> UpdateMetrics:
        return replace(update, is_skipped=number > 6, loss=math.nan if number > 6 else 1.0)

    changed_updates(monkeypatch, change)
    with fails(EngineError, "not_finite", match="2 updates .* batch 4"):
        train(out, val_batches=0)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["0000004"]


def test_a_checkpoint_is_kept_until_training_has_gone_on_well_after_the_next_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Path
) -> None:
    """Its weights may be finite and still give no finite loss: then there is the one before."""
    out = tmp_path / "out"

    def change(_: Trainer, number: int, update: UpdateMetrics) -> UpdateMetrics:
        return replace(update, is_skipped=number > 8, loss=math.nan if number > 8 else update.loss)

    changed_updates(monkeypatch, change)
    with pytest.raises(EngineError) as error:
        train(out, iters=40, val_batches=0)
    last = out / "checkpoints" / "0000008"
    assert f"remove {last}" in str(error.value)
    assert "10 updates in a row" in str(error.value)
    assert {path.name for path in last.parent.iterdir()} == {"0000004", "0000008"}
    monkeypatch.undo()
    shutil.rmtree(last)
    train(out, resume=True, val_batches=0)
    assert same(arrays_of(out), arrays_of(undisturbed))
    assert losses_of(out) == losses_of(undisturbed)


def test_an_initial_adapter_that_is_not_finite_is_reported_before_training(
    train: Train, tmp_path: Path, undisturbed: Path
) -> None:
    weights = {name: array * math.nan for name, array in arrays_of(undisturbed).items()}
    file = tmp_path / run_folder.ADAPTERS
    mx.save_safetensors(str(file), weights)
    with fails(EngineError, "not_finite", match="before training"):
        train(tmp_path / "out", resume_adapter_file=file)
    assert not (tmp_path / "out" / run_folder.ADAPTERS).exists()


@pytest.mark.parametrize("losses", [[math.nan, 2.0, math.nan], [3.0, math.nan, math.nan]])
def test_a_validation_loss_that_is_not_a_number_is_never_the_best_loss(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float]
) -> None:
    given = iter(losses)
    monkeypatch.setattr(Trainer, "loss_of", lambda *_: next(given))
    events = train(tmp_path / "out", iters=2, save_every=1, steps_per_eval=1)
    (finished,) = (event for event in events if isinstance(event, Finished))
    assert finished.best is not None
    assert math.isfinite(finished.best[1])
    best = tmp_path / "out" / run_folder.BEST / run_folder.ADAPTERS
    assert best.exists() == (finished.best[0] == 1)


def test_going_back_to_a_checkpoint_also_restores_the_written_adapter(
    train: Train, tmp_path: Path, undisturbed: Path
) -> None:
    """Though files of the later one are there under all names."""
    out = copied(undisturbed, tmp_path / "out")
    first = arrays_of(out / "checkpoints" / "0000004")
    mx.eval(first)
    assert not same(arrays_of(out), first)
    shutil.rmtree(out / "checkpoints" / "0000008")
    train(out, resume=True, iters=4, val_batches=0)
    assert same(arrays_of(out), first)


def test_an_initial_adapter_in_half_precision_is_trained_in_float32(
    train: Train, tmp_path: Path, undisturbed: Path
) -> None:
    weights = {n: a.astype(mx.bfloat16) for n, a in arrays_of(undisturbed).items()}
    file = tmp_path / run_folder.ADAPTERS
    mx.save_safetensors(str(file), weights)
    train(tmp_path / "out", iters=1, save_every=1, resume_adapter_file=file)
    assert {array.dtype for array in arrays_of(tmp_path / "out").values()} == {mx.float32}


# --- full tuning in half precision, as a whole run


# float16 runs all that bfloat16 does, and scales its losses as well.
@pytest.fixture(
    scope="module",
    params=["float16", pytest.param("bfloat16", marks=pytest.mark.slow)],
)
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in half precision."""
    model = tmp_path_factory.mktemp(request.param) / "tiny"
    shutil.copytree(TINY_CHAT, model)
    weights = mx.load(str(TINY_CHAT / "model.safetensors"))
    assert isinstance(weights, dict)
    dtype = getattr(mx, request.param)
    cast = {name: array.astype(dtype) for name, array in weights.items()}
    mx.save_safetensors(str(model / "model.safetensors"), cast, metadata={"format": "mlx"})
    return model


def config(folder: Path, out: Path, model: Path, **changes: Any) -> FineTuneConfig:
    return config_of(folder, out, model=model, val_batches=0, **{**FULL, **changes})


def test_full_tuning_in_half_precision_learns_and_resumes_with_equal_weights(
    folder: Path, tmp_path: Path, half: Path
) -> None:
    def train(name: str, **changes: Any) -> list[Event]:
        events: list[Event] = []
        run(config(folder, tmp_path / name, half, **changes), Cluster(), events.append)
        return events

    train("whole")
    train("out", iters=4)
    train("out", resume=True)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert same(arrays_of(out), arrays_of(whole))
    assert losses_of(out) == losses_of(whole)
    assert losses_of(whole)[8] < losses_of(whole)[1] - 1
    dtypes = {array.dtype for array in arrays_of(whole).values()}
    assert len(dtypes) == 1
    assert dtypes <= {mx.float16, mx.bfloat16}
    weights = mx.load(str(whole / "model" / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} == dtypes
    for place in (whole, out):
        state = checkpoint.load_last(place, {})
        masters = {n: a for n, a in state.optimizer.items() if n.endswith(".master")}
        assert {array.dtype for array in state.optimizer.values()} == {mx.float32}
        assert {n.removesuffix(".master") for n in masters} == state.adapter.keys()
        assert finite(state.optimizer)


@pytest.mark.slow
def test_losses_in_half_precision_are_nearly_those_in_float32(
    folder: Path, tmp_path: Path, half: Path
) -> None:
    """Without master weights nearly nothing is learned at this learning rate."""
    losses = {}
    for name, model in (("half", half), ("whole", TINY_CHAT)):
        changes = {"learning_rate": 1e-5, "iters": 20, "save_every": 20}
        run(config(folder, tmp_path / name, model, **changes), Cluster(), lambda _: None)
        found = losses_of(tmp_path / name)
        losses[name] = sum(found[n] for n in range(1, 6)) - sum(found[n] for n in range(16, 21))
    assert losses["half"] > 0.8 * losses["whole"] > 0


def test_the_forecast_of_memory_counts_master_weights(
    folder: Path, tmp_path: Path, half: Path
) -> None:
    events: list[Event] = []
    changes = {"iters": 2, "micro_batches": 4, "max_grad_norm": 1.0}
    gc.collect()  # What earlier tests have left would count as memory, until it is collected.
    run(config(folder, tmp_path / "out", half, **changes), Cluster(), events.append)
    (finished,) = (event for event in events if isinstance(event, Finished))
    assert finished.peak_bytes == pytest.approx(finished.forecast.peak_bytes, rel=0.15)


@pytest.mark.slow
def test_losses_of_packed_rows_fall_in_half_precision(
    folder: Path, tmp_path: Path, half: Path
) -> None:
    changes = {"packing": True, "max_seq_length": 128, "batch_size": 2, "iters": 4}
    run(config(folder, tmp_path / "out", half, **changes), Cluster(), lambda _: None)
    assert finite(arrays_of(tmp_path / "out"))
    assert losses_of(tmp_path / "out")[4] < losses_of(tmp_path / "out")[1]


# --- disks


def test_a_disk_that_fills_during_a_save_leaves_the_previous_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each write in turn, of the arrays, the state, and what is published."""
    out = tmp_path / "out"
    train(out, iters=4, val_batches=0)
    before = arrays_of(out)
    mx.eval(before)
    move, copy = Path.replace, shutil.copyfile
    for moment in range(3):
        calls = iter(range(100))

        def refuse(*words: Any, real: Any, moment: int = moment, calls: Any = calls) -> Any:
            if next(calls) == moment:
                raise OSError(28, "No space left on device")
            return real(*words)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", lambda *w: refuse(*w, real=move))  # noqa: B023
            patch.setattr(shutil, "copyfile", lambda *w: refuse(*w, real=copy))  # noqa: B023
            state = checkpoint.load_last(out, {})
            later = checkpoint.TrainingCheckpoint(8, 8, {}, state.adapter, state.optimizer, [])
            with fails(UsageError, "unwritable", match="No space left"):
                checkpoint.save(out, later)
        assert same(arrays_of(out), before)
        assert checkpoint.load_last(out, {}).iteration in (4, 8)
        assert same(checkpoint.load_last(out, {}).adapter, before)
        shutil.rmtree(out / "checkpoints" / "0000008", ignore_errors=True)
    train(out, resume=True, val_batches=0)
    assert max(losses_of(out)) == 8


def test_the_error_for_an_unreadable_checkpoint_names_the_previous_checkpoint(
    train: Train, tmp_path: Path, undisturbed: Path
) -> None:
    out = copied(undisturbed, tmp_path / "out")
    (out / "checkpoints" / "0000008" / "state.json").write_text(json.dumps({})[:1])
    before = out / "checkpoints" / "0000004"
    with fails(UsageError, "unreadable", match=str(before)):
        train(out, resume=True, iters=12, val_batches=0)
