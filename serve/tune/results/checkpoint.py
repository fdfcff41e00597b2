"""Writes the files of a run, on rank 0: adapters as mlx_lm writes them, and checkpoints from which
it can resume. Each file is complete or absent."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from serve.core.errors import UsageError
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
class Checkpoint:
    """Everything that the rest of a run follows from. iteration counts batches, step the
    updates of the optimizer, settings are those that must not change, losses History's,
    loss_scale are LossScale's value and count. optimizer has the master weights too."""

    iteration: int
    step: int
    settings: dict[str, Any]
    adapter: Arrays
    optimizer: Arrays
    losses: list[tuple[int, float]]
    loss_scale: tuple[float, int] = (1.0, 0)


def begin(folder: Path, config: dict[str, Any]) -> None:
    """Makes a new run's folder. Raises UsageError if another run, adapter or README.md is there;
    a run that ended before its first checkpoint does not count."""
    check_free(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config)
        for name in (METRICS, f"{BEST}/{ADAPTERS}"):
            (folder / name).unlink(missing_ok=True)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint, and publishes it. Raises UsageError; then what was there before is
    still whole."""
    fields = ("iteration", "step", "settings", "losses", "loss_scale")
    state = {field: getattr(checkpoint, field) for field in fields}

    def write(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        _save_arrays(path / ADAPTERS, checkpoint.adapter)
        _save_arrays(path / "optimizer.safetensors", checkpoint.optimizer)
        (path / "state.json").write_text(json.dumps(state))
        for part in path.iterdir():
            _sync(part)

    with writing(folder):
        # The disk never holds more than two: this one, and the one before.
        _keep_last(folder, 1)
        _replace(folder_of(folder, checkpoint.iteration), write)
    return publish(folder)


def publish(folder: Path) -> Path:
    """Puts the last checkpoint's adapter where mlx_lm looks. Of those before it the last one
    stays: whether training can go on from a checkpoint only the update after it shows."""
    final = whole_checkpoints(folder)[-1]
    with writing(folder):
        # Also if both are there: somebody may have gone back to an earlier checkpoint.
        for name in (ADAPTERS, f"{final.name}_{ADAPTERS}"):
            _replace(folder / name, lambda path: shutil.copyfile(final / ADAPTERS, path))
        _keep_last(folder, 2)
    return folder / ADAPTERS


def _keep_last(folder: Path, count: int) -> None:
    """Removes older checkpoints, and those that are half written."""
    if not (folder / CHECKPOINTS).exists():
        return
    kept = whole_checkpoints(folder)[-count:]
    for old in (folder / CHECKPOINTS).iterdir():
        if old not in kept:
            shutil.rmtree(old)


def save_adapter(folder: Path, config: dict[str, Any], adapter: Arrays, *, peft: bool) -> None:
    """A folder that mlx_lm and the server load, with one in PEFT's format in it. Raises
    UsageError, also if that format has no room for the adapter."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config)
        whole = folder / f"new.{ADAPTERS}"  # MLX looks at the end of the name
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
        for path in new.iterdir():  # One by one: of a run all but the weights is the same.
            path.replace(final / path.name)
        new.rmdir()


def load_last(folder: Path, settings: dict[str, Any]) -> Checkpoint:
    """The last whole checkpoint. Raises UsageError if there is none, or it is of a run with
    other settings."""
    check_resumable(folder)
    whole = whole_checkpoints(folder)
    try:
        state = json.loads((whole[-1] / "state.json").read_text())
        arrays = [load_arrays(whole[-1] / name) for name in (ADAPTERS, "optimizer.safetensors")]
    except (OSError, ValueError, RuntimeError) as error:
        mend = ""
        if whole[1:]:
            mend = f" Without that folder, --resume continues from {whole[-2]}."
        raise UsageError(f"--resume: {whole[-1]} cannot be read: {error}.{mend}") from error
    now = json.loads(json.dumps(settings))
    former = state["settings"]
    changed = [name for name in now if now[name] != former.get(name)]
    if changed:
        before = ", ".join(f"{name} was {former.get(name)}" for name in changed)
        raise UsageError(f"--resume: {folder} belongs to a run with other settings: {before}.")
    return Checkpoint(adapter=arrays[0], optimizer=arrays[1], **state)


def add_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    with writing(folder), (folder / METRICS).open("a") as stream:
        stream.write(json.dumps(metrics, default=str) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Without a line that a kill has cut."""
    whole, _, _ = (folder / METRICS).read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def forget_metrics_after(folder: Path, iteration: int) -> None:
    """Removes metrics from after the last checkpoint, which a resumed run reports again."""
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
    _replace(folder / CONFIG, lambda path: path.write_text(json.dumps(config, indent=2)))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Any failure to write as one error."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--adapter-path {folder} cannot be written: {reason}.") from error


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes beside a file or folder, and puts it in its place when it is on the disk."""
    partial = path.with_name(path.name + ".new")
    write(partial)
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_arrays(path: Path, arrays: Arrays) -> None:
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
    load_arrays(path)  # MLX looks at the length of the file there, and not when it writes.


def load_arrays(path: Path) -> Arrays:
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    return arrays
