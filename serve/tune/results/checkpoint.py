"""Writes the files of a run, on rank 0: adapters as mlx_lm writes them, and checkpoints from which
the run can resume. Each file is complete or absent."""

import filecmp
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from serve.core.errors import UsageError
from serve.core.folder import sync
from serve.lora.formats import convert
from serve.tune.backward import Arrays
from serve.tune.results.run_folder import (
    ADAPTERS,
    BEST,
    CHECKPOINTS,
    CONFIG,
    METRICS,
    PEFT,
    check_free,
    check_resumable,
    folder_of,
    whole_checkpoints,
)


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """Everything that a run needs to continue.

    `iteration` counts batches, `step` the updates of the optimizer. `settings` must not change in a
    resumed run. `losses` come from LossHistory, `loss_scale` is LossScale's value and num_finite,
    and `optimizer` includes the master weights.
    """

    iteration: int
    step: int
    settings: dict[str, Any]
    adapter: Arrays
    optimizer: Arrays
    losses: list[tuple[int, float]]
    loss_scale: tuple[float, int] = (1.0, 0)


def make_folder(folder: Path, config: dict[str, Any]) -> None:
    """Makes the folder of a new run. Raises UsageError if it contains another run, an adapter or a
    README.md. A run that ended before its first checkpoint does not count."""
    check_free(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config)
        for name in (METRICS, f"{BEST}/{ADAPTERS}"):
            (folder / name).unlink(missing_ok=True)


def save(folder: Path, checkpoint: TrainingCheckpoint) -> Path:
    """Writes and publishes a checkpoint. Raises UsageError, with the former files unchanged."""
    fields = ("iteration", "step", "settings", "losses", "loss_scale")
    state = {field: getattr(checkpoint, field) for field in fields}

    def write(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        _save_arrays(path / ADAPTERS, checkpoint.adapter)
        _save_arrays(path / "optimizer.safetensors", checkpoint.optimizer)
        (path / "state.json").write_text(json.dumps(state))
        for part in path.iterdir():
            sync(part)

    with writing(folder):
        # At most two checkpoints are on the disk: this one and the one before.
        _remove_all_but_last(folder, 1)
        _replace(folder_of(folder, checkpoint.iteration), write)
    return publish(folder)


def publish(folder: Path) -> Path:
    """Copies the last checkpoint's adapter to where mlx_lm looks for it. The checkpoint before it
    is kept, because only the next update shows whether training can continue from the last one."""
    *_, final = whole_checkpoints(folder)
    adapters = final / ADAPTERS
    with writing(folder):
        # Other files are replaced too: somebody may have gone back to an earlier checkpoint.
        for name in (ADAPTERS, f"{final.name}_{ADAPTERS}"):
            path = folder / name
            if not path.exists() or not filecmp.cmp(adapters, path, shallow=False):
                _replace(path, lambda new: shutil.copyfile(adapters, new))
        _remove_all_but_last(folder, 2)
    return folder / ADAPTERS


def _remove_all_but_last(folder: Path, count: int) -> None:
    """Removes all checkpoints but the last `count`, and incomplete ones."""
    if not (folder / CHECKPOINTS).exists():
        return
    kept = whole_checkpoints(folder)[-count:]
    for old in (folder / CHECKPOINTS).iterdir():
        if old not in kept:
            shutil.rmtree(old)


def save_adapter(
    folder: Path,
    config: dict[str, Any],
    adapter: Arrays,
    *,
    peft: bool,
) -> None:
    """Writes a folder that mlx_lm loads, and with `peft` one for PEFT inside. Raises UsageError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config)
        whole = folder / f"new.{ADAPTERS}"  # MLX requires this suffix.
        _save_arrays(whole, adapter)
        _replace(folder / ADAPTERS, whole.replace)
    if peft:
        export_peft(folder)


def export_peft(folder: Path) -> None:
    new = folder / f"{PEFT}.new"
    final = folder / PEFT
    with writing(folder):
        shutil.rmtree(new, ignore_errors=True)
        convert(folder, new)
        final.mkdir(exist_ok=True)
        for path in new.iterdir():  # File by file: only the weights change during a run.
            path.replace(final / path.name)
        new.rmdir()


def load_last(folder: Path, settings: dict[str, Any]) -> TrainingCheckpoint:
    """Returns the last complete checkpoint of a run with these settings. Raises UsageError."""
    check_resumable(folder)
    *earlier, last = whole_checkpoints(folder)
    try:
        text = (last / "state.json").read_text()
        state = json.loads(text)
        adapter = load_arrays(last / ADAPTERS)
        optimizer = load_arrays(last / "optimizer.safetensors")
    except (OSError, ValueError, RuntimeError) as error:
        advice = ""
        if earlier:
            advice = f" Without that folder, --resume continues from {earlier[-1]}."
        raise UsageError(
            f"--resume: {last} cannot be read: {error}.{advice}", code="unreadable"
        ) from error
    former = state["settings"]
    as_json = json.loads(json.dumps(settings))
    differences = []
    for name, value in as_json.items():
        before = former.get(name, value)  # a former run without valid.jsonl compared no losses
        if value != before:
            differences.append(f"{name} was {before}")
    if differences:
        raise UsageError(
            f"--resume: {folder} belongs to a run with other settings: {', '.join(differences)}."
        )
    return TrainingCheckpoint(adapter=adapter, optimizer=optimizer, **state)


def add_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    line = json.dumps(metrics, default=str) + "\n"
    with writing(folder), (folder / METRICS).open("a") as stream:
        stream.write(line)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run, without a last line that a kill has cut off."""
    text = (folder / METRICS).read_text()
    whole_lines, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole_lines.splitlines()]


def remove_metrics_after(folder: Path, iteration: int) -> None:
    """Removes the metrics after the last checkpoint, which a resumed run reports again."""
    path = folder / METRICS
    if path.exists():
        kept = [each for each in read_metrics(folder) if each["iteration"] <= iteration]
        text = "".join(json.dumps(each) + "\n" for each in kept)
        with writing(folder):
            _replace(path, lambda new: new.write_text(text))


def write_text(path: Path, text: str) -> None:
    with writing(path.parent):
        _replace(path, lambda new: new.write_text(text))


# --- files


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    text = json.dumps(config, indent=2)
    _replace(folder / CONFIG, lambda path: path.write_text(text))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns a failure to write inside a with block into a UsageError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--adapter-path {folder} cannot be written: {reason}.", code="unwritable"
        ) from error


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file or folder beside the old one, and renames it once it is on the disk."""
    partial = path.with_name(path.name + ".new")
    write(partial)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def _save_arrays(path: Path, arrays: Arrays) -> None:
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
    load_arrays(path)  # MLX checks the length of the file when it reads, not when it writes.


def load_arrays(path: Path) -> Arrays:
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    return arrays
